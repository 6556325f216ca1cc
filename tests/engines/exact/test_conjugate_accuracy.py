"""The exact engine over long runs and hard data: 100,000 updates, distant means, rows that must not be absorbed.

Closed forms are summed with `math.fsum` or in extended precision, and squares are taken about the data's own mean, so that the
reference loses no digits where the engine might.
"""

import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from ppl_bandit.engines import conjugate
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

A = 3
NUM_ROWS = 100_000
KEY = jr.key(0)


def beta_bernoulli(arm):
    with numpyro.plate("arms", A):
        rate = numpyro.sample("rate", dist.Beta(1.0, 2.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def gamma_poisson(arm, context):
    with numpyro.plate("arms", A):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.5))
    numpyro.sample("reward", dist.Poisson(rate[arm] * context))


def regression(arm, context):
    """A level that the arms share, an offset for each, and two slopes: one dense Gaussian of six."""
    level = numpyro.sample("level", dist.Normal(0.0, 100.0))
    offset = numpyro.sample("offset", dist.Normal(0.0, 1.0).expand([A]))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0).expand([2]))
    numpyro.sample("reward", dist.Normal(level + offset[arm] + context @ slope, 0.8))


def normal_inverse_gamma(arm):
    with numpyro.plate("arms", A):
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


def absorbed(engine, rows):
    """Absorb rows one at a time, in one compiled loop; return the posterior's parameters, all rows having been certified."""

    def step(state, row):
        state, info = engine.update(KEY, state, jax.tree.map(lambda leaf: leaf[None], row))
        return state, info.is_trusted

    state, is_trusted = jax.jit(lambda state, rows: jax.lax.scan(step, state, rows))(engine.init(KEY), rows)
    assert bool(is_trusted.all())
    return engine.capabilities.parameters(state)


def absorbed_at_once(engine, rows):
    state, info = jax.jit(engine.update)(KEY, engine.init(KEY), rows)
    assert bool(info.is_trusted)
    return engine.capabilities.parameters(state)


def assert_close(found, expected, rtol):
    for site, parameters in expected.items():
        for name, value in parameters.items():
            np.testing.assert_allclose(found[site][name], value, rtol=rtol, atol=1e-13, err_msg=f"{site} {name}")


def sums(values, arm):
    return np.array([math.fsum(values[arm == a]) for a in range(A)])


def check_long_run(program, rows, expected, example=None):
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, A, example))
        rows = Interaction(*jax.tree.map(jnp.asarray, rows))
        one_by_one, together = absorbed(engine, rows), absorbed_at_once(engine, rows)
    assert_close(one_by_one, expected, rtol=1e-6)
    assert_close(together, expected, rtol=1e-6)
    # 1e5 roundings of 1e-16 each, and offsets of 0.04 that are differences of levels of 1e4.
    assert_close(together, one_by_one, rtol=1e-7)


@pytest.mark.slow
def test_beta_bernoulli_over_a_long_run():
    rng = np.random.default_rng(1)
    arm, click = rng.integers(0, A, NUM_ROWS), rng.integers(0, 2, NUM_ROWS)
    clicked, played = sums(click, arm), sums(np.ones(NUM_ROWS), arm)
    expected = {"rate": {"concentration1": 1.0 + clicked, "concentration0": 2.0 + played - clicked}}
    check_long_run(beta_bernoulli, (arm, click), expected)


@pytest.mark.slow
def test_gamma_poisson_over_a_long_run():
    rng = np.random.default_rng(2)
    arm, exposure = rng.integers(0, A, NUM_ROWS), rng.uniform(0.1, 3.0, NUM_ROWS)
    count = rng.poisson(np.array([0.2, 3.0, 900.0])[arm] * exposure)
    expected = {"rate": {"concentration": 2.0 + sums(count, arm), "rate": 1.5 + sums(exposure, arm)}}
    check_long_run(gamma_poisson, (arm, count, exposure), expected, example=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.5, 1e4])
def test_dense_regression_over_a_long_run(level):
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
    check_long_run(regression, (arm, reward, features), expected, example=np.ones(2))


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


