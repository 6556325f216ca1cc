"""Success or failure that depends on features: a click, given the visitor.

Use it when a reward is 0 or 1 and features are known before the decision. Logistic regression has no conjugate prior, so the
posterior is approximate.
"""

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
num_features = 3
context = jnp.array([1.0, 0.0, 0.0])


def contexts(key):
    features = jax.random.normal(key, (num_features - 1,))
    return jnp.concatenate([jnp.ones(1), features])  # the first weight is an intercept


def model(arm, context):
    with numpyro.plate("arms", num_arms):
        prior = dist.Normal(jnp.zeros(num_features), 1.0)
        weights = numpyro.sample("weights", prior.to_event(1))
    numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))


truth = {"weights": jnp.array([[-1.0, 1.0, 0.0], [-1.0, 0.0, 1.0], [-0.5, -0.5, -0.5]])}
