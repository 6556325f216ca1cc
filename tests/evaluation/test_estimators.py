"""Estimators agree with their formulas written as loops, and intervals cover after adaptive collection."""

import math

import numpy as np
import pytest
from scipy.special import ndtr

from ppl_bandit.evaluation import estimators
from ppl_bandit.evaluation.estimators import Estimate

RNG = np.random.default_rng(0)
T, A = 40, 3
PROPENSITIES = RNG.dirichlet(np.ones(A), T)
ARMS = np.array([RNG.choice(A, p=row) for row in PROPENSITIES])
REWARDS = RNG.normal(size=T)
TARGET = RNG.dirichlet(np.ones(A), T)
MEANS = RNG.normal(size=(T, A))
PLAYED = PROPENSITIES[np.arange(T), ARMS]
WEIGHTS = estimators.importance_weights(TARGET, ARMS, PLAYED)


def score(t, weight):
    return sum(TARGET[t, a] * MEANS[t, a] for a in range(A)) + weight * (REWARDS[t] - MEANS[t, ARMS[t]])


def test_estimators_agree_with_loops_to_1e_10():
    weights = [TARGET[t, ARMS[t]] / PROPENSITIES[t, ARMS[t]] for t in range(T)]
    ips = sum(w * y for w, y in zip(weights, REWARDS, strict=True)) / T
    snips = sum(w * y for w, y in zip(weights, REWARDS, strict=True)) / sum(weights)
    dr = sum(score(t, weights[t]) for t in range(T)) / T
    scores = estimators.doubly_robust_scores(TARGET, WEIGHTS, MEANS, ARMS, REWARDS)
    found = (
        estimators.weighted_mean(WEIGHTS * REWARDS).value,
        estimators.weighted_mean(REWARDS, WEIGHTS).value,
        estimators.weighted_mean(scores).value,
    )
    assert found == pytest.approx((ips, snips, dr), abs=1e-10)


@pytest.mark.parametrize("unit", [1.0, 1e-3, 1e6])
@pytest.mark.parametrize("shift", [0.0, 1e3])
def test_effective_events_count_rare_rewards_in_any_unit(unit, shift):
    rewards = np.zeros(1000)
    rewards[::100] = 1.0  # ten events, the first in row 0
    found = estimators.effective_events(np.ones(1000), unit * (rewards + shift))
    # n p (1 - p) / (1 - 2 p)^2
    assert found[-1] == pytest.approx(1000 * 0.01 * 0.99 / 0.98**2, rel=1e-6)
    assert found[0] == 0.0 and found[450] == pytest.approx(5 * (446 / 451) / (441 / 451) ** 2, rel=1e-4)
    opposite = estimators.effective_events(np.ones(1000), unit * (1.0 - rewards + shift))
    np.testing.assert_allclose(opposite[1:], found[1:], rtol=1e-4)
    assert estimators.effective_events(np.ones(50), np.full(50, unit * 0.1 + shift))[-1] == 0.0
    assert estimators.effective_events(np.ones(600), unit * RNG.normal(size=600))[-1] > 400


def test_weighted_means_and_contrasts_have_the_variance_of_the_design():
    h0, h1 = RNG.random(T), RNG.random(T)
    g0, g1 = RNG.normal(size=T), RNG.normal(size=T)
    q0, q1 = sum(h0 * g0) / sum(h0), sum(h1 * g1) / sum(h1)
    one = math.sqrt(sum((h0 * (g0 - q0)) ** 2)) / sum(h0)
    both = math.sqrt(sum((h1 * (g1 - q1) / sum(h1) - h0 * (g0 - q0) / sum(h0)) ** 2))
    assert estimators.weighted_mean(g0, h0) == pytest.approx(Estimate(q0, one))
    assert estimators.weighted_contrast((g1, g0), (h1, h0)) == pytest.approx(Estimate(q1 - q0, both))


def test_running_means_know_earlier_rows_only():
    found = estimators.running_means(ARMS, REWARDS, A)
    for t in range(T):
        for a in range(A):
            earlier = REWARDS[:t][ARMS[:t] == a]
            unseen = REWARDS[:t].mean() if t else 0.0
            assert found[t, a] == pytest.approx(earlier.mean() if earlier.size else unseen)


def test_stabilising_weights_use_earlier_rows_only():
    variances = RNG.random(T) + 1
    before = estimators.stabilising_weights(variances)
    changed = variances.copy()
    changed[20:] *= 100
    assert (estimators.stabilising_weights(changed)[:21] == before[:21]).all()


def test_weights_without_propensity_are_zero_or_infinite():
    found = estimators.importance_weights(np.array([[0.0, 1.0], [0.5, 0.5]]), np.array([0, 0]), np.zeros(2))
    assert found.tolist() == [0.0, math.inf]
    assert estimators.effective_sample_size(found) == 0.0


def test_intervals_cover_after_thompson_sampling_with_a_floor():
    # Two Gaussian arms without a gap, floor .05, 300 decisions, 400 runs: coverage .95 +- 3 sqrt(.95 .05 / 400) = .033.
    rng, covered = np.random.default_rng(3), 0
    for _ in range(400):
        counts, sums = np.zeros(2), np.zeros(2)
        arms, rewards, first = np.zeros(300, int), rng.normal(size=300), np.zeros(300)
        for t in range(300):
            centre = sums / (counts + 1)
            first[t] = 0.05 + 0.9 * ndtr((centre[0] - centre[1]) / math.sqrt((1 / (counts + 1)).sum()))
            arms[t] = rng.random() >= first[t]
            counts[arms[t]] += 1
            sums[arms[t]] += rewards[t]
        target = np.broadcast_to([1.0, 0.0], (300, 2))
        weights = estimators.importance_weights(target, arms, np.where(arms == 0, first, 1 - first))
        means = estimators.running_means(arms, rewards, 2)
        scores = estimators.doubly_robust_scores(target, weights, means, arms, rewards)
        low, high = estimators.weighted_mean(scores, np.sqrt(first)).interval(0.95)
        covered += low <= 0.0 <= high
    assert abs(covered / 400 - 0.95) < 0.033


def test_weights_do_not_depend_on_which_arm_another_system_showed():
    target = np.tile([1.0, 0.0, 0.0], (3, 1))
    decided, nan = [0.5, 0.25, 0.25], np.nan
    found = [
        estimators.policy_variances(target, np.array([decided, shown, decided]))
        for shown in ([0.1, nan, nan], [nan, 0.6, nan], [nan, nan, 0.3])
    ]
    np.testing.assert_array_equal(found, [[2.0, 2.0, 2.0]] * 3)
