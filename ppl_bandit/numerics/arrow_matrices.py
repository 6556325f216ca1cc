"""Gaussian precisions of an arrow's shape: many small groups of rows that meet in a few common ones, and nowhere else.

A hierarchy over a hundred arms has a precision matrix of 101 rows, of which all but 301 entries are 0, whatever is observed.
Eliminating the arms first leaves them 0 (no fill-in), so that the integral, the mean and draws take as many operations as there
are arms. A matrix without such a shape is all core.

Axes after those that are named go over a batch. They come last, so that loops over a thousand particles are the innermost ones.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.runtime.unrolled_reductions import sum_along

__all__ = ["Arrow", "as_arrow", "as_matrix", "gaussian_integral", "solve", "steps_along", "times"]

_ROUNDINGS = 32.0  # a pivot that is this many roundings of what it was left over from is known to 3%
_IN_PANELS = (
    24  # rows up to which no library is called: it is faster below, and the program short enough to be compiled
)
_UNROLLED = 8  # rows whose factor is written out at a time: no call per matrix, and one fused loop over a batch


class Arrow(NamedTuple):
    """Symmetric matrices, (R, S, S), S = L s + c, of which L groups of s rows have entries with themselves and the last c rows.

    Attributes:
        leaves: of each group with itself.
        cross: of each group with the core.
        core: of the last rows with themselves.
    """

    leaves: Float[Array, "R L s s ..."]
    cross: Float[Array, "R L s c ..."]
    core: Float[Array, "R c c ..."]


class _Eliminated(NamedTuple):
    """Factors of leaves and core, and what elimination makes of the cross entries and a right-hand side."""

    leaf: "_Factor"
    cross: Array
    leaf_side: Array
    core: "_Factor"
    core_side: Array


class _Factor(NamedTuple):
    """Matrices as K diag(pivots) K', K with ones on its diagonal: rows of what is left of it, three parts, or one array."""

    lower: Any
    pivots: Array
    inverses: Array


def as_arrow(matrix: Any, num_leaves: int, leaf_size: int) -> Arrow:
    """Return the entries of matrices, (R, S, S), that an arrow has; the others are taken to be 0."""
    (num, size, _), first_core = matrix.shape, num_leaves * leaf_size
    by_leaf = matrix[:, :first_core].reshape(num, num_leaves, leaf_size, size)
    own = by_leaf[..., :first_core].reshape(num, num_leaves, leaf_size, num_leaves, leaf_size)
    each = np.arange(num_leaves)
    leaves = own[:, each, :, each].swapaxes(0, 1)
    return Arrow(leaves, by_leaf[..., first_core:], matrix[:, first_core:, first_core:])


def as_matrix(arrow: Arrow) -> Float[Array, "R S S"]:
    """Return arrows, without a batch, with their zeros."""
    num, num_leaves, size, num_core = arrow.cross.shape
    each, first_core = np.arange(num_leaves), num_leaves * size
    corner = jnp.zeros((num, num_leaves, size, num_leaves, size), arrow.core.dtype)
    corner = corner.at[:, each, :, each].set(arrow.leaves.swapaxes(0, 1)).reshape(num, first_core, first_core)
    cross = arrow.cross.reshape(num, first_core, num_core)
    return jnp.block([[corner, cross], [cross.swapaxes(1, 2), arrow.core]])


