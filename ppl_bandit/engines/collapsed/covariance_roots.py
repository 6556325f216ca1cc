"""Square roots of the covariances of Gaussian blocks at every particle, which a row changes without a factorization.

A row adds h h' to a precision matrix P and c h to the linear coefficients b. With a root R of the covariance, R R' =
inverse(P), v = R'h and s = 1 + v'v, Potter's square-root filter is

    R <- R (I - v v' / (s + sqrt(s))),    log|P| <- log|P| + log s,    m <- m + R v (c - h'm) / s,    m = inverse(P) b,

O(S^2) operations instead of O(S^3). R R' stays positive definite, and rounding changes it relatively, not by what cancels. The
arrays of a particle are adjacent in memory: with 50 rows, those of 1,000 particles are 20 MB, and every pass over them counts.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.posterior import Natural
from ppl_bandit.numerics.arrow_matrices import MAX_BATCH_OPERATIONS, MIN_PIVOT, Arrow
from ppl_bandit.runtime.conditional_execution import apply_where

_ROUNDINGS = 1e4  # relative to the largest entry: smaller ones are rounding


class CovarianceRoots(NamedTuple):
    """Roots of the covariances of R Gaussian blocks of S rows, for M particles.

    Attributes:
        root: root root' = inverse(precision).
        shift: inverse(precision) linear, the means less the centre.
        log_det: of the precisions; nan where a pivot is not positive, or consists of rounding.
    """

    root: Float[Array, "M R S S"]
    shift: Float[Array, "M R S"]
    log_det: Float[Array, "M R"]


def factorize(precision: Arrow, linear: Float[Array, "R S M"]) -> CovarianceRoots:
    """Return the roots of precisions without leaves."""

    def one(precision: Float[Array, "S S"], linear: Float[Array, " S"]) -> CovarianceRoots:
        half, log_det = _divide_by_root(precision, jnp.eye(len(linear), dtype=linear.dtype))
        return CovarianceRoots(half.T, half.T @ (half @ linear), log_det)

    given = jnp.moveaxis(precision.core, -1, 0), jnp.moveaxis(linear, -1, 0)
    return jax.lax.map(lambda own: jax.vmap(one)(*own), given, batch_size=_batch_size(linear))


def add_rows(roots: CovarianceRoots, fresh: Natural) -> CovarianceRoots:
    """Add rows whose natural parameters all particles share; a factorization is needed if they add more than one term.

    Args:
        fresh: with precisions without leaves.
    """
    linear, quadratic = fresh.linear, fresh.quadratic.core
    every, pivot = jnp.arange(len(linear)), jnp.argmax(jnp.diagonal(quadratic, axis1=1, axis2=2), axis=1)
    largest = quadratic[every, pivot, pivot]
    # The term that explains the row of the largest diagonal entry; 0 for a block that the rows do not read.
    scale = jnp.where(largest > 0.0, jax.lax.rsqrt(jnp.where(largest > 0.0, largest, 1.0)), 0.0)
    h, c = quadratic[every, :, pivot] * scale[:, None], linear[every, pivot] * scale
    linear, quadratic = linear - c[:, None] * h, quadratic - h[:, :, None] * h[:, None]
    tolerance = _ROUNDINGS * jnp.finfo(linear.dtype).eps
    is_left = jnp.any(jnp.max(jnp.abs(quadratic), axis=(1, 2)) > tolerance * largest)
    is_left |= jnp.any(jnp.max(jnp.abs(linear), axis=1) > tolerance * (1.0 + jnp.abs(c)) * jnp.sqrt(largest))

    def one(roots: CovarianceRoots, linear: Float[Array, " S"], quadratic: Float[Array, "S S"]) -> CovarianceRoots:
        root, shift, log_det = roots
        matrix = jnp.eye(len(shift), dtype=root.dtype) + root.T @ quadratic @ root
        half, more = _divide_by_root(matrix, root.T)
        shift = shift + half.T @ (half @ (linear - quadratic @ shift))
        return CovarianceRoots(half.T, shift, log_det + more)

    def add_rest(roots: CovarianceRoots) -> CovarianceRoots:
        return jax.lax.map(lambda own: jax.vmap(one)(own, linear, quadratic), roots, batch_size=_batch_size(linear))

    return apply_where(is_left, add_rest, _add_term(roots, h, c))


def _add_term(roots: CovarianceRoots, h: Float[Array, "R S"], c: Float[Array, " R"]) -> CovarianceRoots:
    root, shift, log_det = roots
    # A row of one arm reads one element: a row of each root in place of a pass over all of them.
    every, largest = jnp.arange(len(h)), jnp.argmax(jnp.abs(h), axis=1)
    v = jax.lax.cond(
        jnp.all(jnp.sum(h != 0.0, axis=1) <= 1),
        lambda: root[:, every, largest] * h[every, largest, None],
        lambda: jnp.sum(root * h[:, :, None], axis=2),
    )
    s = 1.0 + jnp.sum(v * v, axis=2)
    covariance = jnp.sum(root * v[:, :, None], axis=3)  # of every element with h'x
    gain = (c - jnp.sum(h * shift, axis=2)) / s
    return CovarianceRoots(
        root - covariance[..., None] * (v / (s + jnp.sqrt(s))[..., None])[:, :, None],
        shift + covariance * gain[..., None],
        log_det + jnp.log(s),
    )


def _batch_size(linear: Float[Array, "R S ..."]) -> int:
    num_blocks, size = linear.shape[:2]
    return max(1, MAX_BATCH_OPERATIONS // (num_blocks * size**3))


def _divide_by_root(
    matrix: Float[Array, "S S"], columns: Float[Array, "S n"]
) -> tuple[Float[Array, "S n"], Float[Array, ""]]:
    """Return inverse(L) columns for the Cholesky factor L of a matrix, and its log determinant."""
    lower = jnp.linalg.cholesky(matrix)
    pivots = jnp.square(jnp.diagonal(lower))
    is_known = pivots > MIN_PIVOT * jnp.finfo(pivots.dtype).eps * jnp.diagonal(matrix)
    log_det = jnp.sum(jnp.log(jnp.where(is_known, pivots, jnp.nan)))
    return jax.scipy.linalg.solve_triangular(lower, columns, lower=True), log_det


def gaussian_integral(
    roots: CovarianceRoots, linear: Float[Array, "R S M"]
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Return linear' inverse(precision) linear / 2 and the log determinants, as `arrow_matrices.gaussian_integral` does."""
    return 0.5 * jnp.sum(linear * jnp.moveaxis(roots.shift, 0, -1), axis=1), roots.log_det.T


def precisions_of(roots: CovarianceRoots) -> Float[Array, "M R S S"]:
    """Return the precisions of a few particles."""
    inverse = jax.lax.map(jnp.linalg.inv, roots.root)
    return jnp.sum(inverse[..., :, None] * inverse[..., None, :], axis=-3)
