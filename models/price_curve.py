"""Prices or doses on a smooth curve: a Gaussian process over the arms, with unknown length-scale and amplitude.

Use it when arms are points on a scale, such as ten prices or doses, and neighbours have similar rewards: each reward then says
something about all arms. The posterior is exact given the length-scale and the amplitude: the values of the curve are
integrated out as one Gaussian, and particles represent these two numbers. The positions are computed inside the program, in
its precision: float32 numbers from outside are too coarse for the covariance of close arms.
"""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist

num_arms = 10
noise = 0.3


def model(arm):
    length_scale = numpyro.sample("length_scale", dist.LogNormal(-1.0, 0.5))
    amplitude = numpyro.sample("amplitude", dist.HalfNormal(1.0))
    position = jnp.linspace(0.0, 1.0, num_arms)
    distance = (position[:, None] - position) / length_scale
    covariance = amplitude**2 * (jnp.exp(-0.5 * distance**2) + 1e-6 * jnp.eye(num_arms))
    curve = numpyro.sample("curve", dist.MultivariateNormal(0.0, covariance))
    numpyro.sample("reward", dist.Normal(curve[arm], noise))


truth = {
    "length_scale": jnp.array(0.3),
    "amplitude": jnp.array(0.8),
    "curve": jnp.array([-0.5, -0.15, 0.2, 0.5, 0.7, 0.75, 0.6, 0.3, -0.1, -0.5]),
}
