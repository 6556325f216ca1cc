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
)

__all__ = ["Region", "affine_change", "magnitude_of", "natural_of", "recentre", "region_around"]


class Region(NamedTuple):
    """Points, (P, ...), the first of them their centre, and what an affine form is there.

    Attributes:
        changes: statistics less those of the centre, laid out like the coefficients that multiply them.
        sizes: what multiplies the size of each coefficient to bound what is added up, and how it is rounded.
        scaled_at, free_at: sizes of the real elements, which multiply the slopes.
    """

    points: Coordinates
    changes: Natural
    sizes: Natural
    scaled_at: Float[Array, "P G S"]
    free_at: Float[Array, "P F"]


def natural_of(layout: Layout, posterior: Posterior) -> Natural:
    """Return the natural parameters of a density of the latents, relative to its own means."""
    pairs = layout.is_member[:, :, None] & layout.is_member[:, None, :]
    # The density of z = u^(1/power) has (shape - 1/power) log u where that of u has shape - 1.
    offset = np.asarray(0.5 * layout.is_member.sum(axis=1) - 1.0 / layout.power, posterior.shape.dtype)
    beta, dirichlet = map_blocks(lambda leaf: leaf - 1.0, (posterior.beta, posterior.dirichlet))
    return Natural(
        beta,
        dirichlet,
        map_blocks(lambda leaf: leaf + offset, posterior.shape),
        map_blocks(lambda leaf: -leaf, posterior.rate),
        nothing(layout.members.shape, posterior.mean.dtype),
        where_member(pairs, posterior.scaled_precision),
        nothing(layout.free.shape, posterior.mean.dtype),
        posterior.precision,
    )


def magnitude_of(layout: Layout, natural: Natural, centre: Coordinates) -> Natural:
    """Return the size to which each coefficient of a form read at `centre` is rounded.

    A slope is read off a residual, so it is rounded like the curvature times the location that entered it.
    """
    sizes = map_blocks(abs, natural)
    if layout.members.size:
        bend = jnp.einsum("gst,gt->gs", sizes.scaled_quadratic, abs(_scaled(layout, centre.real)))
        sizes = sizes._replace(scaled_linear=sizes.scaled_linear + bend)
    if layout.free.size:
        sizes = sizes._replace(linear=sizes.linear + sizes.quadratic @ abs(pick(centre.real, layout.free)))
    return sizes


