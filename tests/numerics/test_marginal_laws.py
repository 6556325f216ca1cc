"""Closed-form laws of arms: their distribution functions, quantiles, and the probability of being best, against scipy."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats

from ppl_bandit import Interaction, RewardModel, engines, selectors
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.numerics import best_arm_probs, marginal_laws

BETAS = {
    "flat": ([1.0, 1.0], [1.0, 1.0]),
    "one_narrow": ([1.0, 1e5], [1.0, 3e5]),
    "skewed": ([1.0, 1e5], [2.0, 40.0]),
    "jeffreys": ([0.5, 0.5], [0.5, 3.5]),
    "small_shape": ([0.1, 50.0], [0.2, 50.0]),
    "large_counts": ([5e5, 5.01e5], [5e5, 5e5]),
    "huge_counts": ([1e9, 1e9 + 5e4], [1e9, 1e9]),
    "three": ([300.0, 2.0, 299.0], [700.0, 3.0, 700.0]),
    "three_scales": ([1.0, 1e5, 1.1e5], [1.0, 3e5, 3.3e5]),
}
GAMMAS = {
    "counts": ([1.0, 2.0], [1.0, 2.0], 1.0),
    "rates": ([1.0, 2.0], [1.0, 2.0], -1.0),
    "unequal": ([0.3, 50.0], [1.0, 60.0], 1.0),
    "large": ([1e6, 1e6], [1e6, 1e6 + 1500.0], -1.0),
}
STUDENTS = {
    "two_degrees": ([2.0, 2.0], [0.0, 0.5], [1.0, 1.0]),
    "one_narrow": ([2.0, 300.0], [0.0, 0.5], [1.0, 0.01]),
    "normal": ([np.inf, np.inf], [0.0, 0.5], [1.0, 2.0]),
    "three_normals": ([np.inf, np.inf, np.inf], [0.0, 0.5, -0.2], [1.0, 2.0, 0.5]),
}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def inverse_gamma_law(shape, rate):
    return marginal_laws.gamma_law(shape, rate, 0.0, 1.0, -1.0)


@functools.cache
def compiled(function, law):
    """`function` of a law, as a function of the law's parameters: compiled once for each number of arms."""
    return jax.jit(lambda parameters, *others: function(law(*parameters), *others))


def beta(case):
    a, b = map(np.array, BETAS[case])
    return marginal_laws.beta_law, (a, b), [stats.beta(*row) for row in zip(a, b, strict=True)]


def gamma(case):
    shape, rate, power = GAMMAS[case]
    law, scipy_law = marginal_laws.gamma_law, lambda a, b: stats.gamma(a, scale=1 / b)
    if power < 0:
        law, scipy_law = inverse_gamma_law, lambda a, b: stats.invgamma(a, scale=b)
    return law, (np.array(shape), np.array(rate)), [scipy_law(a, b) for a, b in zip(shape, rate, strict=True)]


def student(case):
    df, loc, scale = map(np.array, STUDENTS[case])
    dists = [stats.t(n, m, s) if np.isfinite(n) else stats.norm(m, s) for n, m, s in zip(df, loc, scale, strict=True)]
    return marginal_laws.student_t_law, (df, loc, scale), dists


CASES = [
    # The laws of two arms share what is compiled.
    pytest.param(make, case, id=f"{make.__name__}-{case}", marks=[pytest.mark.slow] if "three" in case else [])
    for make, cases in ((beta, BETAS), (gamma, GAMMAS), (student, STUDENTS))
    for case in cases
]


def reference_probs(dists):
    """P(best) by a midpoint rule of 40,000 nodes in the normal score of each arm's own probability.

    Every F_b is then a smooth function unless b is far narrower than the arm; its step falls between two nodes, which are
    5e-4 apart and carry at most 2e-4 of probability each: an error below 1e-4, and below 1e-7 for equal widths.
    """
    edges = np.linspace(-9.0, 9.0, 40_001)
    middle = (edges[1:] + edges[:-1]) / 2
    weights = stats.norm.pdf(middle) * (edges[1] - edges[0])
    won = []
    for arm, own in enumerate(dists):
        # The upper half through the survival function, which keeps its digits.
        x = np.where(middle < 0, own.ppf(stats.norm.cdf(middle)), own.isf(stats.norm.sf(middle)))
        won.append(np.sum(weights * np.prod([d.cdf(x) for b, d in enumerate(dists) if b != arm], axis=0)))
    return np.array(won) / np.sum(won)


@pytest.mark.parametrize("make, case", CASES)
def test_the_probability_of_being_best_is_exact_to_1e_4(make, case):
    law, parameters, dists = make(case)
    found = compiled(best_arm_probs.best_arm_probs, law)(parameters)
    np.testing.assert_allclose(found, reference_probs(dists), rtol=0, atol=1e-4)


