"""Every approximate engine keeps the contract, on a program whose posterior is a Gaussian that all of them can represent.

Tolerances: engines hold 2,000 draws and the effective sample size is at least 1,000, so a mean is off by 1 / sqrt(1,000)
posterior standard deviations and a standard deviation by 1 / sqrt(2 x 1,000) of itself; four of these are allowed.
"""

import functools
import logging
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import logistic, normal, per_arm, slow_but

from ppl_bandit import engines
from ppl_bandit.engines import fits
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

MEAN_TOLERANCE = 4 / math.sqrt(1000)
SD_TOLERANCE = 4 / math.sqrt(2 * 1000)
NUM_DRAWS = 2000
CAPACITY = 16


def measurements(arm):
    normal(per_arm("mean", dist.Normal(1.0, 2.0))[arm], 1.5)


@functools.cache
def reward_model():
    return RewardModel(measurements, 2)


def measurements_about_a_shift(arm):
    """The same law of `mean`, and of rewards, with a site given which it is exact: arm 0 varies about it."""
    shift = numpyro.sample("shift", dist.Normal(0.0, math.sqrt(3.0)))
    normal(per_arm("mean", dist.Normal(1.0 + shift * jnp.array([1.0, 0.0]), jnp.array([1.0, 2.0])))[arm], 1.5)


@functools.cache
def shifted_model():
    return RewardModel(measurements_about_a_shift, 2)


MAKERS = {
    "collapsed": lambda **k: engines.collapsed(shifted_model(), ("shift",), **{"num_particles": NUM_DRAWS, **k}),
    "nuts": lambda **k: engines.nuts(reward_model(), num_draws=NUM_DRAWS, **k),
    "reweight": lambda **k: engines.reweight(reward_model(), num_particles=NUM_DRAWS, **k),
    "laplace": lambda **k: engines.laplace(reward_model(), **k),
    "svi": lambda **k: engines.svi(reward_model(), **k),
}
every_engine = pytest.mark.parametrize("name", MAKERS)
# In the default run these two are built for the main contract alone: a batch leads to the exact posterior.
most_engines = pytest.mark.parametrize("name", slow_but(MAKERS, "collapsed", "reweight", "laplace"))

ROWS = Interaction(jnp.array([0, 0, 1, 0, 0, 1, 0, 0]), jnp.array([0.3, -1.2, 6.0, 2.0, 0.9, 4.0, -0.4, 0.1]))
ALL = jnp.ones(8, bool)


@functools.cache
def compiled(name, discount=1.0):
    """An engine's functions, compiled once for all tests; interactions have 8 rows, of which a mask selects."""
    engine = MAKERS[name](capacity=CAPACITY, discount=discount)
    return engine._replace(
        init=jax.jit(engine.init), update=jax.jit(engine.update), sample=jax.jit(engine.sample, static_argnums=2)
    )


def exact_posterior(rows, discount=1.0):
    """Mean and standard deviation of each arm: a conjugate Normal with known noise, in NumPy."""
    arm, reward = np.asarray(rows.arm), np.asarray(rows.reward, float)
    weight = discount ** np.arange(len(arm))[::-1]
    precision = np.array([1 / 4 + np.sum(weight[arm == a]) / 2.25 for a in range(2)])
    mean = [(1.0 / 4 + np.sum((weight * reward)[arm == a]) / 2.25) / precision[a] for a in range(2)]
    return np.array(mean), 1 / np.sqrt(precision)


def assert_posterior(engine, state, expected, key=0):
    draws = np.asarray(engine.sample(jr.key(key), state, NUM_DRAWS)["mean"])
    assert draws.shape == (NUM_DRAWS, 2)
    mean, sd = expected
    assert np.max(np.abs(draws.mean(axis=0) - mean) / sd) < MEAN_TOLERANCE
    assert np.max(np.abs(draws.std(axis=0) / sd - 1)) < SD_TOLERANCE


@most_engines
def test_without_data_the_draws_are_the_prior(name):
    engine = compiled(name)
    assert_posterior(engine, engine.init(jr.key(0)), (np.ones(2), np.full(2, 2.0)))


@every_engine
def test_a_batch_leads_to_the_exact_posterior(name):
    engine = compiled(name)
    state, info = engine.update(jr.key(1), engine.init(jr.key(0)), ROWS._replace(mask=ALL))
    assert bool(info.is_trusted) and not bool(info.is_full)
    assert_posterior(engine, state, exact_posterior(ROWS))


@most_engines
def test_rows_one_at_a_time_lead_to_the_same_posterior(name):
    engine = compiled(name)
    state = engine.init(jr.key(0))
    for row in range(8):
        state, info = engine.update(jr.key(row), state, ROWS._replace(mask=ALL & (jnp.arange(8) == row)))
        assert bool(info.is_trusted)
    assert_posterior(engine, state, exact_posterior(ROWS))


