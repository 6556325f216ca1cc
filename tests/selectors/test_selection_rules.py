"""What each selector does that no other does: values by hand, by brute force, by scipy."""

import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.selectors import bayes_ucb, double_sampling, greedy, information_directed, thompson, top_two, with_floor
from ppl_bandit.selectors.information_directed import least_ratio_mixture, regret_and_information
from ppl_bandit.selectors.selector_contract import winner_frequencies
from ppl_bandit.types import Marginals

MIXTURE = jax.jit(least_ratio_mixture)
DOUBLE_SAMPLING, THOMPSON, GREEDY = double_sampling(), thompson(), greedy()
BAYES_UCB, INFORMATION_DIRECTED = bayes_ucb(), information_directed()


def winners(counts):
    """A table whose rows are won by arm 0 counts[0] times, by arm 1 counts[1] times, ..."""
    return jnp.asarray(np.repeat(np.eye(len(counts)), counts, axis=0), jnp.float32)


def test_shares_of_a_tied_row_are_equal_or_go_to_the_lowest_index():
    table = jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 2.0, 2.0], [0.0, 0.0, 3.0]])
    every = jnp.ones(3, bool)
    np.testing.assert_allclose(winner_frequencies(table, every), np.array([5 / 6, 8 / 6, 11 / 6]) / 4, rtol=1e-6)
    np.testing.assert_allclose(winner_frequencies(table, every, is_lowest_first=True), [0.5, 0.25, 0.25])
    masked = winner_frequencies(table, jnp.array([False, True, True]))
    np.testing.assert_allclose(masked, np.array([0.0, 1 + 1 / 2 + 1 / 2, 1 / 2 + 1 / 2 + 1]) / 4, rtol=1e-6)


def test_shares_are_exactly_one_hot_for_any_number_of_draws():
    # 41 * (1 / 41) is not 1 in float32, and a compiler may divide that way.
    for num_draws in (41, 47, 1000):
        table = jnp.tile(jnp.array([0.0, 1.0]), (num_draws, 1))
        np.testing.assert_array_equal(jax.jit(winner_frequencies)(table, jnp.ones(2, bool)), [0.0, 1.0])


def test_double_sampling_draws_more_candidates_the_surer_it_is():
    nums = [int(DOUBLE_SAMPLING(jr.key(0), winners([k, 100 - k]), 1).num_candidates) for k in (50, 20, 10, 5, 2, 1, 0)]
    # log10(1 / p_FA) by scipy.stats.truncnorm: .30, 1.18, 2.40, 4.71, 11.40, 22.39, infinite.
    assert nums == [1, 1, 2, 4, 11, 22, 1000]


def num_candidates(counts, **settings):
    return int(double_sampling(**settings)(jr.key(0), winners(counts), 1).num_candidates)


def test_the_number_of_candidates_can_be_fixed_or_another_function_of_the_false_alarm():
    assert num_candidates([10, 90], num_candidates=7) == 7
    # 1 / p_FA = 10**2.40 = 251 by scipy.stats.truncnorm; Markov: p_a / p* = 1/9 for one arm.
    assert num_candidates([10, 90], num_candidates=jnp.sqrt) == 15
    assert num_candidates([10, 90], num_candidates=lambda inverse: inverse, false_alarm="markov") == 9


@pytest.mark.slow  # further functions and bounds
def test_every_bound_of_the_false_alarm_gives_its_number_of_candidates():
    num = num_candidates
    assert num([10, 90], num_candidates=jnp.log) == 5
    assert num([10, 90], num_candidates=lambda inverse: inverse, max_candidates=100) == 100
    # Chebyshev: .09 / .8^2 = .1406; for a tie it is infinite, as is Markov's.
    assert num([10, 90], num_candidates=lambda inverse: inverse, false_alarm="chebyshev") == 7
    assert num([50, 50], false_alarm="chebyshev") == num([50, 50], false_alarm="markov") == 1
    # The mean over the arms other than the leader: (.05 + .15) / .8 / 2 = 1/8.
    assert num([5, 15, 80], num_candidates=lambda inverse: inverse, false_alarm="markov") == 8
    assert num([0, 100], num_candidates=jnp.log, false_alarm="markov") == 1000  # infinite


