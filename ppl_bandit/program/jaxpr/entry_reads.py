"""Element-level dependence: which entries of one argument each entry of a result may depend on.

The other arguments are data: nothing is assumed about their values, so the result holds for all of them. Constants are folded,
because they decide which entry is indexed and what is multiplied by 0. A primitive that is not described is taken to mix all
entries of its operands. So the reported dependence may be too large, never too small.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.program.jaxpr.primitives import Kind, apply_per_column, describe_primitive, index_operands
from ppl_bandit.runtime.jax_adapter import apply_primitive

__all__ = [
    "DATA",
    "MAX_ENTRIES",
    "Reads",
    "connected_components",
    "entries_read",
    "fold_in_numpy",
    "is_known",
    "reads_of_results",
]

MAX_ENTRIES = 2000  # of an argument whose reads are analysed; the table of more would be too large

DATA = object()  # an array whose numbers are unknown, and that does not depend on the argument

_ELEMENTWISE = (Kind.CHOICE, Kind.LINEAR, Kind.COMPARISON, Kind.ELEMENTWISE)


class Reads(NamedTuple):
    """An array that depends on the argument.

    Attributes:
        of: (..., K), which of the K entries of the argument each entry may depend on.
    """

    of: np.ndarray


def entries_read(function: Callable, size: int, data: tuple) -> np.ndarray:
    """Return which of the K entries of its first argument each entry of a function of (argument, *data) reads, (..., K).

    Args:
        size: K.
        data: arrays, or their shapes.
    """
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((size,), jnp.result_type(float)), *data)
    args = [Reads(np.eye(size, dtype=bool)), *[DATA] * len(jax.tree.leaves(data))]
    with jax.ensure_compile_time_eval():
        (out,) = interpret(Domain(_apply, is_known, fold_in_numpy), closed.jaxpr, closed.consts, args)
    return out.of if isinstance(out, Reads) else np.zeros((*closed.out_avals[0].shape, size), bool)


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


def is_known(value: Any) -> bool:
    """Return whether a value is an array of known numbers."""
    return value is not DATA and not isinstance(value, Reads)


def fold_in_numpy(eqn: Any, values: list[Any]) -> Sequence[Any]:
    """Fold constants that can decide which entries are read.

    NumPy is used where it has an equivalent, because JAX compiles every primitive that runs outside of `jit`. Other results
    are computed by JAX only if they can be indices or conditions; real numbers, of which at most the zeros matter, become
    unknown data.
    """
    described, dtypes = describe_primitive(eqn), [var.aval.dtype for var in eqn.outvars]
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):  # random keys
        return [DATA] * len(eqn.outvars)
    if described.numpy is not None:
        with np.errstate(all="ignore"):
            return [np.asarray(described.numpy(eqn.params, *map(np.asarray, values))).astype(dtypes[0])]
    if described.move is not None:
        return [moved[..., 0] for moved in described.move(eqn, [np.asarray(value)[..., None] for value in values])]
    if described.kind is Kind.CHOICE and len(values) == 3:
        return [np.where(values[0], values[2], values[1])]
    if described.kind is Kind.MOVE or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
        return apply_primitive(eqn, values)
    return [DATA] * len(eqn.outvars)


def reads_of_results(eqn: Any, values: list[Any]) -> list[np.ndarray] | None:
    """Return the entries that the results of an equation read, (..., K) for each; None if they are not told apart."""
    if not eqn.outvars:
        return []
    name, params = eqn.primitive.name, eqn.params
    kind, move = describe_primitive(eqn).kind, describe_primitive(eqn).move
    size = next(value for value in values if isinstance(value, Reads)).of.shape[-1]
    shape = eqn.outvars[0].aval.shape
    if name == "mul" and any(map(is_known, values)):  # nothing is read where a factor is 0
        factor = np.asarray(next(value for value in values if is_known(value)))
        return [_union(values, shape) & np.broadcast_to(factor != 0, shape)[..., None]]
    if kind is Kind.CHOICE and is_known(values[0]):
        which = np.broadcast_to(np.asarray(values[0]).astype(int), shape)[..., None]
        cases = [case.of & (which == i) for i, case in enumerate(values[1:]) if isinstance(case, Reads)]
        return [np.logical_or.reduce(cases)]
    if kind in _ELEMENTWISE:
        return [_union(values, shape)]
    if name == "dot_general":
        return [_dot_general(eqn, values)]
    reads = [
        value.of if isinstance(value, Reads) else np.zeros((*atom.aval.shape, size), bool)
        for atom, value in zip(eqn.invars, values, strict=True)
    ]
    if kind is Kind.IDENTITY:
        return reads
    if kind in (Kind.SUM, Kind.REDUCTION) and "axes" in params:
        return [np.logical_or.reduce(reads[0], axis=tuple(params["axes"]))]
    if kind in (Kind.SUM, Kind.CUMULATIVE) and "reverse" in params:
        order = slice(None, None, -1 if params["reverse"] else 1)
        along = np.moveaxis(reads[0], params["axis"], 0)[order]
        return [np.moveaxis(np.logical_or.accumulate(along, axis=0)[order], 0, params["axis"])]
    if move is not None:
        return move(eqn, reads)
    fixed = index_operands(eqn)
    if kind not in (Kind.MOVE, Kind.SUM) or not all(is_known(values[i]) for i in fixed):
        return None
    if kind is Kind.SUM:
        operands = [values[i] if i in fixed else part.astype(float) for i, part in enumerate(reads)]
        return [np.asarray(part) > 0 for part in apply_per_column(eqn, operands)]
    return [_moved(eqn, values, reads)]


def _apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
    if not any(isinstance(value, Reads) for value in values):
        return [DATA] * len(eqn.outvars)
    found = reads_of_results(eqn, values)
    if found is None:
        parts = [value.of.reshape(-1, value.of.shape[-1]) for value in values if isinstance(value, Reads)]
        every = np.logical_or.reduce(np.concatenate(parts), axis=0)
        found = [np.broadcast_to(every, (*var.aval.shape, len(every))) for var in eqn.outvars]
    return [Reads(reads) for reads in found]


def _union(values: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    parts = [value.of for value in values if isinstance(value, Reads)]
    out = np.zeros((*shape, parts[0].shape[-1]), bool)
    for part in parts:
        out |= part
    return out


def _moved(eqn: Any, values: list[Any], reads: Sequence[np.ndarray]) -> np.ndarray:
    """Apply an indexing primitive to the positions of the operands' entries, and look up what these entries read."""
    fixed, size = index_operands(eqn), reads[0].shape[-1]
    table = [np.zeros((1, size), bool)]  # position 0: what an index out of range is filled with
    operands, start = list(values), 1
    for i, part in enumerate(reads):
        if i not in fixed:
            number = math.prod(part.shape[:-1])
            operands[i] = np.arange(start, start + number).reshape(part.shape[:-1])
            table.append(part.reshape(-1, size))
            start += number
    positions = np.asarray(apply_primitive(eqn, operands)[0])
    return np.concatenate(table)[np.clip(positions, 0, start - 1)]


