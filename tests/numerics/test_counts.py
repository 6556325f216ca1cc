"""Binomial and multinomial draws follow their laws, in both precisions."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.numerics.random_bits import _binomial, _binomial_mass_near_mean, multinomial, uniform

NUM_DRAWS = 50_000
LEVEL = (
    5e-6  # of each comparison, with fixed seeds: a false alarm in any of them once in ten thousand changes of the seed
)


def _two_sided_z(num_comparisons):
    return stats.norm.isf(LEVEL / num_comparisons / 2)


def binomial(key, num, prob):
    return _binomial(uniform(key, prob.shape, prob.dtype), num.astype(prob.dtype), prob)


def test_counts_of_what_is_not_a_number_are_none():
    draw = jax.jit(lambda probs: multinomial(jr.key(0), 100, probs))
    for probs in ([jnp.nan, jnp.nan], [0.2, jnp.nan, 0.3]):
        assert np.all(np.isnan(draw(jnp.array(probs))))


@pytest.mark.parametrize(
    "num, prob, dtype",
    [
        (1000, 0.5, "float32"),
        (1000, 0.003, "float32"),
        (1000, 0.9999, "float64"),
        (7, 0.3, "float32"),
        (100_000, 0.2, "float64"),
        pytest.param(1_000_000, 0.7, "float32", marks=pytest.mark.slow),
    ],
)
def test_binomial_draws_follow_their_laws(num, prob, dtype):
    with jax.enable_x64(dtype == "float64"):
        parameters = jnp.full(NUM_DRAWS, num, dtype), jnp.full(NUM_DRAWS, prob, dtype)
        draws = np.asarray(jax.jit(binomial)(jr.key(21), *parameters), float)
    law = stats.binom(num, float(np.dtype(dtype).type(prob)))
    counts = np.arange(int(draws.min()), int(draws.max()) + 1)
    expected = NUM_DRAWS * law.pmf(counts)
    # Pearson's test needs cells that are not nearly empty; the rest is one cell.
    is_cell = expected > 10
    seen = np.array([(draws == count).sum() for count in counts])
    observed = np.append(seen[is_cell], NUM_DRAWS - seen[is_cell].sum())
    expected = np.append(expected[is_cell], NUM_DRAWS - expected[is_cell].sum())
    keep = expected > 1e-3
    p_value = stats.chi2.sf(np.sum((observed - expected)[keep] ** 2 / expected[keep]), keep.sum() - 1)
    assert p_value > LEVEL


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_mode_of_a_binomial_has_its_exact_probability(dtype):
    # In float32 the log factorials of a thousand differ by thousands of roundings: 3e-4 of the probability. A draw that no
    # probability is left for would search the whole range, and all others with it.
    num = np.repeat([1, 2, 15, 16, 17, 1000, 1_000_000], 200)
    prob = np.tile(np.concatenate([np.geomspace(1e-7, 0.5, 100), 1 - np.geomspace(1e-6, 0.5, 100)]), 7).astype(dtype)
    mode = np.minimum(np.floor((num + 1) * prob.astype(float)), num)
    with jax.enable_x64(dtype == "float64"):
        found = jax.jit(_binomial_mass_near_mean)(*(jnp.asarray(x, dtype) for x in (mode, num, prob)))
    exact = stats.binom(num, prob.astype(float)).pmf(mode)
    # Some ten roundings; scipy's own error is 1e-14.
    assert np.max(np.abs(np.asarray(found, float) / exact - 1)) < max(10 * np.finfo(dtype).eps, 5e-14)


def test_binomial_draws_at_the_edges_are_certain():
    num, prob = jnp.array([0.0, 5.0, 5.0, 1e6]), jnp.array([0.5, 0.0, 1.0, 1e-30])
    np.testing.assert_array_equal(jax.jit(binomial)(jr.key(0), num, prob), [0.0, 0.0, 5.0, 0.0])


@pytest.mark.parametrize("probs", [(0.3, 0.7), (0.2, 0.5, 0.3), (0.0, 0.999, 0.001, 0.0)])
def test_multinomial_counts_have_their_moments_and_add_up(probs):
    probs, num_draws = np.array(probs), 20_000
    draw = jax.jit(jax.vmap(lambda key: multinomial(key, 100, jnp.asarray(probs))))
    counts = np.asarray(draw(jr.split(jr.key(22), num_draws)), float)
    np.testing.assert_array_equal(counts.sum(axis=1), 100)
    error = np.sqrt(100 * probs * (1 - probs) / num_draws)
    assert np.all(np.abs(counts.mean(axis=0) - 100 * probs) <= _two_sided_z(len(probs)) * error)
    covariance = 100 * (np.diag(probs) - np.outer(probs, probs))
    # The standard error of a covariance of near-normal counts: sqrt((v_a v_b + c^2) / n), and never below a tenth of a count.
    spread = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / num_draws)
    assert np.all(np.abs(np.cov(counts.T) - covariance) <= _two_sided_z(covariance.size) * (spread + 1e-3))
