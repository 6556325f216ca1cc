"""All rows of data so far, in arrays of fixed shape.

Engines that evaluate the likelihood of all data again keep it in their state, in a padded buffer whose shape is the same at
every step. It grows outside `jit`, by doubling, so that T steps compile O(log T) times and not T times. A row that is already
stored is counted, not stored again: ten thousand clicks on 34 items are 68 rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

# The index of stored rows is a set-associative hash table: a row may occupy any of the ways of the set of its hash. A row
# whose set is full is stored again, which costs time and does not change the posterior.
_NUM_SETS, _NUM_WAYS = 1024, 4


class Buffer(NamedTuple):
    """Rows 0, ..., num_rows - 1 are data, the rest is padding; N is the capacity.

    Attributes:
        arm: index of the arm played in each row.
        reward: {outcome: (N,)}, in the dtypes of the outcomes.
        context: a pytree whose leaves have a leading axis N, or None.
        times: how often each row was observed.
        table: indices of rows by their hash; -1 is empty.
        num_rows: number of rows that hold data.
    """

    arm: Int[Array, " N"]
    reward: dict[str, Array]
    context: Any
    times: Int[Array, " N"]
    table: Int[Array, "sets ways"]
    num_rows: Int[Array, ""]


class BufferedRows(NamedTuple):
    """The rows of a buffer with the weights of their log likelihoods.

    Attributes:
        rows: in the order of the buffer.
        weights: of the rows' log likelihoods: how often a row was observed, or a power of the discount; 0 for padding.
        places: indices of the rows that count, first; those beyond num_rows have no meaning.
        num_rows: number of rows that count.
    """

    rows: Interaction
    weights: Float[Array, " N"]
    places: Int[Array, " N"]
    num_rows: Int[Array, ""]


def empty_buffer(model: RewardModel, capacity: int) -> Buffer:
    """Return a buffer without data; its padding is the example context on arm 0."""
    none = jnp.zeros(capacity, int)
    table = jnp.full((_NUM_SETS if capacity else 0, _NUM_WAYS), -1)
    return Buffer(none, model.zero_outcomes(capacity), model.context_rows(capacity), none, table, jnp.zeros((), int))


def rows_that_fit(buffer: Buffer, interaction: Interaction) -> tuple[Interaction, Bool[Array, ""]]:
    """Return the rows of an interaction, all masked if they do not fit, and whether they fit, even if none is stored yet."""
    mask = row_mask(interaction)
    has_room = buffer.num_rows + jnp.sum(mask) <= buffer.arm.shape[0]
    return interaction._replace(mask=mask & has_room), has_room


def row_mask(interaction: Interaction) -> Bool[Array, " N"]:
    """Return the mask of an interaction; without a mask all rows count."""
    return jnp.ones(interaction.arm.shape[0], bool) if interaction.mask is None else interaction.mask


def as_rows(model: RewardModel, buffer: Buffer, interaction: Interaction) -> Interaction:
    """Return an interaction in the dtypes of the buffer, with a mask.

    Raises:
        TypeError: for floats where the example context of the reward model has integers.
    """

    def convert(stored: Array, new: Any) -> Array:
        new = jnp.asarray(new)
        if jnp.issubdtype(new.dtype, jnp.inexact) and not jnp.issubdtype(stored.dtype, jnp.inexact):
            raise TypeError(
                f"a context has {new.dtype} where the example context of the reward model has {stored.dtype}, and rounding "
                "would change it; give an example context with decimals, such as 1.0 for 1"
            )
        return new.astype(stored.dtype)

    return Interaction(
        convert(buffer.arm, interaction.arm),
        jax.tree.map(convert, buffer.reward, model.outcome_values(interaction.reward)),
        jax.tree.map(convert, buffer.context, interaction.context),
        row_mask(interaction),
    )


def append_row(buffer: Buffer, row: Interaction, is_counted: Bool[Array, ""], merges: bool) -> Buffer:
    """Add one row, given without a leading axis; a row that does not fit is ignored.

    Args:
        merges: whether a row that is already stored is only counted; false if the age of a row matters.
    """
    capacity = buffer.arm.shape[0]
    new = row[:3]
    candidates = buffer.table[_hash_set(new)] if merges else jnp.full(_NUM_WAYS, -1, buffer.table.dtype)
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
        where = jnp.where(is_new, _hash_set(new), _NUM_SETS)
        table = table.at[where, way].set(place.astype(table.dtype), mode="drop")

    def write(stored: Array, value: Array) -> Array:
        return stored.at[jnp.where(is_new, place, capacity)].set(value, mode="drop")

    arm, reward, context = jax.tree.map(write, buffer[:3], new)
    times = buffer.times.at[jnp.where(is_counted, place, capacity)].add(1, mode="drop")
    return Buffer(arm, reward, context, times, table, buffer.num_rows + is_new)


def append_rows(model: RewardModel, buffer: Buffer, interaction: Interaction, merges: bool = True) -> Buffer:
    """Add the rows of an interaction that its mask selects, in order; rows that do not fit are ignored."""
    rows = as_rows(model, buffer, interaction)

    def step(number: Array, buffer: Buffer) -> Buffer:
        row = take_rows(rows, number)
        assert row.mask is not None
        return append_row(buffer, row, row.mask, merges)

    return jax.lax.fori_loop(0, rows.arm.shape[0], step, buffer)


def take_rows(rows: Interaction, index: Array) -> Interaction:
    """Return the rows at indices, or at one index without a leading axis."""
    return jax.tree.map(lambda leaf: leaf[index], rows)


def grow_buffer(buffer: Buffer, num_rows: int) -> Buffer:
    """Double the capacity of a buffer until more rows fit; return the same buffer if they already do.

    It runs outside `jit`, in NumPy, so that it compiles nothing.
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
    """Return the rows of a buffer, weighted for a likelihood.

    Padding is a copy of the first row: derivatives also flow through masked rows, and a padding value that real data do not
    have could make them nan.

    Args:
        discount: weight of a row relative to the next one; 1 discounts nothing.
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
    """Return a state with capacity for more rows; it runs outside of `jit`."""
    return state._replace(buffer=grow_buffer(state.buffer, num_rows))


def _hash_set(row: Any) -> Int[Array, ""]:
    """Return the set of a row in the hash table."""
    total = jnp.zeros((), jnp.uint32)
    for number, leaf in enumerate(jax.tree.leaves(row)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            # Equal numbers need equal bits: -0.0 + 0.0 is 0.0.
            bits = jax.lax.bitcast_convert_type(leaf + 0.0, jnp.uint32).ravel()
        else:
            bits = leaf.astype(jnp.uint32).ravel()
        odd = np.random.default_rng(number).integers(0, 2**31, bits.size, dtype=np.uint32) * 2 + 1
        total += jnp.sum(bits * odd, dtype=jnp.uint32)
    total = (total ^ (total >> 15)) * jnp.uint32(0x2C1B3C6D)
    return ((total ^ (total >> 12)) % _NUM_SETS).astype(int)
