"""The mean of an outcome's distribution, by the best method that the distribution allows.

NumPyro's `.mean` is missing for many distributions, nan for some that have a mean (Categorical) and for some that have none
(Cauchy), infinite for others, and the circular mean for laws of angles (VonMises), which is not the mean of the number. The
methods, in order: `.mean`; a sum over a finite support; quadrature of the quantile function; quadrature of the density; Monte
Carlo with the same random numbers for every arm, whose error does not fall with data and is noted at every decision. Each is
applied to the law before affine maps, which move and scale the mean. A distribution whose mean does not exist is an error,
never a silent average.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float
from numpyro.distributions import Distribution

from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto
from ppl_bandit.program.model.tracing import Trace
from ppl_bandit.runtime.numpyro_adapter import before_affine_map, has_circular_part, support_bounds, without_censoring

NUM_QUADRATURE_NODES = 128
NUM_MONTE_CARLO_DRAWS = 1024
MONTE_CARLO_NOTE = (
    f"the expected rewards are averages of {NUM_MONTE_CARLO_DRAWS:,} fixed draws of a reward: their error, about "
    f"{1 / math.sqrt(NUM_MONTE_CARLO_DRAWS):.2f} standard deviations of one reward, does not fall with data; name the "
    'quantity to maximise with numpyro.deterministic("expected_reward", ...)'
)
_TAIL_PROBS = (1e-8, 1e-5)
# The panels of the density: between draws, and from the outermost draws to the ends of the support.
_NUM_PANEL_DRAWS, _DRAWS_PER_PANEL = 128, 3
_NUM_TAIL_PANELS = 40  # of doubling width: 1e11 times the range of the draws
_NUM_PANEL_NODES, _NUM_COARSE_NODES = 8, 6
_MAX_PANEL_ERROR = 1e-4  # of a mean, in mean absolute deviations of a reward


class MeanMethod(NamedTuple):
    """A method to compute a mean.

    Attributes:
        description: its name in `explain()`.
        mean: distribution of batch shape (N,) -> (N,); raises NotImplementedError if the method does not apply.
        verdict: distribution -> (N,): 1 where the mean is finite, -1 where it does not exist, 0 where the method cannot decide.
        uses_draws: whether the mean depends on random numbers; then rows are evaluated one by one, with the same numbers.
    """

    description: str
    mean: Callable[[Distribution], Float[Array, " N"]]
    verdict: Callable[[Distribution], Array]
    uses_draws: bool = False


def _stated(fn: Distribution) -> Array:
    if has_circular_part(fn):
        raise NotImplementedError
    return jnp.broadcast_to(fn.mean, fn.batch_shape)


def _summed(fn: Distribution) -> Array:
    if not fn.has_enumerate_support:
        raise NotImplementedError
    values = fn.enumerate_support(expand=False)  # (K, 1)
    return jnp.sum(values * jnp.exp(fn.log_prob(values)), axis=0)


def _integrated(fn: Distribution) -> Array:
    nodes, weights = np.polynomial.legendre.leggauss(NUM_QUADRATURE_NODES)
    # u = v^3 (10 - 15 v + 6 v^2) has vanishing derivatives at 0 and 1: it resolves quantile functions with poles there.
    v = 0.5 * (nodes + 1.0)
    u = v**3 * (10.0 - 15.0 * v + 6.0 * v**2)
    density = 0.5 * weights * 30.0 * v**2 * (1.0 - v) ** 2
    limits = jnp.finfo(jnp.zeros(()).dtype)
    levels = jnp.clip(jnp.asarray(u), limits.tiny, 1.0 - limits.eps)  # in float32 the outermost nodes round to 0 and 1
    quantiles = jnp.clip(fn.icdf(levels[:, None] + jnp.zeros(fn.batch_shape)), *_known_bounds(fn))
    return jnp.tensordot(jnp.asarray(density), quantiles, axes=1)


def _known_bounds(fn: Distribution) -> tuple[Any, Any]:
    """Return the ends of the support: rounding puts quantiles of a law truncated far out in a tail outside of it."""
    try:
        return support_bounds(fn)
    except NotImplementedError:
        return -jnp.inf, jnp.inf


def _panel_edges(fn: Distribution) -> tuple[Float[Array, "edges N"], Float[Array, "draws N"]]:
    """Return edges of panels that cover the support of a continuous law, and the draws between which they lie.

    Panels follow the draws where the law has its mass, and double in width beyond them. Towards a finite end of the support
    they shrink again, because densities can have a pole there.
    """
    bounds = support_bounds(fn)
    draws = jnp.sort(fn.sample(jr.key(0), (_NUM_PANEL_DRAWS,)), axis=0)
    inner = draws[::_DRAWS_PER_PANEL]
    growth = 2.0 ** jnp.arange(1.0, _NUM_TAIL_PANELS + 1.0)[:, None]
    outwards = (inner[-1] - inner[0]) / 8.0 * (growth - 1.0)

    def tail(outermost: Array, bound: Any, sign: float) -> Array:
        """Return edges from the outermost draw to the end of the support, in any order."""
        bound = jnp.broadcast_to(jnp.asarray(bound, draws.dtype), fn.batch_shape)
        gap = jnp.where(jnp.isfinite(bound), jnp.abs(bound - outermost), 0.0)
        half = _NUM_TAIL_PANELS // 2
        inwards = jnp.concatenate(
            [jnp.minimum(outwards[:half], gap), gap * (1.0 - growth[: half - 1] ** -2), gap[None]]
        )
        return outermost + sign * jnp.where(jnp.isfinite(bound), inwards, outwards)

    edges = [tail(inner[0], bounds[0], -1.0), inner, tail(inner[-1], bounds[1], 1.0)]
    return jnp.sort(jnp.concatenate(edges), axis=0), draws


def _panel_sums(fn: Distribution, edges: Float[Array, "edges N"], num_nodes: int) -> tuple[Array, Array, Array]:
    """Return, for each panel, the integrals of the density, and of the value and its absolute value times the density."""
    nodes, weights = np.polynomial.legendre.leggauss(num_nodes)
    widths = jnp.diff(edges, axis=0)
    x = edges[:-1, None] + widths[:, None] * jnp.asarray(0.5 * (nodes + 1.0))[:, None]
    density = jnp.exp(fn.log_prob(x.reshape(-1, *edges.shape[1:])).reshape(x.shape))
    mass = jnp.where(jnp.isfinite(density), density, 0.0) * jnp.asarray(0.5 * weights)[:, None] * widths[:, None]
    return jnp.sum(mass, axis=1), jnp.sum(mass * x, axis=1), jnp.sum(mass * jnp.abs(x), axis=1)


def _from_density(fn: Distribution) -> Array:
    mass, moment, _ = _panel_sums(fn, _panel_edges(fn)[0], _NUM_PANEL_NODES)
    return jnp.sum(moment, axis=0) / jnp.sum(mass, axis=0)


def _from_density_verdict(fn: Distribution) -> Array:
    """Compare the quadrature with a coarser one, with a total probability of 1, and its outermost panels with 0."""
    edges, draws = _panel_edges(fn)
    mass, moment, size = _panel_sums(fn, edges, _NUM_PANEL_NODES)
    coarse_mass, coarse, _ = _panel_sums(fn, edges, _NUM_COARSE_NODES)
    total = jnp.sum(mass, axis=0)
    shift = jnp.abs(jnp.sum(moment, axis=0) / total - jnp.sum(coarse, axis=0) / jnp.sum(coarse_mass, axis=0))
    spread = jnp.mean(jnp.abs(draws - draws[_NUM_PANEL_DRAWS // 2]), axis=0)
    is_fine = (jnp.abs(total - 1.0) <= _MAX_PANEL_ERROR) & (shift <= _MAX_PANEL_ERROR * spread)
    # A law without a mean has as much of E|x| in each panel of its tail as in the one before, or more.
    share = (jnp.sum(size[:3], axis=0) + jnp.sum(size[-3:], axis=0)) / jnp.sum(size, axis=0)
    falls = (size[0] <= 0.97 * size[1]) & (size[-1] <= 0.97 * size[-2])
    is_finite = is_fine & (share <= _MAX_PANEL_ERROR)
    return jnp.where(is_finite, 1, jnp.where((share > 1e-2) & ~falls, -1, 0))


def _sampled(fn: Distribution) -> Array:
    # The caller passes one row at a time, so that the same key gives every arm the same random numbers.
    draws = fn.sample(jr.key(0), (NUM_MONTE_CARLO_DRAWS,))
    return jnp.mean(draws, axis=0)


def _stated_verdict(fn: Distribution) -> Array:
    mean = _stated(fn)  # nan means "no mean" (Cauchy) or "not implemented" (Categorical)
    return jnp.where(jnp.isinf(mean), -1, jnp.where(jnp.isnan(mean), 0, 1))


def _summed_verdict(fn: Distribution) -> Array:
    return jnp.where(jnp.isfinite(_summed(fn)), 1, 0)


def _integrated_verdict(fn: Distribution) -> Array:
    # E|x| is finite only if p * |quantile(p)| -> 0 at both ends; it stays constant for a Cauchy and grows beyond it.
    outer, inner = (jnp.asarray(p) + jnp.zeros(fn.batch_shape) for p in _TAIL_PROBS)
    centre = fn.icdf(jnp.full(fn.batch_shape, 0.5))

    def weight(p: Array, upper: bool) -> Array:
        return p * jnp.abs(fn.icdf(1.0 - p if upper else p) - centre)

    falls = [weight(outer, upper) <= 0.5 * weight(inner, upper) for upper in (False, True)]
    return jnp.where(jnp.isfinite(_integrated(fn)) & falls[0] & falls[1], 1, -1)


def _sampled_verdict(fn: Distribution) -> Array:
    # A generalised Pareto tail of shape 1 or more has no mean; both tails of |x| count.
    draws = jnp.abs(fn.sample(jr.key(0), (16 * NUM_MONTE_CARLO_DRAWS,)))
    largest = jnp.sort(draws, axis=0)[-NUM_MONTE_CARLO_DRAWS:]
    shape, _ = jax.vmap(fit_generalized_pareto, in_axes=1)(largest[1:] - largest[0])
    return jnp.where(jnp.isfinite(_sampled(fn)) & (shape < 1.0), 1, -1)


def _method(
    description: str, mean: Callable[[Distribution], Array], verdict: Callable[[Distribution], Array], **fields: Any
) -> MeanMethod:
    """Return a method that leaves masks and censoring out, and applies affine maps to the mean of the law before them."""

    def mapped_mean(fn: Distribution) -> Array:
        law = without_censoring(fn)
        base, shift, scale = before_affine_map(law)
        return mean(law) if base is law else jnp.broadcast_to(shift + scale * mean(base), fn.batch_shape)

    def base_verdict(fn: Distribution) -> Array:
        return verdict(before_affine_map(without_censoring(fn))[0])

    return MeanMethod(description, mapped_mean, base_verdict, **fields)


MONTE_CARLO = _method(
    f"Monte Carlo over {NUM_MONTE_CARLO_DRAWS} draws, the same random numbers for every arm",
    _sampled,
    _sampled_verdict,
    uses_draws=True,
)
MEAN_METHODS = (
    _method("its distribution's own formula", _stated, _stated_verdict),
    _method("a sum over its finite support", _summed, _summed_verdict),
    _method(
        f"Gauss-Legendre quadrature of its quantile function ({NUM_QUADRATURE_NODES} nodes)",
        _integrated,
        _integrated_verdict,
    ),
    _method("Gauss-Legendre quadrature of its density", _from_density, _from_density_verdict, uses_draws=True),
    MONTE_CARLO,
)


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
        base, _, scale = before_affine_map(without_censoring(fn))
        return jnp.broadcast_to(scale**2 * base.variance, fn.batch_shape)
    if method is MEAN_METHODS[1]:
        base = without_censoring(fn)
        values = base.enumerate_support(expand=False)
        return jnp.sum((values - method.mean(fn)) ** 2 * jnp.exp(base.log_prob(values)), axis=0)
    raise NotImplementedError
