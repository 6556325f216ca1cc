"""Learning tasks, and the rows that a posterior learns: complete, partial and late.

Learn some outcomes of a row now and the others later.

An engine on `counting_model` takes rows in which every outcome counts or not. A live bandit changes to it at the first reward
that is learnt in part, so that bandits without such rewards keep their smaller program.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit import engines
from ppl_bandit.inputs.arms import Arms
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.outcomes import any_rewards, counting_context, counting_model
from ppl_bandit.types import Engine, Selector


class DesignRecord(NamedTuple):
    """What is recorded of the design of an experiment.

    Attributes:
        settings: the design as JSON values.
        allocation: probabilities of the arms before the first look; None lets the selector decide.
    """

    settings: Mapping[str, Any]
    allocation: tuple[float, ...] | None


class Windows(NamedTuple):
    """Times that are part of an experiment, in seconds; None is no limit.

    Attributes:
        unit: how long the decision of a unit stands.
        reward: after which a pending decision is settled.
        default: {outcome: value} of its reward; None discards it.
    """

    unit: float | None = None
    reward: float | None = None
    default: Mapping[str, float] | None = None


class Task(NamedTuple):
    """The fixed settings of a live bandit.

    Attributes:
        may_fall_back: whether another engine may replace an exact one that refuses a datum.
        draws: whether every decision draws the latents, even if the law of the decision is known (`engines.decide`).
        design: None for an experiment without one.
        late: entries of the context that are known only with the reward.
        factory: of the engine.
        windows: of units and rewards.
        is_partial: whether the engine takes rows of which some outcomes do not count.
    """

    model: RewardModel
    arms: Arms
    selector: Selector
    num_samples: int
    seed: int
    may_fall_back: bool
    draws: bool = False
    design: DesignRecord | None = None
    late: tuple[str, ...] = ()
    factory: Any = None
    windows: Windows = Windows()
    is_partial: bool = False


class Rows(NamedTuple):
    """Checked rows of data.

    Attributes:
        arms: indices, (N,).
        rewards: {outcome: (N,)}; nan for an outcome that is not learnt yet.
        contexts: with a leading axis N.
        counted: (N, outcomes), which outcomes to learn now; None learns all that are not nan.
    """

    arms: np.ndarray
    rewards: dict[str, np.ndarray]
    contexts: Any
    counted: np.ndarray | None = None


def learning_model(task: Task) -> RewardModel:
    """Return the model of the rows that the engine takes."""
    return counting_model(task.model) if task.is_partial else task.model


def counted_rows(task: Task, rows: Rows) -> Rows:
    """Return rows as the engine takes them: `counted` is a part of the contexts, and no reward is nan."""
    if not task.is_partial:
        return rows
    model = task.model
    counted = is_known(rows, model.outcomes) if rows.counted is None else rows.counted
    stand_in = any_rewards(model)
    rewards = {name: np.where(np.isnan(values), stand_in[name], values) for name, values in rows.rewards.items()}
    return Rows(rows.arms, rewards, counting_context(model, rows.contexts, counted))


def is_known(rows: Rows, outcomes: tuple[str, ...]) -> np.ndarray:
    """Return which outcomes of each row are known, (N, outcomes)."""
    return np.stack([~np.isnan(rows.rewards[name]) for name in outcomes], axis=1)


@functools.lru_cache(maxsize=8)
def counting_engine(model: RewardModel, factory: Callable[[RewardModel], Engine]) -> Engine:
    """Return an engine on `counting_model` whose readings take the contexts of `model`."""
    with jax.enable_x64(True):
        engine = factory(counting_model(model))
    own = engine.capabilities
    everything = np.ones(len(model.outcomes), bool)

    def at_decision(read: Callable | None) -> Any:
        if read is None:
            return None
        return lambda state, context: read(state, counting_context(model, context, everything))

    readings = {"marginals": at_decision(own.marginals), "infinite_means": at_decision(own.infinite_means)}
    return engine._replace(capabilities=own._replace(add_rows=None, **readings))


def why_not_in_part(task: Task, engine: Engine) -> str:
    """Return why an experiment learns complete rewards only, in words; empty if it learns outcomes as they come.

    Args:
        engine: of the prior.
    """
    if task.is_partial:
        return ""
    if task.model.moving_sites:
        return "its latents move, so that a later outcome belongs to another time"
    if engine.settings.get("discount", 1.0) != 1.0:
        return "the engine discounts old rewards, and an outcome that comes later is not newer"
    factory = task.factory.func if isinstance(task.factory, functools.partial) else task.factory
    if (
        getattr(engines, getattr(factory, "__name__", ""), None) is not factory
    ):  # it may ignore the model that it is given
        return "the engine is not one of this library's"
    found = counting_engine(task.model, task.factory).explanation
    if found.engine != engine.explanation.engine:
        return f"the {engine.explanation.engine} engine fits complete rewards only"
    return ""
