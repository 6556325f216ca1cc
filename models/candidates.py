"""Candidates that change with every decision, known by their features: articles, offers, applicants.

Use it when the arms are the places of a list, and what stands in each place is new every time. The context has one row of
features per candidate. The weights are shared, so that every reward teaches about all later candidates. The posterior is exact:
one Gaussian over the weights.
"""

import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist

num_arms = 4
num_features = 3


def model(arm, context):
    weights = numpyro.sample("weights", dist.Normal(jnp.zeros(num_features), 1.0).to_event(1))
    features = context[jnp.arange(arm.size), arm]  # of the candidate that is chosen in each row
    numpyro.sample("reward", dist.Normal(features @ weights, 0.5))


context = jnp.ones((num_arms, num_features))
truth = {"weights": jnp.array([0.8, -0.5, 0.3])}


def contexts(key):
    return jr.normal(key, (num_arms, num_features))
