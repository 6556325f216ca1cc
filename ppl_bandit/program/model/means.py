"""The mean of an outcome's distribution, by the best method that the distribution allows.

NumPyro's `.mean` is missing for many distributions, nan for some that have a mean (Categorical) and for some that have none
(Cauchy), and infinite for others. The methods, in order: `.mean`; a sum over a finite support; Gauss-Legendre quadrature of the
quantile function; Monte Carlo with the same random numbers for every arm. A distribution whose mean does not exist is an
error, never a silent average.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto
from ppl_bandit.program.model.tracing import Trace
from ppl_bandit.runtime.numpyro_adapter import without_censoring

__all__ = ["MONTE_CARLO", "MEAN_METHODS", "MeanMethod", "describe", "expected_reward", "reward_variance"]

NUM_QUADRATURE_NODES = 128
NUM_MONTE_CARLO_DRAWS = 1024
_TAIL_PROBS = (1e-8, 1e-5)


class MeanMethod(NamedTuple):
    """A method to compute a mean.

    Attributes:
        description: its name in `explain()`.
        mean: distribution of batch shape (N,) -> (N,); raises NotImplementedError if the method does not apply.
        verdict: distribution -> (N,): 1 where the mean is finite, -1 where it does not exist, 0 where the method cannot decide.
    """

    description: str
    mean: Callable[[Distribution], Float[Array, " N"]]
    verdict: Callable[[Distribution], Array]


def _stated(fn: Distribution) -> Array:
    return jnp.broadcast_to(without_censoring(fn).mean, fn.batch_shape)


def _summed(fn: Distribution) -> Array:
    fn = without_censoring(fn)
    if not fn.has_enumerate_support:
        raise NotImplementedError
    values = fn.enumerate_support(expand=False)  # (K, 1)
    return jnp.sum(values * jnp.exp(fn.log_prob(values)), axis=0)


def _integrated(fn: Distribution) -> Array:
    fn = without_censoring(fn)
    nodes, weights = np.polynomial.legendre.leggauss(NUM_QUADRATURE_NODES)
    # u = v^3 (10 - 15 v + 6 v^2) has vanishing derivatives at 0 and 1: it resolves quantile functions with poles there.
    v = 0.5 * (nodes + 1.0)
    u = v**3 * (10.0 - 15.0 * v + 6.0 * v**2)
    density = 0.5 * weights * 30.0 * v**2 * (1.0 - v) ** 2
    limits = jnp.finfo(jnp.zeros(()).dtype)
    levels = jnp.clip(jnp.asarray(u), limits.tiny, 1.0 - limits.eps)  # in float32 the outermost nodes round to 0 and 1
    quantiles = fn.icdf(levels[:, None] + jnp.zeros(fn.batch_shape))
    return jnp.tensordot(jnp.asarray(density), quantiles, axes=1)


def _sampled(fn: Distribution) -> Array:
    # The caller passes one row at a time, so that the same key gives every arm the same random numbers.
    draws = without_censoring(fn).sample(jr.key(0), (NUM_MONTE_CARLO_DRAWS,))
    return jnp.mean(draws, axis=0)


def _stated_verdict(fn: Distribution) -> Array:
    mean = _stated(fn)  # nan means "no mean" (Cauchy) or "not implemented" (Categorical)
    return jnp.where(jnp.isinf(mean), -1, jnp.where(jnp.isnan(mean), 0, 1))


def _summed_verdict(fn: Distribution) -> Array:
    return jnp.where(jnp.isfinite(_summed(fn)), 1, 0)


def _integrated_verdict(fn: Distribution) -> Array:
    # E|x| is finite only if p * |quantile(p)| -> 0 at both ends; it stays constant for a Cauchy and grows beyond it.
    base = without_censoring(fn)
    outer, inner = (jnp.asarray(p) + jnp.zeros(fn.batch_shape) for p in _TAIL_PROBS)
    centre = base.icdf(jnp.full(fn.batch_shape, 0.5))

    def weight(p: Array, upper: bool) -> Array:
        return p * jnp.abs(base.icdf(1.0 - p if upper else p) - centre)

    falls = [weight(outer, upper) <= 0.5 * weight(inner, upper) for upper in (False, True)]
    return jnp.where(jnp.isfinite(_integrated(fn)) & falls[0] & falls[1], 1, -1)


def _sampled_verdict(fn: Distribution) -> Array:
    # A generalised Pareto tail of shape 1 or more has no mean; both tails of |x| count.
    draws = jnp.abs(without_censoring(fn).sample(jr.key(0), (16 * NUM_MONTE_CARLO_DRAWS,)))
    largest = jnp.sort(draws, axis=0)[-NUM_MONTE_CARLO_DRAWS:]
    shape, _ = jax.vmap(lambda own: fit_generalized_pareto(own, is_sorted=True), in_axes=1)(largest[1:] - largest[0])
    return jnp.where(jnp.isfinite(_sampled(fn)) & (shape < 1.0), 1, -1)


MONTE_CARLO = MeanMethod(
    f"Monte Carlo over {NUM_MONTE_CARLO_DRAWS} draws, the same random numbers for every arm",
    _sampled,
    _sampled_verdict,
)
MEAN_METHODS = (
    MeanMethod("its distribution's own formula", _stated, _stated_verdict),
    MeanMethod("a sum over its finite support", _summed, _summed_verdict),
    MeanMethod(
        f"Gauss-Legendre quadrature of its quantile function ({NUM_QUADRATURE_NODES} nodes)",
        _integrated,
        _integrated_verdict,
    ),
    MONTE_CARLO,
)


def describe(method: MeanMethod | None, outcomes: tuple[str, ...]) -> str:
    """Return as text how the expected reward is computed; None stands for the program's own site."""
    if method is None:
        return "the program's own expected_reward site"
    return f"the mean of '{outcomes[0]}', from {method.description}"


def expected_reward(trace: Trace, outcomes: tuple[str, ...], method: MeanMethod | None) -> Float[Array, " N"]:
    """Return the quantity to maximise: the program's `expected_reward` site, or the mean of its one outcome."""
    if method is None:
        return trace["expected_reward"]["value"]
    return method.mean(trace[outcomes[0]]["fn"])


def reward_variance(trace: Trace, outcomes: tuple[str, ...], method: MeanMethod | None) -> Float[Array, " N"]:
    """Return the variance of the one outcome.

    Raises:
        NotImplementedError: if the mean is computed by a method that does not give the variance.
    """
    fn = trace[outcomes[0]]["fn"]
    if method is MEAN_METHODS[0]:
        return jnp.broadcast_to(without_censoring(fn).variance, fn.batch_shape)
    if method is MEAN_METHODS[1]:
        base = without_censoring(fn)
        values = base.enumerate_support(expand=False)
        return jnp.sum((values - method.mean(fn)) ** 2 * jnp.exp(base.log_prob(values)), axis=0)
    raise NotImplementedError
