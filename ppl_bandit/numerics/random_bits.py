"""Random bits and whole numbers: unrolled Threefry, and multinomial draws by inversion of the distribution function.

Every function takes a key first and spends it, and runs under `jit`, `vmap` and `scan`.
"""

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
    ratio = jnp.where(depth < 5.0, polynomial(_MIDDLE, middle), polynomial(_TAIL, tail))
    return symmetric * ratio.astype(dtype)


def polynomial(coefficients: tuple[float, ...], x: Array) -> Array:
    """Return a polynomial with the given coefficients, the constant first."""
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


_NUM_TABULATED = 16
_STIRLING_ERRORS = tuple(
    0.0 if n == 0 else math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    for n in range(_NUM_TABULATED)
)

_Search: TypeAlias = tuple[Array, Array, Array, Array, Array]


def multinomial(key: Key, num: int, probs: Float[Array, " K"]) -> Float[Array, " K"]:
    """Draw the counts of `num` independent draws from Cat(probs), as floats.

    Each count is binomial given the counts before it.

    Args:
        probs: nonnegative, and sum to 1; if one of them is nan, all counts are.
    """
    probs = as_float(probs)
    later = jnp.cumsum(probs[::-1])[::-1]  # probability of this category and those after it
    shares = jnp.where(later > 0, probs / jnp.where(later > 0, later, 1.0), 0.0)
    zero_or_nan = 0.0 * later[0]
    left = jnp.asarray(num, probs.dtype)
    uniforms = uniform(key, (probs.size - 1,), probs.dtype)
    if probs.size == 2:
        first = _binomial(uniforms[0], left, jnp.clip(shares[0], 0.0, 1.0)) + zero_or_nan
        return jnp.stack([first, num - first])

    def take(left: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        count = _binomial(row[0], left, jnp.clip(row[1], 0.0, 1.0))
        return left - count, count

    left, counts = lax.scan(take, left, (uniforms, shares[:-1]))
    return jnp.append(counts, left) + zero_or_nan


def _binomial(quantile: Array, num: Array, prob: Array) -> Array:
    """Turn uniform numbers into Binomial(num, prob) variables, for whole numbers `num` of at least 0.

    The search starts at the mode and adds probabilities outwards, for all elements together.
    """
    inside = jnp.clip(prob, jnp.finfo(prob.dtype).tiny, 1.0 - jnp.finfo(prob.dtype).epsneg)
    odds = inside / (1.0 - inside)
    mode = jnp.minimum(jnp.floor((num + 1.0) * inside), num)
    at_mode = _binomial_mass_near_mean(mode, num, inside)

    def widen(state: _Search) -> _Search:
        distance, rest, above, below, found = state
        up, down = mode + distance, mode - distance
        above = above * odds * (num - up + 1.0) / up
        below = below * (down + 1.0) / (odds * jnp.maximum(num - down, 1.0))
        above, below = jnp.where(up <= num, above, 0.0), jnp.where(down >= 0, below, 0.0)
        is_open = found < 0
        found = jnp.where(is_open & (rest < above), up, found)
        found = jnp.where((found < 0) & (rest < above + below), down, found)
        rest = jnp.where(is_open, rest - above - below, rest)
        # At most num values are left, none of them likelier than these two. A rest that exceeds their sum is a rounding error
        # and goes to the mode; otherwise one element would search to the ends of its range while all others wait.
        found = jnp.where((found < 0) & (rest >= num * (above + below)), mode, found)
        return distance + 1.0, rest, above, below, found

    first = jnp.where(quantile < at_mode, mode, -1.0)
    start = (jnp.ones_like(prob), quantile - at_mode, at_mode, at_mode, first)

    found = lax.while_loop(lambda state: jnp.any(state[-1] < 0), widen, start)[-1]
    return jnp.where(prob <= 0, 0.0, jnp.where(prob >= 1, num, found))


def _binomial_mass_near_mean(count: Array, num: Array, prob: Array) -> Array:
    """Return the probability of `count`, within one of its mean, under Binomial(num, prob), to full relative precision.

    Follows Loader (2000, "Fast and accurate computation of binomial probabilities"): the error of Stirling's formula for each
    factorial, and the deviance. The difference of log factorials, which are thousands, would keep few digits.
    """
    others = num - count
    correction = stirling_error(num) - stirling_error(count) - stirling_error(others)
    deviance = _deviance(count, num * prob) + _deviance(others, num * (1.0 - prob))
    inner = jnp.sqrt(num / (2.0 * jnp.pi * jnp.maximum(count * others, 1.0))) * jnp.exp(correction - deviance)
    edge = jnp.exp(num * jnp.where(count == 0, jnp.log1p(-prob), jnp.log(prob)))
    return jnp.where((count == 0) | (others == 0), edge, inner)


def stirling_error(num: Array) -> Array:
    """Return log(n!) minus Stirling's formula, for whole n."""
    inverse = 1.0 / jnp.maximum(num, float(_NUM_TABULATED))
    square = inverse * inverse
    series = inverse * (1 / 12 - square * (1 / 360 - square * (1 / 1260 - square * (1 / 1680 - square / 1188))))
    tabulated = jnp.asarray(_STIRLING_ERRORS, num.dtype)[jnp.clip(num, 0, _NUM_TABULATED - 1).astype(jnp.int32)]
    return jnp.where(num < _NUM_TABULATED, tabulated, series)


def _deviance(count: Array, mean: Array) -> Array:
    """Return count log(count / mean) + mean - count, for a count within one of the mean."""
    relative = (count - mean) / mean
    return mean * ((1.0 + relative) * jnp.log1p(relative) - relative)
