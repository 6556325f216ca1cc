"""Ordered slates as arms: which two of three items to show, and which of them first.

Use it when the slates are few enough to list. A visitor looks at the first place, and at the second one only if the first is
not clicked. A click in the second place is worth half. Items are shared by the slates, so that every slate teaches about
others. The posterior is exact: one Beta for the attraction of each item.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 6
slates = [(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)]
outcomes = ("first", "second")


def model(arm):
    with numpyro.plate("items", 3):
        attraction = numpyro.sample("attraction", dist.Beta(1.0, 1.0))
    top, bottom = attraction[jnp.array(slates)[arm]].T
    first = numpyro.sample("first", dist.Bernoulli(top))
    numpyro.sample("second", dist.Bernoulli(bottom).mask(first == 0))  # not seen after a click
    numpyro.deterministic("expected_reward", top + 0.5 * (1.0 - top) * bottom)


truth = {"attraction": jnp.array([0.2, 0.5, 0.35])}
