"""Cost of a simulated step, in microseconds per realization and step, beside a straightforward port.

The port draws the table with `jax.random.beta` and counts successes by hand; same law, same selector. Run it alone on the
machine: `python tests/benchmarks/bench_simulation.py`. `--paper` times the paper's experiment, 5,000 realizations of 1,500
steps with M = 1,000 real draws, in float32, and `--collapsed` 5,000 realizations of 500 steps of a Gaussian hierarchy with the
collapsed engine: meant for a GPU. `--trials N` times N trials of five arms with 20 looks in this process, in one worker process
and in two.
"""

import argparse
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor

import jax
import jax.numpy as jnp
import jax.random as jr
from bench_collapsed import load

from ppl_bandit import Design, Environment, engines, operating_characteristics, selectors, stopping
from ppl_bandit.paper import runs as paper
from ppl_bandit.simulation.chunks import run_chunks, trace_chunk
from ppl_bandit.simulation.rollouts import rollout

NUM_DRAWS = 1000


def port(key, number, *, num_steps, rates):
    """The double-sampling Bernoulli bandit, written down without the library's engines and samplers."""
    select = selectors.double_sampling()

    def step(counts, inputs):
        key, number = inputs
        key_draw, key_select, key_reward = jr.split(key, 3)
        table = jr.beta(key_draw, 1.0 + counts[0], 1.0 + counts[1], (NUM_DRAWS, rates.size))
        arm = select(key_select, table, number).arm
        won = jr.bernoulli(key_reward, rates[arm]).astype(counts.dtype)
        return counts.at[0, arm].add(won).at[1, arm].add(1.0 - won), jnp.max(rates) - rates[arm]

    steps = jr.split(jr.fold_in(key, number), num_steps), jnp.arange(1, num_steps + 1)
    return jnp.sum(jax.lax.scan(step, jnp.zeros((2, rates.size)), steps)[1])


def library(setting, draws, num_steps):
    bandit = paper.SETTINGS[setting]
    is_linear = bool(bandit.weights)
    model = paper._linear(len(bandit.weights)) if is_linear else paper._bernoulli(len(bandit.rates))
    truth = (
        {
            "weights": jnp.asarray(bandit.weights),
            "variance": jnp.full(len(bandit.weights), bandit.noise**2),
        }
        if is_linear
        else {"rate": jnp.asarray(bandit.rates, float)}
    )
    world = Environment(model, truth, paper.uniform_context if is_linear else None)
    return play_function(model, engines.conjugate(model), world, num_steps, draws)


def play_function(model, engine, world, num_steps, draws=False):
    settings = {"num_steps": num_steps, "num_samples": NUM_DRAWS, "draws": draws}

    def play(key, number):
        run, _, _ = rollout(jr.fold_in(key, number), model, engine, selectors.double_sampling(), world, **settings)
        return jnp.sum(run.regret)

    return play


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--paper", action="store_true")
    parser.add_argument("--collapsed", action="store_true")
    parser.add_argument("--trials", type=int)
    arguments = parser.parse_args()
    if arguments.trials:
        time_trials(arguments.trials)
        return
    if arguments.collapsed:
        model, truth, _ = load("gaussian_hierarchy")
        engine = engines.collapsed(model, num_particles=1000)
        seconds, regret = timed(play_function(model, engine, Environment(model, truth), 500), 5000)
        print(f"{jax.devices()[0].device_kind}: 5,000 x 500 in {seconds:.1f} s, mean regret {regret:.2f}")
        return
    num_runs, num_steps = (5000, 1500) if arguments.paper else (arguments.runs, arguments.steps)
    is_double = not arguments.paper
    cases = [
        ("Bernoulli (.4, .8), law of p-hat", "bernoulli", False, num_runs),
        ("Bernoulli (.4, .8), real draws", "bernoulli", True, num_runs if arguments.paper else max(num_runs // 20, 20)),
        ("Bernoulli (.4, .7, .8), law of p-hat", "bernoulli-three", False, num_runs // 4),
        ("linear Gaussian caption, law of p-hat", "linear-caption", False, num_runs),
    ]
    print(
        f"{jax.devices()[0].device_kind}, {'float64' if is_double else 'float32'}, {num_steps} steps, M = {NUM_DRAWS}"
    )
    with jax.enable_x64(is_double):
        rates = jnp.array([0.4, 0.8])
        few = max(num_runs // 100, 8)
        reference = None
        if not arguments.paper:
            play = jax.jit(jax.vmap(lambda n: port(jr.key(0), n, num_steps=num_steps, rates=rates)))
            jax.block_until_ready(play(jnp.arange(few)))
            began = time.perf_counter()
            jax.block_until_ready(play(jnp.arange(few)))
            reference = (time.perf_counter() - began) / few / num_steps * 1e6
            print(f"{'straightforward port, jax.random.beta':<40} {reference:10.2f} us")
        for label, setting, draws, runs in cases:
            seconds, regret = timed(library(setting, draws, num_steps), runs)
            each = seconds / runs / num_steps * 1e6
            ratio = "" if reference is None or "linear" in label else f"{reference / each:8.1f}x faster"
            print(f"{label:<40} {each:10.2f} us  {seconds:8.2f} s for {runs} runs  mean regret {regret:.2f} {ratio}")


def time_trials(num_trials):
    """Print the seconds of trials, by the clock and of the processors, with compilation."""
    model = paper._bernoulli(5)
    rules = stopping.superiority(0.99), stopping.inferiority(0.01)
    design = Design(range(100, 2001, 100), selector=selectors.thompson(), allocation="looks", stopping=rules)
    context = multiprocessing.get_context("spawn")
    for num_workers in (0, 1, 2) if jax.default_backend() == "cpu" else (0,):
        pool = ProcessPoolExecutor(num_workers, context) if num_workers else None
        began, before = time.perf_counter(), os.times()
        operating_characteristics(model, design, {"null": 0.3}, num_trials=num_trials, executor=pool)
        seconds = time.perf_counter() - began
        if pool is not None:
            pool.shutdown()  # so that the seconds of its processes are known
        spent = [after - first for after, first in zip(os.times()[:4], before[:4], strict=True)]
        where = f"{num_workers} workers" if num_workers else "this process"
        print(f"{where}: {seconds:.1f} s; processor: {sum(spent[:2]):.1f} s here, {sum(spent[2:]):.1f} s of workers")


def timed(play, num_runs):
    """Return the seconds of all chunks after compilation, and the mean regret."""
    key = jr.key(0)
    function = trace_chunk(play, key, num_runs)()
    began = time.perf_counter()
    parts = list(run_chunks(function, key, num_runs))
    return time.perf_counter() - began, float(sum(part.sum() for part in parts) / num_runs)


if __name__ == "__main__":
    main()