def recentre(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> tuple[Natural, Natural]:
    """Return the same form relative to another centre of the reals, and the size to which its coefficients are rounded."""
    size = magnitude_of(layout, natural, old)
    if not old.real.size:
        return natural, size
    moved, there = new.real - old.real, magnitude_of(layout, natural, new)
    if layout.members.size:
        x = _scaled(layout, moved)
        bend = jnp.einsum("gst,gt->gs", natural.scaled_quadratic, x)
        gain = jnp.sum((natural.scaled_linear - 0.5 * bend) * x, axis=-1)
        size = size._replace(
            scale=size.scale + jnp.sum((size.scaled_linear + 0.5 * jnp.abs(bend)) * jnp.abs(x), axis=-1),
            scaled_linear=size.scaled_linear + there.scaled_linear,
        )
        natural = natural._replace(scale=natural.scale + gain, scaled_linear=natural.scaled_linear - bend)
    if layout.free.size:
        bend = natural.quadratic @ pick(moved, layout.free)
        size = size._replace(linear=size.linear + there.linear)
        natural = natural._replace(linear=natural.linear - bend)
    return natural, size


def region_around(layout: Layout, points: Coordinates) -> Region:
    """Return what an affine form needs to know of points, (P, ...), the first of which is their centre."""
    away = points.real - points.real[0] if points.real.size else points.real
    scaled, sizes_of_scaled, scaled_at = _around_scaled(layout, points, away)
    y, at = pick(away, layout.free), abs(pick(points.real, layout.free))
    unit, sizes_of_unit = _around_units(layout, points.unit)
    logs = tuple(jax.nn.log_softmax(rows, axis=-1) for rows in points.simplex)
    kept: tuple[Any, ...] = (unit, logs, *scaled[:2])
    free = (y, -0.5 * y[..., :, None] * y[..., None, :])
    changes = Natural._make([*kept, *scaled[2:], *free])
    # The latents of a point are rounded at their own size: 1 - z near 1, a distant location times the slope there.
    rounded = (sizes_of_unit, tuple(1.0 + jnp.abs(rows) for rows in points.simplex), *sizes_of_scaled[:2])
    y = abs(y)
    free = (y, (0.5 * y[..., :, None] + at[..., :, None]) * y[..., None, :])
    rounded = map_blocks(lambda own, leaf: own + abs(leaf) + abs(leaf[:1]), rounded, kept)
    sizes = Natural._make([*rounded, *sizes_of_scaled[2:], *free])
    return Region(points, map_blocks(lambda leaf: leaf - leaf[:1], changes), sizes, scaled_at, at)


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


def _around_scaled(layout: Layout, points: Coordinates, away: Float[Array, "P D"]) -> tuple[Any, Any, Any]:
    """Return the statistics of the positive elements and of the reals that they scale, their sizes, and the reals' own."""
    log_u, dtype = points.positive, points.positive.dtype
    shape = (log_u.shape[0], *layout.members.shape)
    none = nothing(shape, dtype)
    if not log_u.size:
        return (
            (log_u, log_u, none, nothing((*shape, 0), dtype)),
            (log_u, log_u, none, nothing((*shape, 0), dtype)),
            none,
        )
    power, (floor, _) = np.asarray(layout.power, dtype), _bounds(layout, POSITIVE)
    u, log_z = jnp.exp(log_u), log_u / power
    far = abs(log_z) if np.all(floor == 0) else abs(log_z) + np.asarray(abs(floor), dtype) * jnp.exp(-log_z)
    stretch = 1.0 + abs(power) * (1.0 + far)
    weight = stretch * u
    if not layout.members.size:
        empty = none, nothing((*shape, shape[-1]), dtype)
        return (log_u, u, *empty), (stretch, weight, *empty), none
    x, at = (where_member(layout.is_member, pick(real, layout.members)) for real in (away, points.real))
    changes = u[..., None] * x
    size, at = abs(x), abs(at)
    return (
        (log_u, u, changes, -0.5 * changes[..., :, None] * x[..., None, :]),
        (
            stretch,
            weight,
            weight[..., None] * size,
            weight[..., None, None] * (0.5 * size[..., :, None] + at[..., :, None]) * size[..., None, :],
        ),
        weight[..., None] * at,
    )


def affine_change(natural: Natural, size: Natural, region: Region) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return <eta, T(z) - T(centre)> at the points of a region, and the sums of sizes that its rounding is relative to.

    Args:
        natural: relative to the region's centre.
        size: the size to which each coefficient is rounded, by `magnitude_of` or `recentre`.
    """
    slopes = map_blocks(abs, (natural.scaled_linear, natural.linear))
    sizes = _dot((size, slopes), (region.sizes, (region.scaled_at, region.free_at)))
    return _dot(natural, region.changes), sizes


def _dot(coefficients: Any, statistics: Any) -> Float[Array, " P"]:
    pairs = zip(jax.tree.leaves(coefficients), jax.tree.leaves(statistics), strict=True)
    terms = [statistic.reshape(statistic.shape[0], -1) @ leaf.ravel() for leaf, statistic in pairs if leaf.size]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros(jax.tree.leaves(statistics)[0].shape[0])


def _scaled(layout: Layout, real: Array) -> Float[Array, "G S"]:
    return where_member(layout.is_member, pick(real, layout.members))


def _bounds(layout: Layout, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the bounds of all elements of a kind."""
    low, high = (
        np.concatenate([np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)])
        for end in ("low", "high")
    )
    return low, high
