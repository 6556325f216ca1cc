"""The exact engine over long runs and hard data: 100,000 updates, distant means, both precisions, weights by age.

Closed forms are summed with `math.fsum` or in extended precision, and squares are taken about the data's own mean, so that the
reference loses no digits where the engine might.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from programs import KEY, assert_not_learnt, is_same, latents, learnt, normal, reals, rows_of
from proved_programs import A, bernoulli_in_a_plate, normal_with_unknown_variance_per_arm, poisson_with_exposure
from shared_models import bernoulli_model

from ppl_bandit import Environment, engines, selectors, simulate
from ppl_bandit.engines import conjugate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_ROWS = 100_000


def regression(arm, context):
    """A level that the arms share, an offset for each, and two slopes: one dense Gaussian of six."""
    level = numpyro.sample("level", dist.Normal(0.0, 100.0))
    offset = reals("offset", A)
    slope = latents("slope", dist.Normal(0.0, 2.0))
    normal(level + offset[arm] + context @ slope, 0.8)


def assert_close(found, expected, rtol):
    for site, parameters in expected.items():
        for name, value in parameters.items():
            np.testing.assert_allclose(found[site][name], value, rtol=rtol, atol=1e-13, err_msg=f"{site} {name}")


def sums(values, arm):
    return np.array([math.fsum(values[arm == a]) for a in range(A)])


def beta_bernoulli():
    rng = np.random.default_rng(1)
    arm, click = rng.integers(0, A, NUM_ROWS), rng.integers(0, 2, NUM_ROWS)
    clicked, played = sums(click, arm), sums(np.ones(NUM_ROWS), arm)
    expected = {"rate": {"concentration1": 1.5 + clicked, "concentration0": 2.0 + played - clicked}}
    return bernoulli_in_a_plate, (arm, click), expected


def gamma_poisson():
    rng = np.random.default_rng(2)
    arm, exposure = rng.integers(0, A, NUM_ROWS), rng.uniform(0.1, 3.0, NUM_ROWS)
    count = rng.poisson(np.array([0.2, 3.0, 900.0])[arm] * exposure)
    expected = {"rate": {"concentration": 2.0 + sums(count, arm), "rate": 1.5 + sums(exposure, arm)}}
    return poisson_with_exposure, (arm, count, {"exposure": exposure}), expected


def dense_regression(level):
    rng = np.random.default_rng(3)
    arm, features = rng.integers(0, A, NUM_ROWS), rng.normal(size=(NUM_ROWS, 2))
    reward = level + np.array([0.5, -0.2, 0.0])[arm] + features @ [1.5, -0.7] + rng.normal(size=NUM_ROWS)
    design = np.column_stack([np.ones(NUM_ROWS), np.eye(A)[arm], features]).astype(np.longdouble)
    weight = np.longdouble(1) / np.longdouble(0.8) ** 2
    precision = np.diag([1e-4, 1.0, 1.0, 1.0, 0.25, 0.25]) + weight * (design.T @ design)
    covariance = inverse_of(precision)
    mean = covariance @ (weight * (design.T @ reward.astype(np.longdouble)))
    expected = {
        name: {"mean": mean[span].reshape(shape), "covariance": covariance[span, span]}
        for name, span, shape in (("level", slice(0, 1), ()), ("offset", slice(1, 4), 3), ("slope", slice(4, 6), 2))
    }
    return regression, (arm, reward, features), expected


def inverse_of(matrix):
    """Invert in extended precision by Gauss-Jordan elimination; the matrix is positive definite, so no pivoting."""
    size = len(matrix)
    work = np.hstack([matrix.astype(np.longdouble), np.eye(size, dtype=np.longdouble)])
    for i in range(size):
        work[i] /= work[i, i]
        for j in range(size):
            if j != i:
                work[j] -= work[j, i] * work[i]
    return work[:, size:]


def normal_inverse_gamma(level):
    rng = np.random.default_rng(4)
    arm = rng.integers(0, A, NUM_ROWS)
    reward = level + np.array([0.5, -0.2, 0.0])[arm] + rng.normal(size=NUM_ROWS)
    played = sums(np.ones(NUM_ROWS), arm)
    average = sums(reward, arm) / played
    squares = sums((reward.astype(np.longdouble) - average.astype(np.longdouble)[arm]) ** 2, arm)
    expected = of_averages(played, average, squares)
    expected["mean"]["covariance_times_precision"] = np.diag(expected["mean"]["covariance_times_precision"])
    return normal_with_unknown_variance_per_arm, (arm, reward), expected


def of_averages(played, average, squares):
    """Return the posterior of a mean and a variance; the prior weighs like a quarter of an observation at 0.3."""
    precision = 0.25 + played
    rate = 1.5 + 0.5 * (squares + 0.25 * played / precision * (average - 0.3) ** 2)
    return {
        "mean": {"mean": (0.25 * 0.3 + played * average) / precision, "covariance_times_precision": 1 / precision},
        "variance": {"concentration": 2.0 + played / 2, "rate": rate},
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        beta_bernoulli,
        gamma_poisson,
        *(functools.partial(dense_regression, level) for level in (0.5, 1e4)),
        *(functools.partial(normal_inverse_gamma, level) for level in (0.5, 1e4)),
    ],
)
def test_a_long_run_has_the_posterior_of_the_closed_form(make):
    program, data, expected = make()
    with jax.enable_x64(True):
        rows = rows_of(*data)
        example = jax.tree.map(lambda leaf: np.ones(leaf.shape[1:]), data[2]) if len(data) == 3 else None
        engine = conjugate(RewardModel(program, A, example))

        def step(state, row):
            state, info = engine.update(KEY, state, jax.tree.map(lambda leaf: leaf[None], row))
            return state, info.is_trusted

        # Rows one at a time, in one compiled loop, and all at once
        state, is_trusted = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(engine.init(KEY), rows)
        at_once, info = learnt(engine, rows)
        assert bool(is_trusted.all()) and bool(info.is_trusted)
        one_by_one, together = map(engine.capabilities.parameters, (state, at_once))
    assert_close(one_by_one, expected, rtol=1e-6)
    assert_close(together, expected, rtol=1e-6)
    # 1e5 roundings of 1e-16 each, and offsets of 0.04 that are differences of levels of 1e4.
    assert_close(together, one_by_one, rtol=1e-7)


@pytest.fixture(scope="module")
def bernoulli_engine():
    engine = conjugate(RewardModel(bernoulli_in_a_plate, A))
    return engine._replace(update=jax.jit(engine.update))


def test_updates_map_over_states(bernoulli_engine):
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), bernoulli_engine.init(KEY))
    rows = Interaction(jnp.array([[0], [2]]), jnp.array([[1], [0]]))
    states, info = jax.jit(jax.vmap(bernoulli_engine.update, in_axes=(None, 0, 0)))(KEY, states, rows)
    assert info.is_trusted.all()
    np.testing.assert_allclose(states.elements["unit"][0], [[2.5, 2], [1.5, 2], [1.5, 2]], rtol=1e-6)
    np.testing.assert_allclose(states.elements["unit"][1], [[1.5, 2], [1.5, 2], [1.5, 3]], rtol=1e-6)


def test_single_precision_follows_the_default_flag(bernoulli_engine):
    assert not jax.config.jax_enable_x64
    rng = np.random.default_rng(5)
    arm, click = rng.integers(0, A, 200), rng.integers(0, 2, 200)
    state, info = bernoulli_engine.update(KEY, bernoulli_engine.init(KEY), rows_of(arm, click))
    assert bool(info.is_trusted) and state.elements["unit"].dtype == jnp.float32
    # 200 sums in float32 round to 200 * 6e-8 at most.
    np.testing.assert_allclose(state.elements["unit"][:, 0], 1.5 + sums(click, arm), rtol=2e-5)


@pytest.mark.parametrize(
    ("arm", "reward"),
    [(0, 2.0), (0, 0.5), (0, -1.0), (0, math.nan), (0, math.inf), (A, 1.0), (-1, 1.0)],
    ids=["beyond", "between", "negative", "nan", "infinite", "no such arm", "negative arm"],
)
def test_a_row_that_the_program_cannot_produce_is_not_absorbed(bernoulli_engine, arm, reward):
    state = bernoulli_engine.init(KEY)
    after, info = bernoulli_engine.update(KEY, state, rows_of([arm], [reward]))
    assert not bool(info.is_trusted) and is_same(after, state)


@pytest.mark.slow
def test_single_precision_certifies_a_variance():
    engine = conjugate(RewardModel(normal_with_unknown_variance_per_arm, A))
    reward = np.random.default_rng(6).normal(3.0, 2.0, size=60)
    arm = np.arange(60) % A
    state, info = learnt(engine, rows_of(arm, reward))
    assert bool(info.is_trusted)
    np.testing.assert_allclose(state.elements["positive"][:, 0], 2.0 + 10.0, rtol=1e-5)
    posterior_mean = (0.25 * 0.3 + sums(reward, arm)) / 20.25
    np.testing.assert_allclose(engine.capabilities.parameters(state)["mean"]["mean"], posterior_mean, rtol=1e-4)


def regression_on_an_interval(arm, context):
    """Everything that the engine keeps as NumPy constants: bounds of a support, powers, members, free elements."""
    share = numpyro.sample("share", dist.Uniform(jnp.zeros(A), 0.5))
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(2), jnp.sqrt(variance)).to_event(1))
    level = reals("level", A)
    numpyro.sample("click", dist.Bernoulli(2.0 * share[arm]))
    numpyro.sample("value", dist.Normal(context @ weight, jnp.sqrt(variance)))
    numpyro.sample("other", dist.Normal(level[arm], 0.5))
    numpyro.deterministic("expected_reward", share[arm])


@pytest.mark.slow
def test_one_engine_serves_both_precisions():
    names = ("click", "value", "other")
    engine = conjugate(RewardModel(regression_on_an_interval, A, np.ones(2), names))
    found = []
    for is_double in (False, True, False):
        with jax.enable_x64(is_double):
            reward = dict(zip(names, jnp.array([[1.0, 0.0, 1.0], [1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), strict=True))
            rows = Interaction(jnp.arange(A), reward, jnp.array([[1.0, 0.5], [0.3, -1.0], [2.0, 1.0]]))
            state, info = learnt(engine, rows)
            assert bool(info.is_trusted)
            found.append(engine.capabilities.parameters(state))
            assert all(np.isfinite(draw).all() for draw in engine.sample(KEY, state, 3).values())
    # A handful of float32 roundings.
    assert_close(found[0], found[1], rtol=1e-4)
    assert_close(found[0], found[2], rtol=0.0)


@pytest.mark.slow
def test_the_scales_of_hundreds_of_arms_are_told_apart():
    def program(arm):
        with numpyro.plate("arms", 300):
            variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
            mean = numpyro.sample("mean", dist.Normal(0.3, jnp.sqrt(variance)))
        normal(mean[arm], jnp.sqrt(variance[arm]))

    assert set(conjugate(RewardModel(program, 300)).explanation.sites) == {"variance", "mean"}


def vague_regression(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1e4).expand([A, 2]).to_event(2))
    normal((weight[arm] * context).sum(-1), 0.1)


@pytest.mark.slow
def test_a_posterior_beyond_the_precision_of_numbers_is_not_trusted():
    # Collinear features a thousand times over, against a prior 1e20 times weaker: no factor of that precision exists.
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(vague_regression, A, np.ones(2)))
        assert_not_learnt(engine, rows_of([0] * 3, [1.0] * 3, np.outer([1e5, 2e5, -1e5], [1.0, 3.0])))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reward", "context"),
    [
        (
            poisson_with_exposure,
            np.array([0, 1, 10**3, 10**6, 10**9]),
            {"exposure": np.array([1e-6, 1.0, 1e3, 1e6, 1e9])},
        ),
        (normal_with_unknown_variance_per_arm, np.array([1e-8, 1.0, -1e4, 1e8, 1e8 + 1]), None),
        # Up to 1e5 times the noise: rounding could hide more than is certified beyond 1e6 times it.
        (regression, np.array([1e-8, 1.0, -1e3, 1e5, 1e5 + 1]), np.outer([1e-6, 1.0, 1e2, 1e3, -1e3], [1.0, 3.0])),
    ],
    ids=["poisson", "unknown variance", "regression"],
)
def test_data_of_any_size_are_certified_where_the_program_is_conjugate(program, reward, context):
    example = jax.tree.map(lambda leaf: np.ones(leaf.shape[1:]), context)
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, A, example))
        rows = rows_of([0, 1, 2, 0, 1], reward, context)
        state, info = learnt(engine, rows)
        _, info_again = learnt(engine, rows, state)
    assert info.is_certified.all(), info.residual
    assert info_again.is_certified.all(), info_again.residual


# Forgetting: an exact posterior under a discount is the posterior of the likelihood so weighted


def of_four_outcomes(arm):
    """A Beta, a Gamma, a Normal-InverseGamma and a free Gaussian posterior at once."""
    rate = latents("rate", dist.Beta(1.0, 2.0), A)
    hazard = latents("hazard", dist.Gamma(2.0, 1.5), A)
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
    mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * jnp.sqrt(variance)))
    level = latents("level", dist.Normal(-1.0, 0.5), A)
    numpyro.sample("click", dist.Bernoulli(rate[arm]))
    numpyro.sample("wait", dist.Exponential(hazard[arm]))
    numpyro.sample("value", dist.Normal(mean + 0.0 * arm, jnp.sqrt(variance)))
    numpyro.sample("other", dist.Normal(level[arm], 0.7))
    numpyro.deterministic("expected_reward", rate[arm])


@pytest.mark.slow
def test_a_discount_weighs_each_row_by_its_age():
    names = ("click", "wait", "value", "other")
    arm, click = np.array([0, 1, 2, 0, 0, 1]), np.array([1, 0, 1, 0, 1, 1])
    wait, value = np.array([0.5, 2.0, 1.0, 0.1, 3.0, 0.7]), np.array([9.0, 11.0, 10.5, 9.5, 10.0, 12.0])
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(of_four_outcomes, A, outcomes=names), discount=0.9)
        rows = rows_of(arm, dict(zip(names, (click, wait, value, value), strict=True)))
        state = None
        for mask in (jnp.arange(6) < 3, jnp.arange(6) == 3, jnp.arange(6) > 3):
            state, info = learnt(engine, rows._replace(mask=mask), state)
            assert bool(info.is_trusted)
    weight = 0.9 ** np.arange(5, -1, -1)
    played, total = sums(weight, arm), weight.sum()
    average = weight @ value / total
    level = (-1.0 / 0.25 + sums(weight * value, arm) / 0.49) / (4.0 + played / 0.49)
    failures = sums(weight * (1 - click), arm)
    expected = {
        "rate": {"concentration1": 1.0 + sums(weight * click, arm), "concentration0": 2.0 + failures},
        "hazard": {"concentration": 2.0 + played, "rate": 1.5 + sums(weight * wait, arm)},
        **of_averages(total, average, weight @ (value - average) ** 2),
        "level": {"mean": level, "covariance": np.diag(1 / (4.0 + played / 0.49))},
    }
    assert_close(engine.capabilities.parameters(state), expected, rtol=1e-9)


def test_a_discounted_beta_posterior_follows_power_discounting_and_its_evidence_adds_up_predictive_densities():
    arms, rewards = np.array([0, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1])
    expected, log_evidence = np.ones((2, 2)), 0.0
    for arm, reward in zip(arms, rewards, strict=True):
        expected = 1.0 + 0.8 * (expected - 1.0)
        log_evidence += np.log(expected[1 - reward, arm] / expected[:, arm].sum())
        expected[:, arm] += [reward, 1 - reward]
    with jax.enable_x64(True):
        engine, rows = conjugate(bernoulli_model(2), discount=0.8), rows_of(arms, rewards)
        together, info = learnt(engine, rows._replace(mask=jnp.ones(5, bool)))
        in_turn = engine.init(KEY)
        for row in range(5):  # the others masked: the same shape compiles once
            in_turn, _ = learnt(engine, rows._replace(mask=jnp.arange(5) == row), in_turn)
        assert bool(info.is_trusted)
        assert engine.capabilities.log_evidence(in_turn) == (pytest.approx(log_evidence, abs=1e-10), 0.0)
    for state in (together, in_turn):
        found = engine.capabilities.parameters(state)["rate"]
        for own, name in zip(expected, ("concentration1", "concentration0"), strict=True):
            np.testing.assert_allclose(found[name], own, rtol=1e-10)


def test_a_discount_outside_its_range_is_refused():
    with pytest.raises(ValueError, match=r"discount must lie in \(0, 1\], got 1.5"):
        conjugate(bernoulli_model(3), discount=1.5)


@pytest.mark.slow
def test_forgetting_lowers_the_regret_where_the_best_arm_changes_and_costs_some_where_it_does_not():
    # Paired over 40 realizations; both differences are tested at four standard errors.
    model = bernoulli_model(3)
    world = Environment(model, {"rate": [0.6, 0.4, 0.2]}, changes={301: {"rate": [0.2, 0.4, 0.6]}})

    def regret(discount):
        engine = functools.partial(engines.conjugate, discount=discount)
        counts = dict(num_steps=600, num_realizations=40, num_samples=300)
        found = simulate(0, model, engine, selectors.double_sampling(), world, **counts)["regret"].values
        return found[:, :300].sum(axis=1), found[:, 300:].sum(axis=1)

    (kept_before, kept_after), (before, after) = regret(1.0), regret(0.98)

    def standard_errors(difference):
        return difference.mean() / (difference.std(ddof=1) / np.sqrt(len(difference)))

    assert standard_errors(before - kept_before) > 4
    assert standard_errors(kept_before + kept_after - before - after) > 4