@pytest.mark.parametrize("make, case", CASES)
def test_distribution_functions_and_quantiles_match_scipy(make, case):
    law, parameters, dists = make(case)
    for order in (1e-3, 0.1, 0.5, 0.9, 1 - 1 / 1500):
        x = np.array([d.ppf(order) for d in dists])
        below = compiled(marginal_laws.cdf, law)(parameters, x)
        np.testing.assert_allclose(below, order, rtol=1e-3, atol=1e-6)
        # A quantile is as good as the probability on its far side: within 0.1 % of the smaller one.
        found = np.asarray(compiled(marginal_laws.quantile, law)(parameters, order))
        reached = [d.cdf(q) if order <= 0.5 else d.sf(q) for d, q in zip(dists, found, strict=True)]
        np.testing.assert_allclose(reached, min(order, 1 - order), rtol=1e-3)


@pytest.mark.parametrize(
    "family, least, most, tolerance",
    [
        ("beta", 2.0, 1e7, 2e-5),
        pytest.param("gamma", 0.1, 1e7, 5e-5, marks=pytest.mark.slow),
        pytest.param("student", 2.0, 1e7, 2e-5, marks=pytest.mark.slow),
        pytest.param("student", 1.0, 2.0, 2e-3, marks=pytest.mark.slow),
    ],
)
def test_two_random_arms_match_many_nodes(monkeypatch, family, least, most, tolerance):
    """Compare with the general integral on ten times as many nodes, for pairs about a deviation apart."""
    rng = np.random.default_rng(5)
    size, apart = np.exp(rng.uniform(np.log(least), np.log(most), (400, 2))), rng.normal(size=400)
    width = np.sqrt((1.0 / size).sum(axis=1))
    if family == "beta":  # of these sums of shapes, the first middle between .05 and .95
        middle = np.log(rng.uniform(0.05, 0.95, 400) / rng.uniform(0.05, 0.95, 400))
        share = 1.0 / (1.0 + np.exp(-np.stack([middle, np.clip(middle + width * apart, -3.0, 3.0)], axis=1)))
        make, arguments = marginal_laws.beta_law, (size * share, size * (1.0 - share))
    elif family == "gamma":
        make, arguments = marginal_laws.gamma_law, (size, size * np.exp(width[:, None] * rng.normal(size=(400, 2))))
    else:
        make, arguments = (
            marginal_laws.student_t_law,
            (size, rng.normal(size=(400, 2)), np.exp(rng.normal(size=(400, 2)))),
        )

    def probs(*values):
        return best_arm_probs.best_arm_probs(make(*values))

    def general(*values):
        return jnp.sum(best_arm_probs._integrate(make(*values), jnp.ones(2, bool))[0], axis=1)

    found = jax.jit(jax.vmap(probs))(*map(jnp.asarray, arguments))
    monkeypatch.setattr(best_arm_probs, "_NUM_TABLE_NODES", dict.fromkeys(range(3), 400))
    monkeypatch.setattr(best_arm_probs, "_NUM_NODES", dict.fromkeys(range(3), 150))
    expected = jax.jit(jax.vmap(general))(*map(jnp.asarray, arguments))
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("least, most, tolerance", [(1.0, 6.0, 1e-3), (6.0, 1e3, 1e-4)])
def test_three_random_arms_with_long_tails_match_many_nodes(monkeypatch, least, most, tolerance):
    rng = np.random.default_rng(1)
    df, loc = np.exp(rng.uniform(np.log(least), np.log(most), (400, 3))), rng.normal(0.0, 0.3, (400, 3))
    parameters = tuple(map(jnp.asarray, (df, loc, np.exp(rng.uniform(-4.0, 0.0, (400, 3))))))

    def probs(*values):
        return best_arm_probs.best_arm_probs(marginal_laws.student_t_law(*values))

    found = jax.jit(jax.vmap(probs))(*parameters)
    monkeypatch.setattr(best_arm_probs, "_NUM_TABLE_NODES", dict.fromkeys(range(3), 400))
    monkeypatch.setattr(best_arm_probs, "_NUM_NODES", dict.fromkeys(range(3), 60))
    monkeypatch.setattr(best_arm_probs, "_LARGEST_V", 15.0)
    expected = jax.jit(jax.vmap(lambda *values: probs(*values)))(*parameters)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_the_smaller_of_two_probabilities_keeps_its_digits():
    # Densities are cut off where they have fallen by 1e-10, and single precision has seven digits.
    for apart in (3.0, 5.0, 6.0):
        expected = stats.norm.sf(apart / np.hypot(1.0, 0.4))
        for order in ([0, 1], [1, 0]):
            parameters = np.full(2, np.inf), np.array([0.0, apart])[order], np.array([1.0, 0.4])[order]
            found = np.asarray(compiled(best_arm_probs.best_arm_probs, marginal_laws.student_t_law)(parameters))
            assert found.min() == pytest.approx(expected, rel=1e-4, abs=1e-9) and found.sum() == 1.0


