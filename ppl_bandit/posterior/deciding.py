"""Decide from a live posterior: one decision, or many in batches of fixed sizes."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from ppl_bandit.posterior.learning import Learner, batch_sizes, row_batches
from ppl_bandit.posterior.task import Task
from ppl_bandit.runtime.cpu_threads import is_on_cpu, num_cores
from ppl_bandit.selectors.selector_contract import check_horizon
from ppl_bandit.types import Selection

# Batch sizes; each is compiled once, for about 6 s. On one core 64 decisions take 0.8 ms, 16 take 0.5 ms, one takes 0.24 ms.
SIZES = (64, 16, 1)


def decide(
    task: Task, learner: Learner, numbers: Sequence[int], contexts: Any, allowed: np.ndarray, *, is_batch: bool
) -> list[Selection]:
    """Return the decisions with some numbers, counted from 0; each has its own posterior draws, and its arrays are read-only.

    Args:
        contexts: in a batch, with a leading axis, one row per decision; otherwise one context. None for a program without.

    Raises:
        ValueError: if the expected rewards of any are not finite, or the last decision lies beyond the selector's horizon.
    """
    if task.selector.horizon is not None:
        check_horizon(numbers[-1] + 1, task.selector.horizon)
    if is_batch:
        rows = _rows(learner, np.array(numbers), contexts, allowed)
    else:
        with jax.enable_x64(True):
            mask = _mask(allowed.tobytes())
            row = learner.run.select(learner.seed, learner.stored, np.int64(numbers[0]), contexts, mask)
            # A copy: a store keeps parts of it for every decision, and a view would keep the device's buffers, 4 kB each.
            rows = np.array(row)[None]
    rows.flags.writeable = False
    found = []
    for row, values in zip(rows, rows.tolist(), strict=True):  # indexing an array takes several times as long
        num_arms = (len(values) - 2) // 2  # see `_selection_row` of `compiled_functions`
        if values[0] < 0:
            raise ValueError(
                "the expected rewards of this decision are not finite, so no arm can be chosen: the program's mean overflows "
                "or is undefined at this context or at draws from this posterior"
            )
        fields: Any = int(values[0]), row[1 : 1 + num_arms], int(values[1 + num_arms]), row[2 + num_arms :]
        found.append(Selection(*fields))
    return found


def _rows(learner: Learner, numbers: np.ndarray, contexts: Any, allowed: np.ndarray) -> np.ndarray:
    """Return one row for each decision of a batch."""
    run, seed, stored = learner.run, learner.seed, learner.stored
    sizes = batch_sizes(numbers.size, SIZES)
    parts = [part for *_, part in row_batches((numbers, contexts), numbers.size, sizes)]
    with jax.enable_x64(True):
        mask = _mask(allowed.tobytes())

    def rows(part: Any) -> np.ndarray:
        with jax.enable_x64(True):  # the setting is local to a thread
            if part[0].size > 1:
                return np.asarray(run.select_many(seed, stored, *part, mask))
            return np.asarray(run.select(seed, stored, *jax.tree.map(lambda leaf: leaf[0], part), mask))[None]

    for part in {part[0].size: part for part in parts if part[0].size > 1}.values():
        run.select_many.prepare(seed, stored, *part, mask)  # traced here: only this thread may run the program
    run.select_many.wait()
    if sum(size > 1 for size in sizes) <= 1 or not is_on_cpu():
        found = list(map(rows, parts))
    else:
        with ThreadPoolExecutor(num_cores()) as pool:
            found = list(pool.map(rows, parts))
    return np.concatenate(found)[: numbers.size]


@functools.lru_cache(maxsize=256)
def _mask(allowed: bytes) -> jax.Array:
    """Return a mask of arms on the device; a bandit uses few different ones."""
    return jax.device_put(np.frombuffer(allowed, bool))