def times(arrow: Arrow, vectors: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
    """Return the product of each matrix with its vector."""
    leaf, core = _parted(arrow, vectors)
    by_leaf = sum_along(arrow.leaves * leaf[:, :, None], 3) + sum_along(arrow.cross * core[:, None, None], 3)
    from_leaves = sum_along(_flat(arrow.cross * leaf[:, :, :, None], 2), 1)
    by_core = from_leaves + sum_along(arrow.core * core[:, None], 2)
    return _joined(by_leaf, by_core)


def gaussian_integral(
    arrow: Arrow, linear: Float[Array, "R S ..."]
) -> tuple[Float[Array, "R ..."], Float[Array, "R ..."]]:
    """Return linear' inverse(matrix) linear / 2 and the log determinant of each matrix.

    They are nan where a matrix is not positive, and where its conditioning leaves a pivot no more than rounding: in single
    precision a hierarchy whose spread is a thousandth of its scale. A number made of rounding would draw particles there.
    """
    parts = _eliminate(arrow, linear)
    smallest = _ROUNDINGS * jnp.finfo(linear.dtype).eps
    gains, pivots = [], []
    for factor, side, matrix, axis in (
        (parts.leaf, parts.leaf_side, arrow.leaves, 2),
        (parts.core, parts.core_side, arrow.core, 1),
    ):
        if side.size:
            at = (slice(None),) * axis
            diagonal = _stacked([matrix[(*at, i, i)] for i in range(matrix.shape[axis])], axis)
            known = jnp.where(factor.pivots > smallest * diagonal, factor.pivots, jnp.nan)
            gains.append(0.5 * sum_along(_flat(side * side * factor.inverses, axis), 1))
            pivots.append(_flat(known, axis))
    log_dets = [sum_along(jnp.log(known), 1) for known in pivots]
    return sum(gains[1:], start=gains[0]), sum(log_dets[1:], start=log_dets[0])


def solve(arrow: Arrow, rhs: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
    """Return inverse(matrix) rhs of each matrix."""
    parts = _eliminate(arrow, rhs)
    return _substitute(parts, parts.leaf_side * parts.leaf.inverses, parts.core_side * parts.core.inverses)


def steps_along(arrow: Arrow, noise: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
    """Turn standard normal numbers into draws whose precision each matrix is."""
    parts = _eliminate(arrow, jnp.zeros_like(noise))
    leaf, core = _parted(arrow, noise)
    return _substitute(parts, leaf * jnp.sqrt(parts.leaf.inverses), core * jnp.sqrt(parts.core.inverses))


def _parted(arrow: Arrow, vectors: Array) -> tuple[Float[Array, "R L s ..."], Float[Array, "R c ..."]]:
    num, num_leaves, size, _ = arrow.cross.shape[:4]
    first_core = num_leaves * size
    leaf = vectors[:, :first_core].reshape(num, num_leaves, size, *vectors.shape[2:])
    return leaf, vectors[:, first_core:]


def _joined(leaf: Float[Array, "R L s ..."], core: Float[Array, "R c ..."]) -> Float[Array, "R S ..."]:
    if not leaf.size:
        return core
    num, num_leaves, size = leaf.shape[:3]
    return jnp.concatenate([leaf.reshape(num, num_leaves * size, *leaf.shape[3:]), core], axis=1)


def _eliminate(arrow: Arrow, rhs: Float[Array, "R S ..."]) -> _Eliminated:
    """Eliminate the leaves, all at once, and then the core."""
    leaf, core_side = _parted(arrow, rhs)
    cross, core, by_leaf = arrow.cross, arrow.core, _Factor([], leaf, leaf)
    if leaf.size:
        by_leaf, (cross, leaf) = _factorize(arrow.leaves, 2, cross, leaf)
        scaled = cross * by_leaf.inverses[:, :, :, None]
        # Products and sums, not matrix products: a batch of small ones is a call each.
        core = core - sum_along(_flat(scaled[:, :, :, :, None] * cross[:, :, :, None], 2), 1)
        core_side = core_side - sum_along(_flat(scaled * leaf[:, :, :, None], 2), 1)
    by_core, (core_side,) = _factorize(core, 1, core_side)
    return _Eliminated(by_leaf, cross, leaf, by_core, core_side)


def _substitute(parts: _Eliminated, leaf: Array, core: Array) -> Float[Array, "R S ..."]:
    """Go back from the core to the leaves."""
    core = _solve_back(parts.core.lower, 1, core)
    if leaf.size:
        pull = sum_along(parts.cross * core[:, None, None], 3) * parts.leaf.inverses
        leaf = _solve_back(parts.leaf.lower, 2, leaf - pull)
    return _joined(leaf, core)


def _factorize(matrix: Array, axis: int, *sides: Array) -> tuple[_Factor, list[Array]]:
    """Return the factor of matrices, and inverse(K) sides.

    Args:
        axis: of the matrix's rows; its columns come next. Sides have it too, and may have one more after it.
    """
    size = matrix.shape[axis]
    if size > _UNROLLED:
        way = _factorize_in_panels if size <= _IN_PANELS else _factorize_one_by_one
        return way(matrix, axis, *sides)
    at = (slice(None),) * axis
    lower: list[list[Array]] = []
    pivots: list[Array] = []
    inverses: list[Array] = []
    found: list[list[Array]] = [[] for _ in sides]
    for i in range(size):
        row: list[Array] = []
        for j in range(i):
            row.append(sum((-row[k] * lower[j][k] for k in range(j)), start=matrix[(*at, i, j)]))
        own = [entry * inverse for entry, inverse in zip(row, inverses, strict=True)]
        pivots.append(sum((-entry * unit for entry, unit in zip(row, own, strict=True)), start=matrix[(*at, i, i)]))
        inverses.append(1.0 / pivots[i])
        lower.append(own)
        for solved, side in zip(found, sides, strict=True):
            more = side.ndim == matrix.ndim
            units = [jnp.expand_dims(unit, axis) if more else unit for unit in own]
            solved.append(sum((-unit * solved[k] for k, unit in enumerate(units)), start=side[(*at, i)]))
    if not size:  # no core: arrays without elements, of the right shape
        return _Factor(lower, sides[0], sides[0]), list(sides)
    factor = _Factor(lower, _stacked(pivots, axis), _stacked(inverses, axis))
    return factor, [_stacked(solved, axis) for solved in found]


def _factorize_in_panels(matrix: Array, axis: int, *sides: Array) -> tuple[_Factor, list[Array]]:
    """Factorize a few rows, and what is left of the others."""
    at, few, others = (slice(None),) * axis, slice(None, _UNROLLED), slice(_UNROLLED, None)
    heads, tails = ([side[(*at, part)] for side in sides] for part in (few, others))
    first, (cross, *heads) = _factorize(matrix[(*at, few, few)], axis, matrix[(*at, few, others)], *heads)
    scaled = cross * jnp.expand_dims(first.inverses, axis + 1)
    rest = matrix[(*at, others, others)] - sum_along(
        jnp.expand_dims(scaled, axis + 2) * jnp.expand_dims(cross, axis + 1), axis
    )
    for number, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        weights = jnp.expand_dims(scaled, axis + 2) if tail.ndim == matrix.ndim else scaled
        tails[number] = tail - sum_along(weights * jnp.expand_dims(head, axis + 1), axis)
    second, tails = _factorize(rest, axis, *tails)
    both = (
        jnp.concatenate(parts, axis=axis)
        for parts in ((first.pivots, second.pivots), (first.inverses, second.inverses))
    )
    found = [jnp.concatenate(parts, axis=axis) for parts in zip(heads, tails, strict=True)]
    return _Factor((first.lower, scaled, second.lower), *both), found


def _factorize_one_by_one(matrix: Array, axis: int, *sides: Array) -> tuple[_Factor, list[Array]]:
    """Factorize with a library, matrix by matrix: two calls for a batch, in one program, can wait for each other (`turns`)."""
    count = math.prod(matrix.shape[:axis] + matrix.shape[axis + 2 :])
    first = jnp.moveaxis(matrix, (axis, axis + 1), (-2, -1))
    columns = [jnp.moveaxis(side, axis, -1) for side in sides]

    def one(given: tuple[Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        root = jnp.linalg.cholesky(given[0])
        diagonal = jnp.diagonal(root)
        solved = jax.lax.linalg.triangular_solve(root, jnp.stack(given[1], axis=1), left_side=True, lower=True)
        return root / diagonal, diagonal**2, list((diagonal[:, None] * solved).T)

    flat = first.reshape(count, *first.shape[-2:]), [side.reshape(count, side.shape[-1]) for side in columns]
    lower, pivots, found = jax.lax.map(one, flat)
    pivots, *found = (
        jnp.moveaxis(each.reshape(side.shape), -1, axis)
        for each, side in zip([pivots, *found], [columns[0], *columns], strict=True)
    )
    return _Factor(lower, pivots, 1.0 / pivots), found


def _solve_back(lower: Any, axis: int, rhs: Array) -> Array:
    """Return inverse(K') rhs."""
    size = rhs.shape[axis]
    if not size:
        return rhs
    at = (slice(None),) * axis
    if isinstance(lower, jax.Array):
        columns = jnp.moveaxis(rhs, axis, -1)
        solved = jax.lax.map(_solve_transposed, (lower, columns.reshape(len(lower), size)))
        return jnp.moveaxis(solved.reshape(columns.shape), -1, axis)
    if isinstance(lower, tuple):
        first, scaled, second = lower
        tail = _solve_back(second, axis, rhs[(*at, slice(_UNROLLED, None))])
        pull = sum_along(scaled * jnp.expand_dims(tail, axis), axis + 1)
        head = _solve_back(first, axis, rhs[(*at, slice(None, _UNROLLED))] - pull)
        return jnp.concatenate([head, tail], axis=axis)
    found: dict[int, Array] = {}
    for i in reversed(range(size)):
        found[i] = sum((-lower[k][i] * found[k] for k in range(i + 1, size)), start=rhs[(*at, i)])
    return _stacked([found[i] for i in range(size)], axis)


def _solve_transposed(given: tuple[Array, Array]) -> Array:
    lower, rhs = given
    return jax.lax.linalg.triangular_solve(
        lower, rhs[:, None], left_side=True, lower=True, transpose_a=True, unit_diagonal=True
    )[:, 0]


def _flat(terms: Array, last: int) -> Array:
    """Return terms with the axes from 1 to `last` as one."""
    return terms.reshape(terms.shape[0], math.prod(terms.shape[1 : last + 1]), *terms.shape[last + 1 :])


def _stacked(parts: list[Array], axis: int) -> Array:
    return jnp.expand_dims(parts[0], axis) if len(parts) == 1 else jnp.stack(parts, axis=axis)