def test_settings_of_double_sampling_are_recorded_unless_they_are_the_defaults():
    assert dict(double_sampling().settings) == {"max_candidates": 1000, "ties": "random", "exact": False}
    assert double_sampling(false_alarm="markov", num_candidates=3).settings["num_candidates"] == 3
    for wrong in (0, 1001, 2.0, True):
        with pytest.raises(ValueError, match="num_candidates must be an integer from 1"):
            double_sampling(num_candidates=wrong)
    with pytest.raises(ValueError, match="false_alarm must be one of 'gaussian', 'markov', 'chebyshev'"):
        double_sampling(false_alarm="hoeffding")


def test_bayes_ucb_takes_a_constant_quantile_or_a_function_of_the_step():
    # Arm 0 is certain of .5; arm 1 is uniform on [0, 1], so that its quantile of order q is q.
    marginals = Marginals(cdf=lambda x: x, quantile=lambda order: jnp.stack([jnp.full_like(order, 0.5), order]))
    table = jnp.zeros((4, 2))

    def played(step, quantile):
        return int(bayes_ucb(quantile)(jr.key(0), table, step, marginals=marginals).arm)

    assert [played(step, 0.4) for step in (1, 100)] == [0, 0] and [played(step, 0.9) for step in (1, 100)] == [1, 1]
    by_step = lambda step: 1.0 - 1.0 / jnp.sqrt(step)  # noqa: E731
    assert [played(step, by_step) for step in (2, 3, 5)] == [0, 0, 1]
    assert dict(bayes_ucb().settings) == {} and bayes_ucb(0.9).settings["quantile"] == 0.9
    for wrong in (0.0, 1.0, True, 2):
        with pytest.raises(ValueError, match="strictly inside"):
            bayes_ucb(wrong)


def test_double_sampling_gives_the_papers_authors_result_with_lowest_ties():
    # p-hat = (.1, .9) gives N = 2: arm 0 is played unless both candidates are arm 1.
    for selector, expected in [(double_sampling(ties="lowest"), 0.19), (DOUBLE_SAMPLING, 0.1)]:
        selection = selector(jr.key(0), winners([10, 90]), 1)
        assert selection.num_candidates == 2
        np.testing.assert_allclose(selection.propensities[0], expected, atol=1e-6)


def test_thompson_and_greedy_are_the_two_ends_of_double_sampling():
    table = winners([10, 30, 30, 30])
    one = THOMPSON(jr.key(0), table, 1)
    np.testing.assert_allclose(one.propensities, [0.1, 0.3, 0.3, 0.3], rtol=1e-6)
    assert one.num_candidates == 1
    many = GREEDY(jr.key(0), table, 1)
    np.testing.assert_allclose(many.propensities, [0.0, 1 / 3, 1 / 3, 1 / 3], rtol=1e-6)
    assert many.num_candidates == 0


def test_top_two_splits_between_the_leader_and_the_runners_up():
    select = top_two(0.2)
    for counts, expected in [
        ([10, 30, 60, 0], [0.0, 0.2, 0.8, 0.0]),
        ([20, 20, 60, 0], [0.1, 0.1, 0.8, 0.0]),
        ([40, 20, 40, 0], [0.5, 0.0, 0.5, 0.0]),
        ([100, 0, 0, 0], [0.8, 0.2 / 3, 0.2 / 3, 0.2 / 3]),
        ([25, 25, 25, 25], [0.25, 0.25, 0.25, 0.25]),
    ]:
        np.testing.assert_allclose(select(jr.key(0), winners(counts), 1).propensities, expected, atol=1e-6)
    alone = select(jr.key(0), winners([10, 30, 60, 0]), 1, allowed=np.array([True, False, False, False]))
    np.testing.assert_array_equal(alone.propensities, [1.0, 0.0, 0.0, 0.0])


