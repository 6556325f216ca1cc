"""How noisy one reward is, given the latents: the other half of how many rewards a posterior is worth.

n = E Var(reward | latents) / Var E(reward | latents), a + b for Beta(a, b) and Bernoulli rewards. The denominator belongs to
the law of the expected reward. The numerator has a closed form, or a one-dimensional quadrature, where the variance of an
arm's reward reads no latent but the one that its mean reads, or the one that scales both. Which it reads is seen from
derivatives at one generic point; a program whose rewards are noisy in another way has no such n here.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.families import POSITIVE, REAL, SIMPLEX, UNIT, Layout
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once

__all__ = ["element_noise", "known_noise", "own_noise"]


def known_noise(model: RewardModel, layout: Layout) -> Callable[[Any], Float[Array, " A"]] | None:
    """Return context -> the variance of each arm's reward, for a program whose noise no latent moves; else None."""
    reads = _variance_reads(model, layout)
    if reads is None or any(own.any() for own in reads.values()):
        return None
    return lambda context: _variances(model, _point(layout), context)


def own_noise(model: RewardModel, layout: Layout, groups: np.ndarray) -> Callable[[Any], Float[Array, " A"]] | None:
    """Return context -> u Var(reward | u) of each arm, for rewards whose noise is 1 / u, the scale of the arm's reals."""
    reads = _variance_reads(model, layout)
    own = np.eye(layout.count(POSITIVE), dtype=bool)[groups]
    if reads is None or any(np.any(found & ~(own if kind == POSITIVE else False)) for kind, found in reads.items()):
        return None

    def at(precision: float, context: Any) -> Array:
        latents = _point(layout)
        for site in layout.of(POSITIVE):
            power = layout.power[site.start : site.start + site.size].reshape(site.shape)
            latents[site.name] = jnp.asarray(site.low + precision ** (1.0 / power))
        return precision * _variances(model, latents, context)

    once, twice = run_once(lambda: (at(1.0, model.context), at(2.0, model.context)))
    if not np.allclose(once, twice, rtol=1e-4):
        return None
    return lambda context: at(1.0, context)


def element_noise(
    model: RewardModel, layout: Layout, kind: str, places: np.ndarray
) -> Callable[[Float[Array, "G A"], Any], Float[Array, "G A"]] | None:
    """Return (values of the element that each arm's mean reads, context) -> Var(reward | value); else None."""
    reads = _variance_reads(model, layout)
    own = np.eye(layout.count(kind), dtype=bool)[places]
    if reads is None or any(np.any(found & ~(own if of == kind else False)) for of, found in reads.items()):
        return None

    def noise(values: Float[Array, "G A"], context: Any) -> Float[Array, "G A"]:
        draws = {
            name: jnp.broadcast_to(value, (values.shape[0], *value.shape)) for name, value in _point(layout).items()
        }
        for site in layout.of(kind):
            readers = np.array([np.flatnonzero(places == site.start + e)[:1].sum() for e in range(site.size)], int)
            is_read = np.isin(site.start + np.arange(site.size), places)
            flat = draws[site.name].reshape(values.shape[0], -1).astype(values.dtype)
            # A program that reads its elements in order needs no shuffling, which costs more than the rest.
            own = values if np.array_equal(readers, np.arange(values.shape[1])) else values[:, readers]
            draws[site.name] = jnp.where(is_read, own, flat).reshape(-1, *site.shape)
        return model.reward_variances(draws, context)

    return noise


def _variance_reads(model: RewardModel, layout: Layout) -> dict[str, np.ndarray] | None:
    """Return, by kind of element, which ones the variance of each arm's reward reads, (A, E); None if it is unknown."""

    def measure() -> tuple[dict[str, Array], Array]:
        def variances(latents: dict[str, Array]) -> Array:
            return _variances(model, latents, model.context)

        return jax.jacfwd(variances)(_point(layout)), variances(_point(layout))

    try:
        slopes, values = run_once(measure)
    except NotImplementedError:
        return None
    if not np.all(np.isfinite(values)):
        return None
    kinds = {site.kind for site in layout.sites}
    return {
        kind: np.concatenate([np.asarray(slopes[s.name]).reshape(model.num_arms, -1) for s in layout.of(kind)], axis=1)
        != 0
        for kind in kinds
    }


def _variances(model: RewardModel, latents: dict[str, Array], context: Any) -> Float[Array, " A"]:
    return model.reward_variances({name: value[None] for name, value in latents.items()}, context)[0]


def _point(layout: Layout) -> dict[str, Array]:
    """Return latents inside their supports, at no special place."""
    latents = {}
    for site in layout.sites:
        shares = {UNIT: 0.4, POSITIVE: 1.3, REAL: 0.7, SIMPLEX: 1.0 / (site.shape[-1] if site.shape else 1)}
        value: Any = shares[site.kind]
        if site.kind in (UNIT, POSITIVE):
            low, high = np.asarray(site.low), np.asarray(site.high)
            value = low + value * (high - low if site.kind == UNIT else 1.0)
        latents[site.name] = jnp.broadcast_to(jnp.asarray(value, float), site.shape)
    return latents
