"""The fixed settings of a live bandit."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ppl_bandit.inputs.arms import Arms
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Selector


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
