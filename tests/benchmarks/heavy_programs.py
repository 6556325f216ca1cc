"""Programs whose posteriors take long moves: a horseshoe regression, a stick-breaking mixture, a small network.

    python tests/benchmarks/heavy_programs.py --jobs 14

For every program: CPU time of each update, row by row, with the engine that `Bandit` chooses; then the expected rewards of
that bandit, of `laplace` and of `svi` against a long run of NumPyro's NUTS on the same rows. Every row of the table is the mean
over data sets, with its standard error.
"""

import argparse
import time
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from accuracy_table import run_parts
from numpyro.infer import MCMC, NUTS

from ppl_bandit import Bandit, RewardModel, engines

NUM_CONTEXTS = 5  # at which expected rewards are compared
CHAINS, WARMUP, DRAWS = 4, 1000, 2000  # of the reference


class Case(NamedTuple):
    """A program and the world that it plays in: reward(rng, arm, context)."""

    program: object
    num_arms: int
    num_features: int
    reward: object


def horseshoe(num_arms, num_features):
    def program(arm, context):
        overall = numpyro.sample("overall", dist.HalfCauchy(1.0))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        with numpyro.plate("arms", num_arms, dim=-2), numpyro.plate("features", num_features, dim=-1):
            local = numpyro.sample("local", dist.HalfCauchy(1.0))
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0))
        slope = weight * local * overall
        numpyro.sample("reward", dist.Normal(jnp.sum(slope[arm] * context, axis=-1), noise))

    slopes = np.array([2.0, -1.5, 1.0])  # of the first feature; all others are 0
    return Case(program, num_arms, num_features, lambda rng, arm, x: slopes[arm] * x[0] + 0.5 * rng.standard_normal())


def sticks(num_components):
    def program(arm):
        stick = numpyro.sample("stick", dist.Beta(1.0, 2.0).expand([num_components - 1]).to_event(1))
        one = jnp.ones(1)
        probs = jnp.concatenate([stick, one]) * jnp.concatenate([one, jnp.cumprod(1.0 - stick)])
        with numpyro.plate("arms", 3):
            centre = numpyro.sample("centre", dist.Normal(0.0, 2.0).expand([num_components]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        numpyro.sample("reward", dist.MixtureSameFamily(dist.Categorical(probs), dist.Normal(centre[arm], scale)))

    centres = np.array([-1.0, 0.5, 1.0])
    return Case(
        program, 3, 0, lambda rng, arm, x: centres[arm] + 2.0 * (rng.random() < 0.3) + 0.3 * rng.standard_normal()
    )


def network(num_units):
    def program(arm, context):
        first = numpyro.sample("first", dist.Normal(0.0, 1.0).expand([3, num_units]).to_event(2))
        bias = numpyro.sample("bias", dist.Normal(0.0, 1.0).expand([num_units]).to_event(1))
        with numpyro.plate("arms", 3):
            last = numpyro.sample("last", dist.Normal(0.0, 1.0).expand([num_units]).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        hidden = jnp.tanh(context @ first + bias)
        numpyro.sample("reward", dist.Normal(jnp.sum(hidden * last[arm], axis=-1), noise))

    slopes = np.array([1.0, -1.0, 0.5])
    return Case(program, 3, 3, lambda rng, arm, x: slopes[arm] * np.tanh(2.0 * x[0]) + 0.3 * rng.standard_normal())


def logistic(num_features):
    """A program that is not heavy, for comparison."""

    def program(arm, context):
        with numpyro.plate("arms", 3):
            weight = numpyro.sample("weight", dist.Normal(0.0, 1.0).expand([num_features]).to_event(1))
        numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weight[arm] * context, axis=-1)))

    return Case(program, 3, num_features, lambda rng, arm, x: float(rng.random() < 1 / (1 + np.exp(-x[0] - 0.3 * arm))))


CASES = {
    "horseshoe, 2 arms, 6 features": horseshoe(2, 6),
    "horseshoe, 3 arms, 10 features": horseshoe(3, 10),
    "stick-breaking mixture, 5 components": sticks(5),
    "network, 6 units": network(6),
    "logistic regression, 5 features": logistic(5),
}


def rows_of(case, num_rows, seed):
    rng = np.random.default_rng(seed)
    arms = rng.integers(case.num_arms, size=num_rows)
    contexts = rng.standard_normal((num_rows, case.num_features))
    rewards = [float(case.reward(rng, arm, context)) for arm, context in zip(arms, contexts, strict=True)]
    return arms, np.array(rewards), contexts if case.num_features else None


