"""A regression with many features in two groups, with one unknown scale for each group.

Use it when there are two kinds of features, such as features of the visitor and of the moment, and it is unknown which kind
matters: if a scale is close to zero, its group has no effect. The posterior is exact given the two scales and the noise: the
weights are integrated out as one Gaussian, and particles represent these three numbers.
"""

import jax.numpy as jnp
import jax.random as jr
import numpyro
import numpyro.distributions as dist

num_arms = 2
num_visitor, num_moment = 3, 3
context = jnp.ones(num_visitor + num_moment)


def model(arm, context):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    of_feature = jnp.repeat(scale, jnp.array([num_visitor, num_moment]), total_repeat_length=num_visitor + num_moment)
    with numpyro.plate("arms", num_arms):
        weights = numpyro.sample("weights", dist.Normal(0.0, of_feature).to_event(1))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, axis=-1), noise))


def contexts(key):
    return jr.normal(key, (num_visitor + num_moment,))


truth = {
    "scale": jnp.array([0.6, 0.05]),
    "noise": jnp.array(0.5),
    "weights": jnp.array([[0.6, -0.4, 0.3, 0.0, 0.05, 0.0], [0.1, 0.2, 0.5, 0.05, 0.0, 0.0]]),
}
