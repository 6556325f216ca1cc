"""Sort short rows, many at once: XLA's own sort, on a CPU, calls a function for every two numbers that it compares."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.runtime.devices import is_on_cpu
from ppl_bandit.runtime.jax_adapter import vmap_rule

__all__ = ["sort_short"]


@vmap_rule(lambda *args: _sort_many(*args))
def sort_short(values: Float[Array, " n"]) -> Float[Array, " n"]:
    """Return a few hundred numbers, at most, in ascending order; of a batch (`vmap`) in a third of the time of `jnp.sort`."""
    if not is_on_cpu():
        return jnp.sort(values)
    # As whole numbers, two of which are compared by one operation, and not by seventeen.
    whole = jnp.int64 if values.dtype.itemsize == 8 else jnp.int32
    bits = jnp.sort(_in_order(jax.lax.bitcast_convert_type(values, whole)))
    return jax.lax.bitcast_convert_type(_in_order(bits), values.dtype)


def _in_order(bits: Int[Array, " n"]) -> Int[Array, " n"]:
    """Give the bits of numbers their order, or undo that: those of positive numbers have it, of negative ones the reverse."""
    return bits ^ ((bits >> (8 * bits.dtype.itemsize - 1)) & jnp.iinfo(bits.dtype).max)


def _sort_many(size: int, is_batched: Any, values: Float[Array, "B n"]) -> tuple[Float[Array, "B n"], bool]:
    """Sort by a network: the same comparisons in every row, side by side over the batch."""
    del size
    assert is_batched[0]
    if not is_on_cpu():
        return jnp.sort(values, axis=1), True
    num = values.shape[1]
    full = 1 << max(num - 1, 0).bit_length()
    rows = jnp.pad(values.T, ((0, full - num), (0, 0)), constant_values=jnp.inf)
    return _network(rows)[:num].T, True


def _network(rows: Float[Array, "n B"]) -> Float[Array, "n B"]:
    """Merge pairs of runs that ascend, of 1, 2, 4, ... rows: with the second turned round, each is bitonic (Batcher 1968)."""
    num, run = len(rows), 1
    while run < num:
        pairs = rows.reshape(-1, 2, run, rows.shape[1])
        rows = jnp.stack([pairs[:, 0], pairs[:, 1, ::-1]], axis=1).reshape(rows.shape)
        distance = run
        while distance:
            pairs = rows.reshape(-1, 2, distance, rows.shape[1])
            low, high = jnp.minimum(pairs[:, 0], pairs[:, 1]), jnp.maximum(pairs[:, 0], pairs[:, 1])
            rows = jnp.stack([low, high], axis=1).reshape(rows.shape)
            distance //= 2
        run *= 2
    return rows
