"""Draw latents from a posterior: many times from one distribution, or once from each of many."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.gaussian import by_block, reals_of
from ppl_bandit.engines.exact.families.layout import POSITIVE, REAL, SIMPLEX, UNIT, Layout
from ppl_bandit.engines.exact.families.posterior import Posterior, latent_of_value
from ppl_bandit.engines.exact.families.registry import FAMILIES, family_of_group, groups_of
from ppl_bandit.numerics import sampling
from ppl_bandit.types import Draws, Key

_KEY_ORDER = [UNIT, POSITIVE, REAL, SIMPLEX]  # kinds after these get the keys after theirs, so that draws stay the same
_KEY_ORDER += [kind for kind in FAMILIES if kind not in _KEY_ORDER]


def sample(layout: Layout, key: Key, posterior: Posterior, num_samples: int) -> Draws:
    """Draw from a posterior: {site: (M, ...)}; the draws are independent."""
    return _draw(layout, key, posterior, (num_samples,), None)


def sample_each(layout: Layout, key: Key, posteriors: Posterior, steps: Float[Array, "K L R S"]) -> Draws:
    """Draw K times from each of L posteriors, (L, ...) each: {site: (K L, ...)}, in K rounds over all of them.

    Args:
        steps: draws of the real elements less their means, for u = 1.
    """
    return _draw(layout, key, posteriors, steps.shape[:2], steps)


def _draw(layout: Layout, key: Key, posterior: Posterior, shape: tuple[int, ...], steps: Array | None) -> Draws:
    """Draw values of each site.

    Args:
        shape: (M,) for draws from one posterior, (K, L) for K draws from each of L.
        steps: draws of the real elements less their means, for u = 1; None draws them.
    """
    keys = dict(zip(_KEY_ORDER, jax.random.split(key, len(_KEY_ORDER)), strict=True))
    values = {}
    for group, parameters in posterior.elements.items():
        family = family_of_group(group)
        own_key = keys[family.kind]
        if family.num_event_dims:
            own_key = jax.random.fold_in(
                own_key, [g for g in groups_of(layout) if family_of_group(g) is family].index(group)
            )
        values[group] = family.sample(own_key, parameters, shape[:1])
    if layout.members.size:
        if steps is None:
            steps = sampling.normal_vectors(keys[REAL], posterior.precision, shape)
        if layout.is_scaled:
            steps = jnp.exp(-0.5 * by_block(layout, values[POSITIVE], 0.0))[..., None] * steps
        real = reals_of(layout, posterior.mean + steps)
    draws: Draws = {}
    for site in layout.sites:
        if site.kind == REAL:
            own = real[..., site.span]
        else:
            span = (*(slice(None),) * len(shape), site.span)
            own = latent_of_value(layout, site, values[site.group][span])
        draws[site.name] = own.reshape(math.prod(shape), *site.shape)
    return draws
