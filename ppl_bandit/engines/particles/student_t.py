"""Multivariate Student-t laws with an even number of degrees of freedom, the proposals of importance sampling and moves."""

import math

import jax.numpy as jnp
from jax.scipy.special import gammaln
from jaxtyping import Array, Float

__all__ = ["log_kernel", "log_normalizing_constant", "student_t_draws"]


def student_t_draws(uniform: Float[Array, "M n"], normal: Float[Array, "M k"]) -> Float[Array, "M k"]:
    """Return draws of a standard Student-t law with 2 n degrees of freedom.

    Args:
        uniform: numbers in (0, 1). A chi-squared variable with 2 n degrees of freedom is a sum of n exponentials.
        normal: standard normal numbers.
    """
    chi_squared = -2.0 * jnp.sum(jnp.log(uniform), axis=1)
    return normal * jnp.sqrt(2 * uniform.shape[1] / chi_squared)[:, None]


def log_kernel(squared_distances: Float[Array, "*M"], degrees: int, size: int) -> Float[Array, "*M"]:
    """Return the log density at standardised squared distances from the centre, without its constant."""
    return -0.5 * (degrees + size) * jnp.log1p(squared_distances / degrees)


def log_normalizing_constant(degrees: int, size: int) -> Float[Array, ""]:
    """Return the log density of a standard Student-t law at its centre."""
    return gammaln((degrees + size) / 2) - gammaln(degrees / 2) - 0.5 * size * math.log(degrees * math.pi)
