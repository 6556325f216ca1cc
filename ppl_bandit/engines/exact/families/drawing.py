"""Draw from a posterior of all families: many times from one law, or once from each of many."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.element_blocks import nothing
from ppl_bandit.engines.exact.families.families import POSITIVE, SIMPLEX, UNIT, Layout, Posterior, by_block, reals_of
from ppl_bandit.numerics import arrow_matrices, sampling
from ppl_bandit.types import Draws, Key

__all__ = ["sample", "sample_each"]


def sample(layout: Layout, key: Key, posterior: Posterior, num_samples: int) -> Draws:
    """Draw from the posterior: {site: (M, ...)}, exact and independent."""
    return _draw(layout, key, posterior, num_samples, (num_samples,))


def sample_each(layout: Layout, key: Key, laws: Posterior) -> Draws:
    """Draw once from each of M laws, (M, ...) each, whose precisions are arrows: {site: (M, ...)}."""
    return _draw(layout, key, laws, len(laws.mean), ())


def _draw(layout: Layout, key: Key, posterior: Posterior, num_samples: int, lead: tuple[int, ...]) -> Draws:
    """Draw (M, ...) values of each site, M = num_samples, from one law, or from M where no axis is put in front of theirs."""
    keys = dict(zip(("beta", "scale", "real", "simplex"), jax.random.split(key, 4), strict=True))
    draws: Draws = {}
    unit = sampling.beta(keys["beta"], posterior.beta[..., 0], posterior.beta[..., 1], lead)
    log_u = sampling.log_gamma(keys["scale"], posterior.shape, lead, posterior.rate)
    real = nothing((num_samples, 0), posterior.mean.dtype)
    if layout.members.size:
        steps = _steps(keys["real"], posterior, lead) if lead else _steps_of_each(keys["real"], posterior)
        if np.any(layout.owner >= 0):
            steps = jnp.exp(-0.5 * by_block(layout, log_u, 0.0))[..., None] * steps
        real = reals_of(layout, posterior.mean + steps)
    for site in layout.sites:
        span = slice(site.start, site.start + site.size)
        full = (num_samples, *site.shape)
        low, high = (jnp.asarray(bound, unit.dtype) for bound in (site.low, site.high))
        if site.kind == UNIT:
            draws[site.name] = low + (high - low) * unit[:, span].reshape(full)
        elif site.kind == POSITIVE:
            draws[site.name] = low + jnp.exp(log_u[:, span] / layout.power[span]).reshape(full)
        elif site.kind == SIMPLEX:
            rows = posterior.dirichlet[site.start]
            key_site = jax.random.fold_in(keys["simplex"], site.start)
            draws[site.name] = sampling.dirichlet(key_site, rows, lead).reshape(full)
        else:
            draws[site.name] = real[:, span].reshape(full)
    return draws


def _steps(key: Key, posterior: Posterior, lead: tuple[int, ...]) -> Float[Array, "M R S"]:
    """Draw the reals less their means, of blocks that nothing scales."""
    factor = jnp.linalg.cholesky(posterior.precision)
    return sampling.multivariate_normal_precision(key, jnp.zeros_like(posterior.mean), factor, lead)


def _steps_of_each(key: Key, laws: Posterior) -> Float[Array, "M R S"]:
    """Draw the reals less their means from each of M laws."""
    precision, middle = jax.tree.map(
        lambda leaf: jnp.moveaxis(leaf, 0, -1), (laws.precision, jnp.zeros_like(laws.mean))
    )
    steps = arrow_matrices.steps_along(precision, sampling.normal(key, middle, jnp.ones_like(middle)))
    return jnp.moveaxis(steps, -1, 0)
