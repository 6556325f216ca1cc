"""Decide from what was learnt: the edge between a caller's context and the compiled functions of engine and selector."""

from typing import Any

import jax
import numpy as np

from ppl_bandit.live.compiled import compiled_choice
from ppl_bandit.live.learning import Learner, Task, pad_rows
from ppl_bandit.selectors.contract import check_horizon
from ppl_bandit.types import Selection

__all__ = ["decide", "decide_many"]


def decide(task: Task, learner: Learner, number: int, context: Any, allowed: np.ndarray) -> Selection:
    """Return the decision of a number, counted from 0, as NumPy values; nothing is changed.

    Raises:
        ValueError: if the expected rewards are not finite, or the selector's horizon is passed.
    """
    check_horizon(number + 1, task.selector.horizon)
    with jax.enable_x64(True):
        if task.selector.uses_marginals and learner.engine.marginals is not None:
            chosen = learner.run.decide(task.seed, learner.state, number, context, allowed)
        else:
            table = learner.run.table(task.seed, learner.state, number, context)
            choice = compiled_choice(task.selector, task.num_samples, len(task.arms)).result()
            chosen = choice(np.int64(task.seed), table, np.int64(number), allowed)
    return _check(jax.device_get(chosen))


def decide_many(
    task: Task, learner: Learner, numbers: np.ndarray, contexts: Any, allowed: np.ndarray
) -> list[Selection]:
    """Return the decisions of several numbers, each with posterior draws of its own; nothing is changed.

    Args:
        contexts: with a leading axis, one row per decision; None for a program without context.

    Raises:
        ValueError: if the expected rewards of any are not finite, or the selector's horizon would be passed.
    """
    check_horizon(int(numbers[-1]) + 1, task.selector.horizon)
    with jax.enable_x64(True):
        padded = pad_rows((numbers, contexts), numbers.size)
        chosen = jax.device_get(learner.run.decide_many(task.seed, learner.state, *padded, allowed))
    return [_check(jax.tree.map(lambda leaf, i=i: leaf[i], chosen)) for i in range(numbers.size)]


def _check(chosen: Selection) -> Selection:
    if int(chosen.arm) < 0:
        raise ValueError(
            "the expected rewards of this decision are not finite, so no arm can be chosen: the program's mean overflows or "
            "is undefined at this context or at draws from this posterior"
        )
    return chosen
