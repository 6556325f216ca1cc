"""Success or failure on similar arms: the rate of each arm varies around a common rate, by an unknown amount.

Use it when there are many similar arms with few successes each: the rewards of one arm inform about the others. The smaller
the spread between the arms, the more they share. There is no conjugate form, so the posterior is approximate.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 5


def model(arm):
    common_logit = numpyro.sample("common_logit", dist.Normal(-1.0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("arms", num_arms):
        # The arms' deviations are drawn in units of the spread, which samplers find easier than the logits themselves.
        deviation = numpyro.sample("deviation", dist.Normal(0.0, 1.0))
    logit = common_logit + spread * deviation
    numpyro.sample("reward", dist.Bernoulli(logits=logit[arm]))


truth = {
    "common_logit": jnp.array(-1.0),
    "spread": jnp.array(0.5),
    "deviation": jnp.array([-1.5, -0.5, 0.0, 0.5, 1.5]),
}
