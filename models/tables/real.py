"""Numbers by arm with an unknown mean and an unknown spread: scores, differences, revenue with many zeros.

Use it for a table of any numbers. The posterior is exact, Normal-InverseGamma for each arm; the prior of a mean is worth a
ninth of a row at the mean of the table. With many rows the mean is right for outcomes that are not normal too.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 2
centre, scale = 0.0, 1.0  # mean and standard deviation of the table


def model(arm):
    with numpyro.plate("arms", num_arms):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, scale**2))
        mean = numpyro.sample("mean", dist.Normal(centre, 3.0 * jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))
