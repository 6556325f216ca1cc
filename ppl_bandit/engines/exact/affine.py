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

from ppl_bandit.engines.exact.blocks import map_blocks, nothing, pick, where_member
from ppl_bandit.engines.exact.families import (
    POSITIVE,
    UNIT,
    Coordinates,
    Layout,
    Natural,
    Posterior,
    by_block,
    by_owner,
)

__all__ = ["Region", "affine_change", "magnitude_of", "natural_of", "recentre", "region_around"]


class Region(NamedTuple):
    """Points, (P, ...), the first of them their centre, and what an affine form is there.

    Attributes:
        changes: statistics less those of the centre, laid out like the coefficients that multiply them.
        sizes: what multiplies the size of each coefficient to bound what is added up, and how it is rounded.
        at: sizes of the real elements, which multiply the slopes.
    """

    points: Coordinates
    changes: Natural
    sizes: Natural
    at: Float[Array, "P R S"]


def natural_of(layout: Layout, posterior: Posterior) -> Natural:
    """Return the natural parameters of a density of the latents, relative to its own means."""
    pairs = layout.is_member[:, :, None] & layout.is_member[:, None, :]
    # The density of z = u^(1/power) has (shape - 1/power) log u where that of u has shape - 1.
    offset = np.asarray(0.5 * layout.num_scaled - 1.0 / layout.power, posterior.shape.dtype)
    beta, dirichlet = map_blocks(lambda leaf: leaf - 1.0, (posterior.beta, posterior.dirichlet))
    return Natural(
        beta,
        dirichlet,
        map_blocks(lambda leaf: leaf + offset, posterior.shape),
        map_blocks(lambda leaf: -leaf, posterior.rate),
        nothing(layout.members.shape, posterior.mean.dtype),
        where_member(pairs, posterior.precision),
    )


def magnitude_of(layout: Layout, natural: Natural, centre: Coordinates) -> Natural:
    """Return the size to which each coefficient of a form read at `centre` is rounded.

    A slope is read off a residual, so it is rounded like the curvature times the location that entered it.
    """
    sizes = map_blocks(abs, natural)
    if layout.members.size:
        bend = jnp.einsum("rst,rt->rs", sizes.quadratic, abs(_in_blocks(layout, centre.real)))
        sizes = sizes._replace(linear=sizes.linear + bend)
    return sizes


def recentre(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> tuple[Natural, Natural]:
    """Return the same form relative to another centre of the reals, and the size to which its coefficients are rounded."""
    size = magnitude_of(layout, natural, old)
    if not old.real.size:
        return natural, size
    there, x = magnitude_of(layout, natural, new), _in_blocks(layout, new.real - old.real)
    bend = jnp.einsum("rst,rt->rs", natural.quadratic, x)
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
    kept: tuple[Any, ...] = (unit, logs, log_u, u)
    reals, sizes_of_reals, at = _around_reals(layout, points.real, u, stretch)
    changes = Natural._make([*kept, *reals])
    # The latents of a point are rounded at their own size: 1 - z near 1, a distant location times the slope there.
    rounded = (sizes_of_unit, tuple(1.0 + jnp.abs(rows) for rows in points.simplex), stretch, stretch * u)
    rounded = map_blocks(lambda own, leaf: own + abs(leaf) + abs(leaf[:1]), rounded, kept)
    sizes = Natural._make([*rounded, *sizes_of_reals])
    return Region(points, map_blocks(lambda leaf: leaf - leaf[:1], changes), sizes, at)


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


def _around_reals(layout: Layout, real: Float[Array, "P D"], u: Any, stretch: Any) -> tuple[Any, Any, Any]:
    """Return the statistics of the Gaussian blocks, their sizes, and the reals' own, times what scales them."""
    num_blocks, size = layout.members.shape
    shape = (real.shape[0], num_blocks, size)
    if not real.size:
        none = nothing(shape, real.dtype), nothing((*shape, size), real.dtype)
        return none, none, none[0]
    x, at = _in_blocks(layout, real - real[0]), abs(_in_blocks(layout, real))
    away = abs(x)
    changes = (x, -0.5 * x[..., :, None] * x[..., None, :])
    sizes = (away, (0.5 * away[..., :, None] + at[..., :, None]) * away[..., None, :])
    if np.all(layout.owner < 0):
        return changes, sizes, at
    unit, weight = by_block(layout, u, 1.0)[..., None], by_block(layout, stretch * u, 1.0)[..., None]
    return (
        (unit * changes[0], unit[..., None] * changes[1]),
        (weight * sizes[0], weight[..., None] * sizes[1]),
        weight * at,
    )


def affine_change(natural: Natural, size: Natural, region: Region) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return <eta, T(z) - T(centre)> at the points of a region, and the sums of sizes that its rounding is relative to.

    Args:
        natural: relative to the region's centre.
        size: the size to which each coefficient is rounded, by `magnitude_of` or `recentre`.
    """
    sizes = _dot((size, map_blocks(abs, natural.linear)), (region.sizes, region.at))
    return _dot(natural, region.changes), sizes


def _dot(coefficients: Any, statistics: Any) -> Float[Array, " P"]:
    pairs = zip(jax.tree.leaves(coefficients), jax.tree.leaves(statistics), strict=True)
    terms = [statistic.reshape(statistic.shape[0], -1) @ leaf.ravel() for leaf, statistic in pairs if leaf.size]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros(jax.tree.leaves(statistics)[0].shape[0])


def _in_blocks(layout: Layout, real: Float[Array, "*batch D"]) -> Float[Array, "*batch R S"]:
    return where_member(layout.is_member, pick(real, layout.members))


def _bounds(layout: Layout, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of all elements of a kind."""
    low, high = (
        np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)])
        for end in ("low", "high")
    )
    return low, high
