"""The optimistic Gittins index: against roots found elsewhere, from a table, and at its edges."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import optimize, stats

from ppl_bandit.numerics import marginal_laws
from ppl_bandit.numerics.tail_excess import tail
from ppl_bandit.selectors import greedy, optimistic_gittins, with_control, with_floor, with_limits
from ppl_bandit.selectors.optimistic_gittins import gittins_index, gittins_index_of_draws
from ppl_bandit.types import Marginals, Tail

LEFT = (0.0, 1.0, 10.0, 300.0, 2000.0, 10_000.0)


def beta_case(a, b, offset=0.0, slope=1.0):
    """E max(w - x, 0) = mean P(Beta(a + 1, b) > x) - x P(Beta(a, b) > x); a falling map turns it around."""
    own, mean = (a, b) if slope > 0 else (b, a), (a if slope > 0 else b) / (a + b)
    low, size = (offset, slope) if slope > 0 else (offset + slope, -slope)

    def excess(x):
        part = (x - low) / size
        return size * (mean * stats.beta.sf(part, own[0] + 1, own[1]) - part * stats.beta.sf(part, *own))

    law = marginal_laws.beta_law(jnp.array([a]), jnp.array([b]), offset, slope)
    return law, low + size * mean, size * stats.beta.std(*own), excess, low + size


def gamma_case(shape, rate, power):
    if power > 0:
        law, next_one = stats.gamma(shape, scale=1 / rate), stats.gamma(shape + 1, scale=1 / rate)
    else:
        law, next_one = stats.invgamma(shape, scale=rate), stats.invgamma(shape - 1, scale=rate)

    def excess(x):
        return law.mean() * next_one.sf(x) - x * law.sf(x)

    made = marginal_laws.gamma_law(jnp.array([shape]), jnp.array([rate]), 0.0, 1.0, power)
    return made, law.mean(), law.std() if np.isfinite(law.std()) else law.mean(), excess, np.inf


def student_case(df, loc, scale):
    def excess(x):
        z = (x - loc) / scale
        if np.isinf(df):
            return scale * (stats.norm.pdf(z) - z * stats.norm.sf(z))
        return scale * ((df + z * z) / (df - 1) * stats.t.pdf(z, df) - z * stats.t.sf(z, df))

    law = marginal_laws.student_t_law(jnp.array([df]), jnp.array([loc]), jnp.array([scale]))
    return law, loc, scale, excess, np.inf


# Each with the error of the index that is allowed, in posterior deviations: up to 2,000 decisions left, and at 10,000. What is
# cut off (1e-10 of the density) moves the index where the tail is heavy; elsewhere it is the cubics between nodes.
INDICES = {
    "flat": (beta_case, (1.0, 1.0), 1e-5, 1e-5),
    "few": (beta_case, (5.0, 2.0), 1e-5, 1e-5),
    "many": (beta_case, (500.0, 50.0), 1e-4, 1e-4),
    "very many": (beta_case, (1e5, 3e5), 1e-4, 1e-4),
    "rare": (beta_case, (1.0, 100.0), 1e-3, 2e-3),
    "skewed": (beta_case, (0.3, 20.0), 1e-3, 1e-3),
    "nearly sure": (beta_case, (20.0, 0.3), 1e-5, 1e-5),
    "two ends": (beta_case, (0.05, 0.05), 2e-4, 1e-5),
    "cost": (beta_case, (2.0, 7.0, 1.0, -3.0), 1e-4, 1e-4),
    "counts": (gamma_case, (2.0, 3.0, 1.0), 1e-4, 1e-3),
    "rare counts": (gamma_case, (0.3, 1.0, 1.0), 1e-3, 1e-3),
    "large counts": (gamma_case, (1e4, 1e4, 1.0), 1e-4, 1e-4),
    "waits": (gamma_case, (4.0, 3.0, -1.0), 3e-3, 5e-3),
    "normal": (student_case, (np.inf, 1.0, 2.0), 1e-4, 1e-4),
    "student": (student_case, (5.0, 1.0, 2.0), 1e-4, 1e-3),
    "heavy": (student_case, (3.0, 1.0, 2.0), 1e-3, 3e-3),
}


# One of every law and shape of tail; the others are slow.
QUICK = ("flat", "rare", "cost", "counts", "waits", "normal", "student", "heavy")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in INDICES]
)
def test_the_index_is_the_root_of_its_equation(case):
    make, arguments, allowed, far_allowed = INDICES[case]
    with jax.enable_x64(True):
        law, mean, deviation, excess, end = make(*arguments)
        table = tail(law)
        found = np.array([gittins_index(table, jnp.asarray(left))[0] for left in LEFT])
        assert found[0] == float(table.mean[0])
    assert found[0] == pytest.approx(mean, abs=1e-6 * deviation)
    for index, left in zip(found[1:], LEFT[1:], strict=True):
        highest = min(mean + left * excess(mean), end)
        root = optimize.brentq(lambda x, left=left: x - mean - left * excess(x), mean, highest, xtol=1e-14, rtol=1e-14)
        assert abs(index - root) < (far_allowed if left > 2000 else allowed) * deviation


@pytest.mark.parametrize("case", ["few", "many", "counts", "normal", "student"])
@pytest.mark.slow
def test_single_precision_keeps_a_thousandth_of_a_deviation_at_a_thousand_decisions_left(case):
    make, arguments, _, _ = INDICES[case]
    with jax.enable_x64(True):
        law, _, deviation, _, _ = make(*arguments)
        wanted = float(gittins_index(tail(law), jnp.asarray(1000.0))[0])
        single = law._replace(
            **{name: leaf.astype(jnp.float32) for name, leaf in law._asdict().items() if jnp.ndim(leaf)}
        )
    # An index is a number of about the mean's size, known to 1e-7 of it.
    rounding = 4e-7 * abs(wanted)
    assert abs(gittins_index(tail(single), jnp.float32(1000.0))[0] - wanted) < 1e-3 * deviation + rounding


@pytest.mark.parametrize("case", ["few", "skewed", "cost", "counts", "waits", "normal", "student"])
def test_the_mean_excess_and_the_probability_above_match_scipy_at_every_node(case):
    make, arguments, _, _ = INDICES[case]
    with jax.enable_x64(True):
        law, _, deviation, excess, _ = make(*arguments)
        table = tail(law)
        nodes, found = np.asarray(table.nodes[0]), np.asarray(table.excess[0])
    assert np.all(np.diff(nodes) > 0)
    wanted = excess(nodes)
    # Far out a Gamma's density falls so fast that nodes are too few for it, and it is cut off at 1e-10 of its largest value.
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-6 * deviation)
    slopes = (excess(nodes - 1e-5 * deviation) - excess(nodes + 1e-5 * deviation)) / (2e-5 * deviation)
    np.testing.assert_allclose(table.above[0], slopes, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_an_arm_that_is_known_is_worth_its_mean():
    with jax.enable_x64(True):
        sure = marginal_laws.beta_law(
            jnp.array([3.0, 3.0]), jnp.array([5.0, 5.0]), jnp.array([0.2, 0.0]), jnp.array([0.0, 1.0])
        )
        found = np.asarray(gittins_index(tail(sure), jnp.asarray(100.0)))
        point = marginal_laws.student_t_law(jnp.array([jnp.inf]), jnp.array([1.5]), jnp.array([0.0]))
        assert gittins_index(tail(point), jnp.asarray(100.0))[0] == 1.5
    assert found[0] == pytest.approx(0.2) and found[1] > 0.375


def test_an_index_from_draws_scatters_about_the_exact_one():
    """At M = 2,000 and 1,000 decisions left: .1 deviations of scatter, so that 60 tables place the mean to .013."""
    draws = np.random.default_rng(0).normal(size=(60, 2000))
    from_draws = jax.jit(jax.vmap(lambda column: gittins_index_of_draws(column, 1000.0)))
    with jax.enable_x64(True):
        found = np.asarray(from_draws(jnp.asarray(draws)))
    wanted = optimize.brentq(lambda x: x - 1000.0 * (stats.norm.pdf(x) - x * stats.norm.sf(x)), 0.0, 10.0)
    assert abs(found.mean() - wanted) < 0.06 and found.std() < 0.2


def test_a_larger_horizon_or_patience_plays_the_arm_that_is_less_known():
    table = jnp.asarray(np.random.default_rng(1).normal(size=(500, 2)) * [0.1, 1.0] + [0.5, 0.0])
    arms = [
        int(optimistic_gittins(horizon, patience)(jr.key(0), table, 1).arm)
        for horizon, patience in [(2, 1.0), (1000, 1.0), (1000, 1e-3)]
    ]
    assert arms == [0, 1, 0]


def test_the_last_step_is_greedy_by_the_mean_and_a_trace_counts_later_steps_as_the_last():
    table = jnp.asarray(np.random.default_rng(2).normal(size=(400, 3)) * [0.1, 3.0, 0.1] + [0.5, 0.4, 0.3])
    select = optimistic_gittins(50)
    assert int(select(jr.key(0), table, 49).arm) == 1
    assert int(select(jr.key(0), table, 50).arm) == 0
    late = jax.jit(lambda step: select(jr.key(0), table, step))(jnp.asarray(70))
    assert int(late.arm) == 0
    for selector in (select, with_floor(select, 0.1)):
        with pytest.raises(ValueError, match=r"step 51 is beyond the horizon of 50.*selectors\.greedy\(\)"):
            selector(jr.key(0), table, 51)


def test_equal_columns_share_and_one_draw_is_its_own_index():
    column = np.random.default_rng(3).normal(size=(300, 1))
    shared = optimistic_gittins(100)(jr.key(0), jnp.asarray(np.hstack([column, column - 5.0, column])), 3)
    np.testing.assert_allclose(shared.propensities, [0.5, 0.0, 0.5])
    single = optimistic_gittins(100)(jr.key(0), jnp.array([[0.1, 0.7, 0.7]]), 3)
    np.testing.assert_allclose(single.propensities, [0.0, 0.5, 0.5])


def exponential_tail(scale):
    """Two arms, theta exponential with mean `scale`: E max(theta - x, 0) = scale exp(-x / scale)."""
    nodes = jnp.linspace(0.0, 20.0, 200)
    above = jnp.exp(-nodes / scale[:, None])
    return Tail(scale, jnp.tile(nodes, (2, 1)), scale[:, None] * above, above)


def test_marginals_decide_where_they_are_offered_and_learning_charges_what_is_known():
    table = jnp.asarray(np.random.default_rng(4).normal(size=(100, 2)))
    offer = exponential_tail(jnp.array([1.0, 1.2]))
    offered = Marginals(lambda x: x, lambda q: q, tail=lambda: offer, pseudo_counts=lambda: jnp.array([1.0, 500.0]))
    assert int(optimistic_gittins(100)(jr.key(0), table, 1, marginals=offered).arm) == 1
    assert int(optimistic_gittins(100, learning=1.0)(jr.key(0), table, 1, marginals=offered).arm) == 0
    plain = optimistic_gittins(100)(jr.key(0), table, 1)
    without_tail = optimistic_gittins(100)(jr.key(0), table, 1, marginals=Marginals(lambda x: x, lambda q: q))
    np.testing.assert_array_equal(plain.propensities, without_tail.propensities)


@pytest.mark.parametrize("offered", [None, Marginals(lambda x: x, lambda q: q)])
def test_learning_without_pseudo_counts_is_explained(offered):
    with pytest.raises(ValueError, match=r"learning=1\.0 needs marginals\.pseudo_counts.*use learning=0\.0"):
        optimistic_gittins(10, learning=1.0)(jr.key(0), jnp.ones((4, 2)), 1, marginals=offered)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "horizon must be an integer of at least 1, got 0.*double_sampling"),
        ((10.5,), "horizon must be an integer of at least 1, got 10.5"),
        ((10, 0.0), r"patience must be positive and finite, got 0.0; use greedy\(\)"),
        ((10, float("nan")), "patience must be positive and finite, got nan"),
        ((10, 1.0, -1.0), "learning must be at least 0 and finite, got -1.0"),
    ],
)
def test_settings_that_cannot_be_used_are_explained(arguments, message):
    with pytest.raises(ValueError, match=message):
        optimistic_gittins(*arguments)


def test_a_selector_says_how_it_was_made_and_how_far_it_goes():
    assert str(optimistic_gittins(20, 0.5)) == "optimistic_gittins(horizon=20, patience=0.5, learning=0.0)"
    index = optimistic_gittins(20)
    for rule in (index, with_floor(index, 0.1), with_control(index, 0.2), with_limits(index, 0.1)):
        assert rule.horizon == 20
    assert greedy().horizon is None