def test_a_floor_lifts_every_allowed_arm_and_passes_the_rest_on():
    table = winners([10, 30, 60, 0])
    floored = with_floor(GREEDY, 0.1)(jr.key(0), table, 1)
    np.testing.assert_allclose(floored.propensities, [0.1, 0.1, 0.7, 0.1], atol=1e-6)
    masked = with_floor(GREEDY, 0.1)(jr.key(0), table, 1, allowed=np.array([True, True, False, False]))
    np.testing.assert_allclose(masked.propensities, [0.1, 0.9, 0.0, 0.0], atol=1e-6)
    # Arms 0 and 1 are level in the 60 rows that the masked arm 2 won.
    np.testing.assert_allclose(masked.best_arm_probs, [0.4, 0.6, 0.0, 0.0], rtol=1e-6)
    assert with_floor(THOMPSON, 0.1)(jr.key(0), table, 1).num_candidates == 1


def test_a_floor_of_zero_changes_nothing_and_the_largest_one_plays_uniformly():
    table = winners([10, 30, 60, 0])
    np.testing.assert_allclose(with_floor(GREEDY, 0.0)(jr.key(0), table, 1).propensities, [0.0, 0.0, 1.0, 0.0])
    np.testing.assert_allclose(with_floor(GREEDY, 1 / 4)(jr.key(0), table, 1).propensities, [1 / 4] * 4, rtol=1e-6)


def test_a_floor_above_one_over_the_number_of_arms_is_explained():
    with pytest.raises(ValueError, match="floor must be at most 1/A = 0.333333 for the table's 3 arms, got 0.34"):
        with_floor(GREEDY, 0.34)(jr.key(0), winners([10, 30, 60]), 1)
    with pytest.raises(ValueError, match=r"floor must lie in \[0, 1/A\] for A arms, got 1.5"):
        with_floor(GREEDY, 1.5)


def test_bayes_ucb_plays_the_highest_exact_quantile_where_marginals_are_given():
    locs, scales = np.array([0.0, 0.5, 0.3]), np.array([1.0, 0.1, 0.4])
    normal = Marginals(
        cdf=lambda x: jax.scipy.stats.norm.cdf(x, locs, scales),
        quantile=lambda q: locs + scales * jax.scipy.special.ndtri(q),
    )
    table = jnp.zeros((1000, 3)).at[:, 2].set(1.0)  # says arm 2 throughout, and must not be asked
    seen = set()
    for step in (2, 3, 5, 10, 100, 5000):
        best = stats.norm.ppf(1 - 1 / step, locs, scales).argmax()
        selection = BAYES_UCB(jr.key(0), table, step, marginals=normal)
        assert selection.arm == best and selection.propensities[best] == 1.0
        seen.add(int(best))
    assert seen == {0, 1}


def test_bayes_ucb_reads_quantiles_off_the_table_otherwise():
    locs, scales = np.array([0.0, 1.3, -9.0]), np.array([1.0, 0.3, 1.0])
    draws = np.random.default_rng(0).normal(size=(1000, 3)) * scales + locs
    # Quantiles .84 and 1.55, 2.88 and 2.16, 4.26 and 2.58: apart by several times the error of the extrapolation.
    for step, best in [(5, 1), (500, 0), (100_000, 0)]:
        assert stats.norm.ppf(1 - 1 / step, locs, scales).argmax() == best
        assert BAYES_UCB(jr.key(0), jnp.asarray(draws, jnp.float32), step).arm == best


def test_bayes_ucb_knows_nothing_at_step_one_and_shares_what_ties():
    table = jnp.asarray(np.random.default_rng(0).normal(size=(1000, 3)), jnp.float32).at[:, 2].set(-9.0)
    equal = table.at[:, 1].set(table[:, 0])
    below = Marginals(cdf=lambda x: x, quantile=lambda q: jnp.where(q > 0, jnp.array([1.0, 1.0, 0.0]), -jnp.inf))

    def propensities(table, step, **arguments):
        return BAYES_UCB(jr.key(0), table, step, **arguments).propensities

    np.testing.assert_allclose(propensities(table, 1), [1 / 3] * 3, rtol=1e-6)
    np.testing.assert_allclose(propensities(table, 1, marginals=below), [1 / 3] * 3, rtol=1e-6)
    np.testing.assert_allclose(propensities(table, 1, allowed=np.array([True, False, True])), [0.5, 0.0, 0.5])
    for step in (2, 50, 5000):
        np.testing.assert_allclose(propensities(equal, step), [0.5, 0.5, 0.0])
        np.testing.assert_allclose(propensities(table, step, marginals=below), [0.5, 0.5, 0.0])


