"""Intervals match published values, and sequences cover at all times at once."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from ppl_bandit.evaluation import confidence_sequences as sequences


@pytest.mark.parametrize(
    ("successes", "trials", "optimal", "expected"),
    [
        (700, 1000, 100, (0.651629, 0.745949)),
        (15, 50, 50, (0.129556, 0.511896)),
        (5, 50, 50, (0.013021, 0.269264)),
        (1, 50, 50, (0.0, 0.13489)),
        (1, 2, 50, (0.0, 1.0)),
        (0, 1, 50, (0.0, 1.0)),
        (100, 200, 1, (0.328923, 0.671076)),
    ],
)
def test_bernoulli_intervals_match_published_values(successes, trials, optimal, expected):
    found = sequences.bernoulli_bounds(np.array([successes]), np.array([trials]), 0.05, optimal)
    assert (found.lower[0], found.upper[0]) == pytest.approx(expected, abs=1e-5)


def test_without_a_trial_nothing_is_excluded():
    found = sequences.bernoulli_bounds(np.zeros(1), np.zeros(1), 0.05, 10.0)
    assert (found.lower[0], found.upper[0]) == (0.0, 1.0)


def test_the_beta_binomial_mixture_is_the_integral_that_defines_it():
    below, above, rho, total, time = 0.3, 0.7, 5.0, 2.0, 8.0
    width, prior = below + above, rho - below * above

    def integrand(q):
        # q = below e^(above l) / (below e^(above l) + above e^(-below l)) solved for l.
        rate = math.log(q * above / ((1 - q) * below)) / width
        psi = math.log((below * math.exp(above * rate) + above * math.exp(-below * rate)) / width) / (below * above)
        return math.exp(rate * total - time * psi) * stats.beta.pdf(q, prior / (above * width), prior / (below * width))

    expected = math.log(integrate.quad(integrand, 0.0, 1.0, epsabs=1e-12)[0])
    assert sequences.beta_binomial_log_mixture(total, time, rho, below, above) == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("num_runs", [100, pytest.param(400, marks=pytest.mark.slow)])
def test_per_arm_sequences_are_wrong_in_at_most_five_percent_of_runs(num_runs):
    # Runs of 500 trials; three standard errors above .05.
    rng = np.random.default_rng(0)
    trials = np.arange(1, 501)
    wrong = 0
    for _ in range(num_runs):
        sums = np.cumsum(rng.random(500) < 0.2)
        found = sequences.bernoulli_bounds(sums, trials, 0.05, 100.0)
        wrong += ((found.lower > 0.2) | (found.upper < 0.2)).any()
    assert wrong / num_runs < 0.05 + 3 * np.sqrt(0.05 * 0.95 / num_runs)


def test_empirical_bernstein_holds_for_heavy_importance_weights_at_all_times():
    # Weights up to 25, mean 1; 400 runs, bound as above for a one-sided error of .05.
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(400):
        weights = np.where(rng.random(800) < 0.04, 25.0, 0.0)
        rewards = rng.random(800) < 0.3
        wrong += (sequences.empirical_bernstein_lower(weights * rewards, 0.05) > 0.3).any()
    assert wrong / 400 < 0.083


def test_empirical_bernstein_refuses_negative_scores_and_takes_none():
    with pytest.raises(ValueError, match="nonnegative"):
        sequences.empirical_bernstein_lower(np.array([0.1, -0.2]), 0.05)
    assert sequences.empirical_bernstein_lower(np.zeros(0), 0.05).size == 0


def test_the_asymptotic_margin_tends_to_the_published_formula():
    t, variance, alpha, optimal = 1e7, 2.0, 0.05, 100.0
    # r^2 t_opt = -W_{-1}(-alpha^2 / e) - 1 solves x - log(1 + x) = log(1 / alpha^2) for x = r^2 t_opt.
    low, high = 1e-6, 100.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if middle - math.log1p(middle) < -2 * math.log(alpha) else (low, middle)
    square = low / optimal
    expected = math.sqrt(
        2 * variance * (t * square + 1) / (t**2 * square) * math.log(math.sqrt(t * square + 1) / alpha)
    )
    found = sequences.asymptotic_margin(np.array([t]), np.array([variance]), alpha, optimal)[0]
    assert found == pytest.approx(expected, rel=1e-5)


def test_the_asymptotic_sequence_is_that_of_the_t_statistics_bayes_factor():
    """At its bounds the Bayes factor, by quadrature over the effect, is 1 / alpha; the first samples have no bounds."""
    n, alpha, optimal = 30, 0.05, 100.0
    margin = sequences.asymptotic_margin(np.array([2.0, n]), np.ones(2), alpha, optimal)
    assert math.isinf(margin[0])
    low, high = 1e-6, 100.0
    for _ in range(200):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if middle - math.log1p(middle) < -2 * math.log(alpha) else (low, middle)
    t = math.sqrt(n - 1) * margin[1]  # of a mean that is this margin away, with sum (x - mean)^2 / n = 1

    def weighted(effect):
        return stats.nct.pdf(t, n - 1, math.sqrt(n) * effect) * stats.norm.pdf(effect, scale=math.sqrt(low / optimal))

    factor = integrate.quad(weighted, -4.0, 4.0, epsabs=1e-12, limit=200)[0] / stats.t.pdf(t, n - 1)
    assert factor == pytest.approx(1 / alpha, rel=1e-5)


@pytest.mark.parametrize("num_runs", [1000])
def test_the_asymptotic_sequence_holds_for_gaussian_scores_from_the_first_on(num_runs):
    # 1,000 runs of 1,000 scores: at most .05, and three standard errors, are ever wrong.
    scores = np.random.default_rng(0).normal(size=(num_runs, 1000))
    times = np.arange(1, 1001)
    mean = np.cumsum(scores, axis=1) / times
    variance = np.cumsum(scores**2, axis=1) / times - mean**2
    margin = np.stack([sequences.asymptotic_margin(times, np.maximum(own, 0.0), 0.05, 1000.0) for own in variance])
    assert (np.abs(mean) > margin).any(axis=1).mean() < 0.05 + 3 * np.sqrt(0.05 * 0.95 / num_runs)
