"""Roots of covariances that rows change one after another are those of the sum of their precisions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.engines.inner.density import Natural
from ppl_bandit.engines.updates.collapsed_posterior import add_rows, factorize, gaussian_integral, precisions_of
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import as_arrow

NUM_BLOCKS, SIZE, NUM_PARTICLES = 2, 5, 3


def precisions(seed=0):
    """Return precisions with a condition number of a million, as of close arms, and linear coefficients."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((NUM_PARTICLES, NUM_BLOCKS, SIZE, SIZE)))[0]
    scales = 10.0 ** np.linspace(0.0, 6.0, SIZE)
    matrices = np.einsum("mrik,k,mrjk->mrij", axes, scales, axes)
    return matrices, rng.standard_normal((NUM_PARTICLES, NUM_BLOCKS, SIZE))


def arrow(matrices):
    """Return precisions of particles with the particles in the last axis."""
    return jax.vmap(lambda own: as_arrow(own, 0, 0), out_axes=-1)(jnp.asarray(matrices))


def row_of(directions, coefficients):
    """Return the natural parameters of rows, the sum over rows of h h' and c h in each block."""
    quadratic = np.einsum("kri,krj->rij", directions, directions)
    linear = jnp.asarray(np.einsum("kri,kr->ri", directions, coefficients))
    return Natural({}, linear, as_arrow(quadratic, 0, 0), jnp.zeros(()))


def rows_of_arms():
    rng = np.random.default_rng(1)
    return [
        (np.eye(SIZE)[rng.integers(0, SIZE, (1, NUM_BLOCKS))] / 0.3, rng.standard_normal((1, NUM_BLOCKS)))
        for _ in range(40)
    ]


def rows_of_features():
    rng = np.random.default_rng(2)
    return [(rng.standard_normal((1, NUM_BLOCKS, SIZE)), rng.standard_normal((1, NUM_BLOCKS))) for _ in range(40)]


def rows_of_one_block():
    return [(h * np.array([1.0, 0.0])[:, None], c) for h, c in rows_of_features()]


def batches():
    rng = np.random.default_rng(3)
    return [(rng.standard_normal((3, NUM_BLOCKS, SIZE)), rng.standard_normal((3, NUM_BLOCKS))) for _ in range(10)]


def no_rows():
    return [(np.zeros((1, NUM_BLOCKS, SIZE)), np.zeros((1, NUM_BLOCKS)))]


@pytest.mark.parametrize("rows", [rows_of_arms, rows_of_features, rows_of_one_block, batches, no_rows])
def test_rows_change_roots_as_a_factorization_of_all_data_would(rows):
    with jax.enable_x64(True):
        matrices, linear = precisions()
        roots = factorize(arrow(matrices), jnp.moveaxis(jnp.asarray(linear), 0, -1))
        add = jax.jit(add_rows)
        for directions, coefficients in rows():
            fresh = row_of(directions, coefficients)
            roots = add(roots, fresh)
            matrices, linear = matrices + fresh.quadratic.core, linear + fresh.linear
        covariances = np.einsum("mrik,mrjk->mrij", roots.root, roots.root)
        # Rounding, times the condition number
        np.testing.assert_allclose(covariances, np.linalg.inv(matrices), atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose(precisions_of(roots), matrices, rtol=1e-8, atol=1e-8 * np.abs(matrices).max())
        last = jnp.moveaxis(jnp.asarray(linear), 0, -1)
        exact = arrow_matrices.gaussian_integral(arrow(matrices), last)
        for found, value in zip(gaussian_integral(roots, last), exact, strict=True):
            np.testing.assert_allclose(found, value, rtol=1e-9)


def test_a_matrix_that_is_not_positive_definite_has_no_log_determinant():
    with jax.enable_x64(True):
        matrices, linear = precisions()
        matrices[0] = -matrices[0]
        roots = factorize(arrow(matrices), jnp.moveaxis(jnp.asarray(linear), 0, -1))
    assert np.all(np.isnan(roots.log_det[0]))
    assert np.all(np.isfinite(roots.log_det[1:]))
