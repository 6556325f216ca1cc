"""The points at which a certificate compares a log density with its affine form.

Some lie near and far from the point where the density was differentiated, others where the posterior has its mass. Real
elements are displaced jointly, along the Cholesky factor of their covariance. In a tight hierarchy, marginal standard
deviations would move a child away from its parent by many of its own conditional ones: the quadratic terms grow by
ten orders of magnitude, and their rounding hides a deviation of several nats.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.exact.certificate.certificate import Region, region_of
from ppl_bandit.engines.exact.families.gaussian import blocks_of, by_block, reals_of
from ppl_bandit.engines.exact.families.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.exact.families.posterior import (
    Coordinates,
    Posterior,
    coordinates_at,
    is_proper,
    where_finite,
)
from ppl_bandit.engines.exact.families.registry import family_of_group, groups_of
from ppl_bandit.numerics.arrow_matrices import Arrow, steps_along

NUM_VARIANTS = 8  # of displacements: trial rows in succession differ in theirs
_SEED = 20170903


def regions_for(
    layout: Layout,
    before: Posterior,
    after: Posterior,
    num_around_centre: int,
    num_in_posterior: int,
    *,
    variant: Int[Array, ""] | int = 0,
    centre: Coordinates | None = None,
) -> tuple[Region, Region]:
    """Return where to compare densities that were differentiated at the means of `before` and lead to `after`.

    The first region is around the point where they were differentiated, the second where the posterior is. The points of an
    improper `after` would be meaningless: those of `before` are used.

    Args:
        variant: which of `NUM_VARIANTS` sets of displacements from the centre to use.
        centre: where the densities were differentiated, if not at these means.
    """
    centre = coordinates_at(layout, before) if centre is None else centre
    offsets = _offsets_around_centre(layout, num_around_centre, before, variant)
    is_fine = is_proper(after)
    after = jax.tree.map(lambda new, old: jnp.where(is_fine, new, old), after, before)
    in_posterior = _offsets_in_posterior(layout, num_in_posterior, after)
    return _displace(layout, centre, offsets), _displace(layout, middle_of(layout, after), in_posterior)


def middle_of(layout: Layout, posterior: Posterior) -> Coordinates:
    """Return the middle of a posterior in all coordinates; `coordinates_at` has fixed values for some of them."""
    at = coordinates_at(layout, posterior)
    elements = {group: family_of_group(group).middle(own) for group, own in posterior.elements.items()}
    return where_finite(at._replace(elements=elements), at)


def _displace(layout: Layout, centre: Coordinates, offsets: Coordinates) -> Region:
    def displaced(middle: Array, offset: Array) -> Array:
        return jnp.concatenate([middle[None], middle + offset.astype(middle.dtype)])

    return region_of(layout, jax.tree.map(displaced, centre, offsets))


def _offsets_around_centre(
    layout: Layout, num_points: int, posterior: Posterior, variant: Int[Array, ""] | int
) -> Coordinates:
    """Return displacements from a centre, (P, ...) each, the same for every engine on every machine.

    Every other four displace real elements in units of 1, the others in units of the posterior's covariance.
    """
    is_unscaled = (np.arange(num_points) // 4 % 2 == 1)[:, None]
    if isinstance(variant, int):
        drawn: Any = _draw_offsets(layout, num_points, variant)
    else:
        variants = [_draw_offsets(layout, num_points, number) for number in range(NUM_VARIANTS)]
        drawn = {group: jnp.asarray(np.stack([own[group] for own in variants]))[variant] for group in variants[0]}
    # With an explicit dtype: jax may cache a NumPy constant across a change of its precision.
    offsets = {group: own.astype(posterior.mean.dtype) for group, own in drawn.items()}
    real: Any = offsets.pop(REAL)
    if not real.size:
        return Coordinates(offsets, real)
    return Coordinates(offsets, jnp.where(is_unscaled, real, _correlated(layout, posterior, real)))


def _draw_offsets(layout: Layout, num_points: int, variant: int) -> dict[str, np.ndarray]:
    """Draw displacements of the elements of each group, and of the real elements in units of 1.

    Every second point moves one site alone; of every four in a row two are far.
    """
    rng = np.random.default_rng(_SEED + 2 * variant)
    point = np.arange(num_points)
    is_far, is_single = (point % 4 >= 2)[:, None], point % 2 == 1
    moved_site = (point // 2 + variant * (num_points // 2)) % len(layout.sites)

    def spread(size: int, near: float, far: tuple[float, float]) -> np.ndarray:
        """Draw from Normal(0, near), or with a random sign and a size uniform in `far`."""
        sign = rng.choice([-1.0, 1.0], size=(num_points, size))
        distant = sign * rng.uniform(*far, size=(num_points, size))
        return np.where(is_far, distant, near * rng.standard_normal((num_points, size)))

    offsets: dict[str, np.ndarray] = {}
    for group, sites in groups_of(layout).items():
        family, num_scalars = family_of_group(group), sum(site.size for site in sites)
        drawn = spread(num_scalars, family.max_sd, family.far_range)
        offsets[group] = drawn.reshape(num_points, sites[-1].span.stop, *sites[0].event_shape)
    reach = 10.0 ** np.where(is_far, rng.uniform(0.0, 1.5, (num_points, 1)), rng.uniform(-1.5, 0.5, (num_points, 1)))
    offsets[REAL] = reach * rng.standard_normal((num_points, layout.count(REAL)))
    for position, site in enumerate(layout.sites):
        offsets[site.group][is_single & (moved_site != position), site.span] = 0.0
    return offsets


def _offsets_in_posterior(layout: Layout, num_points: int, posterior: Posterior) -> Coordinates:
    """Return displacements of a few of a posterior's standard deviations, (P, ...) each."""
    rng = np.random.default_rng(_SEED + 1)
    reach = np.resize([1.0, 2.0, 0.5, 3.0], num_points)[:, None]

    def spread(size: int) -> np.ndarray:
        return (reach * rng.standard_normal((num_points, size))).astype(posterior.mean.dtype)

    offsets: dict[str, Any] = {}
    for group in groups_of(layout):
        family = family_of_group(group)
        sd = jnp.sqrt(family.variance(posterior.elements[group]))
        # Where counts are small, or not those of a proper posterior, the family is not nearly Gaussian.
        sd = jnp.where(jnp.isfinite(sd), jnp.minimum(sd, family.max_sd), family.max_sd)
        offsets[group] = sd * spread(sd.size).reshape(num_points, *sd.shape)
    return Coordinates(offsets, _correlated(layout, posterior, spread(layout.count(REAL))))


def _correlated(layout: Layout, posterior: Posterior, steps: Any) -> Float[Array, "P D"]:
    """Turn independent standard normal steps into steps with the covariance of the real elements."""
    if not steps.size:
        return steps
    moved = _times_root_covariance(posterior.precision, blocks_of(layout, jnp.asarray(steps)))
    if layout.is_scaled:
        shape, rate = posterior.elements[POSITIVE][:, 0], posterior.elements[POSITIVE][:, 1]
        moved = moved * by_block(layout, jnp.sqrt(rate / shape), 1.0)[:, None]
    return where_finite(reals_of(layout, moved), steps)  # an improper prior is refused elsewhere


def _times_root_covariance(precision: Any, steps: Float[Array, "P R S"]) -> Float[Array, "P R S"]:
    if isinstance(precision, Arrow):
        return jax.vmap(lambda own: steps_along(precision, own))(steps)
    if precision.shape[-1] == 1:
        return steps / jnp.sqrt(precision[..., 0])
    root, columns = jnp.linalg.cholesky(precision), jnp.moveaxis(steps, 0, -1)
    solved = jax.lax.linalg.triangular_solve(root, columns, left_side=True, lower=True, transpose_a=True)
    return jnp.moveaxis(solved, -1, 0)
