"""Trees of small arrays as few: every array that goes into a compiled call, or out of it, takes microseconds of its own."""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.runtime.jax_adapter import is_tracer

__all__ = ["Joined", "Joining", "pack", "unpacker"]

_MOST_JOINED = 1 << 14  # numbers of an array: to copy them takes 6 us, to hand an array on 4 to 7


def pack(tree: Any) -> Float[Array, " n"]:
    """Return all leaves in one row of float64, which holds whole numbers up to 2^53 exactly."""
    return jnp.concatenate([jnp.ravel(leaf).astype(float) for leaf in jax.tree.leaves(tree)])


def unpacker(form: Any) -> Callable[[np.ndarray], Any]:
    """Return what undoes `pack`: a row -> NumPy arrays in the tree, shapes and types of `form`."""
    treedef: Any = jax.tree.structure(form)
    plan, casts, tables, end = [], [], [], 0
    for i, leaf in enumerate(jax.tree.leaves(form)):
        start, end = end, end + leaf.size
        plan.append((leaf.dtype == bool, slice(start, end) if leaf.shape else start))
        if leaf.dtype not in (bool, float):
            casts.append((i, leaf.dtype))
        if len(leaf.shape) > 1:
            tables.append((i, leaf.shape))

    def unpack(row: np.ndarray) -> Any:
        rows = (
            row,
            row.astype(bool),
        )  # whole: leaves of both are views; of other types by themselves, since not all fits them
        parts = [rows[is_truth][where] for is_truth, where in plan]
        for i, own in casts:
            parts[i] = parts[i].astype(own)
        for i, shape in tables:
            parts[i] = parts[i].reshape(shape)
        return treedef.unflatten(parts)

    return unpack


class Joined(NamedTuple):
    """The arrays of a tree, of which `Joining` made fewer."""

    arrays: tuple[Any, ...]


class Joining:
    """Join the leaves of a tree to one row for each type of number, but for the largest, and cut them apart again.

    Args:
        form: a tree of arrays, or of shapes and types.
    """

    def __init__(self, form: Any):
        self._form = _form_of(form)
        self._treedef, self._leaves = self._form
        sizes = [math.prod(shape) for shape, _ in self._leaves]
        is_joined = [
            0 < size <= _MOST_JOINED and isinstance(dtype, np.dtype)
            for size, (_, dtype) in zip(sizes, self._leaves, strict=True)
        ]
        types = dict.fromkeys(dtype for (_, dtype), joins in zip(self._leaves, is_joined, strict=True) if joins)
        self._rows = [[i for i, joins in enumerate(is_joined) if joins and self._leaves[i][1] == own] for own in types]
        self._alone = [i for i, size in enumerate(sizes) if size and not is_joined[i]]
        self._ends = [np.cumsum([sizes[i] for i in row]).tolist() for row in self._rows]

    def fits(self, tree: Any) -> bool:
        """Tell whether a tree has this form: what changes its shape from call to call cannot be cut as it was first."""
        return _form_of(tree) == self._form

    def join(self, tree: Any) -> Joined:
        """Return a tree of this form, of traced arrays or NumPy's, as few arrays."""
        leaves = jax.tree.leaves(tree)
        numpy = _module_of(leaves)
        rows = (numpy.concatenate([numpy.ravel(leaves[i]) for i in row]) for row in self._rows)
        return Joined((*rows, *(leaves[i] for i in self._alone)))

    def cut(self, joined: Joined) -> Any:
        """Undo `join`."""
        empty = _module_of(joined.arrays).zeros
        parts: list[Any] = [empty(shape, dtype) if 0 in shape else None for shape, dtype in self._leaves]
        num_rows = len(self._rows)
        for row, members, ends in zip(joined.arrays[:num_rows], self._rows, self._ends, strict=True):
            for i, start, end in zip(members, (0, *ends), ends, strict=False):
                parts[i] = row[start:end].reshape(self._leaves[i][0])
        for i, leaf in zip(self._alone, joined.arrays[num_rows:], strict=True):
            parts[i] = leaf
        return self._treedef.unflatten(parts)


def _module_of(arrays: Iterable[Any]) -> Any:
    """Return jax's NumPy for traced arrays, and NumPy for others."""
    return jnp if any(is_tracer(array) for array in arrays) else np


def _form_of(tree: Any) -> tuple[Any, list[tuple[tuple[int, ...], Any]]]:
    """Return the structure of a tree, and the shapes and types of its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(tuple(leaf.shape), leaf.dtype) for leaf in leaves]
