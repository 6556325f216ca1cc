"""A function of a program that is traced once runs it once per shape, and says the same ever after."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import RewardModel
from ppl_bandit.program.model.tracing import forbid_programs, program_lock
from ppl_bandit.runtime.compile_ahead import traced_once
from ppl_bandit.types import Interaction

RUNS = []


def slopes(arm, context):
    RUNS.append(jnp.shape(arm))
    with numpyro.plate("arms", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(jnp.tanh(slope[arm] * context), 0.5))


@pytest.fixture(scope="module")
def model():
    return RewardModel(slopes, 2, context=np.float64(1.5))


def test_it_says_what_the_program_says_under_every_transformation(model):
    likelihood = traced_once(model.log_likelihood)
    draws = {"slope": jnp.array([[0.3, -0.2], [1.4, 0.9], [0.0, -3.0]])}

    def total(density, latents, reward):
        rows = Interaction(jnp.array([0, 1, 1]), reward, jnp.array([0.5, 2.0, -1.0]), jnp.array([True, True, False]))
        return jnp.sum(density(latents, rows))

    def readings(density):
        slope = jax.vmap(jax.value_and_grad(lambda latents, reward: total(density, latents, reward)), (0, None))
        return jax.jit(slope)(draws, jnp.array([0.1, -0.4, 2.0]))

    with jax.enable_x64(True):
        expected, found = readings(model.log_likelihood), readings(likelihood)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_the_program_runs_once_for_each_shape_and_precision(model):
    likelihood = traced_once(model.log_likelihood)

    def read(num_rows):
        rows = Interaction(jnp.zeros(num_rows, int), jnp.ones(num_rows), jnp.ones(num_rows), None)
        return likelihood({"slope": jnp.zeros(2)}, rows)

    RUNS.clear()
    for is_double, num_rows in ((True, 3), (True, 4), (False, 3), (True, 3), (False, 3), (True, 4)):
        with jax.enable_x64(is_double):
            assert jax.jit(read, static_argnums=0)(num_rows).dtype == (np.float64 if is_double else np.float32)
    assert RUNS == [(3,), (4,), (3,)]


def test_a_thread_that_may_run_no_program_repeats_what_is_traced_and_refuses_the_rest(model):
    expected = traced_once(model.expected_rewards)
    known = expected({"slope": jnp.zeros((4, 2))}, 1.0)
    with forbid_programs():
        np.testing.assert_array_equal(expected({"slope": jnp.zeros((4, 2))}, 1.0), known)
        with pytest.raises(RuntimeError, match="background thread"):
            expected({"slope": jnp.zeros((5, 2))}, 1.0)
    with program_lock():
        assert expected({"slope": jnp.zeros((5, 2))}, 1.0).shape == (5, 2)
