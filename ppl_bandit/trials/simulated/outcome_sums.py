"""Sums of many outcomes of one arm, drawn at once from their own law.

n Bernoulli outcomes add up to a Binomial number, n Poisson outcomes to a Poisson number, n Normal outcomes to a Normal number
with an independent chi-squared sum of squares. Posteriors that depend on a block of rows through such sums need no rows.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpyro.distributions as dist
from jaxtyping import Array, Float

from ppl_bandit.numerics import sampling
from ppl_bandit.numerics.counts import binomial
from ppl_bandit.types import Key

__all__ = ["sums_of_outcomes"]

Sums = Callable[[Key, Float[Array, " A"]], tuple[Array, Array | None]]


def sums_of_outcomes(law: Any) -> Sums | None:
    """Return (key, numbers of outcomes (A,)) -> sum and sum of squares of each arm's outcomes; None for another family.

    The sum of squares is None where the family needs none: its likelihood depends on the sum alone.

    Args:
        law: a NumPyro distribution with one entry per arm.
    """
    while isinstance(law, dist.ExpandedDistribution):
        law = law.base_dist
    if isinstance(law, dist.BernoulliProbs | dist.BernoulliLogits):
        probs = law.mean
        return lambda key, num: (binomial(key, num, jnp.broadcast_to(probs, num.shape)), None)
    if isinstance(law, dist.BinomialProbs | dist.BinomialLogits):
        each, probs = law.total_count, law.mean / law.total_count
        return lambda key, num: (binomial(key, num * each, jnp.broadcast_to(probs, num.shape)), None)
    if isinstance(law, dist.Poisson):
        return lambda key, num: (jr.poisson(key, num * law.rate).astype(num.dtype), None)
    if isinstance(law, dist.Exponential):
        return lambda key, num: (_gamma(key, num) / law.rate, None)
    if isinstance(law, dist.Gamma):
        return lambda key, num: (_gamma(key, num * law.concentration) / law.rate, None)
    if isinstance(law, dist.Normal):
        return lambda key, num: _normal_sums(key, num, law.loc, law.scale)
    return None


def _gamma(key: Key, shape: Float[Array, " A"]) -> Float[Array, " A"]:
    """Draw Gamma variables; 0 for shape 0."""
    return jnp.where(shape > 0, jnp.exp(sampling.log_gamma(key, jnp.where(shape > 0, shape, 1.0))), 0.0)


def _normal_sums(key: Key, num: Float[Array, " A"], mean: Any, sd: Any) -> tuple[Array, Array]:
    key_mean, key_squares = jr.split(key)
    total = num * mean + jnp.sqrt(num) * sd * jr.normal(key_mean, num.shape, num.dtype)
    around = 2.0 * sd**2 * _gamma(key_squares, jnp.maximum(0.5 * (num - 1.0), 0.0))
    return total, around + total**2 / jnp.maximum(num, 1.0)
