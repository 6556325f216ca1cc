"""The intervals of `evaluate` without a model for many logs of two arms at once; `test_rare_rewards.py` compares them."""

import numpy as np
from scipy.special import ndtri

from ppl_bandit.evaluation.confidence_sequences import bernoulli_bounds
from ppl_bandit.evaluation.estimators import needed_events
from ppl_bandit.evaluation.evaluation import MAX_WEIGHT_DEVIATION, MIN_EFFECTIVE_SAMPLE_SIZE


def arm_parts(arm, arms, rewards, propensities, level):
    """Return the residuals of the stabilised estimate, (runs, rows - 1), estimates, events and refusals of one arm."""
    is_played = (arms == arm).astype(float)
    counts = np.cumsum(np.stack([1.0 - arms, arms], axis=2), axis=1)
    sums = np.cumsum(np.stack([(1 - arms) * rewards, arms * rewards], axis=2), axis=1)
    pooled = sums.sum(axis=2) / counts.sum(axis=2)
    own = np.where(counts[:, :, arm] > 0, sums[:, :, arm] / np.maximum(counts[:, :, arm], 1), pooled)[:, :-1]
    played, reward, prob = is_played[:, 1:], rewards[:, 1:], propensities[:, 1:, arm]
    weight, allocation = played / prob, np.sqrt(prob)
    score = own + weight * (reward - own)
    total = allocation.sum(axis=1)
    estimate = (allocation * score).sum(axis=1) / total
    residual = allocation * (score - estimate[:, None]) / total[:, None]
    counted = weight * allocation
    mean = (counted * reward).sum(axis=1) / counted.sum(axis=1)
    second, third, fourth = ((((counted * (reward - mean[:, None])) ** k).sum(axis=1)) for k in (2, 3, 4))
    unit = needed_events(level) / (20 * max(1, ndtri(0.5 + 0.5 * level) / ndtri(0.975)) ** 3)
    with np.errstate(divide="ignore", invalid="ignore"):
        events = np.where(second > 0, np.minimum(second**3 / third**2, 3 * unit * second**2 / fourth), 0.0)
    size = weight.sum(axis=1) ** 2 / (weight**2).sum(axis=1)
    deviation = np.abs(weight.mean(axis=1) - 1) > MAX_WEIGHT_DEVIATION * weight.std(axis=1) / np.sqrt(weight.shape[1])
    return residual, estimate, events, (size < MIN_EFFECTIVE_SAMPLE_SIZE) | deviation


def arm_bounds(arm, arms, rewards, alpha):
    """Return the last bounds of the arm's beta-binomial sequence."""
    is_played = arms == arm
    return bernoulli_bounds((rewards * is_played).sum(axis=1), is_played.sum(axis=1), alpha, 100.0)


def intervals(target, arms, rewards, propensities, level=0.95):
    """Return lower and upper ends, (runs,), nan where the interval is refused, of an arm or of first minus second."""
    each = (target,) if isinstance(target, int) else target
    parts = [arm_parts(arm, arms, rewards, propensities, level) for arm in each]
    bounds = [arm_bounds(arm, arms, rewards, (1 - level) / len(each)) for arm in each]
    residual, estimate, low, high = parts[0][0], parts[0][1], bounds[0].lower, bounds[0].upper
    if len(each) == 2:
        residual, estimate = residual - parts[1][0], estimate - parts[1][1]
        low, high = low - bounds[1].upper, high - bounds[1].lower
    margin = ndtri(0.5 + 0.5 * level) * np.sqrt((residual**2).sum(axis=1))
    is_rare = np.min([part[2] for part in parts], axis=0) < needed_events(level)
    smallest = 0.0 if len(each) == 1 else -1.0
    low = np.where(is_rare, low, np.maximum(estimate - margin, smallest))
    high = np.where(is_rare, high, np.minimum(estimate + margin, 1.0))
    is_refused = np.any([part[3] for part in parts], axis=0)
    return np.where(is_refused, np.nan, low), np.where(is_refused, np.nan, high)
