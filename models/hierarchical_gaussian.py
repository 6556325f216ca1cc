"""Measurements with known noise on similar arms: the mean of each arm varies around a common mean.

Use it when there are many similar arms with few data each, such as shops of a chain or versions of a page: the rewards of
one arm inform about the others. The posterior is exact, one joint Gaussian of the common mean and the means of the arms.
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
