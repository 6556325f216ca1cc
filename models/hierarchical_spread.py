"""Measurements on arms that are alike, by how much is unknown, and with unknown noise: means of arms about a common one.

Use it when there are many similar arms and little data on each, and neither how much arms differ nor how noisy a reward is can
be said beforehand: the data decide how much one arm says about another. The posterior is exact given the spread and the noise:
the means are integrated out, and particles hold these two numbers alone.
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
