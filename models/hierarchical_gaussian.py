"""Measurements with known noise, on arms that are alike: each arm's mean varies about a common one.

Use it when there are many similar arms and little data on each, so that what is learnt about one should move the others
too: shops of a chain, versions of a page. The posterior is exact, one joint Gaussian over the common mean and the arms'.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 5


def model(arm):
    common_mean = numpyro.sample("common_mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("arms", num_arms):
        mean = numpyro.sample("mean", dist.Normal(common_mean, 0.5))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


truth = {"common_mean": jnp.array(1.0), "mean": jnp.array([0.4, 0.7, 1.0, 1.3, 1.7])}
