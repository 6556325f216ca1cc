"""Decide from what was learnt: the edge between a caller's context and the compiled functions of engine and selector."""

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.posterior.learning import Learner, pad_rows, pieces
from ppl_bandit.posterior.task import Task
from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.selectors.selector_contract import check_horizon

__all__ = ["Chosen", "decide", "decide_many"]

_SIZES = (256, 16, 1)  # of the pieces of a batch, compiled once each; one row is a decision like any other


class Chosen(NamedTuple):
    """Decisions in the order of their numbers: `Selection` by columns, in NumPy arrays that nobody may change."""

    arms: list[int]
    best_arm_probs: np.ndarray
    num_candidates: list[int]
    propensities: np.ndarray


def decide(task: Task, learner: Learner, number: int, context: Any, allowed: np.ndarray) -> Chosen:
    """Return the decision of a number, counted from 0; nothing is changed.

    Raises:
        ValueError: if the expected rewards are not finite, or the selector's horizon is passed.
    """
    check_horizon(number + 1, task.selector.horizon)
    with jax.enable_x64(True):
        mask = _mask(allowed.tobytes())
        row = learner.run.select(learner.seed, learner.held, np.int64(number), context, mask)
        return _chosen(np.asarray(row)[None])


def decide_many(task: Task, learner: Learner, numbers: np.ndarray, contexts: Any, allowed: np.ndarray) -> Chosen:
    """Return the decisions of several numbers, each with posterior draws of its own; nothing is changed.

    Args:
        contexts: with a leading axis, one row per decision; None for a program without context.

    Raises:
        ValueError: if the expected rewards of any are not finite, or the selector's horizon would be passed.
    """
    check_horizon(int(numbers[-1]) + 1, task.selector.horizon)
    run, seed, held = learner.run, learner.seed, learner.held
    sizes = pieces(numbers.size, _SIZES)
    ends = np.cumsum(sizes).tolist()
    with jax.enable_x64(True):
        mask = _mask(allowed.tobytes())

    def arguments(start: int, size: int) -> Any:
        part = jax.tree.map(lambda leaf: leaf[start : start + size], (numbers, contexts))
        return seed, held, *pad_rows(part, part[0].size, size), mask

    def rows(start: int, size: int) -> np.ndarray:
        with jax.enable_x64(True):  # a flag of this thread's own
            if size > 1:
                return np.asarray(run.select_many(*arguments(start, size)))
            part = jax.tree.map(lambda leaf: leaf[start], (numbers, contexts))
            return np.asarray(run.select(seed, held, *part, mask))[None]

    starts = [end - size for end, size in zip(ends, sizes, strict=True)]
    for size in set(sizes) - {1}:  # traced here: other threads must not run the program
        run.select_many.prepare(*arguments(starts[sizes.index(size)], size))
    run.select_many.wait()
    if sum(size > 1 for size in sizes) <= 1 or jax.default_backend() != "cpu":
        found = list(map(rows, starts, sizes))
    else:
        with ThreadPoolExecutor(num_cores()) as pool:
            found = list(pool.map(rows, starts, sizes))
    return _chosen(np.concatenate(found)[: numbers.size])


@functools.lru_cache(maxsize=256)
def _mask(allowed: bytes) -> jax.Array:
    """Return a mask on the device, where the few that a bandit uses stay."""
    return jax.device_put(np.frombuffer(allowed, bool))


def _chosen(rows: np.ndarray) -> Chosen:
    """Read packed selections, one per row."""
    num_arms = (rows.shape[1] - 2) // 2
    arms = list(map(int, rows[:, 0].tolist()))
    if min(arms) < 0:
        raise ValueError(
            "the expected rewards of this decision are not finite, so no arm can be chosen: the program's mean overflows or "
            "is undefined at this context or at draws from this posterior"
        )
    rows.flags.writeable = False
    counts = list(map(int, rows[:, 1 + num_arms].tolist()))
    # The order of the fields of `Selection`.
    return Chosen(arms, rows[:, 1 : 1 + num_arms], counts, rows[:, 2 + num_arms :])
