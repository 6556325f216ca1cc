"""Arrows against the dense matrices that they are, with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.numerics.arrow_matrices import Arrow, as_arrow, as_matrix, gaussian_integral, solve, steps_along, times

# Blocks, leaves, rows of a leaf, rows of the core: a hierarchy, random slopes, a core in panels, and one by one, no core.
SHAPES = [(1, 20, 1, 1), (2, 3, 2, 2), pytest.param((1, 4, 1, 12), marks=pytest.mark.slow), (2, 0, 0, 30), (2, 3, 2, 0)]
BATCH = 3


def matrices(num, num_leaves, size, num_core, seed=0):
    """Return positive matrices of an arrow's shape, (BATCH, R, S, S)."""
    rng = np.random.default_rng(seed)
    total = num_leaves * size + num_core
    leaf = np.append(np.repeat(np.arange(num_leaves), size), np.full(num_core, -1))
    is_entry = (leaf[:, None] == leaf) | (leaf[:, None] < 0) | (leaf < 0)
    entries = rng.standard_normal((BATCH, num, total, total)) * is_entry
    symmetric = entries + np.swapaxes(entries, 2, 3)
    return symmetric + np.eye(total) * (1.0 + np.abs(symmetric).sum(axis=3, keepdims=True))


def arrows_of(dense, num_leaves, size):
    each = [as_arrow(matrix, num_leaves, size) for matrix in dense]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves, axis=-1)), *each)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_arrow_is_the_matrix_that_it_stands_for(shape):
    num, num_leaves, size, _ = shape
    dense = matrices(*shape)
    vectors = np.random.default_rng(1).standard_normal((BATCH, num, dense.shape[-1]))
    basis = np.broadcast_to(np.eye(dense.shape[-1])[:, None], (dense.shape[-1], num, dense.shape[-1]))

    @jax.jit
    def compute(arrow, columns, basis):
        one = jax.tree.map(lambda leaf: leaf[..., 0], arrow)
        root = jax.vmap(lambda own: steps_along(one, own))(basis)
        return as_matrix(one), gaussian_integral(arrow, columns), solve(arrow, columns), times(arrow, columns), root

    with jax.enable_x64(True):
        arrow, columns = arrows_of(dense, num_leaves, size), jnp.asarray(np.moveaxis(vectors, 0, -1))
        matrix, (gain, log_det), found, product, root = jax.device_get(compute(arrow, columns, jnp.asarray(basis)))
    np.testing.assert_array_equal(matrix, dense[0])
    solved = np.linalg.solve(dense, vectors[..., None])[..., 0]
    np.testing.assert_allclose(gain.T, 0.5 * np.sum(vectors * solved, axis=2), rtol=1e-12)
    np.testing.assert_allclose(log_det.T, np.linalg.slogdet(dense)[1], rtol=1e-12)
    np.testing.assert_allclose(np.moveaxis(found, -1, 0), solved, rtol=1e-10, atol=1e-14)
    exact = np.einsum("brst,brt->brs", dense, vectors)
    np.testing.assert_allclose(np.moveaxis(product, -1, 0), exact, rtol=1e-12, atol=1e-13)
    # What unit vectors become are the columns of a root of the inverse: the law of draws is exact, not only nearly so.
    covariance = np.einsum("prs,prt->rst", root, root)
    np.testing.assert_allclose(covariance, np.linalg.inv(dense[0]), rtol=1e-10, atol=1e-14)


def test_a_pivot_that_is_no_more_than_rounding_has_no_integral():
    """A common mean of precision 1/4 behind arms of precision 1e8: single precision has lost the quarter."""
    core, leaves = 0.25 + 5e8, np.full((1, 5, 1, 1), 1e8)
    for dtype, is_known in ((jnp.float32, False), (jnp.float64, True)):
        with jax.enable_x64(True):
            arrow = Arrow(*(jnp.asarray(part, dtype) for part in (leaves, -leaves, np.full((1, 1, 1), core))))
            _, log_det = jax.jit(gaussian_integral)(arrow, jnp.zeros((1, 6), dtype))
        assert np.isfinite(log_det[0]) == is_known
    np.testing.assert_allclose(log_det[0], np.log(0.25) + 5 * np.log(1e8), rtol=1e-8)


def test_what_is_not_positive_has_no_integral():
    dense = matrices(1, 3, 1, 1)
    dense[1, 0, 0, 0] = -1.0  # a leaf
    dense[2, 0, 3, 3] = -1.0  # the core
    with jax.enable_x64(True):
        _, log_det = jax.jit(gaussian_integral)(arrows_of(dense, 3, 1), jnp.zeros((1, 4, BATCH)))
    np.testing.assert_array_equal(np.isfinite(log_det[0]), [True, False, False])
