"""Confidence sequences: intervals that hold at all sample sizes at once, hence at any data-dependent stopping time.

The mixture for bounded variables is that of Howard, Ramdas, McAuliffe and Sekhon (2021, "Time-uniform, nonparametric,
nonasymptotic confidence sequences"): of a sum S_t of centred variables with intrinsic time V_t, it exceeds 1 / alpha at any t
with probability at most alpha. The empirical-Bernstein sequence is that of Waudby-Smith and Ramdas (2024,
"Estimating means of bounded random variables by betting"), the asymptotic one the t statistic's, which for large samples is
that of Waudby-Smith et al. (2024, "Time-uniform central limit theory").
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from scipy import special

from ppl_bandit.evaluation.estimators import importance_weights
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.targets import Component

Numbers: TypeAlias = float | np.ndarray

_NUM_BISECTIONS = 60  # halves an interval to 1e-18 of its length
_LARGEST_BET = 0.5  # of the empirical-Bernstein sequence: a fraction of the largest admissible one


class Bounds(NamedTuple):
    """Lower and upper ends of intervals, one pair per entry."""

    lower: np.ndarray
    upper: np.ndarray


def normal_mixture_parameter(optimal_time: float, alpha: float) -> float:
    """Return rho, the parameter for which two-sided mixtures are tightest near `optimal_time`."""
    log_term = 2.0 * math.log(1.0 / alpha)
    return optimal_time / (log_term + math.log1p(log_term))


def beta_binomial_log_mixture(
    total: Numbers, time: Numbers, rho: Numbers, below: Numbers, above: Numbers
) -> np.ndarray:
    """Return the log of the two-sided beta-binomial mixture supermartingale.

    For sums of variables that lie between -below and above: exp(l S - V psi(l)) is mixed over l with a Beta law of
    q = below e^(above l) / (below e^(above l) + above e^(-below l)), which makes the integral a ratio of Beta functions.

    Args:
        total: S.
        time: V; below * above for each variable.
        rho: as from `normal_mixture_parameter`.
    """
    width = below + above
    prior = np.maximum(rho - below * above, 1e-3 * below * above)
    wins, losses = (time + above * total) / (above * width), (time - below * total) / (below * width)
    log_scale = time / (below * above) * np.log(width) - wins * np.log(below) - losses * np.log(above)
    prior_wins, prior_losses = prior / (above * width), prior / (below * width)
    return (
        log_scale + special.betaln(prior_wins + wins, prior_losses + losses) - special.betaln(prior_wins, prior_losses)
    )


def bernoulli_bounds(num_successes: np.ndarray, num_trials: np.ndarray, alpha: float, optimal_time: float) -> Bounds:
    """Return beta-binomial mixture intervals of a mean of variables in [0, 1].

    The interval is {p: the mixture supermartingale of the sum less its mean under p is below 1 / alpha}. Variables in [0, 1]
    with mean p are sub-Bernoulli with ranges p and 1 - p, so that the bounds hold for all of them, not for counts alone.

    Args:
        num_successes: sums of the variables.
        num_trials: their numbers; an interval without a trial is [0, 1].
        optimal_time: number of trials at which the sequence is tightest.
    """
    successes, trials = np.broadcast_arrays(np.asarray(num_successes, float), np.asarray(num_trials, float))

    def exceeds(p: np.ndarray) -> np.ndarray:
        return excludes_mean(p, successes, trials, alpha, optimal_time)

    mean = np.divide(successes, trials, out=np.full(successes.shape, 0.5), where=trials > 0)
    tiny = 1e-12
    inside = np.clip(mean, tiny, 1.0 - tiny)
    with np.errstate(divide="ignore", invalid="ignore"):
        lower = _first_inside(exceeds, np.full(mean.shape, tiny), inside)
        upper = _first_inside(exceeds, np.full(mean.shape, 1.0 - tiny), inside)
    return Bounds(np.where(lower <= tiny, 0.0, lower), np.where(upper >= 1.0 - tiny, 1.0, upper))


def excludes_mean(
    p: np.ndarray, num_successes: np.ndarray, num_trials: np.ndarray, alpha: float, optimal_time: float
) -> np.ndarray:
    """Return whether the mean p strictly inside (0, 1) lies outside of `bernoulli_bounds`."""
    variance = p * (1.0 - p)
    rho = normal_mixture_parameter(optimal_time, alpha) * variance
    log_mixture = beta_binomial_log_mixture(num_successes - p * num_trials, variance * num_trials, rho, p, 1.0 - p)
    return log_mixture > math.log(1.0 / alpha)


def empirical_bernstein_lower(scores: np.ndarray, alpha: float) -> np.ndarray:
    """Return lower confidence bounds of the running mean of conditional means, after each score.

    Scores are nonnegative and may be unbounded above, such as importance-weighted rewards; their conditional means are at
    most 1. The bets l_t are predictable, and psi_E(l) = -log(1 - l) - l. The bound of a mean that stays the same is

        (sum l_t x_t - log(1 / alpha) - sum psi_E(l_t) (x_t - m_{t-1})^2) / sum l_t,

    with m the running mean of the scores so far, at most 1.
    """
    scores = np.asarray(scores, float)
    if scores.size == 0:
        return np.zeros(0)
    if scores.min() < 0:
        raise ValueError(f"scores must be nonnegative, got {scores.min():g}; shift and scale the rewards to [0, 1]")
    steps = np.arange(1, scores.size + 1)
    mean = (0.5 + np.cumsum(scores)) / (steps + 1)
    centre = np.minimum(np.concatenate([[0.5], mean[:-1]]), 1.0)  # before each score
    squares = (scores - np.minimum(mean, 1.0)) ** 2
    variance = (0.25 + np.cumsum(squares)) / (steps + 1)
    variance = np.concatenate([[0.25], variance[:-1]])
    bets = np.sqrt(2.0 * math.log(1.0 / alpha) / (variance * steps * np.log1p(steps)))
    bets = np.minimum(bets, _LARGEST_BET)
    cost = np.cumsum((-np.log1p(-bets) - bets) * (scores - centre) ** 2)
    lower = (np.cumsum(bets * scores) - math.log(1.0 / alpha) - cost) / np.cumsum(bets)
    return np.maximum(lower, 0.0)


def asymptotic_margin(times: np.ndarray, variance: np.ndarray, alpha: float, optimal_time: float) -> np.ndarray:
    """Return half the width of the asymptotic confidence sequence of a mean; infinite for the first few samples.

    The sequence excludes means at which the t statistic's Bayes factor, the normal prior of whose effect has variance r^2, has
    reached 1 / alpha: ((1 + u) / (1 + u / A))^(n/2) = sqrt(A) / alpha with u = (mean - mu)^2 / variance and A = 1 + n r^2. For
    Gaussian scores it holds at all times (Lai, 1976; Wang and Ramdas, 2024). For others the coverage at all times from a first
    time on tends to 1 - alpha as that grows: for large n the margin is that of Waudby-Smith et al. (2024),

        sqrt(2 variance (n r^2 + 1) / (n^2 r^2) log(sqrt(n r^2 + 1) / alpha)).

    Args:
        times: sample sizes n.
        variance: of the scores, sum (x - mean)^2 / n, at each of them.
        optimal_time: sample size at which the sequence is tightest.
    """
    times = np.asarray(times, float)
    square = (-special.lambertw(-(alpha**2) / math.e, k=-1).real - 1.0) / optimal_time
    total = 1.0 + times * square
    with np.errstate(divide="ignore", over="ignore"):
        growth = np.exp(np.log(total / alpha**2) / times)
        ratio = np.where(growth < total, (growth - 1.0) / np.maximum(1.0 - growth / total, 1e-300), math.inf)
    return np.where(np.isinf(ratio), math.inf, np.sqrt(variance) * np.sqrt(np.where(np.isinf(ratio), 0.0, ratio)))


def _first_inside(exceeds: Callable[[np.ndarray], np.ndarray], outer: np.ndarray, inner: np.ndarray) -> np.ndarray:
    """Return, elementwise, the end of the interval between a point outside of it, or at the edge, and one inside."""
    outside, inside = outer.copy(), inner.copy()
    is_edge = ~exceeds(outer)
    for _ in range(_NUM_BISECTIONS):
        middle = 0.5 * (outside + inside)
        is_out = exceeds(middle)
        outside, inside = np.where(is_out, middle, outside), np.where(is_out, inside, middle)
    return np.where(is_edge, outer, inside)


if TYPE_CHECKING:
    import pandas

BETA_BINOMIAL = "valid if rewards lie within the bounds and the mean of no arm changes: a beta-binomial mixture per arm"
EMPIRICAL_BERNSTEIN = "valid if propensities are true and rewards lie within the bounds: empirical Bernstein"
ASYMPTOTIC = "valid in large samples alone, if propensities are true and have a floor: asymptotic"
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
    if bounds is not None and not log.is_varying and all(component.arm is not None for component in components):
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
