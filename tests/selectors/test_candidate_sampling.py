"""How many candidates double sampling draws, which one it plays, and with which probability."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import stats

from ppl_bandit.selectors.mode_probs import FEW_CANDIDATES, mode_probs
from ppl_bandit.selectors.probability_matching import choose_num_candidates, draw_mode, log_false_alarm

PRECISIONS = [pytest.param(False, id="float32"), pytest.param(True, id="float64", marks=pytest.mark.slow)]
TIES = [pytest.param(False, id="random"), pytest.param(True, id="lowest")]
MODE_PROBS = {
    is_lowest: jax.jit(functools.partial(mode_probs, is_lowest_first=is_lowest)) for is_lowest in (False, True)
}


@functools.partial(jax.jit, static_argnums=2)
def alarm_and_num(probs, allowed, max_candidates):
    return log_false_alarm(probs, allowed), choose_num_candidates(probs, allowed, max_candidates)


def false_alarm(probs):
    """log p_FA by scipy's truncated normal, in float64: no formula shared with the code under test."""
    probs = np.asarray(probs, float)
    rivals = np.delete(probs, probs.argmax())
    means = rivals[rivals > 0]
    scales = np.sqrt(means * (1 - means))
    logs = stats.truncnorm.logsf(probs.max(), -means / scales, (1 - means) / scales, loc=means, scale=scales)
    return np.logaddexp.reduce(np.append(logs, -np.inf)) - math.log(len(rivals))


def candidates(probs):
    digits = -false_alarm(probs) / math.log(10)
    return int(np.clip(math.floor(min(digits, 1e9) + 1e-12), 1, 1000))


def padded(probs, size, is_double=False):
    """Append arms of probability 0: they change no mode, and tables of one shape compile once."""
    return jnp.asarray(np.append(probs, np.zeros(size - len(probs))), jnp.float64 if is_double else jnp.float32)


def mode_probs_by_enumeration(probs, num, is_lowest_first):
    firsts = np.array(list(itertools.product(range(num + 1), repeat=len(probs) - 1)))
    counts = np.column_stack([firsts, num - firsts.sum(axis=1)])
    counts = counts[counts[:, -1] >= 0]
    is_mode = counts == counts.max(axis=1, keepdims=True)
    if is_lowest_first:
        is_mode &= is_mode.cumsum(axis=1) == 1
    return stats.multinomial.pmf(counts, num, probs) @ (is_mode / is_mode.sum(axis=1, keepdims=True))


