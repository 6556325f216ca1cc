"""Estimators of a policy's mean reward from logged decisions, with standard errors that hold under adaptive collection.

Rows are in the order of decisions t = 1..T: arm A_t, drawn with probability e_t(A_t), and reward Y_t. The target plays arm
a with probability pi_t(a); w_t = pi_t(A_t) / e_t(A_t) is the importance weight. The doubly robust score is

    G_t = sum_a pi_t(a) m_t(a) + w_t (Y_t - m_t(A_t)),

and the estimate Q = sum h_t G_t / sum h_t. Its standard error holds if the outcome model m_t, the weight h_t and e_t were
fixed before A_t was drawn (Hadad, Hirshberg, Zhan, Wager and Athey, 2021, "Confidence intervals for policy evaluation in
adaptive experiments").
"""

import math
from typing import NamedTuple

import numpy as np
from scipy import special

__all__ = [
    "Estimate",
    "direct_method",
    "doubly_robust_scores",
    "effective_sample_size",
    "importance_weights",
    "inverse_propensity",
    "running_means",
    "self_normalised",
    "shrunk_weights",
    "stabilising_weights",
    "switched_weights",
    "two_point_allocation",
    "weighted_contrast",
    "weighted_mean",
]

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


def inverse_propensity(weights: np.ndarray, rewards: np.ndarray) -> Estimate:
    """Return the mean of the importance-weighted rewards (IPS)."""
    return weighted_mean(weights * rewards)


def self_normalised(weights: np.ndarray, rewards: np.ndarray) -> Estimate:
    """Return the weighted mean of the rewards (SNIPS), with the standard error of a ratio."""
    total = float(weights.sum())
    if total == 0:
        return Estimate(math.nan, math.nan)
    value = float(np.sum(weights * rewards)) / total
    return Estimate(value, float(np.sqrt(np.sum((weights * (rewards - value)) ** 2))) / total)


def direct_method(target: np.ndarray, means: np.ndarray) -> Estimate:
    """Return the mean of the outcome model under the target; its error ignores that the model may be wrong."""
    return weighted_mean(np.sum(target * means, axis=1))


def doubly_robust_scores(
    target: np.ndarray, weights: np.ndarray, means: np.ndarray, arms: np.ndarray, rewards: np.ndarray
) -> np.ndarray:
    """Return the scores G_t; with importance weights changed by `switched_weights` or `shrunk_weights`, those variants.

    Args:
        means: (T, A), m_t(a), each row known before its decision.
    """
    return np.sum(target * means, axis=1) + weights * (rewards - means[np.arange(arms.size), arms])


def switched_weights(weights: np.ndarray, threshold: float) -> np.ndarray:
    """Return weights with those above a threshold set to 0: there the outcome model stands alone (Switch-DR)."""
    return np.where(weights <= threshold, weights, 0.0)


def shrunk_weights(weights: np.ndarray, strength: float) -> np.ndarray:
    """Return lambda w / (w^2 + lambda), the optimistic shrinkage of Su et al. (2020); an infinite strength changes nothing."""
    return weights if math.isinf(strength) else strength * weights / (weights**2 + strength)


def weighted_mean(scores: np.ndarray, allocation: np.ndarray | None = None) -> Estimate:
    """Return sum h G / sum h with variance sum h^2 (G - Q)^2 / (sum h)^2."""
    if allocation is None:
        value = float(np.mean(scores))
        return Estimate(value, float(np.sqrt(np.sum((scores - value) ** 2))) / scores.size)
    total = float(allocation.sum())
    if total == 0:
        return Estimate(math.nan, math.nan)
    value = float(allocation @ scores) / total
    return Estimate(value, float(np.sqrt(np.sum((allocation * (scores - value)) ** 2))) / total)


def weighted_contrast(
    scores: tuple[np.ndarray, np.ndarray], allocations: tuple[np.ndarray | None, np.ndarray | None]
) -> Estimate:
    """Return the difference of two weighted means, with the standard error of the joint form."""
    parts, value = [], 0.0
    for sign, own, allocation in zip((1.0, -1.0), scores, allocations, strict=True):
        mean = weighted_mean(own, allocation)
        share = np.full(own.size, 1.0 / own.size) if allocation is None else allocation / allocation.sum()
        parts.append(sign * share * (own - mean.value))
        value += sign * mean.value
    return Estimate(value, float(np.sqrt(np.sum((parts[0] + parts[1]) ** 2))))


def two_point_allocation(propensities: np.ndarray, decay: float = 0.0) -> np.ndarray:
    """Return the two-point allocation weights for one arm.

    h_t^2 / e_t = lambda_t (1 - sum_{s<t} h_s^2 / e_s): each row gets a share lambda_t of the variance that is left, between
    what it would get if propensities stayed as they are and if they fell as t^-decay.

    Args:
        decay: a, the rate at which the floor of the propensities falls; 0 for a constant floor.
    """
    num_rows = propensities.size
    t = np.arange(1, num_rows + 1)
    stays = 1.0 / (1.0 + num_rows - t)
    falls = (1.0 - decay) / ((1.0 - decay) + num_rows * (t / num_rows) ** decay - t)
    rate = np.clip((1.0 - propensities) * falls + propensities * stays, 0.0, 1.0)
    with np.errstate(divide="ignore"):
        left = np.exp(np.concatenate([[0.0], np.cumsum(np.log1p(-rate[:-1]))]))
    return np.sqrt(propensities * rate * left)


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
    """Return (T, A): the mean reward of each arm over the earlier rows; 0 for an arm not seen yet."""
    num_rows = arms.size
    sums, counts = np.zeros((num_rows + 1, num_arms)), np.zeros((num_rows + 1, num_arms))
    later = np.arange(1, num_rows + 1)
    sums[later, arms] = rewards
    counts[later, arms] = 1.0
    sums, counts = np.cumsum(sums, axis=0)[:-1], np.cumsum(counts, axis=0)[:-1]
    return np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
