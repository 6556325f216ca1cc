"""Two independent filters of the same rows: their weights, their evidence, and how far they disagree."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.diagnostics import notable_k_hat
from ppl_bandit.engines.particles.weights import finite_log_weights, normalize_weights, resample
from ppl_bandit.types import Key

__all__ = [
    "NUM_FILTERS",
    "Reweighted",
    "disagreement",
    "evidence_error",
    "pick",
    "pooled_evidence",
    "pooled_log_weights",
    "resample_each",
    "reweigh",
]

NUM_FILTERS = 2
_RESAMPLE_SHARE = 0.5  # of the effective sample size, below which the filters are resampled


class Reweighted(NamedTuple):
    """Weights of the particles after a row.

    Attributes:
        log_weights: the largest of each filter is 0.
        weights: normalised, by filter.
        ess: effective sample size of all particles, twice that of the worse filter.
        k_hat: Pareto k-hat of all weights.
        log_densities: log predictive density of the row, by filter.
        is_uneven: whether the filters should be resampled.
    """

    log_weights: Float[Array, "2 H"]
    weights: Float[Array, "2 H"]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    log_densities: Float[Array, " 2"]
    is_uneven: Bool[Array, ""]


def reweigh(log_weights: Float[Array, "2 H"], log_likelihoods: Float[Array, "2 H"]) -> Reweighted:
    """Weight particles by the likelihood of a row."""
    later = jax.vmap(finite_log_weights)(log_weights + log_likelihoods)
    old, new = (jax.vmap(normalize_weights)(own) for own in (log_weights, later))
    # Of all weights at once: under `vmap` a branch that is rarely needed would always run.
    pooled = finite_log_weights(jnp.log(new.weights).ravel())
    least = jnp.min(new.ess)
    return Reweighted(
        later - jnp.max(later, axis=1, keepdims=True),
        new.weights,
        NUM_FILTERS * least,
        notable_k_hat(pooled, normalize_weights(pooled)),
        new.log_mean - old.log_mean,
        least < _RESAMPLE_SHARE * log_weights.shape[1],
    )


def pooled_evidence(log_evidences: Float[Array, " 2"]) -> Float[Array, ""]:
    """Return log p(data) from the estimates of both filters."""
    return logsumexp(jnp.asarray(log_evidences)) - jnp.log(NUM_FILTERS)


def evidence_error(log_evidences: Float[Array, " 2"]) -> Float[Array, ""]:
    """Return the standard error of `pooled_evidence`: half the difference of two independent estimates."""
    return 0.5 * jnp.abs(log_evidences[0] - log_evidences[1])


def pooled_log_weights(log_weights: Float[Array, "2 H"]) -> Float[Array, " particles"]:
    """Return the log weights of all particles, where both filters have the same total."""
    return (log_weights - logsumexp(log_weights, axis=1, keepdims=True)).ravel()


def resample_each(key: Key, log_weights: Float[Array, "2 H"]) -> Int[Array, "2 H"]:
    """Draw the indices of as many particles of each filter, in proportion to its weights."""
    offsets = jr.uniform(key, (NUM_FILTERS,))
    return jax.vmap(lambda offset, own: resample(offset, own, log_weights.shape[1]))(offsets, log_weights)


def pick(particles: Any, index: Int[Array, "2 H"]) -> Any:
    """Return the particles of each filter at its own indices; every array is (2, H, ...)."""
    return jax.tree.map(lambda leaf: jax.vmap(lambda own, at: own[at])(leaf, index), particles)


def disagreement(
    values: Float[Array, "2 H D"], weights: Float[Array, "2 H"], variances: Float[Array, "2 H D"] | float = 0.0
) -> Float[Array, ""]:
    """Return the largest difference of the filters' means, in standard deviations.

    Args:
        variances: of the law at each particle, whose mean is its value.
    """
    mean = jnp.einsum("fh,fhd->fd", weights, values)
    spread = variances + jnp.square(values - mean[:, None])
    variance = jnp.einsum("fh,fhd->fd", weights, spread).mean(axis=0)
    return jnp.max(jnp.abs(mean[0] - mean[1]) / jnp.sqrt(jnp.maximum(variance, 1e-300)))
