"""Which entries of an array a program reads, and which arms: by the interpreter of jaxprs.

The other arguments are data: nothing is assumed about their values. Constants are folded, because they decide which entry is
indexed and what is multiplied by 0. A primitive that is not described is taken to mix all entries of its operands. So the
reported dependence may be too large, never too small.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.entrywise import Entries, Entrywise, Known
from ppl_bandit.program.jaxpr.interpreter import DATA, Domain, fold_in_numpy, interpret, is_known
from ppl_bandit.program.jaxpr.primitives import Kind, describe_primitive
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr

MAX_ENTRIES = 2000  # of an argument whose reads are analysed; the analysis of more would take too long


class Affine(NamedTuple):
    """An array whose entries are affine in the latents, or multiples of the reciprocal of one latent.

    Attributes:
        reads: (..., E), which of the E latent elements each entry depends on.
        is_term: whether each entry is a multiple of elements, without a constant added.
        power: 1, or -1 for a multiple of a reciprocal.
    """

    reads: np.ndarray
    is_term: bool
    power: int


def entries_read(function: Callable, size: int, data: tuple) -> np.ndarray:
    """Return which of the K entries of its first argument each entry of a function of (argument, *data) reads, (..., K).

    Args:
        size: K.
        data: arrays, or their shapes.
    """
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), jnp.result_type(float)), *data)
    domain = _Reads()
    args = [_entries_of(domain, np.eye(size, dtype=bool)), *[0] * len(jax.tree.leaves(data))]
    (out,) = domain.evaluate(closed, args)
    return _reads_of(domain, out, size)


def affine_reads(closed: ClosedJaxpr, latents: Sequence[np.ndarray]) -> Affine | None:
    """Return the one output of a jaxpr as an affine function of its first inputs; None if it is not proved to be one.

    Args:
        latents: for each input that is a latent, (..., E): which of the E elements each entry is. The other inputs are data.
    """
    domain = _Affine()
    args = [*(_entries_of(domain, own) for own in latents), *[None] * (len(closed.jaxpr.invars) - len(latents))]
    (out,) = domain.evaluate(closed, args)
    values = [value for value in domain.values(out) if value != Known(0)]
    forms = [value for value in values if not domain.is_data(value)]
    if not forms or _NOT_AFFINE in forms or len({form.power for form in forms}) > 1:
        return None
    is_term = len(forms) == len(values) and all(form.is_term for form in forms)
    return Affine(_reads_of(domain, out, latents[0].shape[-1]), is_term, forms[0].power)


def connected_components(groups: np.ndarray) -> np.ndarray:
    """Return a label for each column of (groups, K): columns have the same label if groups connect them."""
    label = np.arange(groups.shape[1])
    while True:
        before = label.copy()
        for group in groups:
            if group.any():
                label[group] = label[group].min()
        if np.array_equal(before, label):
            return label


class _Reads(Entrywise):
    """The entries that a number reads, as the bits of an integer."""

    def unknown(self, array: np.ndarray | None = None) -> int:
        return 0

    def is_data(self, value: Any) -> bool:
        return isinstance(value, Known) or value == 0

    def of_bits(self, bits: int) -> int:
        return bits

    def bits_of(self, value: Any) -> int:
        return 0 if isinstance(value, Known) else value

    def apply(self, eqn: Any, parts: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        return self.multiply(*parts) if eqn.primitive.name == "mul" else self._union(parts)

    def add(self, x: Any, y: Any) -> Any:
        return self._union((x, y))

    def multiply(self, x: Any, y: Any) -> Any:
        return Known(0.0) if Known(0) in (x, y) else self._union((x, y))

    def choose(self, cases: Sequence[Any]) -> Any:
        return self._union(cases)

    def mix(self, eqn: Any, values: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        return self._union([part for value in values if isinstance(value, Entries) for part in self.values(value)])

    def _union(self, parts: Sequence[Any]) -> int:
        bits = 0
        for part in parts:
            bits |= self.bits_of(part)
        return bits


def _entries_of(domain: "_Reads", reads: np.ndarray) -> Entries:
    """Return an array of which (..., K) says what each entry reads."""
    rows = np.packbits(reads.reshape(-1, reads.shape[-1]), axis=1, bitorder="little")
    values = [domain.of_bits(int.from_bytes(row.tobytes(), "little")) for row in rows]
    return domain.entries(values, reads.shape[:-1])


def _reads_of(domain: "_Reads", out: Any, size: int) -> np.ndarray:
    """Undo `_entries_of`."""
    if not isinstance(out, Entries):
        return np.zeros((*np.shape(out), size), bool)
    codes, which = np.unique(out.codes, return_inverse=True)
    num_bytes = -(-size // 8)
    rows = [np.frombuffer(domain.bits_of(domain.table[code]).to_bytes(num_bytes, "little"), np.uint8) for code in codes]
    table = np.unpackbits(np.array(rows, np.uint8).reshape(-1, num_bytes), axis=1, count=size, bitorder="little")
    return table.astype(bool)[which.reshape(out.codes.shape)]


class _Form(NamedTuple):
    """A number that is affine in latents: the bits of those that it reads, and as in `Affine`."""

    bits: int
    is_term: bool = True
    power: int = 1


_NOT_AFFINE = "a value that depends on latents in another way"


class _Affine(_Reads):
    """A form, `_NOT_AFFINE`, or None for data."""

    def unknown(self, array: np.ndarray | None = None) -> Any:
        return None

    def is_data(self, value: Any) -> bool:
        return value is None or isinstance(value, Known)

    def of_bits(self, bits: int) -> Any:
        return _Form(bits)

    def bits_of(self, value: Any) -> int:
        return 0 if self.is_data(value) else value.bits

    def apply(self, eqn: Any, parts: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        name, params = eqn.primitive.name, eqn.params
        if name == "mul":
            return self.multiply(*parts)
        if all(map(self.is_data, parts)) or _NOT_AFFINE in parts:
            return self._union(parts)
        if describe_primitive(eqn).kind is Kind.LINEAR:
            return self._sum(parts)
        if name == "convert_element_type" and np.dtype(params["new_dtype"]).kind == "f":
            return parts[0]
        if name == "div" and self.is_data(parts[1]):
            return parts[0]
        is_reciprocal = name == "div" and self.is_data(parts[0])
        if is_reciprocal or (name == "integer_pow" and params["y"] in (1, -1)):
            form = parts[-1]
            power = form.power * (-1 if is_reciprocal else params["y"])
            return form if power == form.power else self._of_one(form._replace(power=power))
        return _NOT_AFFINE

    def add(self, x: Any, y: Any) -> Any:
        return self._sum((x, y))

    def multiply(self, x: Any, y: Any) -> Any:
        if Known(0) in (x, y):
            return Known(0.0)
        if self.is_data(x) or self.is_data(y):
            return y if self.is_data(x) and not self.is_data(y) else None if self.is_data(x) else x
        return _NOT_AFFINE

    def choose(self, cases: Sequence[Any]) -> Any:
        return self._union(cases)

    def _sum(self, parts: Sequence[Any]) -> Any:
        parts = [part for part in parts if part != Known(0)]
        if not parts:
            return Known(0.0)
        forms = [part for part in parts if not self.is_data(part)]
        if not forms or _NOT_AFFINE in forms or len({form.power for form in forms}) > 1:
            return self._union(forms)
        bits = 0
        for form in forms:
            bits |= form.bits
        is_term = len(forms) == len(parts) and all(form.is_term for form in forms)
        found = _Form(bits, is_term, forms[0].power)
        return self._of_one(found) if found.power == -1 else found

    def _of_one(self, form: _Form) -> Any:
        """Refuse the reciprocal of a sum, and a sum of reciprocals."""
        return form if form.is_term and form.bits.bit_count() == 1 else _NOT_AFFINE

    def _union(self, parts: Sequence[Any]) -> Any:
        return None if all(map(self.is_data, parts)) else _NOT_AFFINE


_PRODUCTS = ("mul", "dot_general")


def tells_rows_apart(closed: ClosedJaxpr, args: Sequence[Any], number: int) -> bool:
    """Return whether a jaxpr computes anything else if the rows of an argument are moved by one.

    Args:
        args: arrays, and `DATA` for those that are not known.
        number: the argument, an array with a different number in each row.
    """

    def operands(argument: np.ndarray) -> list[Any]:
        """Return the known operands of what cannot be computed, and the known results."""
        found: list[Any] = []

        def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
            found.extend(filter(is_known, values))
            return [DATA] * len(eqn.outvars)

        def fold(eqn: Any, values: list[Any]) -> Sequence[Any]:
            results = fold_in_numpy(eqn, values)
            return results if all(map(is_known, results)) else apply(eqn, values, ())

        given = [*args[:number], argument, *args[number + 1 :]]
        with jax.ensure_compile_time_eval():
            results = interpret(Domain(apply, is_known, fold), closed.jaxpr, closed.consts, given)
        return found + [value for value in results if is_known(value)]

    own = np.asarray(args[number])
    pairs = zip(operands(own), operands(np.roll(own, 1)), strict=True)
    return not all(first is second or _is_equal(first, second) for first, second in pairs)


def reads_of_latents(closed: ClosedJaxpr, args: Sequence[Any]) -> list[bool]:
    """Return, for each output of a jaxpr, whether it depends on the latents; a product with known zeros does not.

    Args:
        args: an array for a known input, True for latents, and False for other inputs that are not known.
    """

    def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        if eqn.primitive.name in _PRODUCTS and any(is_array(value) and not np.any(value) for value in values):
            return [np.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
        return [any(value is True for value in values)] * len(eqn.outvars)

    def is_array(value: Any) -> bool:
        return not isinstance(value, bool)

    def fold(eqn: Any, values: list[Any]) -> list[Any]:
        return [value if is_known(value) else False for value in fold_in_numpy(eqn, values)]

    with jax.ensure_compile_time_eval():
        domain = Domain(apply, is_array, fold, np.asarray)
        return [value is True for value in interpret(domain, closed.jaxpr, closed.consts, args)]


def _is_equal(first: Any, second: Any) -> bool:
    is_key = jnp.issubdtype(getattr(first, "dtype", float), jax.dtypes.extended)  # random keys hold no arms
    return is_key or np.array_equal(np.asarray(first), np.asarray(second), equal_nan=True)