def bandit_of(case, engine=None):
    context = np.zeros(case.num_features) if case.num_features else None
    return Bandit(case.program, case.num_arms, context=context, engine=engine)


def learn_by_rows(bandit, rows):
    """CPU time of each update, and after which updates the draws were trusted."""
    arms, rewards, contexts = rows
    times, is_trusted = [], []
    for row, (arm, reward) in enumerate(zip(arms, rewards, strict=True)):
        context = {} if contexts is None else {"context": contexts[row]}
        began = time.process_time()
        bandit.update(arm=int(arm), reward=reward, **context)
        times.append(time.process_time() - began)
        is_trusted.append("NOT TRUSTED" not in bandit.explain())
    return np.array(times), np.array(is_trusted)


def reference(case, rows, seed):
    """Posterior draws of NumPyro's NUTS, (draws, ...) for each site, and the largest r-hat."""
    arms, rewards, contexts = rows

    def conditioned():
        with numpyro.handlers.condition(data={"reward": jnp.asarray(rewards)}):
            case.program(*filter(lambda given: given is not None, (jnp.asarray(arms), contexts)))

    kernel = NUTS(conditioned, target_accept_prob=0.95)
    chains = MCMC(
        kernel, num_warmup=WARMUP, num_samples=DRAWS, num_chains=CHAINS, chain_method="vectorized", progress_bar=False
    )
    chains.run(jr.key(seed))
    return chains.get_samples()


def tables_of(case, draw_table):
    """Draws of expected rewards at some contexts."""
    rng = np.random.default_rng(99)
    contexts = rng.standard_normal((NUM_CONTEXTS, case.num_features)) if case.num_features else [None]
    return [np.asarray(draw_table(context)) for context in contexts]


def errors(found, known):
    """Largest error of a mean in standard deviations, extreme ratio of standard deviations, largest error of P(best)."""

    def best(table):
        return np.bincount(table.argmax(axis=1), minlength=table.shape[1]) / len(table)

    shifts = [np.abs(a.mean(0) - b.mean(0)) / b.std(0) for a, b in zip(found, known, strict=True)]
    ratios = np.concatenate([np.log(a.std(0) / b.std(0)) for a, b in zip(found, known, strict=True)])
    gaps = [np.abs(best(a) - best(b)).max() for a, b in zip(found, known, strict=True)]
    return np.max(shifts), np.exp(ratios[np.abs(ratios).argmax()]), max(gaps)


def measure(name, seed, num_rows, others):
    """Return [(program, engine, figures)] of one data set."""
    warnings.simplefilter("ignore")
    case = CASES[name]
    rows = rows_of(case, num_rows, seed)
    model = RewardModel(case.program, case.num_arms, np.zeros(case.num_features) if case.num_features else None)
    with jax.enable_x64(True):
        draws = reference(case, rows, seed)
    known = tables_of(case, lambda context: model.expected_rewards(draws, context))
    results = [(name, "NUTS against itself", errors(*([table[half::2] for table in known] for half in (0, 1))))]
    for label in (None, *others):
        bandit = bandit_of(case, None if label is None else getattr(engines, label))
        times, is_trusted = learn_by_rows(bandit, rows)
        found = tables_of(case, lambda context, own=bandit: own.expected_rewards(context, num_samples=4000))
        line = (*errors(found, known), np.median(times), times[1:].max(), np.mean(is_trusted), is_trusted[-1], times[0])
        results.append((name, label or f"default ({bandit.explanation.engine})", line))
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", help="name of one program")
    parser.add_argument("--others", nargs="*", default=["laplace", "svi"], help="engines besides the default one")
    arguments = parser.parse_args()
    names = [arguments.only] if arguments.only else list(CASES)
    jobs = [(name, seed) for seed in range(arguments.seeds) for name in names]
    parts = [(*job, arguments.rows, tuple(arguments.others)) for job in jobs]
    found = [line for lines in run_parts(measure, parts, arguments.jobs).values() for line in lines]
    print(
        "\n| program | engine | mean | sd | P(best) | median | longest | trusted | at the end | first |\n|"
        + " --- |" * 10
    )
    for name, engine in dict.fromkeys((line[0], line[1]) for line in found):
        values = np.array([line[2] for line in found if line[:2] == (name, engine)], float)
        errors_of_means = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0 * values[0]
        cells = [f"{a:.3f} +- {b:.3f}" for a, b in zip(values.mean(0), errors_of_means, strict=True)]
        print(f"| {name} | {engine} | " + " | ".join(cells) + f" | {len(values)} sets, longest {values.max(0)[4:5]} |")


if __name__ == "__main__":
    main()
