"""Gaussian blocks: real elements in groups whose joint law is one Gaussian, scaled by at most one positive element.

    T = (u x, -u x x' / 2)    x: a block's elements relative to a centre; u: the Gamma element that scales it, or 1

A block holds the elements that the prior or a row of data can couple (`proof.gaussian_blocks`); all blocks are padded to the
same size, so that they are one batch of small matrices. Precisions are matrices, or `Arrow`s where a layout has leaves.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.inner.layout import Layout
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow

_MAX_FUSED_TERMS = 4000  # products of at most so many terms are one fused loop; larger ones would need too much memory


def take(array: Float[Array, "*batch D"], index: np.ndarray) -> Array:
    """Return array[..., index] for a constant index; a reshape if it lists all elements in order."""
    if np.array_equal(index.ravel(), np.arange(array.shape[-1])):
        return array.reshape(*array.shape[:-1], *index.shape)
    # Not int64: jax caches indices across a change of its precision.
    return jnp.asarray(array).at[..., index.astype(np.int32)].get(mode="promise_in_bounds")


def zero_padding(is_member: np.ndarray, values: Array) -> Array:
    """Return values with 0 in the padded entries."""
    return values if is_member.all() else jnp.where(is_member, values, 0.0)


def reals_of(layout: Layout, blocks: Float[Array, "*batch R S"]) -> Float[Array, "*batch D"]:
    """Return the elements of blocks in the order of the real elements."""
    flat = blocks.reshape(*blocks.shape[:-2], layout.members.size)
    columns = np.flatnonzero(layout.is_member.ravel())
    return take(flat, columns[np.argsort(layout.members[layout.is_member])])


def blocks_of(layout: Layout, real: Float[Array, "*batch D"]) -> Float[Array, "*batch R S"]:
    """Return the real elements in blocks, with 0 as padding: the inverse of `reals_of`."""
    return zero_padding(layout.is_member, take(real, layout.members))


def by_block(layout: Layout, values: Float[Array, "*batch G"], otherwise: float) -> Float[Array, "*batch R"]:
    """Return the value of the positive element that scales each block, or `otherwise` for a block without one."""
    if np.all(layout.owner >= 0):
        return take(values, layout.owner)
    more = jnp.concatenate([values, jnp.full((*values.shape[:-1], 1), otherwise, values.dtype)], axis=-1)
    return take(more, np.where(layout.owner < 0, layout.power.size, layout.owner))


def sum_by_owner(layout: Layout, values: Float[Array, "R ..."]) -> Any:
    """Return the sum over the blocks that each positive element scales."""
    if np.array_equal(layout.owner, np.arange(layout.power.size)):
        return values
    is_own = layout.owner == np.arange(layout.power.size)[:, None]
    return np.asarray(is_own, values.dtype) @ values


def padding(layout: Layout, dtype: Any) -> Float[np.ndarray, "R S S"]:
    """Return 1 on the diagonal of the padded entries, and 0 elsewhere: their part of a precision matrix."""
    return np.eye(layout.members.shape[1], dtype=dtype) * ~layout.is_member[:, :, None]


def times_blocks(matrices: Any, vectors: Float[Array, "*P R S"]) -> Float[Array, "*P R S"]:
    """Multiply the matrix of each block with its vectors; arrows with one vector each."""
    if isinstance(matrices, Arrow):
        return arrow_matrices.times(matrices, vectors)
    if vectors.size * vectors.shape[-1] <= _MAX_FUSED_TERMS:
        return jnp.sum(matrices * vectors[..., None, :], axis=-1)
    return jnp.einsum("rst,...rt->...rs", matrices, vectors)


def solve_blocks(precision: Any, rhs: Float[Array, "R S"]) -> Float[Array, "R S"]:
    """Return inverse(precision) rhs for each block."""
    if isinstance(precision, Arrow):
        return arrow_matrices.solve(precision, rhs)
    if rhs.shape[-1] == 1:
        return rhs / precision[..., 0]
    factor = jnp.linalg.cholesky(precision)
    return jax.scipy.linalg.cho_solve((factor, True), rhs[..., None])[..., 0]


def invert_blocks(matrices: Float[Array, "*batch R S S"]) -> Float[Array, "*batch R S S"]:
    """Return the inverse of each positive definite block."""
    size = matrices.shape[-1]
    if size == 1:
        return 1.0 / matrices
    found = _invert_small(matrices) if size <= arrow_matrices.MAX_UNROLLED else jnp.linalg.inv(matrices)
    return 0.5 * (found + jnp.swapaxes(found, -1, -2))


def _invert_small(matrices: Float[Array, "*batch S S"]) -> Float[Array, "*batch S S"]:
    """Return what `jnp.linalg.inv` returns, without its loop over the pivots on a CPU."""
    size = matrices.shape[-1]
    lu, pivots, _ = jax.lax.linalg.lu(matrices)
    place = np.arange(size, dtype=np.int32)
    permutation = jnp.broadcast_to(place, pivots.shape)
    for step in range(size):
        here, other = permutation[..., step : step + 1], pivots[..., step : step + 1]
        there = jnp.sum(jnp.where(place == other, permutation, 0), axis=-1, keepdims=True, dtype=np.int32)
        permutation = jnp.where(place == step, there, jnp.where(place == other, here, permutation))
    rows = (permutation[..., None] == place).astype(matrices.dtype)
    half = jax.lax.linalg.triangular_solve(lu, rows, left_side=True, lower=True, unit_diagonal=True)
    return jax.lax.linalg.triangular_solve(lu, half, left_side=True, lower=False)


def log_determinants(precision: Float[Array, "R S S"]) -> Float[Array, " R"]:
    """Return the log determinant of each block."""
    return jnp.log(precision[:, 0, 0]) if precision.shape[-1] == 1 else jnp.linalg.slogdet(precision)[1]
