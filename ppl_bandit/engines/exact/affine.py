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

from ppl_bandit.engines.exact.families import POSITIVE, UNIT, Coordinates, Layout, Natural, Posterior

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
    num_members = jnp.asarray(layout.is_member.sum(axis=1), posterior.shape.dtype)
    pairs = layout.is_member[:, :, None] & layout.is_member[:, None, :]
    return Natural(
        posterior.beta - 1.0,
        tuple(rows - 1.0 for rows in posterior.dirichlet),
        # The density of z = u^(1/power) has (shape - 1/power) log u where that of u has shape - 1.
        posterior.shape - jnp.asarray(1.0 / layout.power, posterior.shape.dtype) + 0.5 * num_members,
        -posterior.rate,
        jnp.zeros_like(posterior.scaled_mean),
        jnp.where(pairs, posterior.scaled_precision, 0.0),
        jnp.zeros_like(posterior.mean),
        posterior.precision,
    )


def magnitude_of(layout: Layout, natural: Natural, centre: Coordinates) -> Natural:
    """Return the size to which each coefficient of a form read at `centre` is rounded.

    A slope is read off a residual, so it is rounded like the curvature times the location that entered it.
    """
    sizes = jax.tree.map(jnp.abs, natural)
    x, y = jnp.abs(_scaled(layout, centre.real)), jnp.abs(centre.real[layout.free])
    return sizes._replace(
        scaled_linear=sizes.scaled_linear + jnp.einsum("gst,gt->gs", sizes.scaled_quadratic, x),
        linear=sizes.linear + sizes.quadratic @ y,
    )


def recentre(layout: Layout, natural: Natural, old: Coordinates, new: Coordinates) -> tuple[Natural, Natural]:
    """Return the same form relative to another centre of the reals, and the size to which its coefficients are rounded."""
    size = magnitude_of(layout, natural, old)
    x, y = _scaled(layout, new.real - old.real), (new.real - old.real)[layout.free]
    bend, scaled_bend = natural.quadratic @ y, jnp.einsum("gst,gt->gs", natural.scaled_quadratic, x)
    there = magnitude_of(layout, natural, new)
    return natural._replace(
        scale=natural.scale + jnp.sum((natural.scaled_linear - 0.5 * scaled_bend) * x, axis=-1),
        scaled_linear=natural.scaled_linear - scaled_bend,
        linear=natural.linear - bend,
    ), size._replace(
        scale=size.scale + jnp.sum((size.scaled_linear + 0.5 * jnp.abs(scaled_bend)) * jnp.abs(x), axis=-1),
        scaled_linear=size.scaled_linear + there.scaled_linear,
        linear=size.linear + there.linear,
    )


def region_around(layout: Layout, points: Coordinates) -> Region:
    """Return what an affine form needs to know of points, (P, ...), the first of which is their centre."""
    centre = jax.tree.map(lambda leaf: leaf[0], points)
    u, log_z = jnp.exp(points.positive), points.positive / jnp.asarray(layout.power, points.positive.dtype)
    away = points.real - centre.real
    x, y = jnp.where(layout.is_member, away[:, layout.members], 0.0), away[:, layout.free]
    at = jnp.where(layout.is_member, points.real[:, layout.members], 0.0), points.real[:, layout.free]
    w = jnp.stack([points.unit, -points.unit], axis=-1)
    low, high = _bounds(layout, UNIT, points.unit.dtype)
    share = jnp.abs(low / jnp.where(high == low, 1.0, high - low) + jax.nn.sigmoid(points.unit))
    floor, _ = _bounds(layout, POSITIVE, points.positive.dtype)
    power = jnp.abs(jnp.asarray(layout.power, points.positive.dtype))
    stretch = 1.0 + power * (1.0 + jnp.abs(log_z) + jnp.abs(floor) * jnp.exp(-log_z))
    logs = tuple(jax.nn.log_softmax(rows, axis=-1) for rows in points.simplex)
    weight = stretch * u
    statistics = Natural(
        jax.nn.log_sigmoid(w),
        logs,
        points.positive,
        u,
        u[..., None] * x,
        -0.5 * u[..., None, None] * x[..., :, None] * x[..., None, :],
        y,
        -0.5 * y[..., :, None] * y[..., None, :],
    )
    x, y, at = jnp.abs(x), jnp.abs(y), (jnp.abs(at[0]), jnp.abs(at[1]))
    # The latents of a point are rounded at their own size: 1 - z near 1, a distant location times the slope there.
    rounded = Natural(
        (share[..., None] + jnp.arange(2.0, dtype=share.dtype))
        / jax.nn.sigmoid(w),  # 1 - z is rounded at the size of 1
        tuple(1.0 + jnp.abs(rows) for rows in points.simplex),
        stretch,
        weight,
        weight[..., None] * x,
        weight[..., None, None] * (0.5 * x[..., :, None] + at[0][..., :, None]) * x[..., None, :],
        y,
        (0.5 * y[..., :, None] + at[1][..., :, None]) * y[..., None, :],
    )
    changes = jax.tree.map(lambda leaf: leaf - leaf[0], statistics)
    kept = ("unit", "simplex", "log_scale", "scale")
    sizes = rounded._replace(
        **{
            name: jax.tree.map(
                lambda own, leaf: own + jnp.abs(leaf) + jnp.abs(leaf[0]),
                getattr(rounded, name),
                getattr(statistics, name),
            )
            for name in kept
        }
    )
    return Region(points, changes, sizes, weight[..., None] * at[0], at[1])


def affine_change(natural: Natural, size: Natural, region: Region) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return <eta, T(z) - T(centre)> at the points of a region, and the sums of sizes that its rounding is relative to.

    Args:
        natural: relative to the region's centre.
        size: the size to which each coefficient is rounded, by `magnitude_of` or `recentre`.
    """
    sizes = _dot(size, region.sizes)
    sizes += _dot(jnp.abs(natural.scaled_linear), region.scaled_at) + _dot(jnp.abs(natural.linear), region.free_at)
    return _dot(natural, region.changes), sizes


def _dot(coefficients: Any, statistics: Any) -> Float[Array, " P"]:
    pairs = zip(jax.tree.leaves(coefficients), jax.tree.leaves(statistics), strict=True)
    terms = [statistic.reshape(statistic.shape[0], -1) @ leaf.ravel() for leaf, statistic in pairs if leaf.size]
    return sum(terms[1:], start=terms[0]) if terms else jnp.zeros(jax.tree.leaves(statistics)[0].shape[0])


def _scaled(layout: Layout, real: Array) -> Float[Array, "G S"]:
    return jnp.where(layout.is_member, real[layout.members], 0.0)


def _bounds(layout: Layout, kind: str, dtype: Any) -> tuple[Array, Array]:
    """Return the bounds of all elements of a kind; with their type spelled out, as `latents_at` does."""
    ends = []
    for end in ("low", "high"):
        parts = [np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)]
        ends.append(jnp.asarray(np.concatenate([np.zeros(0), *parts]), dtype))
    return ends[0], ends[1]
