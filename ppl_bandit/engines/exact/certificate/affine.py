"""The affine form of a log density: how much it changes from one point to another, and how much of that is rounding.

Natural parameters are coefficients of sufficient statistics, the reals' relative to a centre (`families`). A form can be read
from another centre, and evaluated between two points. Whatever is added up on the way is added up in absolute value as well:
floating point resolves the result to so many units in the last place of that sum, and to no more.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.element_blocks import map_blocks, nothing, where_member
from ppl_bandit.engines.exact.families.families import (
    POSITIVE,
    UNIT,
    Coordinates,
    Layout,
    Natural,
    Posterior,
    blocks_of,
    by_block,
    by_owner,
)

__all__ = ["Region", "affine_change", "magnitude_of", "natural_of", "recentre", "region_around"]

_FEW_TERMS = 4000  # a product that is asked for takes some 5 us


class Region(NamedTuple):
    """Points, (P, ...), the first of them their centre, and what an affine form is there.

    Attributes:
        changes: statistics of all families but the Gaussian less those of the centre, like the coefficients that multiply them.
        sizes: what multiplies the size of each coefficient to bound what is added up, and how it is rounded.
        away: reals less those of the centre, and `at`: their own size.
        unit: u of each block, and `weight`: u times how much more than once it is rounded; None where nothing scales any.
    """

    points: Coordinates
    changes: tuple[Any, ...]
    sizes: tuple[Any, ...]
    away: Float[Array, "P R S"]
    at: Float[Array, "P R S"]
    unit: Float[Array, "P R"] | None
    weight: Float[Array, "P R"] | None


def natural_of(layout: Layout, posterior: Posterior) -> Natural:
    """Return the natural parameters of a density of the latents, relative to its own means."""
    # The density of z = u^(1/power) has (shape - 1/power) log u where that of u has shape - 1.
    offset = np.asarray(0.5 * layout.num_scaled - 1.0 / layout.power, posterior.shape.dtype)
    beta, dirichlet = map_blocks(lambda leaf: leaf - 1.0, (posterior.beta, posterior.dirichlet))
    return Natural(
        beta,
        dirichlet,
        map_blocks(lambda leaf: leaf + offset, posterior.shape),
        map_blocks(lambda leaf: -leaf, posterior.rate),
        nothing(layout.members.shape, posterior.mean.dtype),
        where_member(layout.is_pair, posterior.precision),
    )


def magnitude_of(layout: Layout, natural: Natural, centre: Coordinates) -> Natural:
    """Return the size to which each coefficient of a form read at `centre` is rounded.

    A slope is read off a residual, so it is rounded like the curvature times the location that entered it.
    """
    sizes = map_blocks(abs, natural)
    if layout.members.size:
        bend = _times(sizes.quadratic, abs(blocks_of(layout, centre.real)))
        sizes = sizes._replace(linear=sizes.linear + bend)
    return sizes


def recentre(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> tuple[Natural, Natural]:
    """Return the same form relative to another centre of the reals, and the size to which its coefficients are rounded."""
    size = magnitude_of(layout, natural, old)
    if not old.real.size:
        return natural, size
    there, x = magnitude_of(layout, natural, new), blocks_of(layout, new.real - old.real)
    bend = _times(natural.quadratic, x)
    scale, sizes_of_scale = natural.scale, size.scale
    if np.any(layout.owner >= 0):
        gain = jnp.sum((natural.linear - 0.5 * bend) * x, axis=-1)
        gain_size = jnp.sum((size.linear + 0.5 * jnp.abs(bend)) * jnp.abs(x), axis=-1)
        scale, sizes_of_scale = scale + by_owner(layout, gain), sizes_of_scale + by_owner(layout, gain_size)
    size = size._replace(scale=sizes_of_scale, linear=size.linear + there.linear)
    return natural._replace(scale=scale, linear=natural.linear - bend), size


def region_around(layout: Layout, points: Coordinates) -> Region:
    """Return what an affine form needs to know of points, (P, ...), the first of which is their centre."""
    unit, sizes_of_unit = _around_units(layout, points.unit)
    logs = tuple(jax.nn.log_softmax(rows, axis=-1) for rows in points.simplex)
    log_u, u, stretch = _around_positives(layout, points.positive)
    changes = (unit, logs, log_u, u)
    # The latents of a point are rounded at their own size: 1 - z near 1, a distant location times the slope there.
    sizes = (sizes_of_unit, tuple(1.0 + jnp.abs(rows) for rows in points.simplex), stretch, stretch * u)
    sizes = map_blocks(lambda own, leaf: own + abs(leaf) + abs(leaf[:1]), sizes, changes)
    away, at = (
        blocks_of(layout, real) for real in (map_blocks(lambda leaf: leaf - leaf[:1], points.real), points.real)
    )
    is_scaled = bool(np.any(layout.owner >= 0))
    units = by_block(layout, u, 1.0) if is_scaled else None
    weights = by_block(layout, stretch * u, 1.0) if is_scaled else None
    return Region(
        points, map_blocks(lambda leaf: leaf - leaf[:1], changes), sizes, away, map_blocks(abs, at), units, weights
    )


def _around_units(layout: Layout, logits: Float[Array, "P U"]) -> tuple[Any, Any]:
    """Return the statistics of the unit elements at some points, and the sizes at which they are rounded."""
    if not logits.size:
        return (nothing((*logits.shape, 2), logits.dtype),) * 2
    low, high = _bounds(layout, UNIT)
    offset = np.asarray(low / np.where(high == low, 1.0, high - low), logits.dtype)
    both = jnp.stack([logits, -logits], axis=-1)
    w = jax.nn.sigmoid(both)
    share = abs(w[..., :1] + offset[:, None])
    # 1 - z is rounded at the size of 1.
    return jax.nn.log_sigmoid(both), (share + np.arange(2, dtype=logits.dtype)) / w


def _around_positives(layout: Layout, log_u: Float[Array, "P G"]) -> tuple[Any, Any, Any]:
    """Return the statistics log u and u of the positive elements, and how much more than once they are rounded."""
    if not log_u.size:
        return log_u, log_u, log_u
    power, (floor, _) = np.asarray(layout.power, log_u.dtype), _bounds(layout, POSITIVE)
    log_z = log_u / power
    far = abs(log_z) if np.all(floor == 0) else abs(log_z) + np.asarray(abs(floor), log_u.dtype) * jnp.exp(-log_z)
    return log_u, jnp.exp(log_u), 1.0 + abs(power) * (1.0 + far)


def affine_change(natural: Natural, size: Natural, region: Region) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return <eta, T(z) - T(centre)> at the points of a region, and the sums of sizes that its rounding is relative to.

    Args:
        natural: relative to the region's centre.
        size: the size to which each coefficient is rounded, by `magnitude_of` or `recentre`.
    """
    change, total = _dot(natural[:4], region.changes), _dot(size[:4], region.sizes)
    if not natural.linear.size:
        return change, total
    x, far = region.away, abs(region.away)
    bend, bend_size = (_times(*pair) for pair in ((natural.quadratic, x), (size.quadratic, far)))
    moved = jnp.sum((natural.linear - 0.5 * bend) * x, axis=-1)
    rounded = jnp.sum(
        size.linear * far + (0.5 * far + region.at) * bend_size + abs(natural.linear) * region.at, axis=-1
    )
    if region.unit is not None and region.weight is not None:
        moved, rounded = region.unit * moved, region.weight * rounded
    return change + jnp.sum(moved, axis=-1), total + jnp.sum(rounded, axis=-1)


