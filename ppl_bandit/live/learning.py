"""Fold rows into a posterior: what a live bandit has learnt is a value, replaced whole or not at all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.live.compiled import Compiled, compiled_functions
from ppl_bandit.live.inputs import Arms
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Engine, Interaction, Selector

__all__ = ["Learner", "Rows", "Task", "fold", "pad_rows", "start"]


class Task(NamedTuple):
    """What a bandit was built with, and never changes.

    Attributes:
        may_fall_back: whether another engine may take over from one that is exact.
    """

    model: RewardModel
    arms: Arms
    selector: Selector
    num_samples: int
    seed: int
    may_fall_back: bool


class Learner(NamedTuple):
    """What a bandit has learnt, and by which engine.

    Attributes:
        run: the engine's functions, compiled.
        state: the engine's.
        has_warned: whether its user knows that these draws lack evidence and that no engine is left to move to.
    """

    engine: Engine
    run: Compiled
    state: Any
    has_warned: bool = False


class Rows(NamedTuple):
    """Rows of data whose form was checked: arms by index (N,), {outcome: (N,)}, and contexts with a leading axis N."""

    arms: np.ndarray
    rewards: dict[str, np.ndarray]
    contexts: Any


def start(task: Task, factory: Callable[[RewardModel], Engine]) -> Learner:
    """Build an engine, and return it with its prior."""
    with jax.enable_x64(True):
        engine = factory(task.model)
        # Selectors without a use for marginals are compiled apart from the model, ahead of time.
        marginals = engine.marginals if task.selector.uses_marginals else None
        run = compiled_functions(
            task.model, engine.init, engine.update, engine.sample, marginals, task.selector, task.num_samples
        )
        return Learner(engine, run, run.init(task.seed))


def fold(task: Task, learner: Learner, num_seen: int, rows: Rows) -> tuple[Any, Any]:
    """Return the engine's state with rows folded into it, and its evidence; nothing is changed.

    Args:
        num_seen: rows folded before these; the engine's random numbers come from it.

    Raises:
        ValueError: for a reward that the program cannot produce.
    """
    model, num_rows = task.model, rows.arms.size
    given = rows.rewards if len(model.outcomes) > 1 else rows.rewards[model.outcomes[0]]
    with jax.enable_x64(True):
        padded = Interaction(*pad_rows((rows.arms, given, rows.contexts, np.ones(num_rows, bool)), num_rows))
        padded = padded._replace(mask=jnp.arange(padded.arm.shape[0]) < num_rows)
        reserve = learner.engine.reserve
        state = learner.state if reserve is None else reserve(learner.state, num_rows)
        after, info, possible = jax.device_get(learner.run.learn(task.seed, state, num_seen, padded))
    for name, fits in possible.items():
        if not np.all(fits[:num_rows]):
            row = int(np.flatnonzero(~fits[:num_rows])[0])
            where = f" in row {row}" if num_rows > 1 else ""
            raise ValueError(
                f"{name}={rows.rewards[name][row]:g}{where} is outside the support of the outcome '{name}' on arm "
                f"{task.arms.names[rows.arms[row]]!r}: the program cannot produce it; correct the reward or the program"
            )
    return after, info


def pad_rows(tree: Any, num_rows: int) -> Any:
    """Repeat the last row up to a power of two, so that batches of any size compile O(log size) times."""
    size = 1 << (num_rows - 1).bit_length()
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], size - num_rows, axis=0)]), tree)
