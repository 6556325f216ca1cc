"""Measurements with unknown noise on similar arms: the means vary around a common mean, by an unknown amount.

Use it when there are many similar arms with few data each, and neither the spread between the arms nor the noise is known:
the data determine how much the arms share. The posterior is exact given the spread and the noise: the means are integrated
out, and particles represent these two numbers.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 5


def model(arm):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    noise = numpyro.sample("noise", dist.LogNormal(0.0, 0.5))
    common_mean = numpyro.sample("common_mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("arms", num_arms):
        mean = numpyro.sample("mean", dist.Normal(common_mean, spread))
    numpyro.sample("reward", dist.Normal(mean[arm], noise))


truth = {
    "spread": jnp.array(0.5),
    "noise": jnp.array(1.0),
    "common_mean": jnp.array(1.0),
    "mean": jnp.array([0.4, 0.7, 1.0, 1.3, 1.7]),
}
