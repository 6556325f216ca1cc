"""Means, covariances and covariance roots of particles, and Student-t laws in the coordinates that they standardise."""

import math

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float

_CUT = 10.0  # multiples of the geometric mean at which differences are cut: five standard deviations of a Gaussian


def mean_and_covariance(
    positions: Float[Array, "M k"], weights: Float[Array, " M"] | None = None
) -> tuple[Float[Array, " k"], Float[Array, "k k"]]:
    """Return the mean and the covariance of draws; equal weights if none are given."""
    num = positions.shape[0]
    if weights is None:
        weights = jnp.full(num, 1.0 / num, positions.dtype)
    mean = weights @ positions
    centred = positions - mean
    return mean, (weights[:, None] * centred).T @ centred


def mean_and_root(
    positions: Float[Array, "M k"],
    prior_covariance: Float[Array, "k k"],
    ess: Float[Array, ""],
    weights: Float[Array, " M"] | None = None,
) -> tuple[Float[Array, " k"], Float[Array, "k k"]]:
    """Return the mean of weighted draws, and a lower-triangular root of their shrunk covariance.

    The covariance is shrunk towards a prior one with the weight of k + 1 draws. It is never shrunk towards a diagonal: in a
    tight hierarchy latents differ by a millionth of what they have in common, and only a full covariance represents that.
    """
    size = positions.shape[1]
    mean, covariance = mean_and_covariance(positions, weights)
    share = ess / (ess + size + 1.0)
    blended = share * covariance + (1.0 - share) * prior_covariance
    scale = jnp.sqrt(jnp.diagonal(blended))
    scale = jnp.where(scale > 0, scale, 1.0)
    correlation = blended / scale / scale[:, None]
    root = jnp.linalg.cholesky(correlation) * scale[:, None]
    # Rounding can make the matrix singular; then add the rounding error to its diagonal, or keep the diagonal alone.
    jitter = 100 * jnp.finfo(positions.dtype).eps
    safe = jnp.linalg.cholesky(correlation + jitter * jnp.eye(size, dtype=positions.dtype)) * scale[:, None]
    root = jnp.where(jnp.all(jnp.isfinite(root)), root, safe)
    return mean, jnp.where(jnp.all(jnp.isfinite(root)), root, jnp.diag(scale))


def jittered_root(covariance: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """Return a lower-triangular root of a covariance whose diagonal is raised by 1e-5 of itself, so that it is invertible."""
    return jnp.linalg.cholesky(covariance + jnp.diag(1e-5 * jnp.diagonal(covariance) + 1e-12))


def robust_covariance(positions: Float[Array, "M k"]) -> Float[Array, "k k"]:
    """Return the covariance of draws without their tails; it is finite also for laws without a variance.

    Differences of draws are cut off at ten times their geometric mean, which always exists.
    """
    num = positions.shape[0]
    gaps = positions - jnp.roll(positions, num // 2, axis=0)  # adjacent particles may be copies of each other
    reach = _CUT * jnp.exp(jnp.mean(jnp.log(jnp.abs(gaps) + jnp.finfo(gaps.dtype).tiny), axis=0))
    gaps = jnp.clip(gaps, -reach, reach)
    return gaps.T @ gaps / (2 * num)


def standardize(
    positions: Float[Array, "M k"], centre: Float[Array, " k"], root: Float[Array, "k k"]
) -> Float[Array, "M k"]:
    """Return root^-1 (x - centre) for every draw x."""
    return jax.scipy.linalg.solve_triangular(root, (positions - centre).T, lower=True).T


def student_t_draws(uniform: Float[Array, "M n"], normal: Float[Array, "M k"]) -> Float[Array, "M k"]:
    """Return draws of a standard Student-t law with 2 n degrees of freedom.

    Args:
        uniform: numbers in (0, 1). A chi-squared variable with 2 n degrees of freedom is a sum of n exponentials.
        normal: standard normal numbers.
    """
    chi_squared = -2.0 * jnp.sum(jnp.log(uniform), axis=1)
    return normal * jnp.sqrt(2 * uniform.shape[1] / chi_squared)[:, None]


def log_kernel(squared_distances: Float[Array, "*M"], degrees: int, size: int) -> Float[Array, "*M"]:
    """Return the log density at standardised squared distances from the centre, without its constant."""
    return -0.5 * (degrees + size) * jnp.log1p(squared_distances / degrees)


def log_normalizing_constant(degrees: int, size: int) -> Float[Array, ""]:
    """Return the log density of a standard Student-t law at its centre."""
    return gammaln((degrees + size) / 2) - gammaln(degrees / 2) - 0.5 * size * math.log(degrees * math.pi)