def _times(matrices: Float[Array, "R S S"], vectors: Float[Array, "*P R S"]) -> Float[Array, "*P R S"]:
    """Multiply matrices and vectors: a few in one loop, which takes less than to ask for a product, and many as products.

    As products, since all terms at once would be as many numbers as there are points and pairs.
    """
    if vectors.size * vectors.shape[-1] <= _FEW_TERMS:
        return jnp.sum(matrices * vectors[..., None, :], axis=-1)
    return jnp.einsum("rst,...rt->...rs", matrices, vectors)


def _dot(coefficients: Any, statistics: Any) -> Float[Array, " P"]:
    pairs = zip(jax.tree.leaves(coefficients), jax.tree.leaves(statistics), strict=True)
    terms = [_sum_of_products(statistic, leaf) for leaf, statistic in pairs if leaf.size]
    if terms:
        return sum(terms[1:], start=terms[0])
    first = jax.tree.leaves(statistics)[0]
    return nothing(first.shape[:1], first.dtype)


def _sum_of_products(statistic: Float[Array, "P ..."], coefficient: Float[Array, "..."]) -> Float[Array, " P"]:
    if statistic.size <= _FEW_TERMS:
        return jnp.sum(statistic * coefficient, axis=tuple(range(1, statistic.ndim)))
    return statistic.reshape(statistic.shape[0], -1) @ coefficient.ravel()


def _bounds(layout: Layout, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of all elements of a kind."""
    low, high = (
        np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)])
        for end in ("low", "high")
    )
    return low, high
