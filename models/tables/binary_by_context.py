"""Successes and failures that depend on columns known before: a click, given the visitor.

Use it for a table whose outcome is 0 or 1. Each arm has a logistic regression on the standardised columns. It has no conjugate
prior, so the posterior is approximate.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 2
columns = {"age": [40.0, 12.0]}  # centre and scale of each column
worth = [1.0, 1.0]  # of a success on each arm, such as its price
context = {name: jnp.array(centre) for name, (centre, _) in columns.items()}


def model(arm, context):
    features = [(context[name] - centre) / scale for name, (centre, scale) in columns.items()]
    with numpyro.plate("arms", num_arms):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        slope = numpyro.sample("slope", dist.Normal(jnp.zeros(len(columns)), 1.0).to_event(1))
    logit = level[arm] + jnp.sum(slope[arm] * jnp.stack(features, axis=-1), axis=-1)
    success = dist.Bernoulli(logits=logit)
    numpyro.sample("reward", success)
    numpyro.deterministic("expected_reward", jnp.array(worth)[arm] * success.mean)
