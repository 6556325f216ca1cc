"""Successes in a batch of known size: opened mails of a mailing, working parts of a lot.

Use it when many equal trials follow one decision and the reward is the number of successes. The posterior is exact: a Beta
per arm, which counts all trials of all batches.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3
num_trials = 10


def model(arm):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Binomial(num_trials, probs=rate[arm]))


truth = {"rate": jnp.array([0.2, 0.25, 0.3])}
