"""Every row of data so far, in arrays of fixed shape.

Engines that are not exact must read the data again, so they keep it: a padded buffer inside the state, whose shape is the
same at every step. It grows outside `jit`, by doubling, so that T steps compile O(log T) times and not T times. A row that
is there already is not stored again but counted: ten thousand clicks on 34 items are 68 rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = [
    "Buffer",
    "BufferedRows",
    "append_rows",
    "append_row",
    "as_rows",
    "empty_buffer",
    "has_room_for",
    "grow_buffer",
    "read_buffer",
    "reserve",
    "row_mask",
    "take_rows",
]

# Where rows are looked up: a row may lie in any of the ways of the set that its bits name. A row whose set is taken by
# others is stored twice, which costs time and changes nothing.
_NUM_SETS, _NUM_WAYS = 1024, 4


class Buffer(NamedTuple):
    """Rows 0, ..., num_rows - 1 are data, the rest is room; N is the capacity.

    Attributes:
        arm: index of the arm played in each row.
        reward: {outcome: (N,)}, in the outcomes' own kind of number.
        context: a pytree whose leaves have a leading axis N, or None.
        times: how often each row was seen.
        table: where rows lie, by their bits; -1 is empty.
        num_rows: how many rows hold data.
    """

    arm: Int[Array, " N"]
    reward: dict[str, Array]
    context: Any
    times: Int[Array, " N"]
    table: Int[Array, "sets ways"]
    num_rows: Int[Array, ""]


class BufferedRows(NamedTuple):
    """A buffer as a likelihood reads it: the rows of a set of arms first, then nothing that counts.

    Attributes:
        rows: in the order of the buffer.
        weights: what each row's log likelihood counts for: how often it was seen, or, with forgetting, less than 1.
        places: of the rows that count; those beyond num_rows are without meaning.
        num_rows: how many count.
    """

    rows: Interaction
    weights: Float[Array, " N"]
    places: Int[Array, " N"]
    num_rows: Int[Array, ""]


def empty_buffer(model: RewardModel, capacity: int) -> Buffer:
    """Return a buffer without data: its rows are the example context on arm 0. One without room looks nothing up."""
    reward = model.outcome_values({name: jnp.zeros(capacity) for name in model.outcomes})
    none = jnp.zeros(capacity, int)
    table = jnp.full((_NUM_SETS if capacity else 0, _NUM_WAYS), -1)
    return Buffer(none, reward, model.context_rows(capacity), none, table, jnp.zeros((), int))


def has_room_for(buffer: Buffer, interaction: Interaction) -> Bool[Array, ""]:
    """Tell whether the rows of an interaction that count have room, were none of them seen before."""
    return buffer.num_rows + jnp.sum(row_mask(interaction)) <= buffer.arm.shape[0]


def row_mask(interaction: Interaction) -> Bool[Array, " N"]:
    """Return the mask of an interaction; all rows count where it has none."""
    return jnp.ones(interaction.arm.shape[0], bool) if interaction.mask is None else interaction.mask


def as_rows(model: RewardModel, buffer: Buffer, interaction: Interaction) -> Interaction:
    """Return an interaction in the buffer's kinds of number, with a mask.

    Raises:
        TypeError: for decimals where the example context of the reward model holds integers.
    """

    def convert(stored: Array, new: Any) -> Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(stored.dtype, jnp.inexact):
            raise TypeError(
                f"a context holds {new.dtype} where the example context of the reward model holds {stored.dtype}: the "
                "numbers would be cut off; give an example context with decimals, such as 1.0 for 1"
            )
        return new.astype(stored.dtype)

    return Interaction(
        convert(buffer.arm, interaction.arm),
        jax.tree.map(convert, buffer.reward, model.outcome_values(interaction.reward)),
        jax.tree.map(convert, buffer.context, interaction.context),
        row_mask(interaction),
    )


def append_row(buffer: Buffer, row: Interaction, is_counted: Bool[Array, ""], merges: bool) -> Buffer:
    """Count one row, given without a leading axis, behind those already there; what does not fit is left out.

    Args:
        merges: whether a row that was seen before is counted again and not stored again; not where its age matters.
    """
    capacity = buffer.arm.shape[0]
    new = row[:3]
    candidates = buffer.table[_set_of(new)] if merges else jnp.full(_NUM_WAYS, -1, buffer.table.dtype)
    is_same = candidates >= 0
    if merges:
        for stored, value in zip(jax.tree.leaves(buffer[:3]), jax.tree.leaves(new), strict=True):
            same = stored[candidates] == value
            is_same &= jnp.all(same.reshape(_NUM_WAYS, -1), axis=1)
    is_known = jnp.any(is_same)
    is_new = is_counted & ~is_known & (buffer.num_rows < capacity)
    place = jnp.where(is_known, candidates[jnp.argmax(is_same)], buffer.num_rows)
    table = buffer.table
    if merges:
        way = jnp.where(jnp.any(candidates < 0), jnp.argmax(candidates < 0), buffer.num_rows % _NUM_WAYS)
        where = jnp.where(is_new, _set_of(new), _NUM_SETS)
        table = table.at[where, way].set(place.astype(table.dtype), mode="drop")

    def write(stored: Array, value: Array) -> Array:
        return stored.at[jnp.where(is_new, place, capacity)].set(value, mode="drop")

    arm, reward, context = jax.tree.map(write, buffer[:3], new)
    times = buffer.times.at[jnp.where(is_counted, place, capacity)].add(1, mode="drop")
    return Buffer(arm, reward, context, times, table, buffer.num_rows + is_new)


def append_rows(model: RewardModel, buffer: Buffer, interaction: Interaction, merges: bool = True) -> Buffer:
    """Count the rows of an interaction that its mask counts, in order; what does not fit is left out."""
    rows = as_rows(model, buffer, interaction)

    def step(number: Array, buffer: Buffer) -> Buffer:
        row = take_rows(rows, number)
        assert row.mask is not None
        return append_row(buffer, row, row.mask, merges)

    return jax.lax.fori_loop(0, rows.arm.shape[0], step, buffer)


def take_rows(rows: Interaction, index: Array) -> Interaction:
    """Return the rows of an index, or one row without a leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], rows)


