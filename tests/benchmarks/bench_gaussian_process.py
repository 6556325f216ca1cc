"""CPU time of a decision and an update of a Gaussian process over arms: one live bandit, median and least of 40 steps.

    taskset -c 1 python tests/benchmarks/bench_gaussian_process.py 10 20 50

The least of the steps hardly depends on other work on the machine; refreshes of the particles are the longest ones.
"""

import sys
import time

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Bandit, engines

NUM_STEPS = 40


def curve_of(num_arms):
    """Return `models/price_curve.py` with another number of arms."""

    def model(arm):
        length_scale = numpyro.sample("length_scale", dist.LogNormal(-1.0, 0.5))
        amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
        position = jnp.linspace(0.0, 1.0, num_arms)
        distance = (position[:, None] - position) / length_scale
        covariance = amplitude**2 * (jnp.exp(-0.5 * distance**2) + 1e-6 * jnp.eye(num_arms))
        curve = numpyro.sample("curve", dist.MultivariateNormal(0.0, covariance))
        numpyro.sample("reward", dist.Normal(curve[arm], 0.3))

    return model


def cpu_times(num_arms):
    """Return the milliseconds of decisions and updates, (steps, 2), without the first, which compiles."""
    bandit = Bandit(curve_of(num_arms), num_arms, engine=engines.collapsed, seed=1)
    truth, rng = np.sin(4.0 * np.linspace(0.0, 1.0, num_arms)), np.random.default_rng(0)
    times = []
    for _ in range(NUM_STEPS + 1):
        started = time.process_time()
        decision = bandit.select()
        decided = time.process_time()
        bandit.update(decision, float(truth[decision.arm] + 0.3 * rng.standard_normal()))
        times.append((decided - started, time.process_time() - decided))
    return 1e3 * np.array(times[1:])


if __name__ == "__main__":
    for num_arms in map(int, sys.argv[1:]):
        times = cpu_times(num_arms)
        for name, own in zip(("decision", "update", "both"), (*times.T, times.sum(axis=1)), strict=True):
            print(
                f"{num_arms} arms, {name}: median {np.median(own):.1f} ms, least {own.min():.1f}, longest {own.max():.0f}"
            )
