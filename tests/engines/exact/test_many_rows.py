"""Many rows at once, certified by the sums of chunks: the closed form, and one bad row among them is found."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.engines import conjugate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction

N, ARMS = 300, 2  # more than a chunk of 256 rows


def bent(arm, context):
    """Linear in the weight where the context is positive, which is all that is tried when the engine is built."""
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(ARMS), 2.0))[arm]
    numpyro.sample("reward", dist.Normal(jnp.where(context > 0, weight * context, weight**2), 0.5))


@pytest.fixture(scope="module")
def engine():
    return conjugate(RewardModel(bent, ARMS, context=np.array(1.0)))


@pytest.fixture(scope="module")
def update(engine):
    return quick_jit(engine.update)


def rows_of(seed=0):
    rng = np.random.default_rng(seed)
    arm, context = rng.integers(0, ARMS, N), rng.uniform(0.2, 1.0, N)
    return Interaction(arm, rng.normal(np.array([1.0, -2.0])[arm] * context, 0.5), context, np.ones(N, bool))


def closed_form(rows):
    """Precision and mean of each weight, by hand."""
    keep = np.asarray(rows.mask)
    sums = [
        np.bincount(rows.arm[keep], values[keep], ARMS) / 0.25
        for values in (rows.context**2, rows.context * rows.reward)
    ]
    return 0.25 + sums[0], sums[1] / (0.25 + sums[0])


def test_many_rows_at_once_give_the_posterior_in_closed_form(engine, update):
    rows = rows_of()
    with jax.enable_x64(True):
        after, info = update(jr.key(0), engine.init(jr.key(0)), rows)
    precision, mean = closed_form(rows)
    assert info.is_trusted and info.is_certified.all()
    np.testing.assert_allclose(after.precision[:, 0, 0], precision, rtol=1e-12)
    np.testing.assert_allclose(after.mean[:, 0], mean, rtol=1e-10)
    residual, tolerance = (np.max(np.asarray(part)) for part in info.residual[:2])
    assert 0.0 < residual <= tolerance < 1e-6  # nats, of all rows of a chunk together


def test_one_row_that_is_not_conjugate_is_found_among_many_and_nothing_is_absorbed(engine, update):
    rows = rows_of()
    rows.context[57] = -0.5
    with jax.enable_x64(True):
        before = engine.init(jr.key(0))
        after, info = update(jr.key(0), before, rows)
    assert not info.is_trusted
    assert np.flatnonzero(~np.asarray(info.is_certified)).tolist() == [57]
    for new, old in zip(jax.tree.leaves(after), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(new, old)


def test_rows_that_are_masked_may_hold_anything(engine, update):
    rows = rows_of(seed=1)
    rows.mask[::3] = False
    rows.reward[::3], rows.context[::3] = np.nan, -1.0
    with jax.enable_x64(True):
        after, info = update(jr.key(0), engine.init(jr.key(0)), rows)
    clean = rows._replace(reward=np.nan_to_num(rows.reward))
    precision, mean = closed_form(clean)
    assert info.is_trusted and int(after.num_rows) == rows.mask.sum()
    np.testing.assert_allclose(after.precision[:, 0, 0], precision, rtol=1e-12)
    np.testing.assert_allclose(after.mean[:, 0], mean, rtol=1e-10)
