"""A sale and its amount: most visitors buy nothing, and the others spend different sums.

Use it when many rewards are zero, the others are positive, and both parts depend on the arm. There are two outcomes: whether
there was a sale, and the amount, which counts only if there was a sale. The posterior is exact: a Beta for each conversion
rate, an InverseGamma for each mean order value.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
outcomes = ("conversion", "spend")


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        order_value = numpyro.sample("order_value", dist.InverseGamma(3.0, 60.0))
    conversion = numpyro.sample("conversion", dist.Bernoulli(rate[arm]))
    spend = dist.Exponential(1.0 / order_value[arm])
    numpyro.sample("spend", spend.mask(conversion == 1))
    numpyro.deterministic("expected_reward", rate[arm] * order_value[arm])


truth = {"rate": jnp.array([0.3, 0.2, 0.1]), "order_value": jnp.array([20.0, 40.0, 60.0])}
