"""Decide from what was learnt: the edge between a caller's context and the compiled functions of engine and selector."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.live.learning import Learner, Task, pad_rows
from ppl_bandit.types import Selection

__all__ = ["decide", "decide_many"]

_SIZES = (256, 16, 1)  # of the pieces of a batch, each compiled once


def decide(task: Task, learner: Learner, number: int, context: Any, allowed: np.ndarray) -> Selection:
    """Return the decision of a number, counted from 0, as NumPy values; nothing is changed.

    Raises:
        ValueError: if the expected rewards are not finite.
    """
    with jax.enable_x64(True):
        mask = _mask(allowed.tobytes())
        row = learner.run.select(learner.seed, learner.state, np.int64(number), context, mask)
        return _unpacked(np.asarray(row))


def decide_many(
    task: Task, learner: Learner, numbers: np.ndarray, contexts: Any, allowed: np.ndarray
) -> list[Selection]:
    """Return the decisions of several numbers, each with posterior draws of its own; nothing is changed.

    Args:
        contexts: with a leading axis, one row per decision; None for a program without context.

    Raises:
        ValueError: if the expected rewards of any are not finite.
    """
    found, done = list[Any](), 0
    with jax.enable_x64(True):
        mask = _mask(allowed.tobytes())
        for size in _SIZES:
            while numbers.size - done >= (0.8 * size if size > 1 else 1):
                num = min(size, numbers.size - done)
                part = jax.tree.map(lambda leaf: leaf[done : done + num], (numbers, contexts))  # noqa: B023
                rows = learner.run.select_many(learner.seed, learner.state, *pad_rows(part, num, size), mask)
                found.append((rows, num))
                done += num
        return [_unpacked(row) for rows, num in found for row in np.asarray(rows)[:num]]


@functools.lru_cache(maxsize=256)
def _mask(allowed: bytes) -> jax.Array:
    """Return a mask on the device, where the few that a bandit uses stay."""
    return jnp.asarray(np.frombuffer(allowed, bool))


def _unpacked(row: np.ndarray) -> Selection:
    arm, num_arms = int(row[0]), (row.size - 2) // 2
    if arm < 0:
        raise ValueError(
            "the expected rewards of this decision are not finite, so no arm can be chosen: the program's mean overflows or "
            "is undefined at this context or at draws from this posterior"
        )
    # The order of the fields of `Selection`.
    return Selection(arm, row[1 : 1 + num_arms], int(row[1 + num_arms]), row[2 + num_arms :])  # type: ignore[arg-type]
