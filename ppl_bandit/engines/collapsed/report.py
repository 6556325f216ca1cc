"""The collapsed engine in words."""

from ppl_bandit.engines.collapsed.inspection import Split
from ppl_bandit.engines.exact.report import family
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Explanation

__all__ = ["accepted"]


def accepted(model: RewardModel, split: Split, words: str | None, num_particles: int, discount: float) -> Explanation:
    return Explanation("collapsed", False, "todo", {})
