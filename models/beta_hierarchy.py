"""Success or failure on similar arms: the conversion rates vary around an unknown mean, with an unknown concentration.

Use it when there are many similar arms with few successes each, and the rates themselves are of interest. The mean and the
concentration of the rates are learnt from the data. The posterior is exact given these two: the rates are integrated out as
Betas, and particles represent the mean and the concentration.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 5


def model(arm):
    mean_rate = numpyro.sample("mean_rate", dist.Beta(1.0, 3.0))
    concentration = numpyro.sample("concentration", dist.LogNormal(3.0, 1.0))
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(mean_rate * concentration, (1.0 - mean_rate) * concentration))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


truth = {
    "mean_rate": jnp.array(0.1),
    "concentration": jnp.array(40.0),
    "rate": jnp.array([0.06, 0.08, 0.1, 0.13, 0.17]),
}
