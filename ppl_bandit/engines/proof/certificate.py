"""Certify that a log density is affine in the sufficient statistics: compare it with its affine form at random points.

The difference `log density(z) - <eta, T(z)>` must be the same number at every point. A difference of analytic functions that
varies is constant on random points with probability zero, so what remains is floating point. The difference is measured in
nats, and the tolerance is what the rounding of the terms explains. At points where the posterior has its mass, rounding itself
has a limit: where it could hide a deviation that matters, nothing is certified.

For every sum of terms, the sum of their absolute values is computed as well: floating point resolves the result to a few units
in the last place of that sum.

Some points lie near and far from the point where the density was differentiated, others where the posterior has its mass. Real
elements are displaced jointly, along the Cholesky factor of their covariance. In a tight hierarchy, marginal standard
deviations would move a child away from its parent by many of its own conditional ones: the quadratic terms grow by
ten orders of magnitude, and their rounding hides a deviation of several nats.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.inner.density import (
    Coordinates,
    Natural,
    Posterior,
    coordinates_at,
    is_proper,
    relative_to,
    where_finite,
)
from ppl_bandit.engines.inner.gaussian import blocks_of, by_block, padding, reals_of, sum_by_owner, times_blocks
from ppl_bandit.engines.inner.layout import POSITIVE, REAL, Layout
from ppl_bandit.engines.inner.registry import family_of_group, groups_of
from ppl_bandit.numerics.arrow_matrices import Arrow, steps_along

_NUM_ROUNDINGS = 4.0  # of a log density, in units of the last place of the sum of its terms
_NUM_HIDDEN_ROUNDINGS = (
    5e5  # inside the program, in units of the last place of 1: 1 - (1 - z) keeps 11 digits at logit -11
)


class Region(NamedTuple):
    """Points, (P, ...), the first of them their centre, with all that an affine form needs there.

    Attributes:
        changes: statistics of each group less those of the centre.
        sizes: factors that turn the size of each coefficient into a bound on the terms that are added.
        steps: real elements less those of the centre, in blocks.
        locations: absolute values of the real elements, in blocks.
        scale: u of each block, and `scale_size`, u times its number of roundings; None if no block is scaled.
    """

    points: Coordinates
    changes: dict[str, Any]
    sizes: dict[str, Any]
    steps: Float[Array, "P R S"]
    locations: Float[Array, "P R S"]
    scale: Float[Array, "P R"] | None
    scale_size: Float[Array, "P R"] | None


class Residual(NamedTuple):
    """How far a log density is from affine, at the point that comes closest to failing.

    Attributes:
        nats: the deviation; infinite where the density is not finite.
        tolerance: what rounding explains there, in nats.
        rounding: what rounding could hide within a standard deviation of the posterior, in nats; at most `resolution` is
            certified.
    """

    nats: Any  # a float, or an array of residuals
    tolerance: Any
    rounding: Any


NO_RESIDUAL = Residual(0.0, 1.0, 0.0)  # of what is masked, or not compared


class Evidence(NamedTuple):
    """The certificates of a program.

    Attributes:
        prior, likelihood: the largest residuals.
        num_rows: rows of data whose likelihood was certified.
        examples: rewards of those rows on arm 0, with what each adds to the parameters of each group.
        num_points: random points per certificate of a row.
        num_summed: rows whose weighted sum each certificate is of.
    """

    prior: Residual
    likelihood: Residual
    num_rows: int
    examples: tuple[tuple[dict[str, float], dict[str, Array]], ...]
    num_points: int
    num_summed: int = 1


def resolution(dtype: Any) -> float:
    """Return the most that rounding may hide from a certificate, in nats, for a dtype."""
    return 1e-3 if jnp.dtype(dtype) == jnp.float64 else 0.1


def is_affine(residual: Residual) -> Bool[Array, "..."]:
    """Return whether rounding explains the deviation and could hide none that matters where the posterior is."""
    return (residual.nats <= residual.tolerance) & (residual.rounding <= resolution(residual.rounding.dtype))


def excess_of(residual: Residual) -> Float[Array, "..."]:
    """Return how close a residual comes to failing: `is_affine` holds where this is at most 1."""
    # NumPy for NumPy arrays: jax would compile every operation.
    numbers: Any = np if isinstance(residual.nats, np.ndarray | np.generic) else jnp
    hidden = residual.rounding / resolution(residual.rounding.dtype)
    return numbers.maximum(residual.nats / numbers.where(residual.tolerance > 0, residual.tolerance, 1.0), hidden)


def worst_of(residuals: Residual) -> Residual:
    """Return the residual that comes closest to failing, along the leading axis, with the largest rounding of all."""
    worst = (residuals.nats / residuals.tolerance).argmax()
    return Residual(residuals.nats[worst], residuals.tolerance[worst], residuals.rounding.max())


def region_of(layout: Layout, points: Coordinates) -> Region:
    """Return the region of points, (P, ...), the first of which is the centre."""
    changes, sizes = {}, {}
    scale = scale_size = None
    for group, coordinates in points.elements.items():
        family = family_of_group(group)
        statistics, own = family.statistics(coordinates), family.rounding_sizes(coordinates, layout)
        changes[group] = statistics - statistics[:1]
        sizes[group] = own + jnp.abs(statistics) + jnp.abs(statistics[:1])
        if group == POSITIVE and layout.is_scaled:
            scale, scale_size = (by_block(layout, leaf[..., 1], 1.0) for leaf in (statistics, own))
    steps, locations = (blocks_of(layout, leaf) for leaf in (points.real - points.real[:1], points.real))
    return Region(points, changes, sizes, steps, jnp.abs(locations), scale, scale_size)


def inverse_roundings(layout: Layout, precision: Float[Array, "R S S"]) -> Float[Array, " R"]:
    """Return how much larger than one rounding the relative error of x' precision x may be, for each block.

    The precision is the inverse of a covariance matrix, so the relative error is that of one rounding times the condition
    number. This is measured as the largest marginal variance relative to the conditional one, where units do not matter.
    """
    if precision.shape[-1] <= 1:
        return jnp.zeros(precision.shape[0], precision.dtype)
    inverse = jnp.linalg.inv(precision + jnp.asarray(padding(layout, precision.dtype)))
    ratios = jnp.diagonal(precision, axis1=1, axis2=2) * jnp.diagonal(inverse, axis1=1, axis2=2)
    found = jnp.max(ratios, axis=1)
    return jnp.where(jnp.isfinite(found), found, 0.0)  # a matrix that is not positive definite is refused elsewhere


def residual_of(
    layout: Layout,
    log_densities: Callable[[Coordinates], Float[Array, " terms"]],
    naturals: Natural,
    centre: Coordinates,
    regions: Sequence[Region],
    num_rows: int = 1,
    num_roundings: Float[Array, " R"] | None = None,
) -> tuple[Residual, Float[Array, " terms"]]:
    """Return how far each of several log densities is from the affine form with the given coefficients.

    Returns:
        The residuals, and the log densities at the centre of the last region.

    Args:
        naturals: with a leading axis over the densities, relative to `centre`.
        regions: the region around `centre`, which may be left out, and the one where the posterior is.
        num_rows: rows of data of which each density is a sum.
        num_roundings: of the quadratic form of each block, beyond those of its terms; see `inverse_roundings`.
    """
    # All points go through one evaluation of the program, compiled once.
    points = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(region.points for region in regions))
    values = jax.vmap(log_densities)(points)
    *around_centre, in_posterior = regions
    num_in_posterior = in_posterior.steps.shape[0]
    middle = jax.tree.map(lambda leaf: leaf[0], in_posterior.points)

    def residual(natural: Natural, values: Float[Array, " P"]) -> Residual:
        moved = relative_to(layout, natural, centre, middle)
        size = _rounding_sizes_after_move(layout, natural, centre, middle)
        found = [_compare(moved, size, in_posterior, values[values.size - num_in_posterior :], num_rows, num_roundings)]
        rounding = found[0][1][1]  # one standard deviation from the middle
        for region in around_centre:
            size = _rounding_sizes_of(layout, natural, centre)
            found.append(
                _compare(natural, size, region, values[: values.size - num_in_posterior], num_rows, num_roundings)
            )
        nats, tolerances = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
        # A point where rounding is large counts only if it contradicts the affine form.
        is_informative = (tolerances <= resolution(tolerances.dtype)) | ~(nats <= tolerances)
        worst = jnp.argmax(jnp.where(is_informative, nats / tolerances, -1.0))
        return Residual(nats[worst], tolerances[worst], rounding)

    return jax.vmap(residual, in_axes=(0, 1))(naturals, values), values[-num_in_posterior]


def _compare(
    natural: Natural,
    size: Natural,
    region: Region,
    values: Float[Array, " P"],
    num_rows: int,
    num_roundings: Float[Array, " R"] | None,
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return the deviations from affine, relative to the first point, and what rounding explains of each."""
    changes, sizes = _affine_change(natural, size, region, num_roundings)
    sizes = sizes + jnp.abs(values)
    eps = jnp.finfo(values.dtype).eps
    tolerances = eps * (num_rows * _NUM_HIDDEN_ROUNDINGS + _NUM_ROUNDINGS * (sizes + sizes[0]))
    nats = jnp.abs(values - values[0] - changes)
    is_finite = jnp.isfinite(nats) & jnp.isfinite(tolerances)
    return jnp.where(is_finite, nats, jnp.inf), jnp.where(is_finite, tolerances, 1.0)