def won(law):
    return jax.jit(lambda: best_arm_probs.best_arm_probs(law))()


def test_arms_without_spread_compete_as_points():
    uniform, sizes, law = np.ones(3), np.array([0.0, 5.0, 3.0]), marginal_laws.beta_law
    # Five times a uniform number, three times another, and a sure 0 or 2: areas of rectangles and triangles.
    for point, expected in ((0.0, [0.0, 0.7, 0.3]), (2.0, [8 / 30, 17 / 30, 5 / 30])):
        parameters, below = (uniform, uniform, np.array([point, 0.0, 0.0]), sizes), compiled(marginal_laws.cdf, law)
        np.testing.assert_allclose(compiled(best_arm_probs.best_arm_probs, law)(parameters), expected, atol=2e-4)
        np.testing.assert_allclose(below(parameters, np.array([point, 1.0, 1.5])), [1.0, 0.2, 0.5], atol=1e-5)
        np.testing.assert_allclose(below(parameters, np.array([point - 0.1, 5.0, 3.0])), [0.0, 1.0, 1.0], atol=1e-5)
    for loc, scale, first in (
        ([0.3, 0.3], [0.0, 0.0], 0.5),
        ([0.3, 0.2], [0.0, 0.0], 1.0),
        ([0.0, 1.0], [0.0, 1.0], stats.norm.cdf(-1)),
    ):
        parameters = np.full(2, np.inf), np.array(loc), np.array(scale)
        found = compiled(best_arm_probs.best_arm_probs, marginal_laws.student_t_law)(parameters)
        np.testing.assert_allclose(found, [first, 1 - first], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("precise", [True, False])
def test_equal_points_share_the_probability_of_being_best(precise):
    with jax.enable_x64(precise):
        zeros = jnp.zeros(3)
        law = marginal_laws.student_t_law(jnp.full(3, 4.0), zeros, zeros)
        np.testing.assert_allclose(won(law), 1 / 3, atol=1e-5)
        law = marginal_laws.beta_law(jnp.ones(3), jnp.ones(3), np.zeros(3), np.array([0.0, 0.0, -1.0]))
        np.testing.assert_allclose(won(law), [0.5, 0.5, 0.0], atol=2e-4)


@pytest.mark.slow
def test_constants_in_single_precision_do_not_shorten_the_law():
    with jax.enable_x64(False):
        weights = jnp.array([0.3, 0.7])  # as a program's module makes them, before anybody asked for more

    def fee(arm):
        with numpyro.plate("arms", 2):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.deterministic("expected_reward", 1000.0 + weights[arm] * rate[arm])
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    with jax.enable_x64(False):
        engine = engines.conjugate(RewardModel(fee, 2))
    middle = engine.capabilities.marginals(engine.init(jr.key(0)), None).quantile(jnp.asarray(0.5))
    # The weights are what they are; their products and sums have 16 digits, and a median of 1,000 has an error of 1e-9.
    np.testing.assert_allclose(middle, 1000.0 + 0.5 * np.asarray(weights, float), rtol=1e-10)


@pytest.mark.slow
def test_hundreds_of_arms_match_draws():
    rng = np.random.default_rng(1)
    a, b = rng.integers(1, 400, (2, 150)).astype(float)
    found = np.asarray(jax.jit(lambda a, b: best_arm_probs.best_arm_probs(marginal_laws.beta_law(a, b)))(a, b))
    num = 200_000
    counts = sum(
        np.bincount(rng.beta(a[:, None], b[:, None], (150, num // 4)).argmax(0), minlength=150) for _ in range(4)
    )
    # Five standard errors of a share, and one count for arms that hardly ever win.
    np.testing.assert_array_less(np.abs(found - counts / num), 5 * np.sqrt(found / num) + 1 / num)
    assert found.sum() == pytest.approx(1.0)


def test_arms_that_may_not_be_played_do_not_compete():
    probs = compiled(best_arm_probs.best_arm_probs, marginal_laws.beta_law)
    parameters = np.array([3.0, 5.0, 90.0]), np.array([4.0, 4.0, 10.0])
    found = probs(parameters, np.array([True, True, False]))
    pair = probs(tuple(values[:2] for values in parameters))
    # The two integrals have different nodes, and each is off by up to 2e-5.
    np.testing.assert_allclose(found, [*pair, 0.0], atol=4e-5)
    np.testing.assert_allclose(probs(parameters, np.array([False, True, False])), [0.0, 1.0, 0.0])


def test_prices_and_costs_scale_the_laws_of_their_arms():
    # Price times conversion rate, and a cost: maps that differ by arm, one of them decreasing.
    a, b = jnp.array([30.0, 8.0, 2.0]), jnp.array([70.0, 40.0, 9.0])
    offset, slope = np.array([0.0, 0.0, 4.0]), np.array([9.0, 15.0, -8.0])
    dists = [stats.beta(*row) for row in zip(np.asarray(a), np.asarray(b), strict=True)]
    num = 400_000
    draws = np.stack([offset[i] + slope[i] * d.rvs(num, random_state=i) for i, d in enumerate(dists)])
    shares = np.bincount(draws.argmax(0), minlength=3) / num

    @jax.jit
    def probs_and_quantile(a, b):
        law = marginal_laws.beta_law(a, b, offset, slope)
        return best_arm_probs.best_arm_probs(law), marginal_laws.quantile(law, jnp.array(0.9))

    found, quantile = map(np.asarray, probs_and_quantile(a, b))
    np.testing.assert_array_less(np.abs(found - shares), 5 * np.sqrt(shares * (1 - shares) / num) + 1e-5)
    np.testing.assert_allclose(quantile[2], 4.0 - 8.0 * dists[2].ppf(0.1), rtol=1e-5)


OFFERS = {
    "bernoulli": True,
    "poisson": True,
    "exponential": True,
    "linear_gaussian": True,
    "hierarchical_gaussian": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OFFERS)
def test_the_exact_engine_offers_the_law_of_its_own_draws(name):
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    engine = engines.conjugate(model)
    arms = jnp.arange(8) % file.num_arms
    contexts = model.context_rows(8)
    rewards = jnp.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]) + (0.5 if name == "exponential" else 0.0)
    state, info = jax.jit(engine.update)(jr.key(0), engine.init(jr.key(0)), Interaction(arms, rewards, contexts))
    assert bool(info.is_trusted)
    marginals = engine.capabilities.marginals(state, file.context)
    num = 100_000
    table = np.asarray(model.expected_rewards(engine.sample(jr.key(1), state, num), file.context))
    for order in (0.05, 0.5, 0.99):
        below = (table <= np.asarray(marginals.quantile(jnp.asarray(order)))).mean(axis=0)
        np.testing.assert_allclose(below, order, atol=5 * np.sqrt(order * (1 - order) / num))
    if not OFFERS[name]:
        assert marginals.best_arm_probs is None  # arms share their parents
        return
    shares = np.bincount(table.argmax(axis=1), minlength=file.num_arms) / num
    tolerance = 5 * np.sqrt(shares * (1 - shares) / num) + 1e-4
    np.testing.assert_array_less(np.abs(marginals.best_arm_probs(None) - shares), tolerance)


def squared(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.deterministic("expected_reward", rate[arm] ** 2)
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def shared(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.deterministic("expected_reward", rate[arm] - 0.5 * rate[0])
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def clipped(arm):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.deterministic("expected_reward", jnp.minimum(rate[arm], 0.5))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def same_element(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.deterministic("expected_reward", rate * (1.0 + arm))
    numpyro.sample("reward", dist.Bernoulli(jnp.broadcast_to(rate, arm.shape)))


@pytest.mark.slow
@pytest.mark.parametrize("program", [clipped, squared, shared])
def test_what_is_not_affine_in_one_element_has_no_closed_form(program):
    engine = engines.conjugate(RewardModel(program, 2))
    assert engine.capabilities.marginals(jax.jit(engine.init)(jr.key(0)), None) is None


@pytest.mark.slow
def test_arms_that_share_an_element_are_not_independent():
    engine = engines.conjugate(RewardModel(same_element, 2))

    @jax.jit
    def quantile():
        marginals = engine.capabilities.marginals(engine.init(jr.key(0)), None)
        assert marginals.best_arm_probs is None
        return marginals.quantile(jnp.array(0.3))

    np.testing.assert_allclose(quantile(), [0.3, 0.6], rtol=1e-5)


@pytest.mark.slow
def test_exact_double_sampling_decides_by_the_exact_probabilities():
    file = load_model("bernoulli")
    engine = engines.conjugate(RewardModel(file.program, 3))
    marginals = engine.capabilities.marginals(engine.init(jr.key(0)), None)
    table = jnp.array([[0.9, 0.1, 0.2]])
    chosen = selectors.double_sampling(exact=True)(jr.key(0), table, 1, marginals=marginals)
    np.testing.assert_allclose(chosen.best_arm_probs, 1 / 3, atol=1e-6)
    without = selectors.double_sampling(exact=True)(jr.key(0), table, 1)
    np.testing.assert_allclose(without.best_arm_probs, [1.0, 0.0, 0.0])
