"""Measurements with outliers: a mean and a scale per arm, and tails heavier than a Gaussian's.

Use it when a few rewards are outliers for reasons that do not depend on the arm. Heavy tails have no conjugate prior, so the
posterior is approximate.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    with numpyro.plate("arms", num_arms):
        mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    numpyro.sample("reward", dist.StudentT(4.0, mean[arm], scale[arm]))


truth = {"mean": jnp.array([0.0, 0.5, 1.0]), "scale": jnp.array([0.5, 0.5, 0.5])}
