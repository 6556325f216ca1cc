"""Milliseconds a step and error of collapsed, reweight and nuts on the same rows, at 100, 1,000 and 10,000 of them.

    python tests/benchmarks/bench_collapsed.py --jobs 12 --limit 420
    python tests/benchmarks/bench_collapsed.py --stream 1000 --engines collapsed,reweight --models hierarchical_spread

A step is an update by one row after that many; of 40 steps the median is given, and the mean, in which refreshes count. Errors
are those of the arms' expected rewards after the rows, in posterior standard deviations (mean), relatively (sd), and in total
variation (p-hat, of 4,000 draws), against quadrature over the outer sites (`collapsed_references`), the worst arm's, as a mean
over --seeds with its standard error. With --stream, all rows are learnt one after another from the prior, compiled
as one program, and the time is that of a row, refreshes included. With --jobs, every model and engine is a process of its own
on one core, and those that are not done at the limit are left out.
"""

import argparse
import time

import collapsed_references
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from accuracy_table import run_parts

from ppl_bandit import engines
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.xla_options import in_order_options
from ppl_bandit.types import Interaction

MODELS = ("gaussian_hierarchy", "hierarchical_spread", "beta_hierarchy", "ridge_regression")
MEANS = (0.4, 0.7, 1.0, 1.3, 1.7)
NUM_DRAWS = 4000
NUM_STEPS = 40


def hierarchy(arm):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    common = numpyro.sample("common", dist.Normal(0.0, 2.0))
    with numpyro.plate("arms", len(MEANS)):
        mean = numpyro.sample("mean", dist.Normal(common, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


def load(name):
    """Return a model, its truth, and (key -> context) or None."""
    if name == "gaussian_hierarchy":
        truth = {"spread": jnp.array(0.5), "common": jnp.array(1.0), "mean": jnp.array(MEANS)}
        return RewardModel(hierarchy, len(MEANS)), truth, None
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    return model, file.truth, None if file.context is None else file.contexts


def rows_of(model, truth, contexts, num_rows, seed=0):
    key_context, key_reward = jr.split(jr.key(seed))
    arm = jr.randint(jr.key(seed + 1), (num_rows,), 0, model.num_arms)
    context = None if contexts is None else jax.vmap(contexts)(jr.split(key_context, num_rows))
    truth = {name: jnp.asarray(value) for name, value in truth.items()}
    return Interaction(arm, model.draw_reward(key_reward, truth, arm, context), context)


def engine_of(name, model, capacity):
    return engines.collapsed(model) if name == "collapsed" else getattr(engines, name)(model, capacity=capacity)


def stream(engine_name, model, rows, num_seeds):
    """Return the milliseconds of a row when all are learnt one after another, and how often particles were refreshed.

    As means over seeds of the engine, with their standard errors: how often particles are refreshed, and how long that takes,
    is chance.
    """
    num_rows = rows.arm.shape[0]
    engine = engine_of(engine_name, model, num_rows)

    def step(state, new):
        key, row = new
        state, info = engine.update(key, state, jax.tree.map(lambda leaf: leaf[None], row))
        return state, (getattr(info, "num_refreshes", jnp.zeros((), int)), info.is_trusted)

    # Compile as the bandit does: idle threads that look for work would distort the times.
    learn = jax.jit(
        lambda key: jax.lax.scan(step, engine.init(key), (jr.split(key, num_rows), rows))[1],
        compiler_options=in_order_options(),
    )
    jax.block_until_ready(learn(jr.key(0)))
    found = []
    for seed in range(1, num_seeds + 1):
        started, cpu = time.perf_counter(), time.process_time()
        num_refreshes, is_trusted = jax.block_until_ready(learn(jr.key(seed)))
        times = time.perf_counter() - started, time.process_time() - cpu
        found.append((*(1e3 * seconds / num_rows for seconds in times), num_refreshes[-1], np.mean(is_trusted)))
    took, cpu, refreshes, trusted = np.mean(found, axis=0)
    error = np.std(found, axis=0, ddof=1)[1] / np.sqrt(num_seeds) if num_seeds > 1 else np.nan
    return (
        f"{took:.2f} ms a row ({cpu:.2f} ± {error:.2f} of CPU), {refreshes:.1f} refreshes, trusted {trusted:.4f}, "
        f"{num_seeds} seeds"
    )


def errors_of(table, exact):
    """Return the largest error of an arm's mean and of its standard deviation, and that of p-hat."""
    sd = exact.std(axis=0)
    mean_error = np.max(np.abs(table.mean(axis=0) - exact.mean(axis=0)) / sd)
    sd_error = np.max(np.abs(table.std(axis=0) / sd - 1.0))
    shares = (np.bincount(np.argmax(t, axis=1), minlength=t.shape[1]) / len(t) for t in (table, exact))
    return mean_error, 100 * sd_error, 0.5 * np.abs(next(shares) - next(shares)).sum()


def measure(name, engine_name, num_rows, loaded, num_seeds):
    """Return a line of errors and times after rows."""
    model, truth, contexts = loaded
    rows = rows_of(model, truth, contexts, num_rows)
    more = rows_of(model, truth, contexts, NUM_STEPS + 1, seed=9)
    reference = collapsed_references.REFERENCES[name]
    exact = collapsed_references.exact_draws(reference(*(np.asarray(leaf) for leaf in rows[:3])))
    engine = engine_of(engine_name, model, num_rows + NUM_STEPS + 1)
    init, update, sample = jax.jit(engine.init), jax.jit(engine.update), jax.jit(engine.sample, static_argnums=2)
    started = time.perf_counter()
    jax.block_until_ready(update(jr.key(0), init(jr.key(1)), rows))
    batch = time.perf_counter() - started
    errors, num_trusted, times, cpus = [], 0, [], []
    for seed in range(num_seeds):
        state, info = update(jr.key(3 * seed), init(jr.key(3 * seed + 1)), rows)
        table = model.expected_rewards(sample(jr.key(3 * seed + 2), state, NUM_DRAWS), model.context)
        errors.append(errors_of(np.asarray(table), exact))
        num_trusted += bool(info.is_trusted)
    for i in range(NUM_STEPS + 1):
        row = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], more)
        started, cpu = time.perf_counter(), time.process_time()
        state, info = jax.block_until_ready(update(jr.key(i), state, row))
        times.append(1e3 * (time.perf_counter() - started))
        cpus.append(1e3 * (time.process_time() - cpu))
    mean, sd, distance = np.mean(errors, axis=0)
    spread = np.std(errors, axis=0, ddof=1) / np.sqrt(num_seeds) if num_seeds > 1 else np.full(3, np.nan)
    return (
        f"mean {mean:.3f} ± {spread[0]:.3f} sd, sd {sd:.1f} ± {spread[1]:.1f}%, p-hat {distance:.3f} ± {spread[2]:.3f}, "
        f"trusted {num_trusted} of {num_seeds}, batch with compiling {batch:.1f} s, "
        f"step median {np.median(times[1:]):.2f} ms, mean {np.mean(times[1:]):.2f}, CPU median {np.median(cpus[1:]):.2f}"
    )


