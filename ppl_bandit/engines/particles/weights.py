"""Importance weights of particles: normalisation, effective sample size, tempering and systematic resampling."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float, Int

_GOLDEN_RATIO = 0.618  # multiples of it are spread evenly over a circle


class NormalizedWeights(NamedTuple):
    """Weights with sum 1, their effective sample size, and the log of their mean before normalisation."""

    weights: Float[Array, " M"]
    ess: Float[Array, ""]
    log_mean: Float[Array, ""]


def normalize_weights(log_weights: Float[Array, " M"]) -> NormalizedWeights:
    """Normalise log weights, none of which is nan or positive infinity; see `finite_log_weights`."""
    largest = jnp.max(log_weights)
    largest = jnp.where(largest > -jnp.inf, largest, 0.0)
    relative = jnp.exp(log_weights - largest)
    total = jnp.sum(relative)
    weights = relative / total
    ess = 1.0 / jnp.sum(jnp.square(weights))
    log_mean = largest + jnp.log(total) - math.log(log_weights.shape[0])
    return NormalizedWeights(weights, jnp.where(jnp.isfinite(ess), ess, 0.0), log_mean)


def weight_ess(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    """Return the effective sample size of weighted draws, 1 / sum w^2 (Kish); 0 if no weight is finite."""
    return normalize_weights(log_weights).ess


def variance_of_mean(ess: Float[Array, "*B"], num: int) -> Float[Array, "*B"]:
    """Return the relative variance of the mean of M independent weights: (M / ess - 1) / M."""
    return jnp.maximum(1.0 / jnp.maximum(ess, 1.0) - 1.0 / num, 0.0)


def finite_log_weights(log_weights: Float[Array, " M"]) -> Float[Array, " M"]:
    """Replace nan and positive infinity by -inf; if no weight is positive then, return equal weights."""
    log_weights = jnp.where(jnp.isnan(log_weights) | (log_weights == jnp.inf), -jnp.inf, log_weights)
    return jnp.where(jnp.any(log_weights > -jnp.inf), log_weights, 0.0)


def flatten_log_weights(log_weights: Float[Array, " M"], min_ess: float) -> Float[Array, " M"]:
    """Temper weights by the largest power 1, 1/2, 1/4, ... at which the effective sample size reaches `min_ess`.

    The loop also ends when all positive weights are equal: a smaller power cannot raise the effective sample size further.
    """

    def is_uneven(flat: Float[Array, " M"]) -> Array:
        is_possible = flat > -jnp.inf
        return (weight_ess(flat) < min_ess) & jnp.any(is_possible & (flat < jnp.max(flat)))

    return jax.lax.while_loop(is_uneven, lambda flat: 0.5 * flat, log_weights)


def resample(offset: Float[Array, ""], log_weights: Float[Array, " M"], num_samples: int) -> Int[Array, " samples"]:
    """Draw indices in proportion to weights by systematic resampling; copies of an index are not adjacent.

    Index m is drawn floor or ceil of num_samples x weight times. With equal weights no draw is repeated before every draw
    is used.

    Args:
        offset: uniform on [0, 1); the only random number used.
    """
    num_draws = log_weights.shape[0]
    cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
    # The number of points (j + offset) / num_samples, j = 0, 1, ..., below each cumulative weight.
    below = jnp.ceil(cumulative / cumulative[-1] * num_samples - offset).astype(int)
    steps = jnp.zeros(num_samples, int).at[below[:-1]].add(1, mode="drop")
    index = jnp.minimum(jnp.cumsum(steps), num_draws - 1)
    # A stride near the golden ratio, coprime to num_samples, is a permutation that separates neighbours without a sort.
    first_stride = int(_GOLDEN_RATIO * num_samples) + 1
    stride = next(n for n in range(first_stride, 2 * num_samples + 2) if math.gcd(n, num_samples) == 1)
    start = jnp.floor(offset * num_samples).astype(int)
    return index[(jnp.arange(num_samples) * stride + start) % num_samples]


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