@pytest.mark.slow
@pytest.mark.parametrize("level", [0.5, 1e4])
def test_normal_inverse_gamma_over_a_long_run(level):
    rng = np.random.default_rng(4)
    arm = rng.integers(0, A, NUM_ROWS)
    reward = level + np.array([0.5, -0.2, 0.0])[arm] + rng.normal(size=NUM_ROWS)
    played = sums(np.ones(NUM_ROWS), arm)
    average = sums(reward, arm) / played
    squares = sums((reward.astype(np.longdouble) - average.astype(np.longdouble)[arm]) ** 2, arm)
    # The prior weighs like a quarter of an observation at 0.3.
    precision = 0.25 + played
    expected = {
        "mean": {
            "mean": (0.25 * 0.3 + played * average) / precision,
            "covariance_times_precision": np.diag(1 / precision),
        },
        "variance": {
            "concentration": 2.0 + played / 2,
            "rate": 1.5 + 0.5 * (squares + 0.25 * played / precision * (average - 0.3) ** 2),
        },
    }
    check_long_run(normal_inverse_gamma, (arm, reward), expected)


@pytest.fixture(scope="module")
def bernoulli_engine():
    engine = conjugate(RewardModel(beta_bernoulli, A))
    return engine._replace(update=jax.jit(engine.update))


@pytest.mark.slow
def test_updates_of_one_row_compile_once():
    calls = []

    def program(arm):
        calls.append(None)
        beta_bernoulli(arm)

    engine = conjugate(RewardModel(program, A))
    update = jax.jit(engine.update)
    state = engine.init(KEY)
    state, _ = update(KEY, state, Interaction(jnp.array([0]), jnp.array([1])))
    num_traces = len(calls)
    for step in range(50):
        state, info = update(KEY, state, Interaction(jnp.array([step % A]), jnp.array([step % 2])))
        assert bool(info.is_trusted)
    assert len(calls) == num_traces
    assert int(state.num_rows) == 51


def test_updates_map_over_states(bernoulli_engine):
    states = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), bernoulli_engine.init(KEY))
    rows = Interaction(jnp.array([[0], [2]]), jnp.array([[1], [0]]))
    states, info = jax.jit(jax.vmap(bernoulli_engine.update, in_axes=(None, 0, 0)))(KEY, states, rows)
    assert info.is_trusted.all()
    np.testing.assert_allclose(states.elements["unit"][0], [[2, 2], [1, 2], [1, 2]], rtol=1e-6)
    np.testing.assert_allclose(states.elements["unit"][1], [[1, 2], [1, 2], [1, 3]], rtol=1e-6)


def test_single_precision_follows_the_default_flag(bernoulli_engine):
    assert not jax.config.jax_enable_x64
    rng = np.random.default_rng(5)
    arm, click = rng.integers(0, A, 200), rng.integers(0, 2, 200)
    state, info = bernoulli_engine.update(
        KEY, bernoulli_engine.init(KEY), Interaction(jnp.asarray(arm), jnp.asarray(click))
    )
    assert bool(info.is_trusted) and state.elements["unit"].dtype == jnp.float32
    # 200 sums in float32 round to 200 * 6e-8 at most.
    np.testing.assert_allclose(state.elements["unit"][:, 0], 1.0 + sums(click, arm), rtol=2e-5)


@pytest.mark.slow
def test_single_precision_certifies_a_variance():
    engine = conjugate(RewardModel(normal_inverse_gamma, A))
    reward = np.random.default_rng(6).normal(3.0, 2.0, size=60)
    arm = np.arange(60) % A
    state, info = jax.jit(engine.update)(KEY, engine.init(KEY), Interaction(jnp.asarray(arm), jnp.asarray(reward)))
    assert bool(info.is_trusted)
    np.testing.assert_allclose(state.elements["positive"][:, 0], 2.0 + 10.0, rtol=1e-5)
    posterior_mean = (0.25 * 0.3 + sums(reward, arm)) / 20.25
    np.testing.assert_allclose(engine.capabilities.parameters(state)["mean"]["mean"], posterior_mean, rtol=1e-4)


def regression_on_an_interval(arm, context):
    """Everything that the engine keeps as NumPy constants: bounds of a support, powers, members, free elements."""
    share = numpyro.sample("share", dist.Uniform(jnp.zeros(A), 0.5))
    variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
    weight = numpyro.sample("weight", dist.Normal(jnp.zeros(2), jnp.sqrt(variance)).to_event(1))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([A]))
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
            state, info = jax.jit(engine.update)(KEY, engine.init(KEY), rows)
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
        numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))

    engine = conjugate(RewardModel(program, 300))
    assert set(engine.explanation.sites) == {"variance", "mean"}


