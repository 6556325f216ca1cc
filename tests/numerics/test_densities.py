"""Densities in single precision against those in double: however narrow, wide or lopsided a law is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics.marginal_laws import beta_law, gamma_law, nodes_of, student_t_law

_SHAPES = np.array([0.02, 0.3, 1.0, 7.0, 3e2, 4e5, 1e8])
_MANY, _FEW = (grid.ravel() for grid in np.meshgrid(_SHAPES, _SHAPES))


@pytest.mark.parametrize(
    "law",
    [
        lambda: beta_law(jnp.asarray(_MANY), jnp.asarray(_FEW)),
        lambda: gamma_law(jnp.asarray(_SHAPES), jnp.asarray(_SHAPES[::-1])),
        lambda: student_t_law(jnp.array([2.5, 30.0, jnp.inf]), jnp.zeros(3), jnp.array([1e-6, 1.0, 1e6])),
    ],
    ids=["beta", "gamma", "student_t"],
)
def test_a_density_in_single_precision_is_that_in_double_to_a_few_of_its_last_digits(law):
    """At a distance d from its mode a Gamma of shape a has the log density -l = a (d + 1 - exp(d)), some -a d^2 / 2. The terms
    are of size a, which is 2 l / d^2, so that they are rounded by 2 l / d^2 2^-24, and the density by exp(-l) of that. Nearer
    than d = .1 a series is taken; beyond, that is at most 200 l exp(-l) 2^-24, 4e-6, for each of two roundings. A Beta's are
    alike. Probabilities are their sums times a step, of errors that have either sign.
    """
    with jax.enable_x64(True):
        double, single = jax.jit(lambda: [nodes_of(law(), 48, in_single=in_single) for in_single in (False, True)])()
        assert single.mass.dtype == jnp.float64
        largest = jnp.max(double.mass, axis=1, keepdims=True)
        assert float(jnp.max(jnp.abs(single.mass - double.mass) / largest)) < 1e-5
        assert float(jnp.max(jnp.abs(single.below - double.below))) < 1e-5
