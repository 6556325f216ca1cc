"""Certify that a log density is affine in the sufficient statistics: compare it with its affine part at random points.

The difference `log density(z) - <eta, T(z)>` must be the same number at every point. For functions that are proved analytic a
difference that varied could be constant on random points only by an accident of probability zero; what remains is the
resolution of floating point, so points are spread over several orders of magnitude, and each difference is measured
relative to the terms that went into it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.families import Coordinates, Layout, Natural, Posterior, affine_part, derive

__all__ = ["Probe", "certify", "make_probe", "residual_of", "tolerance"]

_SEED = 20170903


class Probe(NamedTuple):
    """Random displacements from a centre, (P, ...) each; the reals' are in units of the prior's standard deviations."""

    offsets: Coordinates
    real_scale: Float[Array, " D"]


def tolerance(dtype: Any = None) -> float:
    """Return the largest relative residual that rounding explains in a precision, jax's current one by default."""
    return 1e-10 if jnp.dtype(jnp.zeros(()).dtype if dtype is None else dtype) == jnp.float64 else 3e-3


def make_probe(layout: Layout, num_points: int, posterior: Posterior | None = None) -> Probe:
    """Draw displacements, the same for every engine on every machine.

    Args:
        posterior: the prior, whose standard deviations scale the reals; None scales them by 1.
    """
    rng = np.random.default_rng(_SEED)
    num_real = layout.count("real")
    reach = 10.0 ** rng.uniform(-1.5, 1.0, size=(num_points, 1))
    offsets = Coordinates(
        jnp.asarray(2.0 * rng.standard_normal((num_points, layout.count("unit")))),
        jnp.asarray(1.2 * rng.standard_normal((num_points, layout.count("positive")))),
        tuple(
            jnp.asarray(1.5 * rng.standard_normal((num_points, site.size // site.shape[-1], site.shape[-1])))
            for site in layout.of("simplex")
        ),
        jnp.asarray(reach * rng.standard_normal((num_points, num_real))),
    )
    scale = jnp.ones(num_real)
    if posterior is not None:
        scale = scale.at[layout.free].set(jnp.sqrt(_variances(posterior.precision)))
        if layout.members.size:
            spread = jnp.sqrt(_variances(posterior.scaled_precision) * (posterior.rate / posterior.shape)[:, None])
            scale = scale.at[layout.members[layout.is_member]].set(spread[layout.is_member])
    return Probe(offsets, scale)


def _variances(precision: Array) -> Array:
    return jnp.diagonal(jnp.linalg.inv(precision), axis1=-2, axis2=-1)


def certify(
    layout: Layout, log_density: Callable[[Coordinates], Array], centre: Coordinates, probe: Probe
) -> tuple[Natural, Float[Array, ""]]:
    """Derive the natural parameters of a log density at `centre` and return them with the largest relative residual."""
    natural = derive(layout, log_density, centre)
    return natural, residual_of(layout, log_density, natural, centre, probe)


def residual_of(
    layout: Layout, log_density: Callable[[Coordinates], Array], natural: Natural, centre: Coordinates, probe: Probe
) -> Float[Array, ""]:
    """Return how far a log density is from being affine with the given coefficients, relative to its terms.

    The residual is infinite where the log density is not finite at a point; 0 for a density that is constant.
    """
    offsets = probe.offsets._replace(real=probe.offsets.real * probe.real_scale)
    # The centre itself comes first: all points go through one evaluation of the program, compiled once.
    points = jax.tree.map(
        lambda middle, offset: middle + jnp.concatenate([jnp.zeros_like(offset[:1]), offset]).astype(middle.dtype),
        centre,
        offsets,
    )

    def difference(point: Coordinates) -> tuple[Array, Array]:
        value = log_density(point)
        affine, size = affine_part(layout, natural, centre, point)
        return value - affine, jnp.abs(value) + size

    differences, sizes = jax.vmap(difference)(points)
    scale = sizes + sizes[0]
    residual = jnp.abs(differences - differences[0]) / jnp.where(scale == 0, 1.0, scale)
    return jnp.max(jnp.where(jnp.isfinite(residual), residual, jnp.inf))