def bent_in_rare_contexts(arm, context):
    with numpyro.plate("arms", A):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(jnp.where(context > 100.0, rate[arm] ** 2, rate[arm])))


def test_a_datum_that_is_not_conjugate_changes_nothing_and_says_so():
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(bent_in_rare_contexts, A, 1.0))
        update = jax.jit(engine.update)
        rows = Interaction(jnp.array([0, 1, 2]), jnp.array([1, 0, 0]), jnp.array([1.0, 50.0, 3.0]))
        state, info = update(KEY, engine.init(KEY), rows)
        assert bool(info.is_trusted)
        after, info = update(KEY, state, rows._replace(context=jnp.array([1.0, 500.0, 3.0])))
    assert not bool(info.is_trusted)
    assert info.is_certified.tolist() == [True, False, True]
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True))


@pytest.mark.parametrize(
    ("arm", "reward"),
    [(0, 2.0), (0, 0.5), (0, -1.0), (0, math.nan), (0, math.inf), (A, 1.0), (-1, 1.0)],
    ids=["beyond", "between", "negative", "nan", "infinite", "no such arm", "negative arm"],
)
def test_a_row_that_the_program_cannot_produce_is_not_absorbed(bernoulli_engine, arm, reward):
    state = bernoulli_engine.init(KEY)
    rows = Interaction(jnp.array([arm]), jnp.array([reward]))
    after, info = bernoulli_engine.update(KEY, state, rows)
    assert not bool(info.is_trusted)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True))


@pytest.mark.slow
def test_a_context_that_indexes_nothing_is_not_absorbed():
    def program(arm, context):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([4, A]))
        numpyro.sample("reward", dist.Bernoulli(rate[context, arm]))

    engine = conjugate(RewardModel(program, A, 0))
    rows = Interaction(jnp.array([0, 1, 2]), jnp.array([1, 1, 0]), jnp.array([3, 4, -5]))
    _, info = jax.jit(engine.update)(KEY, engine.init(KEY), rows)
    assert info.is_certified.tolist() == [True, False, False]


@pytest.mark.slow
def test_a_discount_weighs_each_row_by_its_age():
    # Three outcomes in one program put a Beta, a Gamma and a Normal-InverseGamma posterior to the test at once.
    def program(arm):
        rate = numpyro.sample("rate", dist.Beta(1.0, 2.0).expand([A]))
        hazard = numpyro.sample("hazard", dist.Gamma(2.0, 1.5).expand([A]))
        variance = numpyro.sample("variance", dist.InverseGamma(2.0, 1.5))
        mean = numpyro.sample("mean", dist.Normal(0.3, 2.0 * jnp.sqrt(variance)))
        level = numpyro.sample("level", dist.Normal(-1.0, 0.5).expand([A]))
        numpyro.sample("click", dist.Bernoulli(rate[arm]))
        numpyro.sample("wait", dist.Exponential(hazard[arm]))
        numpyro.sample("value", dist.Normal(mean + 0.0 * arm, jnp.sqrt(variance)))
        numpyro.sample("other", dist.Normal(level[arm], 0.7))
        numpyro.deterministic("expected_reward", rate[arm])

    names = ("click", "wait", "value", "other")
    arm, click = np.array([0, 1, 2, 0, 0, 1]), np.array([1, 0, 1, 0, 1, 1])
    wait, value = np.array([0.5, 2.0, 1.0, 0.1, 3.0, 0.7]), np.array([9.0, 11.0, 10.5, 9.5, 10.0, 12.0])
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, A, outcomes=names), discount=0.9)
        reward = dict(zip(names, map(jnp.asarray, (click, wait, value, value)), strict=True))
        rows = Interaction(jnp.asarray(arm), reward)
        update = jax.jit(engine.update)
        state, info = update(KEY, engine.init(KEY), rows._replace(mask=jnp.arange(6) < 4))
        state, info_later = update(KEY, state, rows._replace(mask=jnp.arange(6) >= 4))
        assert bool(info.is_trusted) and bool(info_later.is_trusted)
    weight = 0.9 ** np.arange(5, -1, -1)
    played, total = sums(weight, arm), weight.sum()
    average = weight @ value / total
    squares = weight @ (value - average) ** 2
    level = (-1.0 / 0.25 + sums(weight * value, arm) / 0.49) / (4.0 + played / 0.49)
    expected = {
        "rate": {
            "concentration1": 1.0 + sums(weight * click, arm),
            "concentration0": 2.0 + sums(weight * (1 - click), arm),
        },
        "hazard": {"concentration": 2.0 + played, "rate": 1.5 + sums(weight * wait, arm)},
        "mean": {
            "mean": (0.25 * 0.3 + total * average) / (0.25 + total),
            "covariance_times_precision": np.full((1, 1), 1 / (0.25 + total)),
        },
        "variance": {
            "concentration": 2.0 + total / 2,
            "rate": 1.5 + 0.5 * (squares + 0.25 * total / (0.25 + total) * (average - 0.3) ** 2),
        },
        "level": {"mean": level, "covariance": np.diag(1 / (4.0 + played / 0.49))},
    }
    assert_close(engine.capabilities.parameters(state), expected, rtol=1e-9)


