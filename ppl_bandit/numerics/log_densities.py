"""Log densities in single precision, exact to its last digits however narrow they are: enough for a sum over nodes.

In double precision their logarithms and exponentials take three times as long.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["LOG", "LOGIT", "PLAIN", "Shape", "log_density_in_single", "shape_of"]

LOGIT, LOG, PLAIN = range(3)
_NEAR = 0.1  # of the distance from a centre: a series is closer than a difference of logarithms
_FAR = 20.0
_LEAST = 1e-7


class Shape(NamedTuple):
    """What a log density depends on, in single precision; all arrays broadcast with each other.

    Attributes:
        first, second: as in `MarginalLaw`.
        width: of the coordinate s.
        lesser, greater: of a Beta, the smaller and the larger shape as parts of their sum.
    """

    first: Float[Array, "..."]
    second: Float[Array, "..."]
    width: Float[Array, "..."]
    lesser: Float[Array, "..."]
    greater: Float[Array, "..."]


def shape_of(first: Float[Array, "..."], second: Float[Array, "..."], width: Float[Array, "..."]) -> Shape:
    """Return the shape of laws by their parameters."""
    total = first + second
    parts = jnp.minimum(first, second) / total, jnp.maximum(first, second) / total
    return Shape(*(field.astype(jnp.float32) for field in (first, second, width, *parts)))


def log_density_in_single(kind: int, shape: Shape, z: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return the log density at centre + width z, less its largest value."""
    if kind == PLAIN:
        finite = jnp.where(jnp.isinf(shape.first), 1.0, shape.first)
        heavy = -0.5 * (finite + 1.0) * jnp.log1p(z * z / finite)
        return jnp.where(jnp.isinf(shape.first), -0.5 * z * z, heavy)
    d = shape.width * z
    if kind == LOG:
        away = shape.first * (d + 1.0 - jnp.exp(jnp.minimum(d, 80.0)))
        bend = 1.0 / 3.0 + d * (1.0 / 12.0 + d / 60.0)
    else:
        assert kind == LOGIT
        # As the smaller shape sees it: of two large terms only those of its size are left.
        d = jnp.where(shape.first <= shape.second, d, -d)
        small, large = jnp.minimum(shape.first, shape.second), jnp.maximum(shape.first, shape.second)
        is_far = d > _FAR
        term, part = jnp.where(is_far, -large, small) * d, jnp.where(is_far, shape.greater, shape.lesser)
        inside = jnp.maximum(part * (jnp.exp(jnp.where(is_far, -d, d)) - 1.0), _LEAST - 1.0)
        away = term - (small + large) * jnp.log1p(inside)
        skew, product = shape.greater - shape.lesser, shape.greater * shape.lesser
        bend = skew / 3.0 + d * ((1.0 - 6.0 * product) / 12.0 + d * (skew * (1.0 - 12.0 * product) / 60.0))
    return jnp.where(jnp.abs(d) < _NEAR, -0.5 * z * z * (1.0 + d * bend), away)
