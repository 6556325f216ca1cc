"""What another selector would have earned if it had made the decisions itself: rejection sampling from a log.

The accepted rows are one path of that selector (Mandel, Liu, Brunskill and Popovic, 2016, "Offline evaluation of online
reinforcement learning algorithms"). The path is shorter than the log, and the answer is for its length.
"""

import math
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit import engines
from ppl_bandit.evaluation.estimators import weighted_mean
from ppl_bandit.evaluation.evaluate import find_model, logged_decisions
from ppl_bandit.evaluation.posterior_path import accepted_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Selector

__all__ = ["RejectionResult", "evaluate_by_rejection"]

_MIN_ACCEPTED = 30


class RejectionResult(NamedTuple):
    """The rewards of one path of a selector.

    Attributes:
        mean: reward per decision over the accepted decisions.
        standard_error: of the mean of these decisions; other paths of the same selector differ by more.
        num_accepted: length of the path.
        num_decisions: length of the log.
        rewards: of the path, in its order.
        is_refused: whether the path is too short for a claim.
        verdict: the answer in words.
    """

    mean: float
    standard_error: float
    num_accepted: int
    num_decisions: int
    rewards: np.ndarray
    is_refused: bool
    verdict: str

    def __str__(self) -> str:
        return self.verdict


def evaluate_by_rejection(
    log: Any,
    selector: Selector,
    *,
    model: RewardModel | None = None,
    name: str = "default",
    outcome: str | None = None,
    seed: int = 0,
) -> RejectionResult:
    """Estimate what a selector would have earned if it had run, from the rows of a log that it accepts.

    In every row the selector decides from the posterior of the rows that it accepted before. The row is accepted with a
    probability for which the arms of accepted rows have the selector's own law.

    Args:
        log, model, name, outcome: as in `evaluate`.
        seed: of the acceptance; another seed gives another path from the same log.

    Raises:
        ValueError: if the log lacks the propensities of all arms, or too many of them are 0.
    """
    if not isinstance(selector, Selector):
        raise ValueError(f"selector must be a selector such as selectors.thompson(), got {selector!r}")
    model = find_model(log, model)
    if model is None:
        raise ValueError("give model=, whose posterior the selector decides from")
    decisions = logged_decisions(log, model, name=name, outcome=outcome)
    with jax.enable_x64(True):
        engine = engines.choose(model)
    rewards = accepted_rewards(model, engine, selector, decisions, seed=seed)
    mean, error = weighted_mean(rewards) if rewards.size else (math.nan, math.nan)
    is_refused = rewards.size < _MIN_ACCEPTED
    start = f"{selector} would have made {rewards.size} decisions with the {decisions.arm.size} rows of the log"
    if is_refused:
        verdict = f"{start}: fewer than {_MIN_ACCEPTED}, too few for a claim about what it would have earned."
    else:
        verdict = (
            f"{start}, and would have earned {mean:.4g} per decision (standard error {error:.2g}). This holds for "
            f"{rewards.size} decisions from the start, not for {decisions.arm.size}."
        )
    return RejectionResult(mean, error, rewards.size, decisions.arm.size, rewards, is_refused, verdict)
