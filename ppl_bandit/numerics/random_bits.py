"""Uniform and normal numbers from random bits, without rejection."""

import math
from typing import Any, TypeAlias

import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, DTypeLike, Float

from ppl_bandit.runtime.random_draws import random_words
from ppl_bandit.types import Key

Shape: TypeAlias = tuple[int, ...]

# Normal quantile of (1 + x) / 2, divided by x, as polynomials fitted at Chebyshev nodes: in w = -log(1 - x^2) for w < 5, and in
# the root of w beyond. Both ranges are mapped to [-1, 1].
_MIDDLE = (
    *(2.12331366539, 0.872006714344, -0.0369258113205, -0.0277037769556, 0.0120748085901),
    *(-0.000606238318142, -0.00121611193754, 0.000296129815979, 6.03991866228e-05),
)
_TAIL = (
    *(5.64614677429, 2.73500084877, 0.00472245365381, -0.00734612019733, 0.00467146933079),
    *(-0.00106063159183, 0.00159428059123, -0.00525885354728, 0.00443156575784, -0.00107094307896),
)
_FIRST_ROOT, _LAST_ROOT = math.sqrt(5.0), 6.06630035524  # of w at 5 and at the smallest 1 - x in float64


def uniform(key: Key, shape: Shape, dtype: DTypeLike, attempt: Any = 0) -> Float[Array, "..."]:
    """Draw uniform numbers strictly between 0 and 1.

    Args:
        attempt: a whole number; each gives an independent array under the same key, as in the iterations of a loop.
    """
    index = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    high, low = random_words(key, index, jnp.asarray(attempt).astype(jnp.uint32))
    below_one = 1.0 - float(jnp.finfo(dtype).epsneg)
    return jnp.minimum(to_unit_interval(high, low if dtype == jnp.float64 else None, dtype), below_one)


def as_float(parameter: Array) -> Array:
    """Convert a parameter to floating point of at least 32 bits, the type of its draws."""
    parameter = jnp.asarray(parameter)
    return parameter.astype(jnp.promote_types(jnp.result_type(parameter, float), jnp.float32))


def to_unit_interval(high: Array, low: Array | None, dtype: DTypeLike) -> Array:
    """Convert random words to uniform numbers above 0 and at most 1, with all their bits as digits near 0."""
    if low is None:
        return (high.astype(dtype) + 0.5) * 2.0**-32
    return high.astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64


def to_normal(high: Array, low: Array | None, dtype: DTypeLike) -> Array:
    """Convert random words to standard normal numbers by the quantile function.

    In float64 the number is the quantile of a uniform number of 64 bits, with a relative error below 2e-6: tails reach beyond 8
    standard deviations, and rounding changes the distribution function by less than 1e-7. The float64 `erf_inv` has no such
    error, but a draw takes 45% longer.

    Args:
        low: further bits, used in float64 only.
    """
    symmetric = lax.bitcast_convert_type(high, jnp.int32).astype(dtype) * 2.0**-31
    if low is None or dtype != jnp.float64:
        bound = 1.0 - float(jnp.finfo(dtype).epsneg)
        return math.sqrt(2.0) * lax.erf_inv(jnp.clip(symmetric, -bound, bound))
    symmetric += low.astype(dtype) * 2.0**-63
    remaining = jnp.maximum((1.0 - symmetric) * (1.0 + symmetric), 2.0 * float(jnp.finfo(dtype).epsneg))
    depth = -jnp.log(remaining.astype(jnp.float32))
    middle, root = 0.4 * depth - 1.0, jnp.sqrt(depth)
    tail = (2.0 * root - _LAST_ROOT - _FIRST_ROOT) / (_LAST_ROOT - _FIRST_ROOT)
    ratio = jnp.where(depth < 5.0, _polynomial(_MIDDLE, middle), _polynomial(_TAIL, tail))
    return symmetric * ratio.astype(dtype)


def _polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    value = jnp.full_like(x, coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = value * x + coefficient
    return value


def uniform_and_normal(
    key: Key, num_uniform: int, num_normal: int, dtype: DTypeLike
) -> tuple[Float[Array, " uniform"], Float[Array, " normal"]]:
    """Draw uniform numbers above 0 and standard normal numbers from one array of random bits.

    Every call of the generator is compiled separately, so one call serves both.
    """
    numbers = jr.uniform(key, (num_uniform + num_normal,), dtype, jnp.finfo(dtype).tiny)
    # erf_inv(-1) is infinite: a number that rounds to -1 becomes the next float.
    above_minus_one = jnp.nextafter(-jnp.ones((), dtype), jnp.zeros((), dtype))
    centred = jnp.maximum(2.0 * numbers[num_uniform:] - 1.0, above_minus_one)
    return numbers[:num_uniform], math.sqrt(2.0) * lax.erf_inv(centred)
