"""Random bits and what is made of them at once: uniform and normal numbers, keys of numbered events.

The bits are the Threefry-2x32 hash (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of the index and attempt
of an element under the key of the caller: the hash of `jax.random`, written out in full, because jax keeps it in a loop on CPUs
and a loop does not fuse with the arithmetic around it.
"""

import math
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int, UInt32

from ppl_bandit.types import Key

__all__ = [
    "Shape",
    "Words",
    "as_float",
    "fold_key",
    "key_words",
    "threefry",
    "to_normal",
    "to_unit_interval",
    "uniform",
    "uniform_and_normal",
]

Shape: TypeAlias = tuple[int, ...]
Words: TypeAlias = tuple[UInt32[Array, ""], UInt32[Array, ""]]  # a Threefry key

# Normal quantile of (1 + x) / 2, over x: Chebyshev fits in w = -log(1 - x^2), from 0 to 5, and in its root beyond, on [-1, 1].
_MIDDLE = (
    *(2.12331366539, 0.872006714344, -0.0369258113205, -0.0277037769556, 0.0120748085901),
    *(-0.000606238318142, -0.00121611193754, 0.000296129815979, 6.03991866228e-05),
)
_TAIL = (
    *(5.64614677429, 2.73500084877, 0.00472245365381, -0.00734612019733, 0.00467146933079),
    *(-0.00106063159183, 0.00159428059123, -0.00525885354728, 0.00443156575784, -0.00107094307896),
)
_FIRST_ROOT, _LAST_ROOT = math.sqrt(5.0), 6.06630035524  # of w at the smallest 1 - x that double precision has


def fold_key(seed: Int[Array, ""], *numbers: int | Int[Array, ""]) -> Key:
    """Return the key of a seed and of some numbers, such as that of a decision.

    As `jax.random.key` and `fold_in` do, but as plain arithmetic, which a CPU runs in a fraction of the time.
    """
    words = _two_words(seed)
    for number in numbers:
        words = threefry(words, *_two_words(number))
    return jr.wrap_key_data(jnp.stack(words), impl="threefry2x32")


def _two_words(number: Any) -> Words:
    number = jnp.asarray(number).astype(jnp.int64)
    return (number >> 32).astype(jnp.uint32), (number & 0xFFFFFFFF).astype(jnp.uint32)


def uniform(key: Key, shape: Shape, dtype: DTypeLike, turn: Any = 0) -> Float[Array, "..."]:
    """Draw uniform numbers strictly between 0 and 1; another turn of a loop gives others under the same key."""
    turn = jnp.asarray(turn).astype(jnp.uint32)
    index = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    high, low = threefry(key_words(key), index, turn)
    below_one = 1.0 - float(jnp.finfo(dtype).epsneg)
    return jnp.minimum(to_unit_interval(high, low if dtype == jnp.float64 else None, dtype), below_one)


def as_float(parameter: Array) -> Array:
    """Give a parameter the type that its draws have: at least 32 bits of floating point."""
    parameter = jnp.asarray(parameter)
    return parameter.astype(jnp.promote_types(jnp.result_type(parameter, float), jnp.float32))


def key_words(key: Key) -> Words:
    """Read a Threefry key as its two words, and draw two from a key of another kind."""
    words = jr.key_data(key)
    if words.shape[-1] != 2:
        words = jr.bits(key, (2,), jnp.uint32)
    return words[0], words[1]


@jax.jit  # traced once per shape, not at every use
def threefry(
    words: Words, index: UInt32[Array, "..."], attempt: UInt32[Array, ""]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Hash (index, attempt) under a key to two random words: 20 rounds of Threefry-2x32."""
    schedule = (*words, words[0] ^ words[1] ^ jnp.uint32(0x1BD11BDA))
    rotations = (13, 15, 26, 6, 17, 29, 16, 24)
    left, right = index + schedule[0], attempt + schedule[1]
    for position in range(20):
        rotation = rotations[position % 8]
        left = left + right
        right = left ^ ((right << rotation) | (right >> (32 - rotation)))
        if position % 4 == 3:
            injection = position // 4 + 1
            left = left + schedule[injection % 3]
            right = right + schedule[(injection + 1) % 3] + jnp.uint32(injection)
    return left, right


def to_unit_interval(high: Array, low: Array | None, dtype: DTypeLike) -> Array:
    """Turn random words into uniform draws, never 0 and as fine-grained near 0 as their bits allow."""
    if low is None:
        return (high.astype(dtype) + 0.5) * 2.0**-32
    return high.astype(dtype) * 2.0**-32 + (low.astype(dtype) + 0.5) * 2.0**-64


def to_normal(high: Array, low: Array | None, dtype: DTypeLike) -> Array:
    """Turn random words into standard normal draws.

    In double precision a draw is the quantile, to a millionth of itself, of a uniform number with all of its digits, so that
    tails reach as far as these do: no sample tells the difference, and all 53 bits would take more than twice as long.

    Args:
        low: adds digits that only float64 can hold.
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
    key: Key, num_uniform: int, num_normal: int, dtype
) -> tuple[Float[Array, " uniform"], Float[Array, " normal"]]:
    """Draw uniform numbers, none of them 0, and standard normal ones, at once: every call of a generator is compiled anew."""
    numbers = jr.uniform(key, (num_uniform + num_normal,), dtype, jnp.finfo(dtype).tiny)
    # Not below the middle of the first step of a float: 2 u - 1 must not be -1.
    centred = jnp.maximum(2.0 * numbers[num_uniform:] - 1.0, jnp.nextafter(-jnp.ones((), dtype), jnp.zeros((), dtype)))
    return numbers[:num_uniform], math.sqrt(2.0) * jax.lax.erf_inv(centred)
