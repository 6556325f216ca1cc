"""Two workarounds for random draws on CPU: a hash that XLA fuses, and arrays that XLA does not fuse."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax
from jaxtyping import Array, DTypeLike, Int, UInt32

from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.types import Key

_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_NUM_ROUNDS = 20
_PARITY = 0x1BD11BDA


@jax.jit  # traced once per shape, not at every use
def random_words(
    key: Key, index: UInt32[Array, "..."], attempt: UInt32[Array, ""]
) -> tuple[UInt32[Array, "..."], UInt32[Array, "..."]]:
    """Return two random words for each index; each attempt gives others.

    They are the Threefry-2x32 hash (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") of (index, attempt).
    It is the hash of `jax.random`, which compiles the 20 rounds to a loop on CPU. XLA does not fuse a loop with the operations
    around it: every round writes its arrays to memory. The unrolled rounds are fused with the arithmetic that turns bits into
    draws.
    """
    words = jr.key_data(key)
    if words.shape[-1] != 2:  # a key of another generator
        words = jr.bits(key, (2,), jnp.uint32)
    schedule = (words[0], words[1], words[0] ^ words[1] ^ jnp.uint32(_PARITY))
    left, right = index + schedule[0], attempt + schedule[1]
    for position in range(_NUM_ROUNDS):
        rotation = _ROTATIONS[position % 8]
        left = left + right
        right = left ^ ((right << rotation) | (right >> (32 - rotation)))
        if position % 4 == 3:
            injection = position // 4 + 1
            left = left + schedule[injection % 3]
            right = right + schedule[(injection + 1) % 3] + jnp.uint32(injection)
    return left, right


def fold_in(key: Key, number: Int[Array, ""]) -> Key:
    """Return `jax.random.fold_in` of a Threefry key, without its loop of rounds."""
    words = random_words(key, jnp.uint32(0), number.astype(jnp.uint32))
    return jr.wrap_key_data(jnp.stack(words), impl="threefry2x32")


def materialize(compute: Callable[[UInt32[Array, ""]], Array], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return `compute(0)`, which XLA does not fuse with the operations that use it.

    On CPU, XLA fuses elementwise operations with their uses. Draws are then computed inside a loop over (M, A), whose last axis
    is too short for vector instructions, or once for every use. A `while_loop` of one iteration is a boundary for fusion, and
    its condition depends on the result, so that XLA cannot remove the loop. Other backends compute directly.

    Args:
        compute: function of the iteration number, which is always 0, but not a constant for XLA; its result is never -inf.
        shape: of the result.
        dtype: of the result.
    """
    if not is_on_cpu():
        return compute(jnp.uint32(0))

    def is_first(carry: tuple[Array, Array]) -> Array:
        iteration, values = carry
        return (iteration < 1) & (values.reshape(-1)[0] == -jnp.inf)

    start = (jnp.uint32(0), jnp.full(shape, -jnp.inf, dtype))
    return lax.while_loop(is_first, lambda carry: (carry[0] + 1, compute(carry[0])), start)[1]
