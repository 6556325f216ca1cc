"""The row buffer keeps the data in order, counts equal rows and grows by doubling."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.engines.rows import append_rows, empty_buffer, grow_buffer, read_buffer, rows_that_fit
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def regression(arm, context):
    noise = numpyro.sample("noise", dist.HalfNormal(2.0))
    with numpyro.plate("arms", 2):
        slope = numpyro.sample("slope", dist.Normal(0.0, noise))
        share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    numpyro.sample("reward", dist.Normal(slope[arm] * context["x"] + share[arm, 0], noise))


@functools.cache
def reward_model():
    return RewardModel(regression, 2, context={"x": 1.0})


ROWS = Interaction(jnp.array([0, 1, 1]), jnp.array([0.3, -1.0, 2.0]), {"x": jnp.array([1.0, 2.0, -0.5])})


append = jax.jit(append_rows, static_argnames=("model", "merges"))  # one compilation for each form of rows


def test_rows_that_count_are_written_in_order_and_the_others_are_not():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS._replace(mask=jnp.array([True, False, True])))
    buffer = append(reward_model(), buffer, ROWS._replace(mask=jnp.array([False, True, False])))
    data = read_buffer(buffer)
    assert int(buffer.num_rows) == 3
    np.testing.assert_array_equal(data.rows.mask, [True, True, True, False])
    np.testing.assert_allclose(data.rows.reward["reward"][:3], [0.3, 2.0, -1.0])
    np.testing.assert_allclose(data.rows.context["x"], [1.0, -0.5, 2.0, 1.0])  # the last is a copy of the first
    np.testing.assert_array_equal(data.weights, [1.0, 1.0, 1.0, 0.0])


def test_equal_rows_are_kept_once_and_counted():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS)
    again = jax.tree.map(lambda leaf: jnp.concatenate([leaf[:2], leaf[:1]]), ROWS)
    buffer = append(reward_model(), buffer, again)
    assert int(buffer.num_rows) == 3
    np.testing.assert_array_equal(read_buffer(buffer).weights, [3.0, 2.0, 1.0, 0.0])
    kept_apart = append(
        reward_model(),
        append(reward_model(), empty_buffer(reward_model(), 8), ROWS, merges=False),
        again,
        merges=False,
    )
    assert int(kept_apart.num_rows) == 6
    # A zero with a sign is equal to one without.
    zeros = Interaction(jnp.zeros(2, int), jnp.array([0.0, -0.0]), {"x": jnp.array([-0.0, 0.0])})
    assert int(append(reward_model(), empty_buffer(reward_model(), 4), zeros).num_rows) == 1


def test_the_rows_of_some_arms_are_read_alone():
    data = read_buffer(append(reward_model(), empty_buffer(reward_model(), 4), ROWS), of=jnp.array([False, True]))
    assert int(data.num_rows) == 2
    np.testing.assert_array_equal(data.places[:2], [1, 2])
    np.testing.assert_array_equal(data.weights, [0.0, 1.0, 1.0, 0.0])


def test_capacity_doubles_until_the_rows_fit_and_the_data_stay():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS)
    masked, has_room = rows_that_fit(buffer, ROWS)
    assert not has_room and not np.any(masked.mask)
    one, has_room = rows_that_fit(buffer, ROWS._replace(mask=jnp.array([False, True, False])))
    assert has_room and one.mask.tolist() == [False, True, False]
    assert grow_buffer(buffer, 1) is buffer
    larger = grow_buffer(buffer, 14)
    assert larger.arm.shape == (32,)
    np.testing.assert_array_equal(read_buffer(larger).rows.arm[:3], ROWS.arm)
    assert int(larger.num_rows) == 3


def test_an_older_row_counts_for_less_by_the_discount():
    buffer = append(reward_model(), empty_buffer(reward_model(), 4), ROWS)
    np.testing.assert_allclose(read_buffer(buffer, 0.9).weights, [0.81, 0.9, 1.0, 0.0], rtol=1e-6)


def test_floats_are_refused_where_the_example_context_has_integers():
    model = RewardModel(regression, 2, context={"x": 1})
    with pytest.raises(TypeError, match="give an example context with decimals"):
        append(model, empty_buffer(model, 4), ROWS)
