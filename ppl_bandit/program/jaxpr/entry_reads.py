"""Which entries of an argument each entry of a result reads, followed through a jaxpr element by element.

Other arguments are data: nothing is known of them, so that what is found holds for all of their values. An operation that is
not known is taken to mix all that it reads. So an entry may be said to read too much, never too little.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import evaluate
from ppl_bandit.runtime.jax_adapter import Jaxpr, apply_primitive, called_jaxpr

__all__ = ["entries_read", "tied_together"]

_DATA = object()  # a value that no latent reaches, and that is known only when the data are
_ELEMENTWISE = set(
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp convert_element_type "
    "copy cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow is_finite le lgamma "
    "log log1p logistic lt max min mul ne neg nextafter not or polygamma pow reduce_precision regularized_incomplete_beta "
    "rem round rsqrt sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta".split()
)
_LAYOUT = set(
    "broadcast_in_dim concatenate expand_dims reshape rev slice split squeeze stack tile transpose unstack".split()
)
_KNOWN = {  # on what is known, such as indices of arms
    "add": np.add,
    "eq": np.equal,
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "sub": np.subtract,
}


def entries_read(function: Callable, size: int, data: tuple) -> np.ndarray:
    """Return which of the K entries of its first argument each entry of a function of (argument, *data) reads, (..., K).

    Args:
        data: arrays, or their shapes.
    """
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), jnp.result_type(float)), *data)
    args: list[Any] = [np.eye(size, dtype=bool), *[_DATA] * len(jax.tree.leaves(data))]
    with jax.ensure_compile_time_eval():
        (out,) = _follow(closed.jaxpr, closed.consts, [_Reads(args[0]), *args[1:]], size)
        shape = closed.out_avals[0].shape
    return out.of if isinstance(out, _Reads) else np.zeros((*shape, size), bool)


def tied_together(groups: np.ndarray) -> np.ndarray:
    """Return a label for each column of (groups, K), the same where groups connect them."""
    label = np.arange(groups.shape[1])
    while True:
        before = label.copy()
        for group in groups:
            if group.any():
                label[group] = label[group].min()
        if np.array_equal(before, label):
            return label


class _Reads(NamedTuple):
    """An array by the entries of the argument that its own read, (..., K)."""

    of: np.ndarray


class _Late:
    """An array that is known, and computed when somebody looks at it: most constants, nobody does."""

    def __init__(self, compute: Callable[[], Sequence[Any]], place: int):
        self._compute, self._place = compute, place

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        del copy  # it is computed for whoever asks
        return np.asarray(self._compute()[self._place], dtype)


def _follow(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], size: int) -> list[Any]:
    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        inner = called_jaxpr(eqn)
        if inner is not None:
            return _follow(inner[0], inner[1], values, size)
        if not any(isinstance(value, _Reads) for value in values):
            if any(value is _DATA for value in values) or eqn.effects:
                return [_DATA] * len(eqn.outvars)
            return _known(eqn, values)
        found = _step(eqn, values)
        if found is not None:
            return [_Reads(reads) for reads in found]
        every = np.any([_anywhere(value.of) for value in values if isinstance(value, _Reads)], axis=0)
        return [_Reads(np.broadcast_to(every, (*var.aval.shape, size))) for var in eqn.outvars]

    return evaluate(jaxpr, consts, args, step)


def _known(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Apply an operation to what is known: in NumPy where it is simple, later where not: jax compiles every single one."""
    name = eqn.primitive.name
    if any(isinstance(value, _Late) for value in values):
        return _later(lambda: _known(eqn, _looked_at(values)), eqn)
    if name in _KNOWN:
        return [_KNOWN[name](*map(np.asarray, values)).astype(eqn.outvars[0].aval.dtype)]
    if name in _LAYOUT:
        return [moved[..., 0] for moved in _moved(eqn, [np.asarray(value)[..., None] for value in values])]
    if name == "convert_element_type":
        return [np.asarray(values[0]).astype(eqn.params["new_dtype"])]
    if name == "select_n" and len(values) == 3:
        return [np.where(values[0], values[2], values[1])]
    return _later(lambda: apply_primitive(eqn, values), eqn)


def _later(compute: Callable[[], Sequence[Any]], eqn: Any) -> list[_Late]:
    once = functools.cache(compute)
    return [_Late(once, place) for place in range(len(eqn.outvars))]


def _looked_at(values: Sequence[Any]) -> list[Any]:
    return [np.asarray(value) if isinstance(value, _Late) else value for value in values]


def _step(eqn: Any, values: list[Any]) -> list[np.ndarray] | None:
    """Return what the outputs of an operation read, element by element, or None where that is not known."""
    if not eqn.outvars:
        return []
    name = eqn.primitive.name
    shape = eqn.outvars[0].aval.shape
    if name in ("select_n", "mul") and any(_is_known(value) for value in values):
        return [_chosen(name, values, shape)]
    if name == "select_n" or name in _ELEMENTWISE:
        return [_union(values, shape)]
    if name == "dot_general":
        parts = []
        for keep in (0, 1):
            if isinstance(values[keep], _Reads):
                other, atom = values[1 - keep], eqn.invars[1 - keep]
                may_count = np.asarray(other) != 0 if _is_known(other) else np.ones(atom.aval.shape, bool)
                parts.append(_product(eqn.params["dimension_numbers"], values[keep].of, may_count, keep))
        return [np.any(parts, axis=0)]
    return _through(eqn, values)


def _anywhere(reads: np.ndarray) -> np.ndarray:
    return np.logical_or.reduce(reads.reshape(-1, reads.shape[-1]), axis=0)


def _is_known(value: Any) -> bool:
    return value is not _DATA and not isinstance(value, _Reads)


