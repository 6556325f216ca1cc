"""Waiting times with a constant hazard: minutes until a visitor leaves, days until a part fails.

Use it when a reward is a duration, longer is better, and the hazard does not depend on the time so far. The posterior is
exact: Gamma(2 + number of waits, 2 + their sum) for the rate of each arm. The expected wait is 1 / rate. To prefer short
waits, add `numpyro.deterministic("expected_reward", -1 / rate[arm])`.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 2.0))
    numpyro.sample("reward", dist.Exponential(rate[arm]))


truth = {"rate": jnp.array([1.0, 0.7, 0.5])}
