"""When outcomes become known: how many rows of each block between looks have theirs at each later look."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.numerics.random_bits import uniform
from ppl_bandit.trials.design import Design
from ppl_bandit.types import Key

__all__ = ["arrival_counts", "arrivals_width", "draw_delays"]


def arrivals_width(design: Design) -> int:
    """Return how many looks a row may wait for its outcome at most, plus one."""
    if isinstance(design.lag, tuple):
        return design.num_looks
    waits = _waits(design, np.full(design.last_rows, design.lag))
    return int(np.max(np.where(waits < design.num_looks, waits, 0))) + 1


def arrival_counts(key: Key, design: Design) -> Float[Array, "K W+1"]:
    """Return the number of rows of block k, before look k, that have their outcomes at look k + w, for w < W.

    The last column counts the rows whose outcomes arrive after the last look. Outcomes that never arrive are not counted.
    """
    width, num_looks = arrivals_width(design), design.num_looks
    block = np.searchsorted(design.look_rows, np.arange(1, design.last_rows + 1))
    if not isinstance(design.lag, tuple):
        waits = np.minimum(_waits(design, np.full(design.last_rows, design.lag)), width)
        counts = np.zeros((num_looks, width + 1))
        np.add.at(counts, (block, waits), 1.0)
        return jnp.asarray(counts, jnp.result_type(float))
    delays, is_known = draw_delays(key, design.lag, design.last_rows)
    place = jnp.searchsorted(jnp.asarray(design.look_rows), jnp.arange(1, design.last_rows + 1) + delays)
    place = jnp.minimum(place, num_looks - 1 if design.is_complete_at_end else num_looks)
    waits = jnp.where(place < num_looks, place - block, width)
    return jnp.zeros((num_looks, width + 1)).at[block, waits].add(is_known.astype(jnp.result_type(float)))


def draw_delays(key: Key, probs: tuple[float, ...], num: int) -> tuple[Array, Array]:
    """Return delays, in decisions, and whether each outcome arrives at all."""
    passed = np.cumsum(probs)
    place = jnp.searchsorted(jnp.asarray(passed), uniform(key, (num,), jnp.result_type(float)), side="right")
    is_known = place < passed.size if passed[-1] < 1.0 - 1e-9 else jnp.ones(num, bool)
    return jnp.minimum(place, passed.size - 1), is_known


def _waits(design: Design, delays: np.ndarray) -> np.ndarray:
    """Return how many looks each row waits; the number of looks or more if its outcome arrives after the last one."""
    rows = np.arange(1, design.last_rows + 1)
    looks = np.asarray(design.look_rows)
    place = np.searchsorted(looks, rows + delays)
    if design.is_complete_at_end:
        place = np.minimum(place, looks.size - 1)
    return np.where(place < looks.size, place - np.searchsorted(looks, rows), looks.size)
