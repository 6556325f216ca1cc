"""Materialisation: compute an array once, in memory of its own, instead of inside the operations that use it."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, UInt32

from ppl_bandit.runtime.devices import is_on_cpu

__all__ = ["materialize"]


def materialize(compute: Callable[[UInt32[Array, ""]], Array], shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Return `compute(0)`, which XLA does not fuse with the operations that use it.

    On CPU, XLA fuses elementwise operations with their uses. Draws are then computed inside a loop over (M, A), whose last axis
    is too short for vector instructions, or once for every use. A `while_loop` of one iteration is a boundary for fusion, and
    its condition depends on the result, so that XLA cannot remove the loop. 1,000 x 3 Beta draws with the shares of wins
    take 0.36 ms instead of 0.87 ms, normal draws 0.11 ms instead of 0.21 ms. Other backends compute directly.

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
