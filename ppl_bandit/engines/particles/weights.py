"""Importance weights of particles: normalisation, effective sample size, tempering and systematic resampling."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
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
