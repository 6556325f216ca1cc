"""Coverage and width of a contextual target's interval, with a right outcome model, a wrong one, and running means.

Posterior means of both programs have closed forms, so that thousands of logs are evaluated in NumPy. On a few of the same logs
the library's own path of the posterior is compared with them.
"""

import math

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from evaluation_of_selectors import show

from ppl_bandit import RewardModel, engines
from ppl_bandit.evaluation import estimators
from ppl_bandit.evaluation.evaluation import evaluate_decisions
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.posterior_path import follow_posterior

__all__ = ["contexts_part"]

NUM_ROWS, NOISE = 500, 0.5
TRUTH = math.sqrt(2 / math.pi)  # E|x|, which a policy by the sign of x earns


def linear(arm, context):
    """Two arms, linear in the context."""
    weight = numpyro.sample("weight", dist.Normal(np.zeros((2, 2)), 1.0).to_event(2))
    numpyro.sample("reward", dist.Normal((weight[arm] * context).sum(-1), NOISE))


def constant(arm, context):
    """A wrong program: it ignores the context, believes in little noise, and starts from a prior far away."""
    level = numpyro.sample("level", dist.Normal(np.full(2, 3.0), 0.1).to_event(1))
    numpyro.sample("reward", dist.Normal(level[arm] + 0.0 * context.sum(-1), 0.1))


def log_of(seed):
    """Arm 0 earns x, arm 1 earns -x; the log prefers arm 1 where the second feature is positive."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(NUM_ROWS, 2))
    first = np.where(x[:, 1] > 0, 0.25, 0.75)
    arms = (rng.random(NUM_ROWS) >= first).astype(int)
    rewards = np.where(arms == 0, x[:, 0], -x[:, 0]) + NOISE * rng.normal(size=NUM_ROWS)
    every = np.stack([first, 1 - first], axis=1)
    return LoggedDecisions((0, 1), arms, rewards, every[np.arange(NUM_ROWS), arms], every, x)


def posterior_means(logs):
    """Return {outcome model: (logs, rows, 2)}, the posterior mean of both arms before each row."""
    x, arms, rewards = (np.stack([getattr(log, name) for log in logs]) for name in ("contexts", "arm", "reward"))
    each, num_logs = np.arange(len(logs)), len(logs)
    precision, shift = np.tile(np.eye(2), (num_logs, 2, 1, 1)), np.zeros((num_logs, 2, 2))
    counts, sums = np.zeros((num_logs, 2)), np.zeros((num_logs, 2))
    found = {name: np.zeros((num_logs, NUM_ROWS, 2)) for name in ("right", "wrong", "running means")}
    for row in range(NUM_ROWS):
        own, arm, reward = x[:, row], arms[:, row], rewards[:, row]
        weight = np.linalg.solve(precision, shift[..., None])[..., 0]
        found["right"][:, row] = np.einsum("rad,rd->ra", weight, own)
        found["wrong"][:, row] = (3.0 + sums) / (1.0 + counts)
        found["running means"][:, row] = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
        precision[each, arm] += own[:, :, None] * own[:, None, :] / NOISE**2
        shift[each, arm] += own * reward[:, None] / NOISE**2
        counts[each, arm] += 1
        sums[each, arm] += reward
    return found


def contexts_chunk(seeds):
    """Return {outcome model: (runs, 2)}: the width of the interval, and whether it covered the truth."""
    logs = [log_of(seed) for seed in seeds]
    results = {}
    for name, means in posterior_means(logs).items():
        results[name] = [interval(log, own) for log, own in zip(logs, means, strict=True)]
    return {name: np.array([(high - low, low <= TRUTH <= high) for low, high in own]) for name, own in results.items()}


def interval(log, means):
    """The interval that `evaluate` reports, from the same estimators."""
    is_first = log.contexts[:, 0] > 0
    target = np.stack([is_first, ~is_first], axis=1).astype(float)
    weights = estimators.importance_weights(target, log.arm, log.propensity)
    scores = estimators.doubly_robust_scores(target, weights, means, log.arm, log.reward)
    variances = np.sum(target**2 / log.propensities, axis=1)
    return estimators.weighted_mean(scores, estimators.stabilising_weights(variances)).interval(0.95)


def library_differences(num_logs):
    """Return the largest difference of an interval's end from that of `evaluate`, in widths, by outcome model."""
    logs = [log_of(seed) for seed in range(num_logs)]
    found, own = {}, posterior_means(logs)
    for name, program in (("right", linear), ("wrong", constant)):
        model = RewardModel(program, 2, context=np.zeros(2))
        with jax.enable_x64(True):
            engine = engines.conjugate(model)
        differences = []
        for log, means in zip(logs, own[name], strict=True):
            path = follow_posterior(model, engine, log)
            result = evaluate_decisions(log, lambda context: [context[0] > 0, context[0] <= 0], means=path.means)
            low, high = interval(log, means)
            differences.append(np.abs(np.subtract(result.interval, (low, high))).max() / (high - low))
        found[name] = max(differences)
    return found


def contexts_part(map_chunks, num_runs, chunk=500, num_compared=3):
    """Print widths and coverages, and how far the library's own intervals are from those in closed form."""
    print(f"a policy by the sign of the context, {NUM_ROWS} rows, 95%")
    seeds = [range(start, min(start + chunk, num_runs)) for start in range(0, num_runs, chunk)]
    chunks = list(map_chunks(contexts_chunk, seeds))
    results = {name: np.concatenate([own[name] for own in chunks]) for name in chunks[0]}
    base = results["running means"][:, 0].mean()
    for name, rows in results.items():
        show(f"{name}: width, relative to running means", rows[:, 0] / base, "right: at most .8")
        show(f"{name}: covered", rows[:, 1], "at least .94")
    for name, difference in library_differences(num_compared).items():
        print(
            f"  {name}: largest difference of `evaluate` on {num_compared} logs {difference:.4f} of the width",
            flush=True,
        )
