"""Every row of data so far, in arrays of fixed shape.

Engines that are not exact must read the data again, so they keep it: a padded buffer inside the state, whose shape is the
same at every step. It grows outside `jit`, by doubling, so that T steps compile O(log T) times and not T times.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["Buffer", "Data", "append", "empty_buffer", "fits", "grow", "read", "reserve", "row_mask"]


class Buffer(NamedTuple):
    """Rows 0, ..., num_rows - 1 are data, the rest is room; N is the capacity.

    Attributes:
        arm: index of the arm played in each row.
        reward: {outcome: (N,)}, in the outcomes' own kind of number.
        context: a pytree whose leaves have a leading axis N, or None.
        num_rows: how many rows hold data.
    """

    arm: Int[Array, " N"]
    reward: dict[str, Array]
    context: Any
    num_rows: Int[Array, ""]


class Data(NamedTuple):
    """A buffer as a likelihood reads it.

    Attributes:
        rows: masked where the buffer holds no data.
        weights: what each row's log likelihood counts for; 1, or less with forgetting.
    """

    rows: Interaction
    weights: Float[Array, " N"]


def empty_buffer(model: RewardModel, capacity: int) -> Buffer:
    """Return a buffer without data: its rows are the example context on arm 0."""
    reward = model.outcome_values({name: jnp.zeros(capacity) for name in model.outcomes})
    return Buffer(jnp.zeros(capacity, int), reward, model.context_rows(capacity), jnp.zeros((), int))


def fits(buffer: Buffer, interaction: Interaction) -> Bool[Array, ""]:
    """Tell whether the rows of an interaction that count have room."""
    return buffer.num_rows + jnp.sum(row_mask(interaction)) <= buffer.arm.shape[0]


def row_mask(interaction: Interaction) -> Bool[Array, " N"]:
    """Return the mask of an interaction; all rows count where it has none."""
    return jnp.ones(interaction.arm.shape[0], bool) if interaction.mask is None else interaction.mask


def append(model: RewardModel, buffer: Buffer, interaction: Interaction) -> Buffer:
    """Write the rows that count behind those already there, in order; what does not fit is left out."""
    mask = row_mask(interaction)
    position = jnp.where(mask, buffer.num_rows + jnp.cumsum(mask) - 1, buffer.arm.shape[0])

    def write(stored: Array, new: Any) -> Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(stored.dtype, jnp.inexact):
            raise TypeError(
                f"a context holds {new.dtype} where the example context of the reward model holds {stored.dtype}: the "
                "numbers would be cut off; give an example context with decimals, such as 1.0 for 1"
            )
        return stored.at[position].set(new.astype(stored.dtype), mode="drop")

    return Buffer(
        write(buffer.arm, interaction.arm),
        jax.tree.map(write, buffer.reward, model.outcome_values(interaction.reward)),
        jax.tree.map(write, buffer.context, interaction.context),
        jnp.minimum(buffer.num_rows + jnp.sum(mask), buffer.arm.shape[0]),
    )


def grow(buffer: Buffer, num_rows: int) -> Buffer:
    """Return a buffer with room for more rows: the same one, or one of doubled capacity, doubled until they fit.

    It reads the number of rows, so it runs outside `jit`, in NumPy: growing compiles nothing.
    """
    capacity = buffer.arm.shape[0]
    needed = int(buffer.num_rows) + num_rows
    larger = capacity
    while larger < needed:
        larger *= 2
    if larger == capacity:
        return buffer

    def pad(leaf: np.ndarray) -> np.ndarray:
        return np.concatenate([leaf, np.repeat(leaf[:1], larger - capacity, axis=0)])

    arm, reward, context = jax.tree.map(pad, jax.device_get(buffer[:3]))
    return Buffer(arm, reward, context, buffer.num_rows)


def read(buffer: Buffer, discount: float = 1.0) -> Data:
    """Return the data for a likelihood.

    Rows without data are copies of the first row: a gradient flows through masked rows too, and must find nothing there
    that real data do not hold.

    Args:
        discount: weight of a row relative to the next one; 1 forgets nothing.
    """
    position = jnp.arange(buffer.arm.shape[0])
    mask = position < buffer.num_rows
    source = jnp.where(mask, position, 0)
    arm, reward, context = jax.tree.map(lambda leaf: leaf[source], buffer[:3])
    age = jnp.where(mask, buffer.num_rows - 1 - position, 0)
    weights = jnp.where(mask, jnp.asarray(discount, float) ** age, 0.0)
    return Data(Interaction(arm, reward, context, mask), weights)


def reserve(state: Any, num_rows: int) -> Any:
    """Return a state with room for more rows of data; its capacity doubles until they fit. Runs outside `jit`."""
    return state._replace(buffer=grow(state.buffer, num_rows))
