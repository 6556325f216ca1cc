"""The fixed settings of a live bandit."""

from typing import NamedTuple

from ppl_bandit.inputs.arms import Arms
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Selector

__all__ = ["Task"]


class Task(NamedTuple):
    """The fixed settings of a live bandit.

    Attributes:
        may_fall_back: whether another engine may replace an exact one that refuses a datum.
        draws: whether every decision draws the latents, even if the law of the decision is known (`engines.decide`).
    """

    model: RewardModel
    arms: Arms
    selector: Selector
    num_samples: int
    seed: int
    may_fall_back: bool
    draws: bool = False
