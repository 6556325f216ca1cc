"""Gaussian precision matrices with block-arrow sparsity: many small groups of rows that are coupled to a few common rows only.

A hierarchy over a hundred arms has a precision matrix of 101 rows, of which all but 301 entries are 0, whatever is observed.
Eliminating the arms first creates no other entries (no fill-in), so that the integral, the mean and draws take time linear in
the number of arms. A matrix without this structure is all core.

Axes after the named ones are batch axes. They come last, so that loops over a thousand particles are the innermost ones.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# In roundings of the diagonal entry that the pivot is left of: such a pivot has a relative error of 3%.
MIN_PIVOT = 32.0
MAX_UNROLLED = 12  # rows that are eliminated by unrolled array operations; matrices with more rows go to LAPACK
# Of one LAPACK call; jaxlib would split a batch of twice as many between threads, and two of these can wait for each other for
# ever (`runtime.cpu_threads`).
MAX_BATCH_OPERATIONS = 100_000


class Arrow(NamedTuple):
    """Symmetric matrices, (R, S, S), S = L s + c: L groups of s rows are coupled within themselves and with the last c rows.

    Attributes:
        leaves: entries of each group with itself.
        cross: entries of each group with the core.
        core: entries of the last rows with themselves.
    """

    leaves: Float[Array, "R L s s ..."]
    cross: Float[Array, "R L s c ..."]
    core: Float[Array, "R c c ..."]


class _Factor(NamedTuple):
    """A factorization K diag(pivots) K' with unit lower triangular K.

    Attributes:
        upper: the rows of K' right of the diagonal; one array of all K if LAPACK computed it.
        pivots: positive for a positive definite matrix.
    """

    upper: list[Array] | Array
    pivots: Array


class _Eliminated(NamedTuple):
    """Factors of leaves and core, with the cross entries and a right-hand side multiplied by inverse(K)."""

    leaf: _Factor
    cross: Array
    leaf_rhs: Array
    core: _Factor
    core_rhs: Array


def as_arrow(matrix: Any, num_leaves: int, leaf_size: int) -> Arrow:
    """Return the entries that an arrow holds of matrices, (R, S, S); the others are taken to be 0."""
    (num, size, _), first_core = matrix.shape, num_leaves * leaf_size
    by_leaf = matrix[:, :first_core].reshape(num, num_leaves, leaf_size, size)
    own = by_leaf[..., :first_core].reshape(num, num_leaves, leaf_size, num_leaves, leaf_size)
    each = np.arange(num_leaves)
    leaves = own[:, each, :, each].swapaxes(0, 1)
    return Arrow(leaves, by_leaf[..., first_core:], matrix[:, first_core:, first_core:])


def as_matrix(arrow: Arrow) -> Float[Array, "R S S"]:
    """Return arrows without batch axes as dense matrices."""
    num, num_leaves, size, num_core = arrow.cross.shape
    each, first_core = np.arange(num_leaves), num_leaves * size
    corner = jnp.zeros((num, num_leaves, size, num_leaves, size), arrow.core.dtype)
    corner = corner.at[:, each, :, each].set(arrow.leaves.swapaxes(0, 1)).reshape(num, first_core, first_core)
    cross = arrow.cross.reshape(num, first_core, num_core)
    return jnp.block([[corner, cross], [cross.swapaxes(1, 2), arrow.core]])


def times(arrow: Arrow, vectors: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
    """Return the product of each matrix with its vector."""
    leaf, core = _split(arrow, vectors)
    by_leaf = jnp.sum(arrow.leaves * leaf[:, :, None], axis=3) + jnp.sum(arrow.cross * core[:, None, None], axis=3)
    by_core = jnp.sum(arrow.cross * leaf[:, :, :, None], axis=(1, 2)) + jnp.sum(arrow.core * core[:, None], axis=2)
    return _join(by_leaf, by_core)


def gaussian_integral(
    arrow: Arrow, linear: Float[Array, "R S ..."]
) -> tuple[Float[Array, "R ..."], Float[Array, "R ..."]]:
    """Return linear' inverse(matrix) linear / 2 and the log determinant of each matrix.

    Both matter only where the matrix is positive definite. The log determinant is nan where it is not, and where a pivot is
    of the size of its rounding error: in single precision, for a hierarchy whose spread is a thousandth of its scale. Particles
    would otherwise be attracted by a value that consists of rounding.
    """
    parts = _eliminate(arrow, linear)
    smallest = MIN_PIVOT * jnp.finfo(linear.dtype).eps
    gain = log_det = jnp.zeros((), linear.dtype)
    for factor, rhs, matrix, axis in (
        (parts.leaf, parts.leaf_rhs, arrow.leaves, 2),
        (parts.core, parts.core_rhs, arrow.core, 1),
    ):
        if rhs.size:
            known = jnp.where(factor.pivots > smallest * _diagonal(matrix, axis), factor.pivots, jnp.nan)
            gain += 0.5 * jnp.sum(rhs * rhs / factor.pivots, axis=tuple(range(1, axis + 1)))
            log_det += jnp.sum(jnp.log(known), axis=tuple(range(1, axis + 1)))
    return gain, log_det


def solve(arrow: Arrow, rhs: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
    """Return inverse(matrix) rhs of each matrix."""
    return solve_and_step(arrow, rhs, jnp.zeros((0, *rhs.shape), rhs.dtype))[0]


def steps_along(arrow: Arrow, noise: Float[Array, "R S ..."]) -> Float[Array, "R S ..."]:
    """Transform standard normal numbers to draws with mean 0 whose precision matrices are the given ones."""
    return solve_and_step(arrow, jnp.zeros_like(noise), noise[None])[1][0]


def solve_and_step(
    arrow: Arrow, rhs: Float[Array, "R S ..."], noise: Float[Array, "K R S ..."]
) -> tuple[Float[Array, "R S ..."], Float[Array, "K R S ..."]]:
    """Do both with one factorization: return inverse(matrix) rhs, and K draws with mean 0 from K sets of normal numbers."""
    parts = _eliminate(arrow, rhs)
    leaf, core = jax.vmap(lambda own: _split(arrow, own))(noise)
    columns = [
        jnp.concatenate([(own / factor.pivots)[None], more / jnp.sqrt(factor.pivots)])
        for own, more, factor in ((parts.leaf_rhs, leaf, parts.leaf), (parts.core_rhs, core, parts.core))
    ]
    found = jax.vmap(lambda leaf, core: _substitute(parts, leaf, core))(*columns)
    return found[0], found[1:]


def _split(arrow: Arrow, vectors: Array) -> tuple[Float[Array, "R L s ..."], Float[Array, "R c ..."]]:
    num, num_leaves, size, _ = arrow.cross.shape[:4]
    first_core = num_leaves * size
    leaf = vectors[:, :first_core].reshape(num, num_leaves, size, *vectors.shape[2:])
    return leaf, vectors[:, first_core:]


def _join(leaf: Float[Array, "R L s ..."], core: Float[Array, "R c ..."]) -> Float[Array, "R S ..."]:
    if not leaf.size:
        return core
    num, num_leaves, size = leaf.shape[:3]
    return jnp.concatenate([leaf.reshape(num, num_leaves * size, *leaf.shape[3:]), core], axis=1)


def _eliminate(arrow: Arrow, rhs: Float[Array, "R S ..."]) -> _Eliminated:
    """Eliminate all leaves at once, and then the core."""
    leaf_rhs, core_rhs = _split(arrow, rhs)
    cross, core, by_leaf = arrow.cross, arrow.core, _Factor([], leaf_rhs)
    if leaf_rhs.size:
        by_leaf, (cross, leaf_rhs) = _factorize(arrow.leaves, 2, cross, leaf_rhs[:, :, :, None])
        leaf_rhs = leaf_rhs[:, :, :, 0]
        # Sums of products: XLA runs a batch of small matrix products as one library call each.
        scaled = cross / by_leaf.pivots[:, :, :, None]
        core = core - jnp.sum(scaled[:, :, :, :, None] * cross[:, :, :, None], axis=(1, 2))
        core_rhs = core_rhs - jnp.sum(scaled * leaf_rhs[:, :, :, None], axis=(1, 2))
    by_core, (core_rhs,) = _factorize(core, 1, core_rhs[:, :, None])
    return _Eliminated(by_leaf, cross, leaf_rhs, by_core, core_rhs[:, :, 0])


def _substitute(parts: _Eliminated, leaf: Array, core: Array) -> Float[Array, "R S ..."]:
    """Solve back from the core to the leaves."""
    core = _solve_back(parts.core.upper, core, 1)
    if leaf.size:
        from_core = jnp.sum(parts.cross * core[:, None, None], axis=3) / parts.leaf.pivots
        leaf = _solve_back(parts.leaf.upper, leaf - from_core, 2)
    return _join(leaf, core)


def _factorize(matrix: Array, axis: int, *sides: Array) -> tuple[_Factor, list[Array]]:
    """Factorize matrices by Gaussian elimination.

    Args:
        matrix: its rows lie along `axis`, its columns along the next.
        sides: columns to multiply by inverse(K), in the same layout.

    Returns:
        The factor, and inverse(K) side for each side.
    """
    size = matrix.shape[axis]
    if not size:
        return _Factor([], sides[-1][_at(axis + 1, 0)]), list(sides)
    if size > MAX_UNROLLED:
        return _factorize_one_by_one(matrix, axis, *sides)
    upper, pivots, solved = [], [], []
    parts = [matrix, *sides]
    for _ in range(size):
        column, parts[0] = parts[0][_at(axis + 1, slice(0, 1))], parts[0][_at(axis + 1, slice(1, None))]
        pivot, multipliers = column[_at(axis, slice(0, 1))], column[_at(axis, slice(1, None))]
        multipliers = multipliers / pivot
        rows, below = ([part[_at(axis, rows)] for part in parts] for rows in (slice(0, 1), slice(1, None)))
        parts = [part - multipliers * row for part, row in zip(below, rows, strict=True)]
        pivots.append(pivot)
        upper.append((rows[0] / pivot)[_at(axis, 0)])
        solved.append(rows[1:])
    factor = _Factor(upper, jnp.concatenate(pivots, axis)[_at(axis + 1, 0)])
    return factor, [jnp.concatenate(rows, axis) for rows in zip(*solved, strict=True)]


def _factorize_one_by_one(matrix: Array, axis: int, *sides: Array) -> tuple[_Factor, list[Array]]:
    """Factorize by LAPACK, in batches that jaxlib computes one matrix after another.

    Two larger batches in one program can wait for each other for ever (`runtime.cpu_threads`).
    """

    def factorize(given: list[Array]) -> tuple[Array, Array, list[Array]]:
        root = jnp.linalg.cholesky(given[0])
        diagonal = jnp.diagonal(root)[:, None]
        solved = [jax.lax.linalg.triangular_solve(root, side, left_side=True, lower=True) for side in given[1:]]
        return root / diagonal[:, 0], diagonal**2, [diagonal * side for side in solved]

    given = [_batch_first(part, axis) for part in (matrix, *sides)]
    lower, pivots, solved = jax.lax.map(factorize, given, batch_size=_batch_size(matrix.shape[axis]))
    factor = _Factor(lower, _batch_last(pivots, matrix, axis)[_at(axis + 1, 0)])
    return factor, [_batch_last(side, matrix, axis) for side in solved]


def _solve_back(upper: list[Array] | Array, rhs: Array, axis: int) -> Array:
    """Return inverse(K') rhs."""
    if isinstance(upper, jax.Array):
        columns = jnp.expand_dims(rhs, axis + 1)
        solved = jax.lax.map(
            _solve_transposed, (upper, _batch_first(columns, axis)), batch_size=_batch_size(rhs.shape[axis])
        )
        return _batch_last(solved, columns, axis)[_at(axis + 1, 0)]
    found = rhs[_at(axis, slice(len(upper), None))]  # empty
    for i in reversed(range(len(upper))):
        own = rhs[_at(axis, i)] - jnp.sum(upper[i] * found, axis=axis)
        found = jnp.concatenate([jnp.expand_dims(own, axis), found], axis=axis)
    return found


def _batch_size(num_rows: int) -> int:
    return max(1, MAX_BATCH_OPERATIONS // num_rows**3)


def _solve_transposed(given: tuple[Array, Array]) -> Array:
    lower, rhs = given
    return jax.lax.linalg.triangular_solve(lower, rhs, left_side=True, lower=True, transpose_a=True, unit_diagonal=True)


def _batch_first(matrix: Array, axis: int) -> Float[Array, "B rows columns"]:
    """Move rows and columns to the end and flatten all other axes."""
    moved = jnp.moveaxis(matrix, (axis, axis + 1), (-2, -1))
    return moved.reshape(-1, *moved.shape[-2:])


def _batch_last(flat: Float[Array, "B rows columns"], like: Array, axis: int) -> Array:
    """Undo `_batch_first` for a matrix whose other axes are those of `like`."""
    others = like.shape[:axis] + like.shape[axis + 2 :]
    return jnp.moveaxis(flat.reshape(*others, *flat.shape[1:]), (-2, -1), (axis, axis + 1))


def _diagonal(matrix: Array, axis: int) -> Array:
    return jnp.stack([matrix[(*_at(axis, i), i)] for i in range(matrix.shape[axis])], axis)


def _at(axis: int, part: int | slice) -> tuple[int | slice, ...]:
    """Return the index that takes a part along an axis."""
    return (*(slice(None),) * axis, part)
