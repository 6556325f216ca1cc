"""Process rows in chunks of equal size, so that memory is bounded and shapes are fixed."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

__all__ = ["join_chunks", "split_chunks"]


def split_chunks(rows: Any, num_rows: int, size: int) -> tuple[Any, Array]:
    """Return rows as (chunks, size, ...), and whether each is a row of the input.

    The last chunk is padded with copies of the first row.

    Args:
        size: at most the number of rows.
    """
    num_chunks = -(-num_rows // size)
    index = jnp.arange(num_chunks * size)
    is_row = index < num_rows

    def split(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf[jnp.where(is_row, index, 0)].reshape((num_chunks, size, *leaf.shape[1:]))

    return jax.tree.map(split, rows), is_row.reshape(num_chunks, size)


def join_chunks(chunks: Any, num_rows: int) -> Any:
    """Undo `split_chunks`."""
    return jax.tree.map(lambda leaf: leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]))[:num_rows], chunks)
