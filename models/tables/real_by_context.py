"""Numbers that depend linearly on columns known before, by arm: spend given the customer, yield given the field.

Use it for a table of any numbers. The posterior is exact: for each arm a linear regression on the standardised columns with
unknown noise, Normal-InverseGamma.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 2
columns = {"age": [40.0, 12.0]}  # centre and scale of each column
centre, scale = 0.0, 1.0  # mean and standard deviation of the outcome
context = {name: jnp.array(middle) for name, (middle, _) in columns.items()}


def model(arm, context):
    standardised = [(context[name] - middle) / width for name, (middle, width) in columns.items()]
    features = jnp.stack([jnp.ones_like(standardised[0]), *standardised], axis=-1)
    prior_mean = jnp.zeros(features.shape[-1]).at[0].set(centre)
    with numpyro.plate("arms", num_arms):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, scale**2))
        prior = dist.Normal(prior_mean, 3.0 * jnp.sqrt(variance)[:, None])
        weights = numpyro.sample("weights", prior.to_event(1))
    mean = jnp.sum(weights[arm] * features, axis=-1)
    numpyro.sample("reward", dist.Normal(mean, jnp.sqrt(variance[arm])))
