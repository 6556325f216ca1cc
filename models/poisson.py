"""Counts over a known exposure: calls an hour, sales a day, defects a metre.

Use it when a reward is a count that is proportional to a known time, area or audience, which can differ between decisions.
The posterior is exact: Gamma(2 + counts, 1 + exposures) for the rate of each arm.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
context = {"exposure": jnp.array(1.0)}


def contexts(key):
    return {"exposure": jax.random.uniform(key, minval=0.5, maxval=2.0)}


def model(arm, context):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    numpyro.sample("reward", dist.Poisson(rate[arm] * context["exposure"]))


truth = {"rate": jnp.array([1.0, 1.5, 2.0])}
