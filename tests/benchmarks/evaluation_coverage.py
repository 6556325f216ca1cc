"""Coverage of intervals and confidence sequences after adaptive collection: python tests/benchmarks/evaluation_coverage.py.

Every figure is printed with its Monte Carlo standard error and, where one is known, the published or expected value. The
parts `gaussian`, `uniform`, `bernstein` and `contexts` (evaluation_with_contexts.py) simulate decisions in NumPy,
independently of the library; `any-selector`, `selectors` and `rejection` use the library's own simulations
(evaluation_of_selectors.py). Estimates come from `ppl_bandit.evaluation`.
"""

import argparse
import math
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import evaluation_of_selectors as with_library
import numpy as np
from evaluation_of_selectors import show
from evaluation_with_contexts import contexts_part

from ppl_bandit.evaluation import estimators
from ppl_bandit.evaluation.confidence_sequences import (
    empirical_bernstein_lower,
    normal_mixture_parameter,
)
from ppl_bandit.evaluation.estimators import Estimate
from ppl_bandit.evaluation.evaluation import evaluate_decisions

sys.path.insert(0, str(Path(__file__).parents[1] / "evaluation"))
from simulated_logs import bernoulli_logs, gaussian_logs, log_of  # noqa: E402

CHUNK = 250
PARTS = ("gaussian", "uniform", "bernstein", "any-selector", "selectors", "rejection", "contexts")


def uniform_noise_thompson(rng, num_runs, num_steps, decay, num_draws=20, num_first=5):
    """Play three arms with mean 1 and noise uniform on [-1, 1], as in the simulations of Hadad et al. (2021).

    Each arm is played five times in turn, with a recorded propensity of 1/3. Then Thompson sampling with a Normal(0, 1) prior
    and each arm's empirical variance for its noise; propensities are shares of 20 draws, with a floor of t^-decay / 3.
    """
    rows = np.arange(num_runs)
    counts, sums, squares = (np.zeros((num_runs, 3)) for _ in range(3))
    arms, rewards = np.zeros((num_runs, num_steps), int), np.zeros((num_runs, num_steps))
    propensities = np.full((num_runs, num_steps, 3), 1 / 3)
    for step in range(num_steps):
        if step < 3 * num_first:
            arm = np.full(num_runs, step % 3)
        else:
            mean = sums / counts
            noise = squares / counts - mean**2
            centre, variance = counts / (counts + noise) * mean, 1 / (counts / noise + 1)
            draws = centre[:, None] + np.sqrt(variance)[:, None] * rng.normal(size=(num_runs, num_draws, 3))
            wins = (draws.argmax(2)[..., None] == np.arange(3)).mean(1)
            probs = _with_floor(wins, (step + 1.0) ** -decay / 3)
            arm = np.minimum((rng.random(num_runs)[:, None] > probs.cumsum(1)).sum(1), 2)
            propensities[:, step] = probs
        reward = 1.0 + rng.uniform(-1, 1, num_runs)
        arms[:, step], rewards[:, step] = arm, reward
        counts[rows, arm] += 1
        sums[rows, arm] += reward
        squares[rows, arm] += reward**2
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
    return Estimate(float(rewards.mean()), float(rewards.std()) / math.sqrt(rewards.size))


def arm_scores(arms, rewards, propensities):
    """Return the doubly robust scores of every arm, with running means as outcome model."""
    num_rows, num_arms = propensities.shape
    means = estimators.running_means(arms, rewards, num_arms)
    scores = []
    for arm in range(num_arms):
        target = np.broadcast_to(np.eye(num_arms)[arm], (num_rows, num_arms))
        weights = estimators.importance_weights(target, arms, propensities[np.arange(num_rows), arms])
        scores.append(estimators.doubly_robust_scores(target, weights, means, arms, rewards))
    return scores


def intervals_of_arm(arm, scores, arms, rewards, propensities, truth, level):
    """Return {name: (covered, missed below, missed above)} of one arm."""
    own = propensities[:, arm]
    found = {"naive": covers(naive(rewards[arms == arm]), truth, level)}
    for name, allocation in (("AIPW", None), ("constant", np.sqrt(own))):
        found[name] = covers(estimators.weighted_mean(scores[arm], allocation), truth, level)
    return found