def grow_buffer(buffer: Buffer, num_rows: int) -> Buffer:
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
    times: Any = np.pad(jax.device_get(buffer.times), (0, larger - capacity))
    return Buffer(arm, reward, context, times, buffer.table, buffer.num_rows)


def read_buffer(buffer: Buffer, discount: float = 1.0, of: Bool[Array, " A"] | None = None) -> BufferedRows:
    """Return the data for a likelihood.

    Rows without data are copies of the first row: a gradient flows through masked rows too, and must find nothing there
    that real data do not hold.

    Args:
        discount: weight of a row relative to the next one; 1 forgets nothing.
        of: arms whose rows count; None counts all.
    """
    place = jnp.arange(buffer.arm.shape[0])
    mask = place < buffer.num_rows
    source = jnp.where(mask, place, 0)
    arm, reward, context = jax.tree.map(lambda leaf: leaf[source], buffer[:3])
    index, num_rows = place, buffer.num_rows
    if of is not None:
        mask = mask & of[arm]
        rank = jnp.cumsum(mask) - 1
        index = jnp.zeros_like(place).at[jnp.where(mask, rank, mask.shape[0])].set(place, mode="drop")
        num_rows = jnp.sum(mask)
    if discount < 1.0:
        age = jnp.where(mask, buffer.num_rows - 1 - place, 0)
        weights = jnp.where(mask, jnp.asarray(discount, float) ** age, 0.0)
    else:
        weights = jnp.where(mask, buffer.times.astype(float), 0.0)
    return BufferedRows(Interaction(arm, reward, context, mask), weights, index, num_rows)


def reserve(state: Any, num_rows: int) -> Any:
    """Return a state with room for more rows of data; its capacity doubles until they fit. Runs outside `jit`."""
    return state._replace(buffer=grow_buffer(state.buffer, num_rows))


def _set_of(row: Any) -> Int[Array, ""]:
    """Return the set that a row may lie in, from the bits of its numbers."""
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(row)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            bits = jax.lax.bitcast_convert_type(leaf + 0.0, jnp.uint32).ravel()  # -0.0 + 0.0 is 0.0
        else:
            bits = leaf.astype(jnp.uint32).ravel()
        odd = np.random.default_rng(number).integers(0, 2**31, bits.size, dtype=np.uint32) * 2 + 1
        total += jnp.sum(bits * odd, dtype=jnp.uint32)
    total = (total ^ (total >> 15)) * jnp.uint32(0x2C1B3C6D)
    return ((total ^ (total >> 12)) % _NUM_SETS).astype(int)
