"""Logs of two Bernoulli arms, many at a time in NumPy: equal allocation, or Thompson sampling with its exact probabilities."""

import numpy as np
from scipy.special import betaln, ndtr

from ppl_bandit.evaluation.logged_decisions import LoggedDecisions


def bernoulli_logs(rng, num_runs, num_rows, rates, floor=None):
    """Return arms, rewards (runs, rows) and propensities (runs, rows, 2).

    Args:
        floor: of Thompson sampling with uniform priors; None allocates equally. P(first arm is better) follows every reward
            exactly: with g = B(a + c, b + d) / (B(a, b) B(c, d)) it rises by g / a with a success of the first arm.
    """
    shape = num_runs, num_rows
    arms, rewards = np.zeros(shape, int), np.zeros(shape)
    propensities = np.full((*shape, 2), 0.5)
    counts, better, rows = np.ones((num_runs, 2, 2)), np.full(num_runs, 0.5), np.arange(num_runs)
    for row in range(num_rows):
        if floor is not None:
            first = floor + (1 - 2 * floor) * np.clip(better, 0.0, 1.0)
            propensities[:, row] = np.stack([first, 1 - first], axis=1)
        arm = (rng.random(num_runs) >= propensities[:, row, 0]).astype(int)
        reward = (rng.random(num_runs) < np.asarray(rates)[arm]).astype(int)
        if floor is not None:
            (a, b), (c, d) = counts[:, 0].T, counts[:, 1].T
            change = np.exp(betaln(a + c, b + d) - betaln(a, b) - betaln(c, d)) / counts[rows, arm, 1 - reward]
            better += np.where(arm == 0, 1, -1) * np.where(reward == 1, 1, -1) * change
            counts[rows, arm, 1 - reward] += 1
        arms[:, row], rewards[:, row] = arm, reward
    return arms, rewards, propensities


def gaussian_logs(rng, num_runs, num_rows, means, scale, floor):
    """Return the same of two Gaussian arms: Thompson sampling under priors Normal(0, scale^2), noise of this scale."""
    shape = num_runs, num_rows
    arms, rewards, propensities = np.zeros(shape, int), np.zeros(shape), np.zeros((*shape, 2))
    counts, sums, rows = np.zeros((num_runs, 2)), np.zeros((num_runs, 2)), np.arange(num_runs)
    for row in range(num_rows):
        centre, variance = sums / (counts + 1), 1 / (counts + 1)
        first = floor + (1 - 2 * floor) * ndtr((centre[:, 0] - centre[:, 1]) / scale / np.sqrt(variance.sum(1)))
        arm = (rng.random(num_runs) >= first).astype(int)
        reward = np.asarray(means)[arm] + scale * rng.normal(size=num_runs)
        arms[:, row], rewards[:, row] = arm, reward
        propensities[:, row] = np.stack([first, 1 - first], axis=1)
        counts[rows, arm] += 1
        sums[rows, arm] += reward
    return arms, rewards, propensities


def log_of(run, arms, rewards, propensities):
    """Return one of these logs."""
    played = np.take_along_axis(propensities[run], arms[run][:, None], axis=1)[:, 0]
    return LoggedDecisions((0, 1), arms[run], rewards[run], played, propensities[run])
