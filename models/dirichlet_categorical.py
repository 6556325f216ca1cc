"""One of several outcomes with known values: leave, sign up, buy.

Use it when the outcome is a category and the quantity to maximise is its value. The outcome is the number of the category,
and the program has an `expected_reward` site for the expected value. The posterior is exact: a Dirichlet per arm, which
counts the categories.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
outcomes = ("category",)
values = (0.0, 5.0, 20.0)  # of leaving, signing up and buying


def model(arm):
    with numpyro.plate("arms", num_arms):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(len(values))))
    numpyro.sample("category", dist.Categorical(probs[arm]))
    numpyro.deterministic("expected_reward", probs[arm] @ jnp.array(values))


truth = {"probs": jnp.array([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.6, 0.2, 0.2]])}
