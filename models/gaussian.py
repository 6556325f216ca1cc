"""Measurements with unknown mean and unknown noise, different for each arm.

Use it when a reward is a number with a symmetric distribution around its mean: a yield, a score, a difference. The posterior
is exact, Normal-InverseGamma for each arm, because the prior of the mean is scaled by the noise.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    with numpyro.plate("arms", num_arms):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.0))
        mean = numpyro.sample("mean", dist.Normal(0.0, jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


truth = {"variance": jnp.array([1.0, 0.5, 1.5]), "mean": jnp.array([0.0, 0.5, 1.0])}
