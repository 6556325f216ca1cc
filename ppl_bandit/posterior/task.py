"""What a live bandit was built with."""

from typing import NamedTuple

from ppl_bandit.inputs.arms import Arms
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Selector

__all__ = ["Task"]


class Task(NamedTuple):
    """What a bandit was built with, and never changes.

    Attributes:
        may_fall_back: whether another engine may take over from one that is exact.
        draws: whether every decision draws the latents, also where there is a shorter way (`engines.decide`).
    """

    model: RewardModel
    arms: Arms
    selector: Selector
    num_samples: int
    seed: int
    may_fall_back: bool
    draws: bool = False