def gaussian_chunk(seed, gap, floor):
    """Return intervals of the losing arm and of the contrast, refusals, and whether the arm's sequence was ever wrong."""
    rng = np.random.default_rng(seed)
    logs = arms, rewards, propensities = gaussian_logs(rng, CHUNK, 1000, (gap, 0.0), 1.0, floor)
    results, refused, wrong = [], [], []
    for run in range(CHUNK):
        own = arms[run], rewards[run], propensities[run]
        scores = arm_scores(*own)
        found = intervals_of_arm(1, scores, *own, 0.0, 0.95)
        contrast = estimators.weighted_contrast((scores[0], scores[1]), tuple(np.sqrt(propensities[run].T)))
        found["constant, contrast"] = covers(contrast, gap, 0.95)
        first, second = (naive(rewards[run][arms[run] == arm]) for arm in (0, 1))
        plain = Estimate(first.value - second.value, math.hypot(first.standard_error, second.standard_error))
        found["naive, contrast"] = covers(plain, gap, 0.95)
        results.append(found)
        refused.append(evaluate_decisions(log_of(run, *logs), 1).is_refused)
        is_arm = arms[run] == 1
        count, total = np.cumsum(is_arm), np.cumsum(np.where(is_arm, rewards[run], 0.0))
        rho = normal_mixture_parameter(100.0, 0.05)
        bound = np.sqrt((count + rho) * (np.log1p(count / rho) + 2.0 * np.log(1.0 / 0.05)))  # normal mixture boundary
        wrong.append((np.abs(total[count > 0]) > bound[count > 0]).any())
    return results, refused, wrong


def uniform_chunk(seed):
    """Return {name: shares of the three arms that were covered, missed below, missed above} of every run."""
    arms, rewards, propensities = uniform_noise_thompson(np.random.default_rng(seed), CHUNK, 1000, 0.7)
    results = []
    for run in range(CHUNK):
        own = arms[run], rewards[run], propensities[run]
        scores = arm_scores(*own)
        found = [intervals_of_arm(arm, scores, *own, 1.0, 0.90) for arm in range(3)]
        results.append({name: np.mean([one[name] for one in found], axis=0) for name in found[0]})
    return results


def bernstein_chunk(seed):
    """A policy that plays arm 0 with .7, Bernoulli arms (.3, .5), logged by Thompson sampling with a floor of .02."""
    arms, rewards, propensities = bernoulli_logs(np.random.default_rng(seed), CHUNK, 1000, (0.3, 0.5), 0.02)
    weights = np.where(arms == 0, 0.7 / propensities[:, :, 0], 0.3 / propensities[:, :, 1])
    truth = 0.7 * 0.3 + 0.3 * 0.5
    wrong = []
    for run in range(CHUNK):
        lower = empirical_bernstein_lower(weights[run] * rewards[run], 0.025)
        upper = 1.0 - empirical_bernstein_lower(weights[run] * (1.0 - rewards[run]), 0.025)
        wrong.append(((lower > truth) | (upper < truth)).any())
    return wrong


def show_intervals(results, expected):
    for name in results[0]:
        values = np.array([row[name] for row in results])
        misses = f"one-sided misses {values[:, 1].mean():.4f}, {values[:, 2].mean():.4f}"
        show(name, values[:, 0], f"{misses}   {expected.get(name, '')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000, help="simulations of each case (%(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="processes (%(default)s)")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of %(default)s")
    arguments = parser.parse_args()
    parts, num_runs = arguments.parts.split(","), arguments.runs
    unknown = set(parts) - set(PARTS)
    if unknown:
        parser.error(f"--parts has {', '.join(sorted(unknown))}, expected some of {', '.join(PARTS)}")
    seeds = range(max(num_runs // CHUNK, 1))
    spawn = get_context("spawn")  # JAX does not survive a fork
    counter = spawn.Value("i", 0)
    with ProcessPoolExecutor(arguments.jobs, spawn, use_one_core, (counter,)) as pool:
        for gap, floor in ((0.0, 0.05), (0.5, 0.05), (0.5, 0.0)) if "gaussian" in parts else ():
            print(f"two Gaussian arms, gap {gap}, floor {floor}, T = 1,000, 95%: the losing arm, and the contrast")
            chunks = list(pool.map(gaussian_chunk, seeds, [gap] * len(seeds), [floor] * len(seeds)))
            show_intervals([row for chunk in chunks for row in chunk[0]], {})
            show("interval refused", [value for chunk in chunks for value in chunk[1]], "at least .95 without a floor")
            show("sequence ever wrong", [value for chunk in chunks for value in chunk[2]], "at most .05")
        if "uniform" in parts:
            print("three arms, uniform noise, no signal, floor t^-.7 / 3, T = 1,000, 90%, mean over arms")
            results = [row for chunk in pool.map(uniform_chunk, seeds) for row in chunk]
            show_intervals(results, {"naive": ".832", "AIPW": ".876", "constant": ".884"})
        if "bernstein" in parts:
            print("stopping at the first exclusion of the truth")
            wrong = [value for chunk in pool.map(bernstein_chunk, seeds) for value in chunk]
            show("empirical Bernstein, policy, floor .02", wrong, "at most .05")
        if "any-selector" in parts:
            with_library.any_selector_part(pool.map, num_runs)
        if "selectors" in parts:
            with_library.selector_part(pool.map, num_runs)
        if "rejection" in parts:
            with_library.rejection_part(pool.map, max(num_runs // 20, 10))
        if "contexts" in parts:
            contexts_part(pool.map, num_runs)


def use_one_core(counter):
    """Pin a worker to one core: a process of JAX takes all of them otherwise."""
    with counter.get_lock():
        number, counter.value = counter.value, counter.value + 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(number + os.getppid()) % len(cores)]})


if __name__ == "__main__":
    main()