@most_engines
def test_masked_rows_may_hold_anything_and_change_nothing(name):
    engine = compiled(name)
    arm, reward = np.full(8, 77, ROWS.arm.dtype), np.full(8, np.nan, ROWS.reward.dtype)
    nonsense = Interaction(jnp.asarray(arm), jnp.asarray(reward), None, ~ALL)
    state, info = engine.update(jr.key(1), engine.init(jr.key(0)), nonsense)
    assert bool(info.is_trusted) and int(state.buffer.num_rows) == 0
    state, _ = engine.update(jr.key(2), state, ROWS._replace(mask=ALL))
    arm[:4], reward[:4] = ROWS.arm[:4], ROWS.reward[:4]
    mixed = Interaction(jnp.asarray(arm), jnp.asarray(reward), None, jnp.arange(8) < 4)
    state, info = engine.update(jr.key(3), state, mixed)
    times = state.buffer.times
    assert bool(info.is_trusted) and int(jnp.sum(times) if times.size else state.buffer.num_rows) == 12
    twice = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf[:4]]), ROWS)
    assert_posterior(engine, state, exact_posterior(twice))


@most_engines
def test_rows_that_do_not_fit_are_reported_and_not_learnt(name):
    engine = compiled(name)
    if engine.capabilities.reserve is None:
        return  # it keeps sums, which any number of rows fit into
    state = engine.init(jr.key(0))
    later = ROWS._replace(reward=ROWS.reward + 0.25, mask=ALL)
    for rows in (ROWS._replace(mask=ALL), later):
        state, info = engine.update(jr.key(1), state, rows)
    assert not bool(info.is_full)
    after, info = engine.update(jr.key(2), state, ROWS._replace(reward=ROWS.reward + 0.5, mask=ALL))
    assert bool(info.is_full) and not bool(info.is_trusted)
    jax.tree.map(np.testing.assert_array_equal, after.buffer, state.buffer)
    both = Interaction(jnp.concatenate([ROWS.arm, ROWS.arm]), jnp.concatenate([ROWS.reward, later.reward]))
    assert_posterior(engine, after, exact_posterior(both))
    roomy = engine.capabilities.reserve(after, 8)
    assert roomy.buffer.arm.shape == (2 * CAPACITY,)


@pytest.mark.parametrize("name", slow_but(["laplace", "collapsed", "reweight"], "laplace"))
def test_a_discount_reduces_the_weight_of_older_rows(name):
    engine = compiled(name, discount=0.7)
    state = engine.init(jr.key(0))
    for row in range(8):
        state, info = engine.update(jr.key(row), state, ROWS._replace(mask=ALL & (jnp.arange(8) == row)))
    assert_posterior(engine, state, exact_posterior(ROWS, discount=0.7))
    state, info = engine.update(jr.key(1), engine.init(jr.key(0)), ROWS._replace(mask=ALL))
    assert_posterior(engine, state, exact_posterior(ROWS, discount=0.7))


def test_nuts_uses_the_energies_of_the_new_data():
    engine = compiled("nuts")
    state, _ = engine.update(jr.key(1), engine.init(jr.key(0)), ROWS._replace(mask=ALL))
    state, info = engine.update(jr.key(2), state, ROWS._replace(mask=ALL & (jnp.arange(8) == 2)))
    assert len(np.unique(state.particles.positions[0, :, 0])) > 0.9 * NUM_DRAWS
    assert float(info.ess) > 1000


def test_more_draws_than_are_stored_repeat_them_evenly():
    engine = compiled("nuts")
    draws = np.asarray(engine.sample(jr.key(0), engine.init(jr.key(0)), 3 * NUM_DRAWS)["mean"])
    _, counts = np.unique(draws[:, 0], return_counts=True)
    assert np.all(counts % 3 == 0)  # a multiple, because two stored draws can agree in float32


@pytest.mark.parametrize("name", ["collapsed", "reweight"])
def test_particles_estimate_the_log_evidence(name):
    engine = compiled(name)
    state, info = engine.update(jr.key(1), engine.init(jr.key(0)), ROWS._replace(mask=ALL))
    arm, reward = np.asarray(ROWS.arm), np.asarray(ROWS.reward, float)
    covariance = 2.25 * np.eye(8) + 4.0 * (arm[:, None] == arm)
    exact = -0.5 * (
        8 * np.log(2 * np.pi)
        + np.linalg.slogdet(covariance)[1]
        + (reward - 1) @ np.linalg.solve(covariance, reward - 1)
    )
    assert 0 < float(info.log_evidence_error) < 0.2
    assert abs(float(info.log_evidence) - exact) < 4 * float(info.log_evidence_error)
    said = float(info.log_evidence), float(info.log_evidence_error)
    assert engine.capabilities.log_evidence(state) == pytest.approx(said, rel=1e-3)


