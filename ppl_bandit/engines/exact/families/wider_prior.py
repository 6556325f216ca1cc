"""The posterior that the same data would give under a wider prior.

Real elements lie `scale` times as far from their mean, positive latents from their bound; Beta and Dirichlet distributions have
1 / scale^2 of their pseudo-counts, which makes them about `scale` times as wide. Latents on which the expected rewards do not
depend, such as a noise variance, stay as they are.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.gaussian import by_block
from ppl_bandit.engines.exact.families.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.exact.families.posterior import (
    Posterior,
    absorb,
    coordinates_at,
    natural_of,
    relative_to,
)
from ppl_bandit.engines.exact.families.registry import family_of_group

__all__ = ["replace_prior_by_wider"]


def replace_prior_by_wider(
    layout: Layout, prior: Posterior, posterior: Posterior, moving: Collection[str], scale: Float[Array, ""]
) -> Posterior:
    """Return the posterior of the same data under a prior that is `scale` times as wide in the sites `moving`."""
    own, wide = natural_of(layout, prior), natural_of(layout, _widen(layout, prior, moving, scale))
    difference = jax.tree.map(jnp.subtract, wide, own)
    here = relative_to(layout, difference, coordinates_at(layout, prior), coordinates_at(layout, posterior))
    return absorb(layout, posterior, here, 0)


def _widen(layout: Layout, prior: Posterior, moving: Collection[str], scale: Float[Array, ""]) -> Posterior:
    dtype = prior.mean.dtype

    def is_moving(group: str) -> np.ndarray:
        """Return whether each element of a group belongs to a moving site."""
        sites = [site for site in layout.sites if site.group == group]
        return np.concatenate([np.full(site.span.stop - site.start, site.name in moving) for site in sites])

    elements = {
        group: jnp.where(
            is_moving(group)[:, None],
            family_of_group(group).widen(parameters, scale, np.asarray(layout.power, dtype)),
            parameters,
        )
        for group, parameters in prior.elements.items()
    }
    precision = prior.precision
    if layout.members.size:
        members = (is_moving(REAL)[layout.members] & layout.is_member).astype(dtype)
        shrinks = -members[:, :, None] - members[:, None, :]  # powers of the scale
        if layout.is_scaled:
            growth = np.asarray(layout.power * is_moving(POSITIVE), dtype)  # of u
            shrinks = shrinks - by_block(layout, jnp.asarray(growth), 0.0)[:, None, None]
        precision = jnp.where(layout.is_pair, precision * scale**shrinks, precision)
    return prior._replace(elements=elements, precision=precision)
