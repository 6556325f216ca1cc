"""Estimators of a policy's mean reward from logged decisions, with standard errors that hold under adaptive collection.

Rows are in the order of decisions t = 1..T: arm A_t, drawn with probability e_t(A_t), and reward Y_t. The target plays arm
a with probability pi_t(a); w_t = pi_t(A_t) / e_t(A_t) is the importance weight. The doubly robust score is

    G_t = sum_a pi_t(a) m_t(a) + w_t (Y_t - m_t(A_t)),

and the estimate Q = sum h_t G_t / sum h_t. Its standard error holds if the outcome model m_t, the weight h_t and e_t were
fixed before A_t was drawn (Hadad, Hirshberg, Zhan, Wager and Athey, 2021, "Confidence intervals for policy evaluation in
adaptive experiments").
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special

_MEMORY = 1000  # rows over which `stabilising_weights` average


class Estimate(NamedTuple):
    """A value and its standard error."""

    value: float
    standard_error: float

    def interval(self, level: float) -> tuple[float, float]:
        """Return the normal interval of this level."""
        margin = float(special.ndtri(0.5 + 0.5 * level)) * self.standard_error
        return self.value - margin, self.value + margin


def importance_weights(target: np.ndarray, arms: np.ndarray, propensity: np.ndarray) -> np.ndarray:
    """Return w_t = pi_t(A_t) / e_t(A_t).

    A row whose recorded propensity is 0 although its arm was played gets no weight where the target never plays that arm, and
    an infinite one elsewhere.

    Args:
        target: (T, A), probabilities of the target policy.
        arms: (T,), indices of the arms that were played.
        propensity: (T,), probability with which each was played.
    """
    wanted = target[np.arange(arms.size), arms]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(wanted > 0, wanted / propensity, 0.0)


def effective_sample_size(weights: np.ndarray) -> float:
    """Return (sum w)^2 / sum w^2; 0 where a weight is infinite or none is positive."""
    squares = float(np.sum(weights * weights))
    return float(np.sum(weights)) ** 2 / squares if math.isfinite(squares) and squares > 0 else 0.0


def needed_events(level: float) -> float:
    """Return from how many effective events on a normal interval is shown: 20 at 95%, where it then covers .93 or more.

    At every level at most 1.45 (1 - level) of the intervals then miss a rare rate, by sums of binomial probabilities:
    tests/evaluation/test_rare_rewards.py. The miss that skewness adds grows with the fifth power of the quantile.
    """
    return max(20.0, 14.0 * _further_out(level) ** 5)


def _further_out(level: float) -> float:
    """Return how many times further out than at 95% the ends of a normal interval lie; 1 at lower levels."""
    return max(1.0, float(special.ndtri(0.5 + 0.5 * level) / special.ndtri(0.975)))


def effective_events(weights: np.ndarray, rewards: np.ndarray, level: float = 0.95) -> np.ndarray:
    """Return how many events the weighted mean of the first t rewards rests on, for every t.

    With r = w (Y - mean), the smaller of (sum r^2)^3 / (sum r^3)^2 and 3 (sum r^2)^2 / sum r^4: n over the squared skewness,
    and 3 n over the kurtosis. For rare rewards of 1 among rewards of 0 both are about the number of ones; for n rewards without
    skewness and without heavy tails they are n or more. Neither depends on the unit of the rewards, nor on where 0
    lies. 0 where all rewards are equal.

    Args:
        level: above 95% the second number is in units of 20 (z / 1.96)^3 and not of `needed_events`: without skewness the error
            grows with the third power of the quantile.
    """
    if rewards.size == 0 or not (np.isfinite(weights).all() and weights.any()):
        return np.zeros(rewards.size)
    share = weights / weights.max()
    symmetric = needed_events(level) / (20.0 * _further_out(level) ** 3)
    from_mean = rewards - np.sum(share * rewards) / np.sum(
        share
    )  # rounding: moments about the mean so far follow from these
    from_mean = from_mean / (np.max(np.abs(from_mean)) or 1.0)
    sums = {(k, j): np.cumsum(share**k * from_mean**j) for k in (1, 2, 3, 4) for j in range(k + 1)}
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(sums[1, 0] > 0, sums[1, 1] / sums[1, 0], 0.0)
        second, third, fourth = (
            sum(math.comb(k, j) * (-mean) ** (k - j) * sums[k, j] for j in range(k + 1)) for k in (2, 3, 4)
        )
        found = np.minimum(second**3 / third**2, 3.0 * symmetric * second**2 / fourth)
    is_constant = (second <= 1e-12 * sums[2, 0]) | (np.ptp(rewards[weights > 0]) <= 1e-12 * np.max(np.abs(rewards)))
    return np.where(is_constant, 0.0, found)


def doubly_robust_scores(
    target: np.ndarray, weights: np.ndarray, means: np.ndarray, arms: np.ndarray, rewards: np.ndarray
) -> np.ndarray:
    """Return the scores G_t.

    Args:
        means: (T, A), m_t(a), each row known before its decision.
    """
    return np.sum(target * means, axis=1) + weights * (rewards - means[np.arange(arms.size), arms])


def weighted_mean(scores: np.ndarray, allocation: np.ndarray | None = None) -> Estimate:
    """Return sum h G / sum h with variance sum h^2 (G - Q)^2 / (sum h)^2."""
    return weighted_contrast((scores,), (np.ones(scores.size) if allocation is None else allocation,))


def weighted_contrast(scores: Sequence[np.ndarray], allocations: Sequence[np.ndarray]) -> Estimate:
    """Return a weighted mean, or of two the first less the second, with the standard error of the joint form."""
    value, residual = 0.0, np.zeros(scores[0].size)
    for sign, own, allocation in zip((1.0, -1.0), scores, allocations, strict=False):
        total = float(allocation.sum())
        if total == 0:
            return Estimate(math.nan, math.nan)
        mean = float(allocation @ own) / total
        value, residual = value + sign * mean, residual + sign * allocation * (own - mean) / total
    return Estimate(value, float(np.sqrt(np.sum(residual**2))))


def policy_variances(probs: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """Return v_t = sum_a pi_t(a)^2 / e_t(a) of each row, (N,).

    Where another system chose and not all its probabilities are known, v_t is that of the row before: a weight must not depend
    on the arm that was shown.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        variances = np.where(probs > 0, probs**2 / propensities, 0.0).sum(axis=1)
    for row in np.flatnonzero(np.isnan(propensities).any(axis=1)):
        variances[row] = variances[row - 1] if row else 1.0
    return variances


