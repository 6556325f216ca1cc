"""Rewards from two groups that are not observed: ordinary visits, and sometimes a large one.

Use it when rewards come from groups and the group of a reward is not observed. A program cannot have a discrete latent per
row, so the outcome is a mixture distribution, in which the group is summed out. The offset between the groups is positive,
so that their labels cannot switch. The prior of the noise has little mass near zero, so that no component degenerates to a
single row. There is no conjugate form, so the posterior is approximate.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 3


def model(arm):
    noise = numpyro.sample("noise", dist.LogNormal(-0.7, 0.5))
    with numpyro.plate("arms", num_arms):
        large_share = numpyro.sample("large_share", dist.Beta(1.0, 3.0))
        ordinary = numpyro.sample("ordinary", dist.Normal(0.0, 1.0))
        offset = numpyro.sample("offset", dist.Gamma(4.0, 1.0))
    probs = jnp.stack([1.0 - large_share[arm], large_share[arm]], axis=-1)
    means = jnp.stack([ordinary[arm], ordinary[arm] + offset[arm]], axis=-1)
    numpyro.sample("reward", dist.MixtureSameFamily(dist.Categorical(probs), dist.Normal(means, noise)))


truth = {
    "noise": jnp.array(0.5),
    "large_share": jnp.array([0.1, 0.2, 0.3]),
    "ordinary": jnp.array([0.5, 0.3, 0.0]),
    "offset": jnp.array([3.0, 3.0, 4.0]),
}
