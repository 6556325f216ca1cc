"""The optimistic Gittins index: against roots found elsewhere, from a table, and at its edges."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import optimize, stats

from ppl_bandit.numerics import laws
from ppl_bandit.numerics.tails import tail_excess
from ppl_bandit.selectors import greedy, optimistic_gittins, with_control, with_floor, with_limits
from ppl_bandit.selectors.optimistic_gittins import gittins_index
from ppl_bandit.types import Marginals, Tail

A, B = np.array([1.0, 5.0, 500.0, 0.3]), np.array([1.0, 2.0, 50.0, 20.0])


def beta_root(a, b, left):
    """Solve (H + 1) x = mu + H E max(theta, x) with E max from the incomplete beta function."""
    mean = a / (a + b)

    def gap(x):
        larger = mean * stats.beta.sf(x, a + 1, b) + x * stats.beta.cdf(x, a, b)
        return (left + 1) * x - mean - left * larger

    return optimize.brentq(gap, mean, 1.0, xtol=1e-14)


@pytest.mark.parametrize("left", [1.0, 10.0, 1500.0])
def test_the_index_of_a_beta_law_is_the_root_of_its_equation(left):
    with jax.enable_x64(True):
        tail = laws.tail(laws.beta_law(jnp.asarray(A), jnp.asarray(B)))
        found = np.asarray(gittins_index(tail.mean, tail.excess, jnp.asarray(left)))
    wanted = np.array([beta_root(a, b, left) for a, b in zip(A, B, strict=True)])
    # The quadrature keeps 1e-10 of the density, which moves the index of the most skewed law by .001 of its deviation.
    assert np.all(np.abs(found - wanted) < 2e-3 * stats.beta.std(A, B))


@pytest.mark.parametrize(
    ("law", "reference"),
    [
        (lambda: laws.gamma_law(jnp.array([2.0]), jnp.array([3.0])), stats.gamma(2.0, scale=1 / 3)),
        (lambda: laws.gamma_law(jnp.array([4.0]), jnp.array([3.0]), power=-1.0), stats.invgamma(4.0, scale=3.0)),
        (lambda: laws.beta_law(jnp.array([2.0]), jnp.array([7.0]), 1.0, -1.0), stats.beta(7.0, 2.0)),
        (lambda: laws.student_t_law(jnp.array([jnp.inf]), jnp.array([1.0]), jnp.array([2.0])), stats.norm(1.0, 2.0)),
        (lambda: laws.student_t_law(jnp.array([5.0]), jnp.array([1.0]), jnp.array([2.0])), stats.t(5.0, 1.0, 2.0)),
    ],
)
def test_the_mean_excess_is_the_integral_of_the_upper_tail(law, reference):
    nodes, weights = np.polynomial.legendre.leggauss(200)
    part = 0.5 * (nodes + 1.0)
    with jax.enable_x64(True):
        tail = laws.tail(law())
        np.testing.assert_allclose(tail.mean, [reference.mean()], rtol=1e-5)
        for order in (0.05, 0.5, 0.95, 0.999):
            x = reference.ppf(order)
            # E max(theta - x, 0) = integral of (quantile - x) over the orders beyond, with u = 1 - (1 - order) part^8.
            beyond = (1 - order) * part**8
            wanted = np.sum(0.5 * weights * 8 * part**7 * (1 - order) * (reference.isf(beyond) - x))
            value, above = tail.excess(jnp.array([x]))
            np.testing.assert_allclose(value, [wanted], rtol=2e-3)
            np.testing.assert_allclose(above, [1 - order], rtol=0.02)  # between nodes it is a line
        np.testing.assert_allclose(tail.excess(jnp.array([-1e3]))[0], tail.mean + 1e3, rtol=1e-9)


def test_an_index_from_draws_scatters_about_the_exact_one():
    """At M = 2,000 and 1,000 decisions left: .1 deviations of scatter, so that 60 tables place the mean to .013."""
    draws = np.random.default_rng(0).normal(size=(60, 2000))
    from_draws = jax.jit(jax.vmap(lambda column: gittins_index(jnp.mean(column), tail_excess(column), 1000.0)))
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
    return Tail(scale, lambda x: (scale * jnp.exp(-x / scale), jnp.exp(-x / scale)))


def test_marginals_decide_where_they_are_offered_and_learning_charges_what_is_known():
    table = jnp.asarray(np.random.default_rng(4).normal(size=(100, 2)))
    tail = exponential_tail(jnp.array([1.0, 1.2]))
    offered = Marginals(lambda x: x, lambda q: q, tail=lambda: tail, pseudo_counts=lambda: jnp.array([1.0, 500.0]))
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
