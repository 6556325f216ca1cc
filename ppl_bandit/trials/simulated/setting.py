"""What all simulated trials of a design have in common."""

from typing import NamedTuple

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.simulated.learners import Learner
from ppl_bandit.types import Engine

__all__ = ["Setting"]


class Setting(NamedTuple):
    """What all simulated trials of a design have in common.

    Attributes:
        control: index of the first control; -1 without one.
        num_samples: posterior draws M, where a probability has no closed form.
        num_futures: simulated continuations behind a predictive probability of success.
    """

    model: RewardModel
    engine: Engine
    learner: Learner
    design: Design
    control: int
    num_samples: int
    num_futures: int