def _rounding_sizes_of(layout: Layout, natural: Natural, centre: Coordinates) -> Natural:
    """Return the size of the numbers from which rounding makes each coefficient of a form derived at `centre`.

    A slope is derived from a residual, so its rounding is that of the curvature times the location.
    """
    sizes = jax.tree.map(jnp.abs, natural)
    if layout.members.size:
        bend = times_blocks(sizes.quadratic, jnp.abs(blocks_of(layout, centre.real)))
        sizes = sizes._replace(linear=sizes.linear + bend)
    return sizes


def _rounding_sizes_after_move(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> Natural:
    """Return the rounding sizes of a form that was derived at `old` and made relative to `new`."""
    sizes = _rounding_sizes_of(layout, natural, old)
    if not layout.members.size:
        return sizes
    x = blocks_of(layout, new.real - old.real)
    elements = dict(sizes.elements)
    if layout.is_scaled:
        bend = jnp.abs(times_blocks(natural.quadratic, x))
        gain = sum_by_owner(layout, jnp.sum((sizes.linear + 0.5 * bend) * jnp.abs(x), axis=-1))
        elements[POSITIVE] = jnp.stack([elements[POSITIVE][:, 0], elements[POSITIVE][:, 1] + gain], axis=-1)
    return sizes._replace(elements=elements, linear=sizes.linear + _rounding_sizes_of(layout, natural, new).linear)


def _affine_change(
    natural: Natural, size: Natural, region: Region, num_roundings: Float[Array, " R"] | None = None
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return <eta, T(z) - T(centre)> at the points of a region, and the sums of sizes to which its rounding is relative.

    Args:
        natural: relative to the region's centre.
        size: the rounding sizes of the coefficients.
        num_roundings: of the quadratic form of each block, beyond those of its terms.
    """
    num_points = region.steps.shape[0]
    change = total = jnp.zeros(num_points, natural.linear.dtype)
    for group, coefficients in natural.elements.items():
        change = change + _dot(region.changes[group], coefficients)
        total = total + _dot(region.sizes[group], size.elements[group])
    if not natural.linear.size:
        return change, total
    x, distance = region.steps, jnp.abs(region.steps)
    bend, bend_size = times_blocks(natural.quadratic, x), times_blocks(size.quadratic, distance)
    moved = jnp.sum((natural.linear - 0.5 * bend) * x, axis=-1)
    terms = size.linear * distance + (0.5 * distance + region.locations) * bend_size
    rounded = jnp.sum(terms + jnp.abs(natural.linear) * region.locations, axis=-1)
    if num_roundings is not None:
        rounded = rounded + num_roundings * jnp.abs(jnp.sum(bend * x, axis=-1))
    if region.scale is not None and region.scale_size is not None:
        moved, rounded = region.scale * moved, region.scale_size * rounded
    return change + jnp.sum(moved, axis=-1), total + jnp.sum(rounded, axis=-1)


def _dot(statistics: Float[Array, "P E n"], coefficients: Float[Array, "E n"]) -> Float[Array, " P"]:
    return jnp.sum(statistics * coefficients, axis=(1, 2))


NUM_VARIANTS = 8  # of displacements: trial rows in succession differ in theirs
_SEED = 20170903  # of the points, which are the same on every machine


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
