"""Binomial and multinomial draws, by inversion of the distribution function.

Every function takes a key first and spends it, and runs under `jit`, `vmap` and `scan`.
"""

import math
from typing import TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ppl_bandit.numerics.random_bits import as_float, uniform
from ppl_bandit.types import Key

_NUM_TABULATED = 16
_STIRLING_ERRORS = tuple(
    0.0 if n == 0 else math.lgamma(n + 1) - (n + 0.5) * math.log(n) + n - 0.5 * math.log(2 * math.pi)
    for n in range(_NUM_TABULATED)
)

_Search: TypeAlias = tuple[Array, Array, Array, Array, Array]


def binomial(key: Key, num: Float[Array, "..."], prob: Float[Array, "..."]) -> Float[Array, "..."]:
    """Draw Binomial(num, prob) variables, as floats.

    The search starts at the mode and adds probabilities outwards, for all elements together.

    Args:
        num: whole numbers of at least 0; broadcasts against `prob`.
        prob: in [0, 1].
    """
    prob = as_float(prob)
    num, prob = jnp.broadcast_arrays(jnp.asarray(num, prob.dtype), prob)
    return _binomial(uniform(key, prob.shape, prob.dtype), num, prob)


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