def _dot_general(eqn: Any, values: list[Any]) -> np.ndarray:
    """Return what a generalised matrix product reads; an entry that is multiplied by a known 0 is not read."""
    parts = []
    for own in (0, 1):
        if isinstance(values[own], Reads):
            other, atom = values[1 - own], eqn.invars[1 - own]
            is_nonzero = np.asarray(other) != 0 if is_known(other) else np.ones(atom.aval.shape, bool)
            parts.append(_product(eqn.params["dimension_numbers"], values[own].of, is_nonzero, own))
    return np.logical_or.reduce(parts)


def _product(dimension_numbers: Any, reads: np.ndarray, other: np.ndarray, own: int) -> np.ndarray:
    """Multiply by einsum; the axes of the result are ordered: batch, left, right."""
    sums, batches = (pair if own == 0 else pair[::-1] for pair in dimension_numbers)
    own_axes = list(range(reads.ndim - 1))
    other_axes = [len(own_axes) + axis for axis in range(other.ndim)]
    for mine, theirs in zip((*sums[0], *batches[0]), (*sums[1], *batches[1]), strict=True):
        other_axes[theirs] = mine
    entry = len(own_axes) + other.ndim
    free = [axis for axis in own_axes if axis not in (*sums[0], *batches[0])]
    other_free = [other_axes[axis] for axis in range(other.ndim) if axis not in (*sums[1], *batches[1])]
    out = [*batches[0], *(free + other_free if own == 0 else other_free + free), entry]
    return np.einsum(reads.astype(float), [*own_axes, entry], other.astype(float), other_axes, out) > 0
