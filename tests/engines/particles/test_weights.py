"""Importance weights: tempering and resampling."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.engines.particles.weights import (
    flatten_log_weights,
    resample,
)


@pytest.mark.parametrize(
    "log_weights", [[0.0, -1e4, -jnp.inf, -jnp.inf], [0.0, 0.0, 0.0, 0.0], [-jnp.inf, 3.0, 0.0, 1.0]]
)
def test_tempering_ends_when_all_positive_weights_are_equal(log_weights):
    flat = np.asarray(flatten_log_weights(jnp.array(log_weights), 4.0 + 1e-6))
    is_possible = np.isfinite(log_weights)
    assert np.all(flat[is_possible] == 0.0) and np.all(flat[~is_possible] == -np.inf)


def test_resampling_uses_each_draw_in_proportion_to_its_weight():
    taken = jax.jit(resample, static_argnums=2)
    probs = np.array([0.1, 0.0, 0.25, 0.65])
    counts = np.bincount(taken(jnp.array(0.3), jnp.log(probs), 1000), minlength=4)
    assert np.all(np.abs(counts - 1000 * probs) <= 1)
    equal = taken(jnp.array(0.7), jnp.zeros(100), 100)
    np.testing.assert_array_equal(np.sort(equal), np.arange(100))
    assert not np.array_equal(equal, np.arange(100))
    assert np.bincount(taken(jnp.array(0.5), jnp.zeros(10), 25)).min() >= 2
    # Over all offsets the expected number is exact: here 40 of them stand for the uniform law.
    few = jax.vmap(lambda offset: taken(offset, jnp.log(probs), 2))((jnp.arange(40) + 0.5) / 40)
    np.testing.assert_allclose(np.bincount(np.ravel(few), minlength=4) / 80, probs, atol=1 / 40)
