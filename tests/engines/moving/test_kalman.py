"""The Kalman filter equals a filter written in NumPy, and refuses what is not linear Gaussian."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit import Bandit, BanditError, engines
from ppl_bandit.engines.updates.exact import prove_linear_step
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, NotConjugate

NUM_STEPS = 1000


def trend(arm, context, *, previous=None, elapsed=1.0):
    """Two levels that return to a common static mean, and a slope that one arm follows; time comes from the context."""
    mean = numpyro.sample("mean", dist.Normal(1.0, 2.0))
    keep = 0.9**elapsed
    if previous is None:
        slope_law, level_law = dist.Normal(0.0, 0.5), dist.Normal(mean, 1.0)
    else:
        slope_law = dist.Normal(0.8 * previous["slope"], 0.3)
        centre = mean + keep * (previous["level"] - mean) + jnp.array([0.0, 1.0]) * previous["slope"]
        level_law = dist.Normal(centre, 0.4 * jnp.sqrt(elapsed))
    slope = numpyro.sample("slope", slope_law)
    with numpyro.plate("arms", 2):
        level = numpyro.sample("level", level_law)
    numpyro.sample("reward", dist.Normal(level[arm] + 0.2 * slope * context["size"], 0.7))


def rows_of_trend():
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1.0, NUM_STEPS))
    times[100:110] = times[100]  # rows at one time, between which no step is taken
    times[500] = times[400]  # a late row, which is learnt at the latest time so far
    times[700:710] += 1000.0  # padding, with which no time passes
    arms, sizes = rng.integers(0, 2, NUM_STEPS), rng.normal(size=NUM_STEPS)
    is_counted = (np.arange(NUM_STEPS) < 700) | (np.arange(NUM_STEPS) >= 710)
    return arms, rng.normal(1.0, 2.0, NUM_STEPS), {"time": times, "size": sizes}, is_counted


def numpy_filter(arms, rewards, contexts):
    """Filter (mean, slope, level 0, level 1) in covariance form."""
    first = np.array([[1.0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])
    mean, cov = np.array([1.0, 0.0, 1.0, 1.0]), first @ np.diag([4.0, 0.25, 1.0, 1.0]) @ first.T
    latest, laws, log_evidence = None, [], 0.0
    for arm, reward, time, size in zip(arms, rewards, contexts["time"], contexts["size"], strict=True):
        elapsed = 0.0 if latest is None else max(time - latest, 0.0)
        latest = time if latest is None else max(time, latest)
        if elapsed > 0.0:
            keep = 0.9**elapsed
            step = np.array([[1, 0, 0, 0], [0, 0.8, 0, 0], [1 - keep, 0, keep, 0], [1 - keep, 1, 0, keep]])
            mean, cov = step @ mean, step @ cov @ step.T + np.diag([0, 0.09, 0.16 * elapsed, 0.16 * elapsed])
        read = np.array([0.0, 0.2 * size, arm == 0, arm == 1])
        variance, gap = read @ cov @ read + 0.49, reward - read @ mean
        log_evidence -= 0.5 * (np.log(2 * np.pi * variance) + gap**2 / variance)
        gain = cov @ read / variance
        mean, cov = mean + gain * gap, cov - np.outer(gain, read @ cov)
        laws.append((mean, np.sqrt(np.diag(cov))))
    return *map(np.array, zip(*laws, strict=True)), log_evidence


def test_it_equals_a_filter_in_numpy_over_a_thousand_steps_and_a_decision_predicts_to_its_own_time():
    arms, rewards, contexts, is_counted = rows_of_trend()
    engine = engines.kalman(RewardModel(trend, 2, context={"time": 0.0, "size": 1.0}))

    def step(state, row):
        state, info = engine.update(jr.key(0), state, jax.tree.map(lambda leaf: leaf[None], row))
        sd = jnp.sqrt(jnp.diagonal(jnp.linalg.inv(state.law.precision[0])))
        return state, (state.law.mean[0], sd, info.is_trusted)

    def run(rows, later):
        state, found = jax.lax.scan(step, engine.init(jr.key(0)), rows)
        return found, engine.capabilities.advance(jr.key(0), state, later).law.mean[0], state

    with jax.enable_x64(True):
        rows = jax.tree.map(jnp.asarray, Interaction(arms, rewards, contexts, is_counted))
        later = {"time": jnp.asarray(contexts["time"][-1] + 3.0), "size": jnp.asarray(0.0)}
        (means, sds, is_trusted), ahead, state = jax.device_get(jax.jit(run)(rows, later))
    kept = jax.tree.map(lambda leaf: leaf[is_counted], (arms, rewards, contexts))
    expected_means, expected_sds, log_evidence = numpy_filter(*kept)
    assert is_trusted.all() and state.law.num_rows == is_counted.sum()
    # A thousand terms of a few nats each, in float64.
    assert engine.capabilities.log_evidence(state) == (pytest.approx(log_evidence, abs=1e-6), 0.0)
    np.testing.assert_allclose(means[is_counted], expected_means, atol=1e-9)
    np.testing.assert_allclose(sds[is_counted], expected_sds, rtol=1e-9)
    np.testing.assert_array_equal(means[700:710], np.tile(means[699], (10, 1)))
    mean, slope, *levels = expected_means[-1]
    expected = mean + 0.9**3.0 * (np.array(levels) - mean) + np.array([0.0, slope])
    np.testing.assert_allclose(ahead[2:], expected, atol=1e-9)
    assert "a Kalman filter" in engine.explanation.report


def refused(law):
    def program(arm, *, previous=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0) if previous is None else law(previous["level"]))
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))

    with jax.enable_x64(True), pytest.raises(NotConjugate) as refusal:
        prove_linear_step(RewardModel(program, 2))
    return str(refusal.value)


@pytest.mark.parametrize(
    "law",
    [
        lambda level: dist.Normal(jnp.tanh(level), 0.1),
        pytest.param(lambda level: dist.Normal(level, jnp.exp(0.1 * level)), marks=pytest.mark.slow),
        pytest.param(lambda level: dist.StudentT(30.0, level, 0.1), marks=pytest.mark.slow),
        lambda level: dist.Normal(jnp.where(level > 9.0, 2.0, 1.0) * level, 0.1),
    ],
    ids=["bent mean", "scale of its own", "heavy tails", "branch far from the prior"],
)
def test_a_step_that_is_not_linear_gaussian_is_refused(law):
    message = refused(law)
    assert "Kalman filter" in message and "affine in the others" in message


def test_a_step_that_rounding_hides_is_not_called_bent():
    message = refused(lambda level: dist.Normal(level, 1e-9))
    assert "rounding alone could hide" in message and "in the step of 'level'" in message
    assert "not linear Gaussian" not in message


@pytest.mark.slow
def test_a_row_after_a_step_that_bends_is_refused_in_the_words_of_a_step():
    def bends(arm, context, *, previous=None, elapsed=1.0):
        law = dist.Normal(0.0, 1.0)
        if previous is not None:
            law = dist.Normal(previous["level"] + jnp.square(previous["level"]) * jnp.maximum(elapsed - 5.0, 0.0), 0.5)
        level = numpyro.sample("level", law)
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))

    model = RewardModel(bends, 1, context={"time": 0.0})
    engine = engines.kalman(model)
    bandit = Bandit(model, engine=lambda _: engine, num_samples=20)
    for time in (0.0, 1.0):
        bandit.update(arm=0, reward=1.0, context={"time": time})
    with pytest.raises(BanditError, match="the step to the time of these rewards is not linear Gaussian") as refusal:
        bandit.update(arm=0, reward=1.0, context={"time": 10.0})
    assert "prior" not in str(refusal.value)
    with jax.enable_x64(True):
        rows = Interaction(jnp.zeros(2, int), jnp.ones(2), {"time": jnp.array([0.0, 10.0])})
        state, info = jax.device_get(jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), rows))
        assert info.is_certified.all() and not info.is_trusted and state.law.num_rows == 0
    (failure,) = info.failed_checks()
    assert failure.startswith("the residual of a row, a step or the prior, relative to its tolerance, is")


def test_engines_of_moving_and_of_other_programs_refuse_each_other():
    def still(arm):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0))
        numpyro.sample("reward", dist.Normal(level + 0.0 * arm, 1.0))

    for factory in (engines.kalman, engines.particle_filter):
        with pytest.raises(ValueError, match="does not take the keyword `previous`"):
            factory(RewardModel(still, 2))
    model = RewardModel(trend, 2, context={"time": 0.0, "size": 1.0})
    for factory in (engines.conjugate, engines.collapsed, engines.reweight, engines.nuts, engines.svi, engines.laplace):
        with pytest.raises(ValueError, match="samples slope, level from `previous`: use engines.choose"):
            factory(model)
