"""Coordinate moves keep the law of particles and reach the end of a funnel.

The funnel is that of n rewards, 0 each, of n arms with Laplace noise of one scale: with u the log of the scale and g = level /
scale, the density of (u, g) is exp(u) exp(-exp(2 u) / 2) prod exp(-|g|) but for the prior of the levels, which is flat here:
u and g are independent, and the scale is half-normal.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit.engines.particles.kernels import coordinate_moves, funnel_shape
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.numerics.random_bits import uniform_and_normal

NUM, SIZE = 4000, 3


def log_density(x):
    log_scale, levels = x[0], x[1:]
    return (1 - SIZE) * log_scale - 0.5 * jnp.exp(2 * log_scale) - jnp.sum(jnp.abs(levels)) * jnp.exp(-log_scale)


TARGET = LogDensity(lambda x: (log_density(x), jnp.zeros(())), log_density, None, None)


def exact_draws(seed):
    rng = np.random.default_rng(seed)
    scale = np.abs(rng.standard_normal(NUM))[:, None]
    return jnp.asarray(np.concatenate([np.log(scale), scale * rng.laplace(size=(NUM, SIZE))], axis=1))


@jax.jit
def after_moves(key, positions):
    return coordinate_moves(key, TARGET, positions, jnp.std(positions, axis=0), 16)[0]


def shares(positions):
    """Of particles whose scale is below a tenth, a third and 1."""
    return np.mean(np.asarray(positions)[:, :1] < np.log([0.1, 1 / 3, 1.0]), axis=0)


EXACT = np.array([0.0797, 0.2611, 0.6827])  # 2 Phi(s) - 1
# Four errors of a share of 4,000 independent draws.
ALLOWED = 4 * np.sqrt(EXACT * (1 - EXACT) / NUM)


@pytest.mark.slow
def test_coordinate_moves_keep_the_law_of_particles():
    end = after_moves(jr.key(0), exact_draws(0))
    assert np.all(np.abs(shares(end.positions) - EXACT) < ALLOWED)
    gaps = np.asarray(end.positions[:, 1:] * np.exp(-end.positions[:, :1]))
    # Of a Laplace law, whose mean absolute value is 1 with a standard deviation of 1.
    np.testing.assert_allclose(np.abs(gaps).mean(axis=0), 1.0, atol=4 / np.sqrt(NUM))
    np.testing.assert_allclose(end.log_prior, jax.vmap(log_density)(end.positions), rtol=1e-4, atol=1e-4)
    assert np.mean(np.any(end.positions != exact_draws(0), axis=1)) > 0.99


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_coordinate_moves_reach_the_end_of_a_funnel(seed):
    positions = exact_draws(seed)
    # As chains leave them: nothing below a scale of 0.15, where 12% of the mass is.
    wide = positions[positions[:, 0] > np.log(0.15)]
    found = shares(after_moves(jr.key(seed), jnp.resize(wide, positions.shape)).positions)
    # Particles repeat, and 64 moves leave some autocorrelation: half as much again.
    assert np.all(np.abs(found - EXACT) < 1.5 * ALLOWED)


@pytest.mark.slow
def test_slopes_show_which_coordinates_narrow_together():
    positions = exact_draws(3)
    still = jr.normal(jr.key(3), (NUM, 1))  # a latent that is independent of the others
    positions = jnp.concatenate([positions, still], axis=1)
    found = funnel_shape(positions, jax.vmap(log_density)(positions[:, :-1]), jnp.std(positions, axis=0))
    np.testing.assert_allclose(found.slopes[0, 1:-1], 1.0, atol=0.1)
    np.testing.assert_array_equal(found.slopes[-1], 0.0)
    assert float(found.slopes[0, -1]) == 0.0 and float(found.cumulative_probs[0]) > 0.4


@pytest.mark.slow
def test_a_density_without_finite_values_or_equal_particles_give_finite_results():
    nowhere = TARGET._replace(parts=lambda x: (jnp.nan * x[0], x[0]))
    start = jnp.ones((20, 2))
    end = jax.jit(lambda: coordinate_moves(jr.key(0), nowhere, start, jnp.ones(2), 2)[0])()
    np.testing.assert_array_equal(end.positions, start)
    found = funnel_shape(start, jnp.full(20, -jnp.inf), jnp.ones(2))
    np.testing.assert_array_equal(found.slopes, 0.0)
    assert np.all(np.isfinite(found.cumulative_probs))


def test_a_particle_with_a_nan_density_does_not_affect_the_others():
    start = exact_draws(4).at[0].set(0.5)
    parts = TARGET._replace(parts=lambda x: (jnp.where(x[1] == 0.5, jnp.nan, log_density(x)), jnp.zeros(())))
    end = jax.jit(lambda: coordinate_moves(jr.key(0), parts, start, jnp.ones(SIZE + 1), 4)[0])()
    assert np.mean(np.any(end.positions != start, axis=1)) > 0.9


def test_particles_without_a_funnel_are_not_moved():
    start = jr.normal(jr.key(0), (1000, 3))
    gaussian = TARGET._replace(parts=lambda x: (-0.5 * jnp.sum(x**2), jnp.ones(())))
    end, _, has_moves = jax.jit(
        lambda: coordinate_moves(jr.key(0), gaussian, start, jnp.ones(3), 8, min_narrowing=0.5)
    )()
    assert not bool(has_moves)
    np.testing.assert_array_equal(end.positions, start)
    np.testing.assert_allclose(end.log_prior, -0.5 * jnp.sum(start**2, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(end.log_likelihood, 1.0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_are_uniform_and_normal_and_all_finite(dtype):
    with jax.enable_x64(dtype == np.float64):
        uniform, normal = uniform_and_normal(jr.key(0), 100_000, 100_000, dtype)
        assert uniform.dtype == normal.dtype == dtype
        assert float(uniform.min()) > 0.0 and float(uniform.max()) < 1.0
        np.testing.assert_allclose(uniform.mean(), 0.5, atol=4 * np.sqrt(1 / 12 / 100_000))
        np.testing.assert_allclose([normal.mean(), normal.std()], [0.0, 1.0], atol=4 * np.sqrt(1 / 100_000))
        assert np.all(np.isfinite(normal))
