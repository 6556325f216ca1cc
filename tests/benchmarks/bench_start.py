"""Measure a start: from the build of a bandit to the return of its first update, beside `MCMC.run` on the same program.

Fresh processes take turns: `MCMC.run` (200 rows, 500 + 500 steps, one chain), a bandit in a first process with empty caches,
and a bandit in the next process. Printed are CPU seconds and seconds, without the imports of jax and NumPyro. Their ratios hold
on a machine with other work, the seconds do not.

Usage: python tests/benchmarks/bench_start.py [--cases logistic] [--turns 3] [--against FOLDER_OF_ANOTHER_VERSION]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

NUM_ARMS, NUM_FEATURES, NUM_ROWS = 3, 5, 200


def bernoulli(arm, context=None, reward=None):
    with numpyro.plate("arms", NUM_ARMS):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]), obs=reward)


def linear(arm, context, reward=None):
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    scale = 1.0 / jnp.sqrt(precision)
    with numpyro.plate("arms", NUM_ARMS):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(NUM_FEATURES), scale).to_event(1))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, -1), scale), obs=reward)


def logistic(arm, context, reward=None):
    with numpyro.plate("arms", NUM_ARMS):
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(NUM_FEATURES), 1.0).to_event(1))
    numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, -1)), obs=reward)


PROGRAMS = {"bernoulli": bernoulli, "linear": linear, "logistic": logistic}


def run_mcmc(name):
    rng = np.random.default_rng(0)
    arm = rng.integers(0, NUM_ARMS, NUM_ROWS)
    context = rng.normal(size=(NUM_ROWS, NUM_FEATURES))
    reward = rng.integers(0, 2, NUM_ROWS).astype(float)
    mcmc = numpyro.infer.MCMC(numpyro.infer.NUTS(PROGRAMS[name]), num_warmup=500, num_samples=500, progress_bar=False)
    mcmc.run(jax.random.key(0), arm, context, reward)
    jax.block_until_ready(mcmc.get_samples())


def run_bandit(name):
    from ppl_bandit import Bandit

    full = PROGRAMS[name]
    context = None if name == "bernoulli" else np.full(NUM_FEATURES, 0.5)

    def without_context(arm):
        full(arm)

    def with_context(arm, context):
        full(arm, context)

    bandit = Bandit(without_context if context is None else with_context, NUM_ARMS, context=context)
    decision = bandit.select(*() if context is None else (context,))
    bandit.update(decision, 1.0)


def measure(folder, what, name, cache):
    """Return CPU seconds and seconds of one process."""
    # An installed package has bytecode; a first process that wrote none would compile this library's source each time.
    unset = "XLA_FLAGS", "PPL_BANDIT_CACHE", "PYTHONDONTWRITEBYTECODE"
    environment = {key: value for key, value in os.environ.items() if key not in unset}
    environment |= {"PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": cache}
    if what == "mcmc":
        environment |= {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, __file__, "--worker", what, "--cases", name]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return tuple(map(float, ended.stdout.split()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against")
    parser.add_argument("--worker")
    given = parser.parse_args()
    if given.worker is not None:
        numpyro.infer.MCMC  # noqa: B018
        wall, cpu = time.perf_counter(), time.process_time()
        (run_mcmc if given.worker == "mcmc" else run_bandit)(given.cases[0])
        print(time.process_time() - cpu, time.perf_counter() - wall, flush=True)
        return
    folders = {"this": Path(__file__).parents[2], **({"other": Path(given.against)} if given.against else {})}
    for name in given.cases:
        found = {}
        for _ in range(given.turns):
            found.setdefault("MCMC.run", []).append(measure(folders["this"], "mcmc", name, ""))
            for version, folder in folders.items():
                with tempfile.TemporaryDirectory() as cache:
                    for process in ("first", "next"):
                        own = measure(folder, "bandit", name, cache)
                        found.setdefault(f"{version}, {process} process", []).append(own)
        reference = [statistics.median(own) for own in zip(*found["MCMC.run"], strict=True)]
        for label, rows in found.items():
            cpu, wall = (statistics.median(own) for own in zip(*rows, strict=True))
            print(
                f"{name:<10} {label:<22} {cpu:6.1f} s of CPU (x {cpu / reference[0]:.2f}), {wall:6.1f} s "
                f"(x {wall / reference[1]:.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
