"""The confidence sequence of a target: which one its log allows, and its bounds over the decisions."""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_bandit.evaluation.confidence_sequences import (
    Bounds,
    asymptotic_margin,
    bernoulli_bounds,
    empirical_bernstein_lower,
)
from ppl_bandit.evaluation.estimators import importance_weights
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.targets import Component

if TYPE_CHECKING:
    import pandas

BETA_BINOMIAL = "beta-binomial mixture per arm: needs rewards within bounds and constant arm means, no propensities"
EMPIRICAL_BERNSTEIN = "empirical Bernstein: needs true propensities and rewards within bounds"
ASYMPTOTIC = (
    "asymptotic: needs true propensities with a floor; holds for large samples only, not a finite-sample guarantee"
)
_MOST_TIMES = 1000
# Where sequences are tightest. They hold because these numbers do not depend on the data, nor on when somebody looks.
OPTIMAL_PLAYS = 100.0
_OPTIMAL_DECISIONS = 1000.0


class ScoredRows(NamedTuple):
    """A component on the rows that can tell about it.

    Attributes:
        has_overlap: (T,), rows in which the log could have played every arm that the component plays.
        is_used: (T,), these rows, but the first where nothing was known before it.
        weights, scores: of the rows that are used: importance weights, and doubly robust scores.
        allocation: h_t of those rows; None where the probabilities of all arms were not recorded.
        num_events: of those rows, the effective number of events so far.
        is_enough: of those rows: whether the rows so far carry an approximation by a normal law.
    """

    component: Component
    has_overlap: np.ndarray
    is_used: np.ndarray
    weights: np.ndarray
    scores: np.ndarray
    allocation: np.ndarray | None
    num_events: np.ndarray
    is_enough: np.ndarray


class Sequence(NamedTuple):
    """A confidence sequence.

    Attributes:
        kind: which one, and what it assumes.
        frame: a DataFrame by number of decisions, with columns estimate, lower, upper; at most 1,000 rows.
    """

    kind: str
    frame: "pandas.DataFrame"


def confidence_sequence(
    log: LoggedDecisions,
    scored: list[ScoredRows],
    level: float,
    bounds: tuple[float, float] | None,
) -> Sequence:
    """Return the confidence sequence of one component, or of the difference of two.

    It holds at all decisions at once with probability `level`, so that it may be looked at after every decision.

    Args:
        scored: each component.
        bounds: smallest and largest possible reward; None if they are not known.
    """
    import pandas

    num_rows = log.arm.size
    times = np.unique(np.round(np.geomspace(1, num_rows, min(num_rows, _MOST_TIMES))).astype(int))
    components = [own.component for own in scored]
    alpha = (1.0 - level) / len(components)
    if bounds is not None and log.contexts is None and all(component.arm is not None for component in components):
        kind, parts = BETA_BINOMIAL, [_arm_bounds(log, component.arm, times, alpha, bounds) for component in components]
    elif bounds is not None:
        kind = EMPIRICAL_BERNSTEIN
        parts = [_policy_bounds(log, component, times, alpha, bounds) for component in components]
    else:
        kind, parts = ASYMPTOTIC, [_score_bounds(own, times, alpha) for own in scored]
    estimate, lower, upper = parts[0]
    if len(parts) == 2:
        estimate, lower, upper = estimate - parts[1][0], lower - parts[1][2], upper - parts[1][1]
    index = pandas.Index(times, name="decisions")
    return Sequence(kind, pandas.DataFrame({"estimate": estimate, "lower": lower, "upper": upper}, index=index))


def _arm_bounds(log: LoggedDecisions, arm: Any, times: np.ndarray, alpha: float, bounds: tuple[float, float]) -> Any:
    low, width = bounds[0], bounds[1] - bounds[0]
    is_played = log.arm == arm
    trials = np.cumsum(is_played)[times - 1].astype(float)
    sums = np.cumsum(np.where(is_played, (log.reward - low) / width, 0.0))[times - 1]
    found: Bounds = bernoulli_bounds(sums, trials, alpha, OPTIMAL_PLAYS)
    mean = np.divide(sums, trials, out=np.full(sums.shape, math.nan), where=trials > 0)
    return low + width * mean, low + width * found.lower, low + width * found.upper


def _policy_bounds(
    log: LoggedDecisions, component: Component, times: np.ndarray, alpha: float, bounds: tuple[float, float]
) -> Any:
    low, width = bounds[0], bounds[1] - bounds[0]
    weights = importance_weights(component.probs, log.arm, log.propensity)
    unit = (log.reward - low) / width
    lower = empirical_bernstein_lower(weights * unit, alpha / 2)[times - 1]
    upper = 1.0 - empirical_bernstein_lower(weights * (1.0 - unit), alpha / 2)[times - 1]
    total = np.cumsum(weights)[times - 1]
    mean = np.divide(np.cumsum(weights * unit)[times - 1], total, out=np.full(total.shape, math.nan), where=total > 0)
    return low + width * mean, low + width * np.minimum(lower, 1.0), low + width * np.maximum(upper, 0.0)


def _score_bounds(own: ScoredRows, times: np.ndarray, alpha: float) -> Any:
    """Return the asymptotic sequence: without bounds until there are enough rows."""
    num = np.cumsum(own.is_used)[times - 1]
    last = np.maximum(num - 1, 0)
    if not own.scores.size:
        return np.full(times.size, math.nan), np.full(times.size, -math.inf), np.full(times.size, math.inf)
    centre = own.scores.mean()  # for the rounding of the squares
    from_centre = own.scores - centre
    sums, squares = np.cumsum(from_centre)[last], np.cumsum(from_centre * from_centre)[last]
    mean = sums / np.maximum(num, 1)
    margin = asymptotic_margin(
        np.maximum(num, 1), np.maximum(squares / np.maximum(num, 1) - mean * mean, 0.0), alpha, _OPTIMAL_DECISIONS
    )
    margin = np.where((num > 1) & own.is_enough[last], margin, math.inf)
    estimate = np.where(num > 0, centre + mean, math.nan)
    return estimate, centre + mean - margin, centre + mean + margin
