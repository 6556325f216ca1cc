"""Regret, and coverage of the intervals of `evaluate`, if the posterior behind decisions is a second old, and if it is not.

    python tests/benchmarks/bench_delay.py --runs 400

Each decision is drawn with the probability that its arm is the best at a posterior that is renewed once a second, and that
probability is recorded. Two Bernoulli arms, a floor of .05, rewards at once.
"""

import argparse

import numpy as np
import pandas as pd
from scipy.stats import norm

from ppl_bandit import evaluate

RATES = np.array([0.30, 0.40])
FLOOR = 0.05


def play(num_runs, num_steps, num_blind, seed):
    """Return arms, rewards and propensities, (R, T); the posterior is renewed before every `num_blind`-th decision."""
    rng = np.random.default_rng(seed)
    wins, losses = np.ones((num_runs, 2)), np.ones((num_runs, 2))
    arms, rewards, propensities = (np.zeros((num_runs, num_steps)) for _ in range(3))
    for start in range(0, num_steps, num_blind):
        total = wins + losses
        mean, variance = wins / total, wins * losses / total**2 / (total + 1)
        prob = norm.cdf((mean[:, 1] - mean[:, 0]) / np.sqrt(variance.sum(1)))
        prob = np.clip(prob, FLOOR, 1 - FLOOR)[:, None]
        shape = num_runs, min(num_blind, num_steps - start)
        arm = (rng.random(shape) < prob).astype(int)
        reward = (rng.random(shape) < RATES[arm]).astype(float)
        for one in range(2):
            wins[:, one] += (reward * (arm == one)).sum(1)
            losses[:, one] += ((1 - reward) * (arm == one)).sum(1)
        here = slice(start, start + shape[1])
        arms[:, here], rewards[:, here], propensities[:, here] = arm, reward, np.where(arm == 1, prob, 1 - prob)
    return arms.astype(int), rewards, propensities


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    for name, num_blind in (
        ("none", 1),
        ("1 s, 10 decisions/s", 10),
        ("1 s, 100 decisions/s", 100),
        ("1 s, 500/s", 500),
    ):
        arms, rewards, propensities = play(given.runs, given.steps, num_blind, seed=7)
        regret = (RATES.max() - RATES[arms]).sum(1)
        covers = np.zeros((given.runs, 2))
        for run in range(given.runs):
            frame = pd.DataFrame({"arm": arms[run], "reward": rewards[run], "propensity": propensities[run]})
            frame["decision"] = [f"d{step}" for step in range(given.steps)]
            for arm in range(2):
                low, high = evaluate(frame, arm).interval
                covers[run, arm] = low <= RATES[arm] <= high
        share = covers.mean(0)
        error = np.sqrt(share * (1 - share) / given.runs)
        print(
            f"{name}: regret {regret.mean():.1f} +- {regret.std() / given.runs**0.5:.1f}; coverage of the worse arm "
            f"{share[0]:.3f} +- {error[0]:.3f}, of the better {share[1]:.3f} +- {error[1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