def _union(values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    reads = [value.of for value in values if isinstance(value, _Reads)]
    out = np.zeros((*shape, reads[0].shape[-1]), bool)
    for part in reads:
        out |= part
    return out


def _chosen(name: str, values: list[Any], shape: tuple[int, ...]) -> np.ndarray:
    """Choose between arrays, or multiply, where the choice or a factor is known: what is left out, or times 0, is not read."""
    if name == "mul":
        factor = next(value for value in values if _is_known(value))
        return _union(values, shape) & np.broadcast_to(np.asarray(factor) != 0, shape)[..., None]
    if not _is_known(values[0]):
        return _union(values, shape)
    which = np.broadcast_to(np.asarray(values[0]).astype(int), shape)[..., None]
    out = np.zeros((*shape, _union(values, shape).shape[-1]), bool)
    for number, case in enumerate(values[1:]):
        if isinstance(case, _Reads):
            out |= case.of & (which == number)
    return out


def _through(eqn: Any, values: list[Any]) -> list[np.ndarray] | None:
    """Send what is read through an operation that moves or gathers up entries."""
    name, params = eqn.primitive.name, eqn.params
    size = next(value for value in values if isinstance(value, _Reads)).of.shape[-1]
    reads = [
        value.of if isinstance(value, _Reads) else np.zeros((*atom.aval.shape, size), bool)
        for atom, value in zip(eqn.invars, values, strict=True)
    ]
    first, rank = reads[0], reads[0].ndim - 1
    if name in _LAYOUT:
        return _moved(eqn, reads)
    if name.startswith("reduce_") and "axes" in params:
        return [np.logical_or.reduce(first, axis=tuple(params["axes"]))]
    if name in ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"):
        order = slice(None, None, -1 if params["reverse"] else 1)
        along = np.moveaxis(first, params["axis"], 0)[order]
        return [np.moveaxis(np.logical_or.accumulate(along, axis=0)[order], 0, params["axis"])]
    if (
        name == "pad"
        and rank == len(params["padding_config"])
        and all(part[2] == 0 for part in params["padding_config"])
    ):
        low_high = [(max(low, 0), max(high, 0)) for low, high, _ in params["padding_config"]]
        cut = tuple(
            slice(max(-low, 0), size_ - max(-high, 0))
            for (low, high, _), size_ in zip(params["padding_config"], first.shape, strict=False)
        )
        return [np.pad(first[cut], [*low_high, (0, 0)]) | _anywhere(reads[1])]
    moved = _MOVED.get(name, ())
    if moved and all(_is_known(value) for i, value in enumerate(values) if i not in moved):
        # Ask where each entry came from; a fill is place 0, which reads nothing.
        table = np.concatenate([np.zeros((1, size), bool), *(reads[i].reshape(-1, size) for i in moved)])
        places, start = _looked_at(values), 1
        for i in moved:
            shape = reads[i].shape[:-1]
            places[i] = np.arange(start, start + math.prod(shape)).reshape(shape)
            start += math.prod(shape)
        where = np.asarray(apply_primitive(eqn, places)[0])
        return [table[np.clip(where, 0, len(table) - 1)]]
    return None


# Which inputs an operation moves; the others say where to.
_MOVED: dict[str, tuple[int, ...]] = {
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter": (0, 2),
}


def _moved(eqn: Any, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Move entries, in NumPy, where nothing is compiled; arrays have one more axis than the operation knows of."""
    name, params, first = eqn.primitive.name, eqn.params, arrays[0]
    rank = first.ndim - 1
    shape = (*eqn.outvars[0].aval.shape, first.shape[-1])
    if name == "broadcast_in_dim":
        place = [1] * (len(shape) - 1)
        for axis, to in enumerate(params["broadcast_dimensions"]):
            place[to] = first.shape[axis]
        return [np.broadcast_to(first.reshape(*place, shape[-1]), shape)]
    if name == "transpose":
        return [first.transpose(*params["permutation"], rank)]
    if name == "rev":
        return [np.flip(first, params["dimensions"])]
    if name == "slice":
        steps = params["strides"] or (1,) * rank
        return [first[tuple(map(slice, params["start_indices"], params["limit_indices"], steps))]]
    if name == "concatenate":
        return [np.concatenate(arrays, axis=params["dimension"])]
    if name == "stack":
        return [np.stack(arrays, axis=params["axis"])]
    if name == "tile":
        return [np.tile(first, (*params["reps"], 1))]
    if name == "unstack":
        return list(np.moveaxis(first, params["axis"], 0))
    if name == "split":
        return np.split(first, np.cumsum(params["sizes"])[:-1], axis=params["axis"])
    return [first.reshape(shape)]


def _product(numbers: Any, reads: np.ndarray, other: np.ndarray, keep: int) -> np.ndarray:
    """Return what a generalised matrix product reads: axes in the order batch, left, right."""
    (left_sum, right_sum), (left_batch, right_batch) = numbers
    sums, batches = (
        ((left_sum, right_sum), (left_batch, right_batch))
        if keep == 0
        else ((right_sum, left_sum), (right_batch, left_batch))
    )
    own_rank, other_rank = reads.ndim - 1, other.ndim
    own = list(range(own_rank))
    its = [own_rank + axis for axis in range(other_rank)]
    for mine, theirs in zip((*sums[0], *batches[0]), (*sums[1], *batches[1]), strict=True):
        its[theirs] = mine
    latent = own_rank + other_rank
    free = [axis for axis in own if axis not in (*sums[0], *batches[0])]
    others = [its[axis] for axis in range(other_rank) if axis not in (*sums[1], *batches[1])]
    out = [*batches[0], *(free + others if keep == 0 else others + free), latent]
    return np.einsum(reads.astype(float), [*own, latent], other.astype(float), its, out) > 0
