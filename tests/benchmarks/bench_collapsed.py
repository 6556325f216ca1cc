"""Milliseconds a step and error of collapsed, reweight and nuts on the same rows, at 100, 1,000 and 10,000 of them.

    python tests/benchmarks/bench_collapsed.py [--engines collapsed,reweight,nuts] [--rows 100,1000,10000] [--models ...]
    python tests/benchmarks/bench_collapsed.py --stream 1000 --engines collapsed,reweight --models hierarchical_spread

A step is an update by one row after that many; of 40 steps the median is given, and the mean, in which refreshes count. Errors
are those of the arms' expected rewards after the rows, in posterior standard deviations (mean) and relatively (sd), against a
run of collapsed with 40,000 particles, whose own accuracy the tests hold against quadrature. With --stream, all rows are learnt
one after another from the prior, compiled as one program, and the time is that of a row, refreshes included.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import engines
from ppl_bandit.commands.model_files import load_model
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Interaction

MODELS = ("hierarchical_spread", "beta_hierarchy", "ridge_regression")
NUM_DRAWS = 4000
NUM_STEPS = 40


def rows_of(file, model, num_rows, seed=0):
    key_context, key_reward = jr.split(jr.key(seed))
    arm = jr.randint(jr.key(seed + 1), (num_rows,), 0, model.num_arms)
    context = None if file.context is None else jax.vmap(file.contexts)(jr.split(key_context, num_rows))
    truth = {name: jnp.asarray(value) for name, value in file.truth.items()}
    return Interaction(arm, model.draw_reward(key_reward, truth, arm, context), context)


@functools.cache
def functions_of(name, model, room):
    """An engine and its update, compiled once for all numbers of rows where what it keeps does not grow with them."""
    engine = engines.collapsed(model) if name == "collapsed" else getattr(engines, name)(model, capacity=room)
    return engine, jax.jit(engine.update)


def stream(name, model, rows):
    """Print the milliseconds of a row when all are learnt one after another, and how often particles were refreshed."""
    num_rows = rows.arm.shape[0]
    engine = engines.collapsed(model) if name == "collapsed" else getattr(engines, name)(model, capacity=num_rows)

    def step(state, new):
        key, row = new
        state, info = engine.update(key, state, jax.tree.map(lambda leaf: leaf[None], row))
        return state, (info.num_refreshes, info.is_trusted)

    learn = jax.jit(lambda key: jax.lax.scan(step, engine.init(key), (jr.split(key, num_rows), rows))[1])
    jax.block_until_ready(learn(jr.key(0)))
    started = time.perf_counter()
    num_refreshes, is_trusted = jax.block_until_ready(learn(jr.key(1)))
    took = 1e3 * (time.perf_counter() - started) / num_rows
    print(
        f"{name:>9} {took:.2f} ms a row, {int(num_refreshes[-1])} refreshes, trusted {np.mean(is_trusted):.3f}",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", default="collapsed,reweight,nuts")
    parser.add_argument("--rows", default="100,1000,10000")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--no-errors", action="store_true")
    parser.add_argument("--stream", type=int)
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    for name in options.models.split(","):
        file = load_model(name)
        model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
        if options.stream is not None:
            for engine_name in options.engines.split(","):
                stream(engine_name, model, rows_of(file, model, options.stream))
            continue
        for num_rows in map(int, options.rows.split(",")):
            rows = rows_of(file, model, num_rows)
            more = rows_of(file, model, NUM_STEPS + 1, seed=9)
            exact = None
            if not options.no_errors:
                best = engines.collapsed(model, num_particles=40_000)
                state, _ = jax.jit(best.update)(jr.key(0), best.init(jr.key(1)), rows)
                exact = np.asarray(model.expected_rewards(best.sample(jr.key(2), state, 40_000), file.context))
            for engine_name in options.engines.split(","):
                room = None if engine_name == "collapsed" else num_rows + NUM_STEPS + 1
                engine, step = functions_of(engine_name, model, room)
                started = time.perf_counter()
                state, info = jax.block_until_ready(step(jr.key(0), jax.jit(engine.init)(jr.key(1)), rows))
                batch = time.perf_counter() - started
                table = None
                if exact is not None:
                    table = np.asarray(model.expected_rewards(engine.sample(jr.key(2), state, NUM_DRAWS), file.context))
                is_trusted = bool(info.is_trusted)
                times = []
                for i in range(NUM_STEPS + 1):
                    row = jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], more)
                    started = time.perf_counter()
                    state, info = jax.block_until_ready(step(jr.key(i), state, row))
                    times.append(1e3 * (time.perf_counter() - started))
                errors = ""
                if exact is not None:
                    sd = exact.std(axis=0)
                    mean_error = np.max(np.abs(table.mean(axis=0) - exact.mean(axis=0)) / sd)
                    sd_error = np.max(np.abs(table.std(axis=0) / sd - 1.0))
                    errors = f"mean error {mean_error:.3f} sd error {sd_error:.3f} "
                print(
                    f"{name:>20} {engine_name:>9} n={num_rows:<6} {errors}trusted {is_trusted} batch {batch:.1f} s, "
                    f"step median {np.median(times[1:]):.2f} ms, mean {np.mean(times[1:]):.2f} ms",
                    flush=True,
                )


if __name__ == "__main__":
    main()
