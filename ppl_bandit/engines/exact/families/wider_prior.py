"""The posterior as it would be, had the prior been some times as wide: the same data, added to another prior.

Reals lie `by` times as far from their mean, positive latents from their bound; Beta and Dirichlet laws have 1 / by^2 of their
pseudo-counts, which makes them about as many times as wide. Latents that the expected rewards do not depend on, such as a
variance of noise, stay as they are.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.certificate.affine import natural_of, recentre
from ppl_bandit.engines.exact.families.families import (
    POSITIVE,
    REAL,
    SIMPLEX,
    UNIT,
    Layout,
    Posterior,
    absorb,
    by_block,
    coordinates_at,
)

__all__ = ["wider"]


def wider(
    layout: Layout, prior: Posterior, posterior: Posterior, moving: Collection[str], by: Float[Array, ""]
) -> Posterior:
    """Return a posterior with its prior replaced by one that is `by` times as wide in the sites that move."""
    centre, here = coordinates_at(layout, prior), coordinates_at(layout, posterior)
    own, other = natural_of(layout, prior), natural_of(layout, _wider_prior(layout, prior, moving, by))
    difference = jax.tree.map(jnp.subtract, other, own)
    return absorb(layout, posterior, recentre(layout, difference, centre, here)[0], 0)


def _wider_prior(layout: Layout, prior: Posterior, moving: Collection[str], by: Float[Array, ""]) -> Posterior:
    def powers(kind: str) -> np.ndarray:
        """Return 1 for elements that move and 0 for the others, as powers of the scale."""
        is_moving = np.zeros(layout.count(kind), prior.mean.dtype)
        for site in layout.of(kind):
            is_moving[site.start : site.start + site.size] = site.name in moving
        return is_moving

    growth = layout.power.astype(prior.mean.dtype) * powers(POSITIVE)  # of log u, in units of log by
    precision = prior.precision
    if layout.members.size:
        members = powers(REAL)[layout.members] * layout.is_member
        shrinks = -by_block(layout, growth, 0.0)[:, None, None] - members[:, :, None] - members[:, None, :]
        precision = jnp.where(layout.is_pair, precision * by**shrinks, precision)
    dirichlet = [
        rows * by**-2.0 if site.name in moving else rows
        for site, rows in zip(layout.of(SIMPLEX), prior.dirichlet, strict=True)
    ]
    return prior._replace(
        beta=prior.beta * by ** (-2.0 * powers(UNIT)[:, None]),
        dirichlet=tuple(dirichlet),
        rate=prior.rate * by**-growth,
        precision=precision,
    )