def stabilising_weights(variances: np.ndarray) -> np.ndarray:
    """Return 1 / sqrt(v_t) for contextual targets, with v_t averaged over the contexts before t.

    v_t(x) = sum_a pi(a|x)^2 / e_t(a|x) (Zhan, Ren, Athey and Zhou, 2021). A weight that depended on the row's own context
    would tilt the estimate towards some contexts, so each row uses the mean over at most 1,000 rows before it.

    Args:
        variances: (T,), v_t at each row's own context.
    """
    sums = np.concatenate([[0.0], np.cumsum(variances)])
    end = np.arange(variances.size)
    start = np.maximum(end - _MEMORY, 0)
    mean = np.where(end > 0, (sums[end] - sums[start]) / np.maximum(end - start, 1), variances[0])
    return 1.0 / np.sqrt(np.maximum(mean, 1e-12))


def running_means(arms: np.ndarray, rewards: np.ndarray, num_arms: int) -> np.ndarray:
    """Return (T, A): each arm's mean reward over the earlier rows; for an arm not seen yet that of all, 0 in the first row."""
    num_rows = arms.size
    sums, counts = np.zeros((num_rows + 1, num_arms)), np.zeros((num_rows + 1, num_arms))
    later = np.arange(1, num_rows + 1)
    sums[later, arms] = rewards
    counts[later, arms] = 1.0
    sums, counts = np.cumsum(sums, axis=0)[:-1], np.cumsum(counts, axis=0)[:-1]
    pooled = sums.sum(axis=1) / np.maximum(counts.sum(axis=1), 1.0)
    return np.where(counts > 0, sums / np.maximum(counts, 1.0), pooled[:, None])
