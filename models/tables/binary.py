"""Successes and failures by arm, with what a success of each arm is worth: conversions, clicks, sales at a price.

Use it for a table whose outcome is 0 or 1, or is 0 or one amount for each arm. The posterior is exact: Beta(1 + successes,
1 + failures) for the rate of each arm.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 2
worth = [1.0, 1.0]  # of a success on each arm, such as its price


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))
    numpyro.deterministic("expected_reward", jnp.array(worth)[arm] * rate[arm])