def test_bayes_ucb_explains_marginals_that_it_cannot_use():
    table = jnp.zeros((1000, 3))
    wrong_shape = Marginals(cdf=lambda x: x, quantile=lambda q: jnp.zeros(2))
    with pytest.raises(ValueError, match=r"marginals must return shape \(3,\).*got \(2,\)"):
        BAYES_UCB(jr.key(0), table, 2, marginals=wrong_shape)
    not_finite = Marginals(cdf=lambda x: x, quantile=lambda q: jnp.array([1.0, jnp.nan, 0.0]))
    with pytest.raises(ValueError, match=r"what marginals return must be finite.*arm 1: nan"):
        BAYES_UCB(jr.key(0), table, 2, marginals=not_finite)
    masked = BAYES_UCB(jr.key(0), table, 2, marginals=not_finite, allowed=np.array([True, False, True]))
    np.testing.assert_array_equal(masked.propensities, [1.0, 0.0, 0.0])
    traced = jax.jit(
        lambda table: BAYES_UCB(jr.key(0), table, 2, marginals=not_finite._replace(quantile=lambda q: table[0]))
    )
    flagged = traced(table.at[0, 1].set(jnp.nan))
    assert flagged.arm == -1 and jnp.all(jnp.isnan(flagged.propensities))


def test_bayes_ucb_and_information_directed_work_from_one_draw():
    table = jnp.array([[0.0, 2.0, 1.0]])
    for selector in (BAYES_UCB, INFORMATION_DIRECTED):
        np.testing.assert_array_equal(selector(jr.key(0), table, 7).propensities, [0.0, 1.0, 0.0])


