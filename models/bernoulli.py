"""Success or failure, with one unknown rate per arm: clicks, conversions, cures.

Use it when a reward is 0 or 1 and there are no features. The posterior is exact: Beta(1 + successes, 1 + failures),
independently for each arm.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


truth = {"rate": jnp.array([0.4, 0.7, 0.8])}
