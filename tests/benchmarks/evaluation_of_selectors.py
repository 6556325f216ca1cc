"""Evaluation with the library's own selectors, engines and simulations: the parts of evaluation_coverage.py that use them."""

import functools
import math

import jax
import numpy as np

from ppl_bandit import Environment, RewardModel, engines, selectors, simulate
from ppl_bandit.evaluation.confidence_sequences import OPTIMAL_PLAYS, excludes_mean
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.rejection import accepted_rows
from ppl_bandit.paper.settings import bernoulli_program

__all__ = ["any_selector_part", "rejection_part", "selector_part", "show"]

RATES = np.array([0.3, 0.35])
NUM_STEPS = 10_000
HORIZONS = (100, 400)


def show(name, values, expected=""):
    """Print a mean with its standard error."""
    values = np.asarray(values, float)
    error = values.std() / math.sqrt(values.size)
    print(f"  {name:52s} {values.mean():8.4f} +- {error:.4f} ({values.size})  {expected}", flush=True)


@functools.cache
def built():
    """Return the model, its engine and its world; built once in every process."""
    model = RewardModel(bernoulli_program(2), 2)
    with jax.enable_x64(True):
        return model, engines.conjugate(model), Environment(model, {"rate": RATES})


def all_selectors():
    """Return every selector of the library, by name."""
    thompson = selectors.thompson()
    listed = (
        thompson,
        selectors.double_sampling(),
        selectors.greedy(),
        selectors.top_two(),
        selectors.bayes_ucb(),
        selectors.information_directed(),
        selectors.optimistic_gittins(NUM_STEPS),
        selectors.with_floor(thompson, 0.05),
        selectors.with_control(thompson, 0.2),
        selectors.with_limits(thompson, floors=0.3, decay=0.5),
    )
    return {selector.name: selector for selector in listed}


def selector_part(map_chunks, num_runs, chunk=125):
    """Per-arm beta-binomial sequences under the library's selectors: was one arm's ever wrong, at any decision?"""
    print(f"beta-binomial sequence of each arm, ever wrong in {NUM_STEPS:,} decisions")
    names, num_chunks = list(all_selectors()), -(-num_runs // chunk)
    tasks = [(name, seed, min(chunk, num_runs)) for name in names for seed in range(num_chunks)]
    found = iter(map_chunks(selector_chunk, *zip(*tasks, strict=True)))
    for name in names:
        wrong = np.concatenate([next(found) for _ in range(num_chunks)], axis=1)
        for arm in (0, 1):
            show(f"{name}, arm {arm} with rate {RATES[arm]}", wrong[arm], "at most .05")


def selector_chunk(name, seed, num_runs):
    """Return (2, runs): was the sequence of each arm ever wrong?"""
    model, engine, environment = built()
    runs = simulate(
        seed,
        model,
        engine,
        all_selectors()[name],
        environment,
        num_steps=NUM_STEPS,
        num_realizations=num_runs,
        num_samples=100,
    )
    arms, rewards = runs["arm"].values, runs["reward"].values.astype(float)
    return np.stack([is_ever_wrong(arms == arm, rewards, RATES[arm]) for arm in (0, 1)])


def is_ever_wrong(is_played, rewards, rate, alpha=0.05):
    """Return, for each run, whether the interval excluded the rate after any play: its mixture exceeds 1 / alpha there."""
    trials, sums = np.cumsum(is_played, axis=1), np.cumsum(np.where(is_played, rewards, 0.0), axis=1)
    return excludes_mean(rate, sums, trials, alpha, OPTIMAL_PLAYS).any(axis=1)


def any_selector_part(map_chunks, num_runs, chunk=250):
    """Bound the share of wrong sequences for all selectors at once.

    The k-th reward of an arm has the same distribution whenever it is played. So the rewards that a selector sees of an arm are
    the beginning of one independent series, and a sequence is ever wrong only if it is wrong after some number of plays of that
    series.
    """
    print(
        f"beta-binomial sequence of an arm, ever wrong after any number of plays up to {NUM_STEPS:,}, whatever the selector"
    )
    num_chunks = -(-num_runs // chunk)
    for rate in (*RATES, 0.02, 0.5):
        tasks = ([rate] * num_chunks, range(num_chunks), [min(chunk, num_runs)] * num_chunks)
        show(f"arm with rate {rate}", np.concatenate(list(map_chunks(any_selector_chunk, *tasks))), "at most .05")


def any_selector_chunk(rate, seed, num_runs):
    """Return, for each run, whether the sequence is wrong after any number of plays."""
    rewards = (np.random.default_rng((seed, int(1000 * rate))).random((num_runs, NUM_STEPS)) < rate).astype(float)
    return is_ever_wrong(np.ones_like(rewards, bool), rewards, rate)


def rejection_part(map_chunks, num_logs, num_rows=1200, chunk=25):
    """Compare the decisions that Thompson sampling accepts from uniform logs with simulated runs of the same length.

    The mean true rate of the decisions is compared: it has the mean of the rewards without their noise.
    """
    print(
        f"rejection sampling: Thompson sampling from uniform logs of {num_rows} rows, relative error of what it earns"
    )
    model, engine, environment = built()
    runs = simulate(
        0,
        model,
        engine,
        selectors.thompson(),
        environment,
        num_steps=num_rows,
        num_realizations=2000,
        num_samples=400,
    )
    earned = RATES.max() - np.cumsum(runs["regret"].values, axis=1, dtype=float) / np.arange(1, num_rows + 1)
    expected, spread = earned.mean(axis=0), earned.std(axis=0) / math.sqrt(len(earned))
    seeds = [range(start, min(start + chunk, num_logs)) for start in range(0, num_logs, chunk)]
    paths = [path for paths in map_chunks(rejection_chunk, seeds, [num_rows] * len(seeds)) for path in paths]
    lengths = np.array([rates.size for rates, _ in paths])
    print(f"  accepted decisions: {lengths.min()} to {lengths.max()}, mean {lengths.mean():.0f}")
    for horizon in HORIZONS:
        first = np.array([rates[:horizon].mean() for rates, _ in paths if rates.size >= horizon])
        reference = f"at most .02; the simulations' own error {spread[horizon - 1] / expected[horizon - 1]:.4f}"
        show(f"the first {horizon} decisions", first / expected[horizon - 1] - 1.0, reference)
    at_end = np.array([rates.mean() / expected[rates.size - 1] - 1.0 for rates, _ in paths])
    show("all accepted decisions", at_end, "at most .02")
    show("all accepted decisions, rewards", [reward / expected[rates.size - 1] - 1.0 for rates, reward in paths])


def rejection_chunk(seeds, num_rows):
    """Return, for each log, the true rates of the accepted decisions and the mean of their rewards."""
    model, engine, _ = built()
    thompson, found = selectors.thompson(), []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        arms = rng.integers(0, 2, num_rows)
        rewards = (rng.random(num_rows) < RATES[arms]).astype(float)
        log = LoggedDecisions((0, 1), arms, rewards, np.full(num_rows, 0.5), np.full((num_rows, 2), 0.5))
        rows = accepted_rows(model, engine, thompson, log, seed=seed)
        found.append((RATES[arms[rows]], rewards[rows].mean()))
    return found