def test_regret_and_information_match_their_definitions():
    rng = np.random.default_rng(3)
    table = rng.integers(0, 4, size=(50, 4)) + rng.normal(size=4) * 0.1
    table[:, 3] = table[:, 2]  # ties in every row that they win
    best = table.max(axis=1)
    wins = table == best[:, None]
    weights = wins / wins.sum(axis=1, keepdims=True)
    probs = weights.mean(axis=0)
    information = np.zeros(4)
    for arm, rival in itertools.product(range(4), range(4)):
        mean_if_best = np.average(table[:, arm], weights=weights[:, rival])
        information[arm] += probs[rival] * (mean_if_best - table[:, arm].mean()) ** 2
    with jax.enable_x64(True):
        computed = regret_and_information(jnp.asarray(table), jnp.ones(4, bool), jnp.asarray(probs))
    np.testing.assert_allclose(computed[0], best.mean() - table.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(computed[1], information, rtol=1e-10)


def test_the_mixture_of_information_directed_sampling_has_the_least_ratio_of_all():
    rng = np.random.default_rng(4)
    grid = np.array([(i, j, 40 - i - j) for i in range(41) for j in range(41 - i)]) / 40
    num_mixed = 0
    with jax.enable_x64(True):
        for _ in range(50):
            regrets = rng.exponential(size=3)
            informations = regrets**3 * rng.exponential(size=3)
            mixture = np.asarray(MIXTURE(jnp.asarray(regrets), jnp.asarray(informations), jnp.ones(3, bool)))
            ratio = (mixture @ regrets) ** 2 / (mixture @ informations)
            assert ratio <= np.min((grid @ regrets) ** 2 / (grid @ informations)) * (1 + 1e-12)
            assert abs(mixture.sum() - 1) < 1e-12
            num_mixed += np.sum(mixture > 0) == 2
    assert 5 < num_mixed < 45  # both kinds of answer were met: one arm, and two


def test_the_mixture_at_its_edges():
    def mixture(regrets, informations, allowed=(True, True, True)):
        return MIXTURE(jnp.array(regrets), jnp.array(informations), jnp.array(allowed))

    np.testing.assert_array_equal(mixture([0.0, 1.0, 2.0], [0.0, 0.0, 0.0]), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(mixture([0.5, 0.5, 2.0], [0.0, 0.0, 0.0]), [0.5, 0.5, 0.0])
    np.testing.assert_array_equal(mixture([0.0, 1.0, 2.0], [1.0, 9.0, 9.0]), [1.0, 0.0, 0.0])
    np.testing.assert_array_equal(mixture([1.0, 1.0, 2.0], [3.0, 3.0, 3.0]), [0.5, 0.5, 0.0])
    np.testing.assert_array_equal(mixture([0.0, 1.0, 2.0], [1.0, 2.0, 3.0], (False, True, False)), [0.0, 1.0, 0.0])
    # Regret 1 tells nothing and regret 2 tells 1: (2 - q)^2 / (1 - q) has its least value 4 at q = 0.
    np.testing.assert_allclose(mixture([1.0, 2.0, 9.0], [0.0, 1.0, 0.0]), [0.0, 1.0, 0.0], atol=1e-6)
    # Regret 1 and 4 with information 0 and 1: (1 + 3 w)^2 / w is least at w = 1/3.
    np.testing.assert_allclose(mixture([1.0, 4.0, 99.0], [0.0, 1.0, 0.0]), [2 / 3, 1 / 3, 0.0], atol=1e-6)


def test_information_directed_sampling_plays_an_arm_that_is_never_best_for_what_it_tells():
    # One of arms 0 to 3 pays 1 and the others 0; arm 4 pays .9 if the best is 0 or 1, so it is never best.
    best = np.repeat(np.arange(4), 25)
    table = jnp.asarray(np.column_stack([np.eye(4)[best], 0.9 * (best < 2)]), jnp.float32)
    selection = INFORMATION_DIRECTED(jr.key(0), table, 1)
    np.testing.assert_allclose(selection.best_arm_probs, [0.25, 0.25, 0.25, 0.25, 0.0])
    # Regret .75 and information 3/16 for the first four, .55 and .45^2 for the last: less cost and more told.
    np.testing.assert_allclose(selection.propensities, [0.0, 0.0, 0.0, 0.0, 1.0], atol=1e-6)
    # Halving what it pays leaves (.775, .225^2): 11.9 against 3, and the first four share.
    dear = INFORMATION_DIRECTED(jr.key(0), table.at[:, 4].multiply(0.5), 1)
    np.testing.assert_allclose(dear.propensities, [0.25, 0.25, 0.25, 0.25, 0.0], atol=1e-6)


def test_information_directed_sampling_handles_hundreds_of_arms():
    rng = np.random.default_rng(6)
    table = rng.normal(size=(1000, 300)) * 0.3 + rng.normal(size=300) * 0.2
    selection = INFORMATION_DIRECTED(jr.key(0), jnp.asarray(table, jnp.float32), 1)
    np.testing.assert_allclose(selection.propensities.sum(), 1.0, atol=1e-5)
    assert 1 <= np.sum(np.asarray(selection.propensities) > 0) <= 2


MANY_BY_QUANTILE = """
import numpyro, numpyro.distributions as dist
from ppl_bandit import Bandit, selectors

def clicks(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([3]))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))

bandit = Bandit(clicks, 3, selector=getattr(selectors, "NAME")(*ARGUMENTS), num_samples=100)
print(len(bandit.select_many(num_decisions=4000)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bayes_ucb", "information_directed", "optimistic_gittins"])
def test_thousands_of_decisions_compile_in_less_than_two_minutes(name):
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}  # those of users
    code = MANY_BY_QUANTILE.replace("NAME", name).replace("ARGUMENTS", "[5000]" if "gittins" in name else "[]")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "4000", done.stderr
