"""The affine form of a log density: how much it changes from one point to another, and how much of that is rounding.

Natural parameters are coefficients of sufficient statistics, the reals' relative to a centre (`families`). A form can be read
from another centre, and evaluated between two points. Whatever is added up on the way is added up in absolute value as well:
floating point resolves the result to so many units in the last place of that sum, and to no more.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families import POSITIVE, UNIT, Coordinates, Layout, Natural, Posterior

__all__ = ["affine_change", "magnitude_of", "natural_of", "recentre"]


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


def affine_change(
    layout: Layout, natural: Natural, centre: Coordinates, point: Coordinates, size: Natural | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return <eta, T(z) - T(centre)> at a point, and the sum of sizes that its rounding is relative to.

    The second counts the terms themselves, and what the latents of the point, rounded at their own size, change in them.

    Args:
        natural: relative to `centre`.
        size: the size to which each coefficient is rounded; `magnitude_of` by default.
    """
    if size is None:
        size = magnitude_of(layout, natural, centre)
    u, log_z = jnp.exp(point.positive), point.positive / jnp.asarray(layout.power, point.positive.dtype)
    x, y = _scaled(layout, point.real - centre.real), (point.real - centre.real)[layout.free]
    bends = jnp.einsum("gst,gt->gs", natural.scaled_quadratic, x), natural.quadratic @ y
    # Within a quadratic form large terms may cancel, and then it is their size that rounding is relative to.
    spans = (
        jnp.einsum("gst,gt->gs", size.scaled_quadratic, jnp.abs(x)),
        size.quadratic @ jnp.abs(y),
    )
    w, complement = jax.nn.sigmoid(point.unit), jax.nn.sigmoid(-point.unit)
    low, high = _bounds(layout, UNIT, point.unit.dtype)
    share = jnp.abs(low / jnp.where(high == low, 1.0, high - low) + w)  # the latent in units of its interval
    floor, _ = _bounds(layout, POSITIVE, point.positive.dtype)
    power = jnp.abs(jnp.asarray(layout.power, point.positive.dtype))
    stretch = 1.0 + power * (1.0 + jnp.abs(log_z) + jnp.abs(floor) * jnp.exp(-log_z))
    fixed = [
        (natural.unit[..., 0], size.unit[..., 0], point.unit, centre.unit, jax.nn.log_sigmoid, share / w),
        (natural.unit[..., 1], size.unit[..., 1], -point.unit, -centre.unit, jax.nn.log_sigmoid, share / complement),
        (natural.log_scale, size.log_scale, point.positive, centre.positive, lambda s: s, stretch),
        (natural.scale, size.scale, point.positive, centre.positive, jnp.exp, stretch * u),
        *(
            (eta, own, here, there, jax.nn.log_softmax, 1.0 + jnp.abs(here))
            for eta, own, here, there in zip(natural.simplex, size.simplex, point.simplex, centre.simplex, strict=True)
        ),
    ]
    changes = [u[:, None] * (natural.scaled_linear - 0.5 * bends[0]) * x, (natural.linear - 0.5 * bends[1]) * y]
    sizes = [
        (stretch * u)[:, None] * (size.scaled_linear + 0.5 * spans[0]) * jnp.abs(x),
        (stretch * u)[:, None] * jnp.abs((natural.scaled_linear - bends[0]) * _scaled(layout, point.real)),
        (size.linear + 0.5 * spans[1]) * jnp.abs(y),
        jnp.abs((natural.linear - bends[1]) * point.real[layout.free]),
    ]
    for eta, own, here, there, statistic, rounded in fixed:
        at_here, at_there = statistic(here), statistic(there)
        changes.append(eta * (at_here - at_there))
        sizes.append(own * (jnp.abs(at_here) + jnp.abs(at_there) + rounded))
    change, total = (sum((term.sum() for term in terms), start=jnp.zeros(())) for terms in (changes, sizes))
    return change, total


def _scaled(layout: Layout, real: Array) -> Float[Array, "G S"]:
    return jnp.where(layout.is_member, real[layout.members], 0.0)


def _bounds(layout: Layout, kind: str, dtype: object) -> tuple[Array, Array]:
    """Return the bounds of all elements of a kind; with their type spelled out, as `latents_at` does."""
    ends = []
    for end in ("low", "high"):
        parts = [np.broadcast_to(getattr(site, end), site.shape).ravel() for site in layout.of(kind)]
        ends.append(jnp.asarray(np.concatenate([np.zeros(0), *parts]), dtype))
    return ends[0], ends[1]
