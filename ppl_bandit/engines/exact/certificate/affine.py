"""The affine form of a log density: how much it changes between two points, and how large its rounding can be.

For every sum, the sum of absolute values is computed as well: floating point resolves the result to a few units in the last
place of that sum.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.gaussian import blocks_of, by_block, padding, sum_by_owner, times_blocks
from ppl_bandit.engines.exact.families.layout import POSITIVE, Layout
from ppl_bandit.engines.exact.families.posterior import Coordinates, Natural
from ppl_bandit.engines.exact.families.registry import family_of_group

__all__ = [
    "Region",
    "affine_change",
    "inverse_roundings",
    "region_of",
    "rounding_sizes_after_move",
    "rounding_sizes_of",
]


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


def rounding_sizes_of(layout: Layout, natural: Natural, centre: Coordinates) -> Natural:
    """Return the size of the numbers from which rounding makes each coefficient of a form derived at `centre`.

    A slope is derived from a residual, so its rounding is that of the curvature times the location.
    """
    sizes = jax.tree.map(jnp.abs, natural)
    if layout.members.size:
        bend = times_blocks(sizes.quadratic, jnp.abs(blocks_of(layout, centre.real)))
        sizes = sizes._replace(linear=sizes.linear + bend)
    return sizes


def rounding_sizes_after_move(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> Natural:
    """Return the rounding sizes of a form that was derived at `old` and made relative to `new`."""
    sizes = rounding_sizes_of(layout, natural, old)
    if not layout.members.size:
        return sizes
    x = blocks_of(layout, new.real - old.real)
    elements = dict(sizes.elements)
    if layout.is_scaled:
        bend = jnp.abs(times_blocks(natural.quadratic, x))
        gain = sum_by_owner(layout, jnp.sum((sizes.linear + 0.5 * bend) * jnp.abs(x), axis=-1))
        elements[POSITIVE] = jnp.stack([elements[POSITIVE][:, 0], elements[POSITIVE][:, 1] + gain], axis=-1)
    return sizes._replace(elements=elements, linear=sizes.linear + rounding_sizes_of(layout, natural, new).linear)


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


def affine_change(
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
