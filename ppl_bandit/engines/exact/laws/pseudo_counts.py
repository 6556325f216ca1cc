"""The variance of one reward given the latents: the numerator of the number of rewards that a posterior is worth.

n = E Var(reward | latents) / Var E(reward | latents), which is a + b for Beta(a, b) and Bernoulli rewards. The denominator
belongs to the marginal law of the expected reward. The numerator has a closed form, or a one-dimensional quadrature, where the
variance of an arm's reward depends on no latent but the one that determines its mean, or the one that scales both. On which
latents it depends is found by derivatives at one generic point; for other programs n is not available here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.layout import POSITIVE, Layout
from ppl_bandit.engines.exact.families.posterior import generic_point, latents_at
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once


def constant_noise(model: RewardModel, layout: Layout) -> Callable[[Any], Float[Array, " A"]] | None:
    """Return context -> the variance of each arm's reward; None if the variance depends on a latent."""
    if not _reads_only(model, layout):
        return None
    return lambda context: _variances(model, _generic_latents(layout), context)


def scaled_noise(model: RewardModel, layout: Layout, owners: np.ndarray) -> Callable[[Any], Float[Array, " A"]] | None:
    """Return context -> u Var(reward | u) of each arm; None unless the variance is proportional to 1 / u.

    Args:
        owners: the positive element u that scales each arm's reals, (A,).
    """
    if not _reads_only(model, layout, POSITIVE, owners):
        return None

    def variances(u: float, context: Any) -> Array:
        latents = _generic_latents(layout)
        for site in layout.of(POSITIVE):
            power = layout.power[site.span].reshape(site.shape)
            latents[site.name] = jnp.asarray(site.low + u ** (1.0 / power))
        return u * _variances(model, latents, context)

    once, twice = run_once(lambda: (variances(1.0, model.context), variances(2.0, model.context)))
    if not np.allclose(once, twice, rtol=1e-4):
        return None
    return lambda context: variances(1.0, context)


def element_noise(
    model: RewardModel, layout: Layout, kind: str, elements: np.ndarray
) -> Callable[[Float[Array, "G A"], Any], Float[Array, "G A"]] | None:
    """Return (values of the element that each arm's mean depends on, context) -> Var(reward | value), or None.

    Args:
        elements: the element of the kind that each arm's mean depends on, (A,).
    """
    if not _reads_only(model, layout, kind, elements):
        return None

    def noise(values: Float[Array, "G A"], context: Any) -> Float[Array, "G A"]:
        latents = _generic_latents(layout)
        draws = {name: jnp.broadcast_to(value, (values.shape[0], *value.shape)) for name, value in latents.items()}
        for site in layout.of(kind):
            in_site = site.start + np.arange(site.size)
            arms = np.array([np.flatnonzero(elements == element)[:1].sum() for element in in_site], int)
            flat = draws[site.name].reshape(values.shape[0], -1).astype(values.dtype)
            # A gather costs more than the rest; it is not needed if element a belongs to arm a.
            own = values if np.array_equal(arms, np.arange(values.shape[1])) else values[:, arms]
            draws[site.name] = jnp.where(np.isin(in_site, elements), own, flat).reshape(-1, *site.shape)
        return model.reward_variances(draws, context)

    return noise


def _reads_only(model: RewardModel, layout: Layout, kind: str = "", elements: np.ndarray | None = None) -> bool:
    """Return whether the variance of each arm's reward is known and depends on no element but one of a kind, or on none.

    Args:
        elements: that element for each arm, (A,).
    """

    def measure() -> tuple[dict[str, Array], Array]:
        def variances(latents: dict[str, Array]) -> Array:
            return _variances(model, latents, model.context)

        # In reverse mode, which a proved program has; custom_vjp has no forward mode.
        return jax.jacrev(variances)(_generic_latents(layout)), variances(_generic_latents(layout))

    try:
        slopes, values = run_once(measure)
    except NotImplementedError:
        return False
    for site in layout.sites:
        is_read = np.asarray(slopes[site.name]).reshape(model.num_arms, -1) != 0
        if elements is not None and site.kind == kind:
            is_read &= site.start + np.arange(site.size) != elements[:, None]
        if is_read.any():
            return False
    return bool(np.all(np.isfinite(values)))


def _variances(model: RewardModel, latents: dict[str, Array], context: Any) -> Float[Array, " A"]:
    return model.reward_variances({name: value[None] for name, value in latents.items()}, context)[0]


def _generic_latents(layout: Layout) -> dict[str, Array]:
    """Return latents inside their supports, at no special value."""
    point = generic_point(layout)
    return latents_at(layout, point._replace(real=jnp.full_like(point.real, 0.7)))