def lines_of(name, engine_name, rows, stream_rows, num_seeds):
    """Return the lines of one model and engine."""
    jax.config.update("jax_enable_x64", True)
    loaded = load(name)
    if stream_rows is not None:
        said = stream(engine_name, loaded[0], rows_of(*loaded, stream_rows), num_seeds)
        return [f"{name:>20} {engine_name:>9} stream of {stream_rows}: {said}"]
    return [
        f"{name:>20} {engine_name:>9} n={num_rows:<6} {measure(name, engine_name, num_rows, loaded, num_seeds)}"
        for num_rows in rows
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", default="collapsed,reweight,nuts")
    parser.add_argument("--rows", default="100,1000,10000")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--stream", type=int)
    parser.add_argument("--seeds", type=int, default=1, help="of the engine, over which errors, or times, are averaged")
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--limit", type=float, default=420.0, help="seconds of all jobs")
    options = parser.parse_args()
    rows = tuple(map(int, options.rows.split(",")))
    cases = [(model, engine) for model in options.models.split(",") for engine in options.engines.split(",")]
    parts = [(*case, rows, options.stream, options.seeds) for case in cases]
    found = {} if options.jobs is None else run_parts(lines_of, parts, options.jobs, options.limit)
    for part in parts:
        for line in lines_of(*part) if options.jobs is None else found.get(part, ()):
            print(line, flush=True)


if __name__ == "__main__":
    main()
