"""Coverage of intervals and confidence sequences after adaptive collection: python tests/benchmarks/evaluation_coverage.py.

Every figure is printed with its Monte Carlo standard error and, where one is known, the published or expected value.
Decisions are simulated in NumPy, independently of the library; estimates come from `ppl_bandit.evaluation`.
"""

import argparse
import math
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from scipy.special import ndtr

from ppl_bandit.evaluation import estimators
from ppl_bandit.evaluation.confidence_sequences import (
    bernoulli_bounds,
    empirical_bernstein_lower,
    normal_mixture_boundary,
    normal_mixture_parameter,
)
from ppl_bandit.evaluation.estimators import Estimate
from ppl_bandit.evaluation.evaluate import evaluate_decisions
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions

CHUNK = 250


def gaussian_thompson(rng, num_runs, num_steps, gap, floor):
    """Play two Gaussian arms with means (gap, 0) and unit noise by Thompson sampling under Normal(0, 1) priors."""
    means, rows = np.array([gap, 0.0]), np.arange(num_runs)
    counts, sums = np.zeros((num_runs, 2)), np.zeros((num_runs, 2))
    arms, rewards = np.zeros((num_runs, num_steps), int), np.zeros((num_runs, num_steps))
    propensities = np.zeros((num_runs, num_steps, 2))
    for step in range(num_steps):
        centre, variance = sums / (counts + 1), 1 / (counts + 1)
        first = floor + (1 - 2 * floor) * ndtr((centre[:, 0] - centre[:, 1]) / np.sqrt(variance.sum(1)))
        arm = (rng.random(num_runs) >= first).astype(int)
        reward = means[arm] + rng.normal(size=num_runs)
        arms[:, step], rewards[:, step] = arm, reward
        propensities[:, step] = np.stack([first, 1 - first], axis=1)
        counts[rows, arm] += 1
        sums[rows, arm] += reward
    return arms, rewards, propensities


def uniform_noise_thompson(rng, num_runs, num_steps, decay):
    """Play three arms without signal, rewards uniform on [-1, 1], with a floor t^-decay / 3 under every propensity."""
    rows = np.arange(num_runs)
    counts, sums = np.zeros((num_runs, 3)), np.zeros((num_runs, 3))
    arms, rewards = np.zeros((num_runs, num_steps), int), np.zeros((num_runs, num_steps))
    propensities = np.zeros((num_runs, num_steps, 3))
    for step in range(num_steps):
        centre, spread = sums / (counts + 1), np.sqrt(1 / (counts + 1))
        draws = centre[:, None] + spread[:, None] * rng.normal(size=(num_runs, 200, 3))
        wins = (draws == draws.max(2, keepdims=True)).mean(1)
        floor = (step + 1.0) ** -decay / 3
        probs = _with_floor(wins, floor)
        arm = np.minimum((rng.random(num_runs)[:, None] > probs.cumsum(1)).sum(1), 2)
        reward = rng.uniform(-1, 1, num_runs)
        arms[:, step], rewards[:, step], propensities[:, step] = arm, reward, probs
        counts[rows, arm] += 1
        sums[rows, arm] += reward
    return arms, rewards, propensities


def _with_floor(probs, floor):
    """Raise every probability to at least the floor, and scale down what exceeds it."""
    excess = np.maximum(probs - floor, 0.0)
    left = 1.0 - floor * probs.shape[1]
    return floor + left * excess / excess.sum(1, keepdims=True)


def covers(estimate: Estimate, truth: float, level: float) -> np.ndarray:
    low, high = estimate.interval(level)
    return np.array([low <= truth <= high, truth < low, truth > high], float)


def naive(rewards):
    if rewards.size < 3:
        return Estimate(0.0, math.inf)
    return Estimate(float(rewards.mean()), float(rewards.std(ddof=1)) / math.sqrt(rewards.size))