@pytest.mark.slow  # a program whose noise is the context; test_many_rows.py masks rows in the default run
def test_masked_rows_may_hold_anything_and_change_nothing():
    def program(arm, context):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0).expand([A]))
        numpyro.sample("reward", dist.Normal(mean[arm] * context, context))

    engine = conjugate(RewardModel(program, A, 1.0))
    rows = Interaction(
        jnp.array([0, 99, 1, 0]),
        jnp.array([1.0, jnp.nan, jnp.inf, 2.0]),
        jnp.array([1.0, jnp.nan, 0.0, 2.0]),
        jnp.array([True, False, False, True]),
    )
    state, info = jax.jit(engine.update)(KEY, engine.init(KEY), rows)
    assert bool(info.is_trusted)
    assert int(state.num_rows) == 2
    # Two observations of arm 0, 1.0 with sd 1 and 2.0 = 2 mean with sd 2: precision 1 + 1 + 1, mean (1 + 1) / 3.
    np.testing.assert_allclose(
        engine.capabilities.parameters(state)["mean"]["mean"], [2 / 3, 0, 0], rtol=1e-6, atol=1e-7
    )


@pytest.mark.slow
def test_a_posterior_beyond_the_precision_of_numbers_is_not_trusted():
    # Collinear features a thousand times over, against a prior 1e20 times weaker: no factor of that precision exists.
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(vague_regression, A, np.ones(2)))
        rows = Interaction(
            jnp.zeros(3, int), jnp.ones(3), jnp.outer(jnp.array([1e5, 2e5, -1e5]), jnp.array([1.0, 3.0]))
        )
        state = engine.init(KEY)
        after, info = jax.jit(engine.update)(KEY, state, rows)
    assert not bool(info.is_trusted)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True))


def vague_regression(arm, context):
    weight = numpyro.sample("weight", dist.Normal(0.0, 1e4).expand([A, 2]).to_event(2))
    numpyro.sample("reward", dist.Normal((weight[arm] * context).sum(-1), 0.1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "reward", "context"),
    [
        (gamma_poisson, np.array([0, 1, 10**3, 10**6, 10**9]), np.array([1e-6, 1.0, 1e3, 1e6, 1e9])),
        (normal_inverse_gamma, np.array([1e-8, 1.0, -1e4, 1e8, 1e8 + 1]), None),
        # Up to 1e5 times the noise: rounding could hide more than is certified beyond 1e6 times it.
        (regression, np.array([1e-8, 1.0, -1e3, 1e5, 1e5 + 1]), np.outer([1e-6, 1.0, 1e2, 1e3, -1e3], [1.0, 3.0])),
    ],
    ids=["poisson", "unknown variance", "regression"],
)
def test_data_of_any_size_are_certified_where_the_program_is_conjugate(program, reward, context):
    example = None if context is None else np.ones(context.shape[1:])
    with jax.enable_x64(True):
        engine = conjugate(RewardModel(program, A, example))
        rows = Interaction(*jax.tree.map(jnp.asarray, (np.array([0, 1, 2, 0, 1]), reward, context)))
        state, info = jax.jit(engine.update)(KEY, engine.init(KEY), rows)
        again, info_again = jax.jit(engine.update)(KEY, state, rows)
    assert info.is_certified.all(), info.residual
    assert info_again.is_certified.all(), info_again.residual
