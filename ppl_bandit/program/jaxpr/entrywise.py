"""Abstract arrays: what is known about each entry of an array, as one value for each entry.

A domain says what is known about one number: which entries of an argument it reads, or that it is a polynomial of latents. An
array of such values is an array of codes into a table, so that an operation on numbers is evaluated once for each combination
of values that meet in an entry, and an operation that moves entries is applied to the codes themselves.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import DATA, Domain, fold_in_numpy, interpret
from ppl_bandit.program.jaxpr.primitives import Kind, apply_per_column, describe_primitive, index_operands
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, apply_primitive, is_tracer

_MAX_NUMBERS = 64  # different numbers in an array of constants that are told apart
_MAX_PRODUCTS = 1 << 22  # in a matrix product whose terms are told apart
_FIRST_CODE = 1 << 29  # where JAX moves entries, so that a number that it fills in is no code


class Entries(NamedTuple):
    """An array of abstract numbers: the place of each entry's value in the table of the domain."""

    codes: np.ndarray


class Known(NamedTuple):
    """A number that is known."""

    number: Any


class Entrywise:
    """The operations on arrays of abstract numbers, given those on numbers, which a domain defines."""

    def __init__(self) -> None:
        self.table: list[Any] = []
        self._codes: dict[Any, int] = {}

    # What a domain defines

    def unknown(self, array: np.ndarray | None = None) -> Any:
        """Return the value of a number that no argument reaches; one in an array, if that is given."""
        raise NotImplementedError

    def is_data(self, value: Any) -> bool:
        """Return whether no argument reaches a number."""
        raise NotImplementedError

    def apply(self, eqn: Any, parts: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        """Return the value of one entry of the result of an elementwise operation."""
        raise NotImplementedError

    def add(self, x: Any, y: Any) -> Any:
        """Return the value of a sum."""
        raise NotImplementedError

    def multiply(self, x: Any, y: Any) -> Any:
        """Return the value of a product."""
        raise NotImplementedError

    def choose(self, cases: Sequence[Any]) -> Any:
        """Return the value of a number of which data decide which of several it is; another one each time if it has a name."""
        raise NotImplementedError

    def mix(self, eqn: Any, values: Sequence[Any], callers: tuple[Any, ...]) -> Any:
        """Return the value of all entries of the results of another operation, or a list of arrays of codes."""
        raise NotImplementedError

    def call(self, eqn: Any, values: list[Any]) -> Sequence[Any] | None:
        """Return the results of a function that is known as a whole; None for others."""
        return None

    # Arrays

    def evaluate(self, closed: ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        """Return `Entries` or a constant array for each result; each argument is one of these, or the value of all entries."""
        shapes = [var.aval.shape for var in closed.jaxpr.invars]
        given = [
            arg if isinstance(arg, Entries | np.ndarray) else self.entries(arg, shape)
            for arg, shape in zip(args, shapes, strict=True)
        ]
        with jax.ensure_compile_time_eval():
            return self.follow(closed.jaxpr, closed.consts, given)

    def follow(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], callers: tuple[Any, ...] = ()
    ) -> list[Any]:
        """Return the results of a jaxpr, given arrays."""
        domain = Domain(self._results, lambda value: not isinstance(value, Entries), self._fold, self._lift, self.call)
        return interpret(domain, jaxpr, consts, args, callers)

    def entries(self, values: Any, shape: tuple[int, ...]) -> Entries:
        """Return an array of values: a list of one for each entry, or the same for all."""
        if isinstance(values, list):
            return Entries(np.array([self.code(value) for value in values], int).reshape(shape))
        return Entries(np.broadcast_to(self.code(values), shape))

    def values(self, array: Any) -> list[Any]:
        """Return the different values in an array, a constant or codes."""
        return [self.table[code] for code in np.unique(self.codes(array))]

    def code(self, value: Any) -> int:
        """Return the place of a value in the table."""
        code = self._codes.setdefault(value, len(self.table))
        if code == len(self.table):
            self.table.append(value)
        return code

    def codes(self, array: Any) -> np.ndarray:
        """Return the codes of an array or a constant."""
        if isinstance(array, Entries):
            return array.codes
        constant = np.asarray(array)
        if constant.dtype.kind not in "biuf":
            return np.broadcast_to(self.code(self.unknown()), constant.shape)
        numbers, which = np.unique(constant, return_inverse=True)
        is_told = (numbers == 0) | (numbers == 1) | (numbers.size <= _MAX_NUMBERS)
        rest = None if np.all(is_told) else self.unknown(constant)
        # One nan is not equal to another, but to itself.
        known = [
            Known(math.nan if x != x else x) if told else rest
            for x, told in zip(numbers.tolist(), is_told, strict=True)
        ]
        return np.array([self.code(value) for value in known], int)[which.reshape(constant.shape)]

    def per_entry(self, function: Callable[..., Any], *arrays: np.ndarray) -> np.ndarray:
        """Apply a function of values to the entries of arrays of codes, once for each combination."""
        arrays = np.broadcast_arrays(*arrays)
        shape = arrays[0].shape
        if all(_is_uniform(array) for array in arrays):
            return np.broadcast_to(self.code(function(*(self.table[array.flat[0]] for array in arrays))), shape)
        flat = [array.ravel() for array in arrays]
        keys = np.zeros(flat[0].size, int)
        for own in flat:  # numbered anew each time, so that they do not overflow
            _, first, keys = np.unique(keys * len(self.table) + own, return_index=True, return_inverse=True)
        found = [self.code(function(*(self.table[own[place]] for own in flat))) for place in first]
        return np.array(found, int)[keys.reshape(shape)]

    # The interpreter

    def _lift(self, constant: Any) -> Any:
        return self.entries(self.unknown(), constant.shape) if is_tracer(constant) else constant

    def _fold(self, eqn: Any, values: list[Any]) -> list[Any]:
        results = zip(fold_in_numpy(eqn, values), eqn.outvars, strict=True)
        return [self.entries(self.unknown(), var.aval.shape) if value is DATA else value for value, var in results]

    def _results(self, eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        if describe_primitive(eqn).kind is Kind.IDENTITY or not eqn.outvars:
            return values[: len(eqn.outvars)]
        found = self._codes_of_results(eqn, values, callers)
        if found is None:
            found = self.mix(eqn, values, callers)
        if not isinstance(found, list):
            found = [np.broadcast_to(self.code(found), var.aval.shape) for var in eqn.outvars]
        return [self._decoded(codes, var.aval.dtype) for codes, var in zip(found, eqn.outvars, strict=True)]

    def _decoded(self, codes: np.ndarray, dtype: Any) -> Any:
        """Return a constant array if all entries are known."""
        found = codes.flat[:1] if _is_uniform(codes) else np.unique(codes)
        if not len(found) or not all(isinstance(self.table[code], Known) for code in found):
            return Entries(codes)
        numbers = np.array([self.table[code].number for code in found])
        return numbers[np.searchsorted(found, codes)].astype(dtype)

    def _codes_of_results(self, eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[np.ndarray] | None:
        """Return the codes of the results, None for an operation that mixes entries or moves them to where latents say."""
        name, params, described = eqn.primitive.name, eqn.params, describe_primitive(eqn)
        kind, fixed, shape = described.kind, index_operands(eqn), eqn.outvars[0].aval.shape
        is_placed = not any(isinstance(values[i], Entries) for i in fixed)
        if name in ("argmax", "argmin") or (kind is Kind.OTHER and name != "dot_general"):
            return None
        codes = list(map(self.codes, values))

        def one(*parts: Any) -> Any:
            return self.apply(eqn, parts, callers)

        if kind is Kind.CHOICE and is_placed:
            which = np.broadcast_to(np.asarray(values[0]).astype(int), shape)
            return [np.choose(which, np.broadcast_arrays(which, *codes[1:])[1:])]
        if kind is Kind.CHOICE:
            by_data = all(map(self.is_data, self.values(values[0])))
            return [self.chosen(shape, *codes[1:])] if by_data else [self.per_entry(one, *codes)]
        if kind is Kind.MOVE and is_placed:
            if described.move is not None:
                return [moved[..., 0] for moved in described.move(eqn, [own[..., None] for own in codes])]
            given = [values[i] if i in fixed else own + _FIRST_CODE for i, own in enumerate(codes)]
            moved = [np.asarray(own) - _FIRST_CODE for own in apply_primitive(eqn, given)]
            unknown, size = self.code(self.unknown()), len(self.table)
            return [np.where((own < 0) | (own >= size), unknown, own) for own in moved]
        if kind is Kind.MOVE:
            by_data = all(map(self.is_data, (own for i in fixed for own in self.values(values[i]))))
            cases = np.unique(np.concatenate([own.ravel() for i, own in enumerate(codes) if i not in fixed]))
            return [self.chosen(shape, *cases)] if by_data else None
        if name == "dot_general":
            return self._dot_general(params["dimension_numbers"], *codes)
        if name == "scatter-add":
            return [self._scatter_add(eqn, values, codes)] if is_placed else None
        if kind not in (Kind.SUM, Kind.REDUCTION, Kind.CUMULATIVE):
            return [self.per_entry(one, *codes)]
        sums, products = ("reduce_sum", "cumsum"), ("reduce_prod", "cumprod")
        two = self.add if name in sums else self.multiply if name in products else one
        if "axes" in params:
            along = np.moveaxis(codes[0], params["axes"], range(len(params["axes"]))).reshape(-1, *shape)
            nothing = np.full(shape, self.code(Known(float(name in products))))
            return [self._folded(two, along) if len(along) else nothing]
        order = slice(None, None, -1 if params["reverse"] else 1)
        totals = list(np.moveaxis(codes[0], params["axis"], 0)[order])
        for number in range(1, len(totals)):
            totals[number] = self.per_entry(two, totals[number - 1], totals[number])
        return [np.moveaxis(np.stack(totals)[order], 0, params["axis"]) if totals else codes[0]]

    def chosen(self, shape: tuple[int, ...], *cases: Any) -> np.ndarray:
        """Return an array of which data decide, for each entry by itself, which of several it is."""
        own, again = (self.per_entry(lambda *parts: self.choose(parts), *cases) for _ in range(2))
        if np.array_equal(own, again):
            return np.broadcast_to(own, shape)
        # Choices have names, since the entries may be different numbers although their cases are the same.
        flat = [np.broadcast_to(codes, shape).ravel() for codes in cases]
        found = [self.code(self.choose([self.table[code] for code in row])) for row in zip(*flat, strict=True)]
        return np.array(found, int).reshape(shape)

    def _folded(self, two: Callable[..., Any], along: np.ndarray) -> np.ndarray:
        return functools.reduce(functools.partial(self.per_entry, two), along)

    def _dot_general(self, dimension_numbers: Any, x: np.ndarray, y: np.ndarray) -> list[np.ndarray] | None:
        (x_sums, y_sums), (x_batch, y_batch) = dimension_numbers
        x_free = [axis for axis in range(x.ndim) if axis not in (*x_sums, *x_batch)]
        y_free = [axis for axis in range(y.ndim) if axis not in (*y_sums, *y_batch)]
        x, y = x.transpose(*x_sums, *x_batch, *x_free), y.transpose(*y_sums, *y_batch, *y_free)
        batch, count = x.shape[len(x_sums) :][: len(x_batch)], math.prod(x.shape[: len(x_sums)])
        x_shape, y_shape = x.shape[x.ndim - len(x_free) :], y.shape[y.ndim - len(y_free) :]
        shape = (*batch, *x_shape, *y_shape)
        if count * math.prod(shape) > _MAX_PRODUCTS:
            return None
        x = x.reshape(count, *batch, *x_shape, *[1] * len(y_shape))
        y = y.reshape(count, *batch, *[1] * len(x_shape), *y_shape)
        products = self.per_entry(self.multiply, x, y)
        return [self._folded(self.add, products) if count else np.full(shape, self.code(Known(0.0)))]

    def _scatter_add(self, eqn: Any, values: list[Any], codes: list[np.ndarray]) -> np.ndarray:
        total, _, updates = codes
        own = np.eye(updates.size).reshape(*updates.shape, updates.size)
        (places,) = apply_per_column(eqn, [np.zeros((*total.shape, updates.size)), values[1], own])
        for number, code in enumerate(updates.ravel()):
            is_hit = np.asarray(places[..., number]) > 0
            total = np.where(is_hit, self.per_entry(self.add, total, np.full(total.shape, code)), total)
        return total


def _is_uniform(array: np.ndarray) -> bool:
    return array.size > 0 and (not any(array.strides) or bool(np.all(array == array.flat[0])))