def intervals_of_one_run(arms, rewards, propensities, truths, level, decay):
    """Return {name: (covered, missed below, missed above)} of the last arm, and of the contrast first minus last."""
    num_rows, num_arms = propensities.shape
    means = estimators.running_means(arms, rewards, num_arms)
    scores = []
    for arm in range(num_arms):
        target = np.broadcast_to(np.eye(num_arms)[arm], (num_rows, num_arms))
        weights = estimators.importance_weights(target, arms, propensities[np.arange(num_rows), arms])
        scores.append(estimators.doubly_robust_scores(target, weights, means, arms, rewards))
    found = {}
    last = num_arms - 1
    own = propensities[:, last]
    two_point = estimators.two_point_allocation(own, decay)
    for name, allocation in (("AIPW", None), ("constant", np.sqrt(own)), ("two-point", two_point)):
        found[name] = covers(estimators.weighted_mean(scores[last], allocation), truths[last], level)
    found["naive"] = covers(naive(rewards[arms == last]), truths[last], level)
    gap = truths[0] - truths[last]
    contrast = estimators.weighted_contrast((scores[0], scores[last]), (np.sqrt(propensities[:, 0]), np.sqrt(own)))
    found["constant, contrast"] = covers(contrast, gap, level)
    first, second = naive(rewards[arms == 0]), naive(rewards[arms == last])
    plain = Estimate(first.value - second.value, math.hypot(first.standard_error, second.standard_error))
    found["naive, contrast"] = covers(plain, gap, level)
    return found


def gaussian_chunk(seed, gap, floor):
    rng = np.random.default_rng(seed)
    arms, rewards, propensities = gaussian_thompson(rng, CHUNK, 1000, gap, floor)
    results, refused, wrong = [], [], []
    for run in range(CHUNK):
        results.append(intervals_of_one_run(arms[run], rewards[run], propensities[run], (gap, 0.0), 0.95, 0.0))
        played = propensities[run, np.arange(1000), arms[run]]
        log = LoggedDecisions((0, 1), arms[run], rewards[run], played, propensities[run])
        refused.append(evaluate_decisions(log, 1).is_refused)
        is_arm = arms[run] == 1
        count, total = np.cumsum(is_arm), np.cumsum(np.where(is_arm, rewards[run], 0.0))
        bound = normal_mixture_boundary(count, 0.05, normal_mixture_parameter(100.0, 0.05))
        wrong.append((np.abs(total[count > 0]) > bound[count > 0]).any())
    return results, refused, wrong


def uniform_chunk(seed):
    rng = np.random.default_rng(seed)
    arms, rewards, propensities = uniform_noise_thompson(rng, CHUNK, 1000, 0.7)
    return [
        intervals_of_one_run(arms[run], rewards[run], propensities[run], (0.0, 0.0, 0.0), 0.90, 0.7)
        for run in range(CHUNK)
    ]


def bernstein_chunk(seed):
    """A policy that plays arm 0 with .7, Bernoulli arms (.3, .5), logged by Thompson sampling with a floor of .02."""
    rng = np.random.default_rng(seed)
    wrong = []
    for _ in range(CHUNK):
        counts, weights, rewards = np.ones((2, 2)), np.zeros(1000), np.zeros(1000)
        for step in range(1000):
            centre = counts[:, 0] / counts.sum(1)
            variance = centre * (1 - centre) / (counts.sum(1) + 1)
            first = 0.02 + 0.96 * ndtr((centre[0] - centre[1]) / math.sqrt(variance.sum()))
            arm = int(rng.random() >= first)
            reward = float(rng.random() < (0.3, 0.5)[arm])
            counts[arm, int(1 - reward)] += 1
            weights[step] = (0.7 / first, 0.3 / (1 - first))[arm]
            rewards[step] = reward
        truth = 0.7 * 0.3 + 0.3 * 0.5
        lower = empirical_bernstein_lower(weights * rewards, 0.025)
        upper = 1.0 - empirical_bernstein_lower(weights * (1.0 - rewards), 0.025)
        wrong.append(((lower > truth) | (upper < truth)).any())
    return wrong