# What is counted does not depend on how much work an update is, so each does little.
SMALL = {
    "collapsed": dict(num_particles=20),
    "nuts": dict(num_draws=8, refresh_every=100),
    "reweight": dict(num_particles=8),
    "laplace": {},
    "svi": dict(num_steps=5, num_particles=1),
}


def small_engine(name, capacity):
    if name == "collapsed":
        return MAKERS[name](capacity=capacity, **SMALL[name])
    return getattr(engines, name)(reward_model(), capacity=capacity, **SMALL[name])


def count_compilations(name, first_capacity, num_steps, monkeypatch, caplog):
    """Compilations by XLA, of whatever kind, during updates of one row each."""
    monkeypatch.setattr(fits, "NUM_CHECK_DRAWS", 10)
    engine = small_engine(name, first_capacity)
    reserve = engine.capabilities.reserve or (lambda state, num_rows: state)
    update = jax.jit(lambda number, state, row: engine.update(jr.fold_in(jr.key(0), number), state, row))
    state = jax.jit(engine.init)(jr.key(0))
    with jax.log_compiles(True), caplog.at_level(logging.DEBUG):
        for step in range(num_steps):
            row = Interaction(np.array([step % 2]), np.array([1.0 + 1e-4 * step], np.float32))  # no two rows are equal
            state, _ = update(np.int32(step), reserve(state, 1), row)
    assert int(state.buffer.num_rows) == num_steps
    return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("name", slow_but(MAKERS, "reweight", "laplace"))
def test_an_update_compiles_once_for_each_capacity(name):
    # What jit looks up a compiled program by - shapes, kinds of number, weak types - is the same after an update as before.
    engine = small_engine(name, 4)
    before = jax.eval_shape(engine.init, jr.key(0))
    row = Interaction(jnp.array([0]), jnp.array([1.0]))
    after, _ = jax.eval_shape(engine.update, jr.key(0), before, row)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    forms = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)] for state in (before, after)]
    assert forms[0] == forms[1]


@pytest.mark.slow
@every_engine
def test_ten_thousand_updates_compile_nine_times(name, monkeypatch, caplog):
    first_capacity, num_steps = 64, 10_000  # up to a capacity of 16,384
    num_compilations = count_compilations(name, first_capacity, num_steps, monkeypatch, caplog)
    assert num_compilations <= 2 + math.log2(num_steps / first_capacity)


@pytest.mark.parametrize("name", slow_but(MAKERS, "laplace"))
def test_functions_run_under_vmap_and_scan_in_double_precision_where_jax_is(name):
    engine = MAKERS[name](capacity=CAPACITY)

    def realization(key):
        def step(state, key):
            state, info = engine.update(key, state, Interaction(jnp.array([0]), jnp.array([1.0])))
            return state, (engine.sample(key, state, 10), info)

        return jax.lax.scan(step, engine.init(key), jr.split(key, 3))

    with jax.enable_x64(True):
        state, (draws, info) = jax.eval_shape(jax.vmap(realization), jr.split(jr.key(0), 5))
    assert draws["mean"].shape == (5, 3, 10, 2)
    assert info.is_trusted.shape == (5, 3) and info.is_trusted.dtype == bool
    floats = {leaf.dtype for leaf in jax.tree.leaves((state, draws, info)) if leaf.dtype.kind == "f"}
    assert floats == {np.dtype("float64")}


@most_engines
def test_the_explanation_does_not_claim_to_be_exact(name):
    explanation = MAKERS[name](discount=0.99).explanation
    assert explanation.engine == name and not explanation.is_exact
    assert set(explanation.sites) == ({"shift", "mean"} if name == "collapsed" else {"mean"})
    claim = "EXACT GIVEN shift" if name == "collapsed" else "APPROXIMATE"
    assert claim in str(explanation) and "0.99" in str(explanation)


def test_choose_is_exact_where_that_is_proved_and_says_what_was_refused_elsewhere():
    assert engines.choose(reward_model()).explanation.is_exact

    def clicks(arm):
        logistic(jnp.broadcast_to(numpyro.sample("level", dist.Normal(0.0, 1.0)), arm.shape))

    chosen = engines.choose(RewardModel(clicks, 2)).explanation
    assert chosen.engine == "reweight" and not chosen.is_exact
    assert "cannot be proved conjugate" in chosen.reason and "NOT EXACT" in chosen.report


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MAKERS["collapsed"](num_particles=5), "num_particles must be at least 20"),
        (lambda: MAKERS["laplace"](discount=0.0), r"discount must lie in \(0, 1\]"),
        (lambda: MAKERS["nuts"](capacity=0), "capacity must be a positive integer"),
        (lambda: engines.nuts(reward_model(), num_draws=3), "num_draws must be at least 4"),
        (lambda: engines.reweight(reward_model(), num_particles=3), "num_particles must be at least 4"),
        (lambda: MAKERS["svi"](guide="gaussian"), "guide must be one of"),
    ],
)
def test_impossible_settings_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
