"""Linear regression on a context, with unknown weights and unknown noise for each arm.

Use it when a reward is a number that depends linearly on features known before the decision. The posterior is exact,
Normal-InverseGamma for each arm. Prior, contexts and truth are those of Urteaga and Wiggins (2017): weights around 1 with
covariance variance * I, variance InverseGamma(1, 1), two features uniform on (0, 1).
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 2
num_features = 2
context = jnp.full(num_features, 0.5)


def contexts(key):
    return jax.random.uniform(key, (num_features,))


def model(arm, context):
    with numpyro.plate("arms", num_arms):
        variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
        prior = dist.Normal(jnp.ones(num_features), jnp.sqrt(variance)[:, None])
        weights = numpyro.sample("weights", prior.to_event(1))
    mean = jnp.sum(weights[arm] * context, axis=-1)
    numpyro.sample("reward", dist.Normal(mean, jnp.sqrt(variance[arm])))


truth = {"variance": jnp.array([0.04, 0.04]), "weights": jnp.array([[0.4, 0.4], [0.8, 0.8]])}