def bernoulli_chunk(seed):
    """Per-arm beta-binomial sequences of the losing arm of a greedy Bernoulli bandit, 3,000 decisions, all of them checked."""
    rng = np.random.default_rng(seed)
    wrong = []
    for _ in range(CHUNK):
        counts = np.zeros((2, 2))
        successes, trials = [], []
        for step in range(3000):
            centre = (counts[:, 0] + 1) / (counts.sum(1) + 2)
            arm = int(rng.random() < 0.5) if step < 20 or centre[0] == centre[1] else int(centre.argmax())
            reward = float(rng.random() < (0.3, 0.35)[arm])
            counts[arm, int(1 - reward)] += 1
            if arm == 0:
                successes.append(counts[0, 0])
                trials.append(counts[0].sum())
        found = bernoulli_bounds(np.array(successes), np.array(trials), 0.05, 250.0)
        wrong.append(((found.lower > 0.3) | (found.upper < 0.3)).any())
    return wrong


def limit_law_bias(num_runs, num_steps=1000):
    """sqrt(T) times the bias of arm 0's sample mean: half of the rows at random, then .9 for the arm that led."""
    rng = np.random.default_rng(7)
    half = num_steps // 2
    found = np.zeros(num_runs)
    for run in range(num_runs):
        arms = rng.integers(0, 2, num_steps)
        rewards = rng.normal(size=num_steps)
        leads = rewards[:half][arms[:half] == 0].mean() > rewards[:half][arms[:half] == 1].mean()
        arms[half:] = rng.random(half) >= (0.9 if leads else 0.1)
        found[run] = math.sqrt(num_steps) * rewards[arms == 0].mean()
    return found


def show(name, values, expected=""):
    values = np.asarray(values, float)
    error = values.std() / math.sqrt(values.size)
    print(f"  {name:44s} {values.mean():8.4f} +- {error:.4f}   {expected}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    seeds = range(max(arguments.runs // CHUNK, 1))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for gap, floor in ((0.0, 0.05), (0.5, 0.05), (0.5, 0.0)):
            print(
                f"two Gaussian arms, gap {gap}, floor {floor}, T = 1,000, 95%: the losing arm; covered, missed below, above"
            )
            parts = list(pool.map(gaussian_chunk, seeds, [gap] * len(seeds), [floor] * len(seeds)))
            results = [row for part in parts for row in part[0]]
            for name in results[0]:
                values = np.array([row[name] for row in results])
                show(name, values[:, 0], f"one-sided misses {values[:, 1].mean():.4f}, {values[:, 2].mean():.4f}")
            show("interval refused", [value for part in parts for value in part[1]])
            show("sequence ever wrong", [value for part in parts for value in part[2]], "at most .05")
        print("three arms, uniform noise, no signal, floor t^-.7 / 3, T = 1,000, 90%, the last arm")
        results = [row for part in pool.map(uniform_chunk, seeds) for row in part]
        expected = {"naive": ".832", "AIPW": ".876", "constant": ".884", "two-point": ".898"}
        for name in results[0]:
            values = np.array([row[name] for row in results])
            show(
                name,
                values[:, 0],
                f"{expected.get(name, '')} misses {values[:, 1].mean():.4f}, {values[:, 2].mean():.4f}",
            )
        print("stopping at the first exclusion of the truth")
        wrong = [value for part in pool.map(bernstein_chunk, seeds) for value in part]
        show("empirical Bernstein, policy, floor .02", wrong, "at most .05")
        wrong = [value for part in pool.map(bernoulli_chunk, seeds) for value in part]
        show("beta-binomial per arm, greedy, t <= 3,000", wrong, "at most .05")
    print("limit law: half at random, then .9 for the leader")
    show("sqrt(T) bias of the sample mean", limit_law_bias(arguments.runs), "-.268")


if __name__ == "__main__":
    main()