def two_arm_mode_prob(share, num):
    """Probability that an arm of this share is the mode of two, with random ties: a binomial tail."""
    tie = 0.5 * stats.binom.pmf(num // 2, num, share) if num % 2 == 0 else 0.0
    return stats.binom.sf(num // 2, num, share) + tie


@pytest.mark.parametrize("is_double", PRECISIONS)
def test_p_fa_and_the_number_of_candidates_match_scipy_for_every_split_of_1000_draws(is_double):
    splits = np.stack([np.arange(1, 501), np.arange(999, 499, -1)], axis=1) / 1000
    with jax.enable_x64(is_double):
        given = jnp.asarray(splits, jnp.float64 if is_double else jnp.float32)
        logs, nums = jax.vmap(alarm_and_num, in_axes=(0, None, None))(given, jnp.ones(2, bool), 1000)
    # float32: an error of a few eps in p-hat moves log p_FA, about -z^2/2, by as many eps times |log p_FA|. float64:
    # just beyond -20 the asymptotic series of jax's log_ndtr is off by 2e-9, which is 7e-12 of log p_FA there.
    np.testing.assert_allclose(logs, [false_alarm(split) for split in splits], rtol=1e-11 if is_double else 3e-6)
    np.testing.assert_array_equal(nums, [candidates(split) for split in splits])
    assert np.asarray(nums).max() == 218 and np.asarray(nums).min() == 1


@pytest.mark.parametrize("is_double", PRECISIONS)
def test_the_number_of_candidates_matches_scipy_for_three_and_for_200_arms(is_double):
    rng = np.random.default_rng(0)
    splits, nums = [], []
    with jax.enable_x64(is_double):
        for num_arms in (3, 200):
            concentrations = np.append(np.full(num_arms - 1, 20 / num_arms), 40)
            for _ in range(40):
                splits.append(rng.multinomial(1000, rng.dirichlet(concentrations)) / 1000)
                nums.append(alarm_and_num(padded(splits[-1], 200, is_double), jnp.arange(200) < num_arms, 1000)[1])
    expected = [candidates(split) for split in splits]
    np.testing.assert_array_equal(nums, expected)
    assert {1, 2, 3, 4} <= set(expected)


def test_known_values_of_p_fa():
    def p_fa(*probs):
        return jnp.exp(alarm_and_num(padded(probs, 3), jnp.arange(3) < len(probs), 1000)[0])

    # Two arms level at 1/2: half of a law that is symmetric about p*. A third arm without a draw halves the mean.
    np.testing.assert_allclose(p_fa(0.5, 0.5), 0.5, rtol=1e-6)
    np.testing.assert_allclose(p_fa(0.0, 0.5, 0.5), 0.25, rtol=1e-6)
    # (.1, .9): mean .1 and sd .3 give (Phi(3) - Phi(8/3)) / (Phi(3) - Phi(-1/3)), in a table of Phi
    # (.998650 - .996170) / (.998650 - .369441).
    np.testing.assert_allclose(p_fa(0.1, 0.9), 0.003942, atol=2e-6)


@pytest.mark.parametrize("is_double", PRECISIONS)
def test_a_p_fa_that_is_a_power_of_ten_is_not_rounded_down(is_double):
    with jax.enable_x64(is_double):
        for num_arms, expected in [(6, 1), (51, 2), (501, 3)]:
            # One rival of p_FA^(a) = 1/2 among 5, 50 or 500.
            _, num = alarm_and_num(padded([0.5, 0.5], 501, is_double), jnp.arange(501) < num_arms, 1000)
            assert num == expected


def test_the_number_of_candidates_at_its_edges():
    def num(*probs, num_allowed=3, max_candidates=1000):
        return alarm_and_num(jnp.array(probs), jnp.arange(3) < num_allowed, max_candidates)[1]

    assert num(0.0, 1.0, 0.0) == 1000
    assert num(0.0, 1.0, 0.0, max_candidates=20) == 20
    assert num(1.0, 0.0, 0.0, num_allowed=1) == 1000
    assert num(0.0, 0.5, 0.5) == 1
    assert num(0.999, 0.001, 0.0, num_allowed=2) == 218
    assert num(0.999, 0.001, 0.0, num_allowed=2, max_candidates=20) == 20


def test_an_arm_that_is_not_allowed_is_not_among_the_other_arms():
    probs = padded([0.7, 0.3], 200)
    log_two = alarm_and_num(probs, jnp.arange(200) < 2, 1000)[0]
    log_all = alarm_and_num(probs, jnp.ones(200, bool), 1000)[0]
    np.testing.assert_allclose(log_two, false_alarm([0.7, 0.3]), rtol=1e-6)
    np.testing.assert_allclose(log_all, false_alarm([0.7, 0.3]) - math.log(199), rtol=1e-6)


@pytest.mark.parametrize("is_double", PRECISIONS)
@pytest.mark.parametrize("is_lowest_first", TIES)
def test_mode_probs_match_enumeration(is_lowest_first, is_double):
    rng = np.random.default_rng(1)
    with jax.enable_x64(is_double):
        for num_arms, concentration, num in itertools.product((2, 3, 4), (0.3, 1.0, np.inf), (1, 2, 3, 4, 7, 8)):
            is_even = np.isinf(concentration)
            probs = np.full(num_arms, 1 / num_arms) if is_even else rng.dirichlet(np.full(num_arms, concentration))
            computed = MODE_PROBS[is_lowest_first](padded(probs, 4, is_double), jnp.asarray(num))
            expected = padded(mode_probs_by_enumeration(probs, num, is_lowest_first), 4, is_double)
            np.testing.assert_allclose(computed, expected, atol=1e-10 if is_double else 1e-5)


@pytest.mark.parametrize("is_double", PRECISIONS)
@pytest.mark.parametrize("is_lowest_first", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mode_probs_match_enumeration_up_to_where_candidates_are_counted_and_beyond(is_lowest_first, is_double):
    rng = np.random.default_rng(2)
    cases = [(num_arms, FEW_CANDIDATES + more) for num_arms in (2, 3) for more in (0, 1)]
    with jax.enable_x64(is_double):
        for num_arms, num in [*cases, (3, 12), (3, 24), (6, 5)]:
            for probs in (rng.dirichlet(np.full(num_arms, 2.0)), np.append(np.full(num_arms - 1, 0.01), 1.01)):
                given = probs / probs.sum()
                computed = MODE_PROBS[is_lowest_first](padded(given, num_arms, is_double), jnp.asarray(num))
                expected = mode_probs_by_enumeration(given, num, is_lowest_first)
                np.testing.assert_allclose(computed, expected, atol=1e-10 if is_double else 1e-5)


@pytest.mark.parametrize("is_double", PRECISIONS)
def test_mode_probs_match_the_binomial_law_for_every_table_of_1000_draws_and_two_arms(is_double):
    with jax.enable_x64(is_double):
        for share in np.arange(501) / 1000:
            num = candidates([share, 1 - share])
            computed = MODE_PROBS[False](padded([share, 1 - share], 4, is_double), jnp.asarray(num))
            expected = two_arm_mode_prob(share, num)
            np.testing.assert_allclose(computed[:2], [expected, 1 - expected], atol=1e-10 if is_double else 1e-5)


@pytest.mark.parametrize("is_double", PRECISIONS)
def test_mode_probs_hold_for_many_candidates_where_the_leader_is_in_doubt(is_double):
    with jax.enable_x64(is_double):
        for share, num in itertools.product((0.5, 0.48, 0.4, 0.2), (20, 55, 1000)):
            computed = MODE_PROBS[False](padded([share, 1 - share], 4, is_double), jnp.asarray(num))
            expected = two_arm_mode_prob(share, num)
            np.testing.assert_allclose(computed[0], expected, atol=1e-10 if is_double else 1e-5)


def test_two_candidates_with_random_ties_match_probabilities_as_one_does():
    probs = jnp.array([0.1, 0.2, 0.3, 0.4])
    for num in (1, 2):
        np.testing.assert_allclose(MODE_PROBS[False](probs, jnp.asarray(num)), probs, rtol=1e-6)


def test_lowest_ties_reproduce_the_bias_of_the_authors_code():
    for probs, expected in [((0.1, 0.9), 0.19), ((0.9, 0.1), 0.99)]:
        np.testing.assert_allclose(MODE_PROBS[True](padded(probs, 4), jnp.asarray(2))[0], expected, rtol=1e-6)


def test_mode_probs_of_hundreds_of_arms_match_a_simulation():
    rng = np.random.default_rng(5)
    num_arms, num_runs = 200, 20_000
    for leader, num in [(0.005, 12), (0.1, 9), (0.3, 25)]:
        probs = np.append(np.full(num_arms - 1, (1 - leader) / (num_arms - 1)), leader)
        counts = rng.multinomial(num, probs, size=num_runs)
        # Ties at random: a uniform number below 1 added to each count decides.
        winners = (counts + rng.random(counts.shape)).argmax(axis=1)
        frequencies = np.bincount(winners, minlength=num_arms) / num_runs
        computed = np.asarray(MODE_PROBS[False](padded(probs, num_arms), jnp.asarray(num)))
        # 5 standard errors of a frequency, and 4 runs for arms that win less than once in all of them.
        assert np.all(
            np.abs(frequencies - computed) <= 5 * np.sqrt(computed * (1 - computed) / num_runs) + 4 / num_runs
        )
        np.testing.assert_allclose(computed.sum(), 1.0, atol=1e-5)


def test_mode_probs_of_equal_arms_are_equal_however_many_tie():
    with jax.enable_x64(True):
        for num_arms, num in [(200, 12), (200, 100), (4, 40)]:
            probs = jnp.full(num_arms, 1 / num_arms)
            np.testing.assert_allclose(MODE_PROBS[False](probs, jnp.asarray(num)), probs, atol=1e-12)


@pytest.mark.parametrize("is_lowest_first", TIES)
def test_the_drawn_mode_follows_mode_probs(is_lowest_first):
    num_runs = 40_000
    keys = jr.split(jr.key(3), num_runs)
    draw = jax.jit(jax.vmap(functools.partial(draw_mode, is_lowest_first=is_lowest_first), in_axes=(0, None, None)))
    for probs, num in [
        ((0.1, 0.9, 0.0, 0.0), 2),
        ((0.3, 0.3, 0.4, 0.0), 7),
        ((0.0, 0.25, 0.0, 0.75), 4),
        ((0.2, 0.0, 0.3, 0.5), 1),
        ((0.01, 0.45, 0.0, 0.54), 60),
    ]:
        given, num = jnp.array(probs), jnp.asarray(num)
        frequencies = np.bincount(draw(keys, given, num), minlength=4) / num_runs
        expected = np.asarray(MODE_PROBS[is_lowest_first](given, num))
        # 5 standard errors, and the error allowed in float32; exactly 0 for an arm of probability 0.
        assert np.all(np.abs(frequencies - expected) <= 5 * np.sqrt(expected * (1 - expected) / num_runs) + 1e-5)
        assert np.all(frequencies[np.array(probs) == 0] == 0)


def test_a_leader_that_wins_everything_is_drawn_whatever_the_number_of_candidates():
    # Thousands side by side: vectorised code must not meet a rate of zero as a negative zero.
    keys = jr.split(jr.key(4), 5000)
    probs = jnp.tile(jnp.array([0.0, 1.0, 0.0, 0.0]), (5000, 1))
    nums = 1 + jnp.arange(5000) % 1000
    assert jnp.all(jax.jit(jax.vmap(draw_mode))(keys, probs, nums) == 1)
    for num in (1, 2, 1000):
        np.testing.assert_array_equal(MODE_PROBS[False](probs[0], jnp.asarray(num)), probs[0])
