"""The backward induction is the optimum, and evaluates rules as the library's simulation does."""

import itertools
import math
from fractions import Fraction

import pytest
from backward_induction import bayes_regret, bayes_ucb, double_sampling, optimal, optimistic_gittins, thompson
from measure_bayes_regret import simulated


def least_regret_by_enumeration(horizon):
    """Try every decision tree of two arms: an arm for each history of rewards, played in all 2^(2 horizon) reward tables."""
    histories = [history for length in range(horizon) for history in itertools.product((0, 1), repeat=length)]
    best = Fraction(0)
    for arms in itertools.product((0, 1), repeat=len(histories)):
        tree = dict(zip(histories, arms, strict=True))
        total = Fraction(0)
        for rewards in itertools.product((0, 1), repeat=horizon):
            # The probability of a history factorises over the arms: s successes in n plays have 1 / ((n + 1) C(n, s)).
            played = [[rewards[i] for i in range(horizon) if tree[rewards[:i]] == arm] for arm in (0, 1)]
            prob = Fraction(1)
            for own in played:
                prob *= Fraction(1, (len(own) + 1) * math.comb(len(own), sum(own)))
            total += prob * sum(rewards)
        best = max(best, total)
    return float(Fraction(2 * horizon, 3) - best)


def test_the_optimum_is_the_best_of_all_decision_trees():
    for horizon in (1, 2, 3):
        assert bayes_regret(optimal(horizon), horizon) == pytest.approx(least_regret_by_enumeration(horizon), abs=1e-12)


def test_the_optimistic_index_is_within_half_a_percent_of_the_optimum_and_other_rules_are_not():
    least = bayes_regret(optimal(20), 20)
    above = {rule: bayes_regret(rule(20), 20) / least - 1.0 for rule in (optimistic_gittins, bayes_ucb, thompson)}
    assert 0.0 < above[optimistic_gittins] < 0.005 < above[bayes_ucb] < above[thompson]


def test_no_rule_can_do_better_than_chance_with_one_decision():
    # One decision among K uniform rates: E max - E mean = K / (K + 1) - 1 / 2, whatever the rule.
    for num_arms in (2, 3):
        for rule in (optimal, thompson, bayes_ucb, optimistic_gittins):
            assert bayes_regret(rule(1), 1, num_arms) == pytest.approx(num_arms / (num_arms + 1) - 0.5, abs=1e-12)


@pytest.mark.slow
def test_the_bayes_regrets_of_the_docs_are_those_of_the_induction():
    expected = {(optimal, 50): 1.3366, (optimal, 100): 1.7482, (optimal, 200): 2.2393, (optimistic_gittins, 50): 1.3413}
    for (rule, horizon), value in expected.items():
        assert bayes_regret(rule(horizon), horizon) == pytest.approx(value, abs=1e-4)


@pytest.mark.slow
def test_the_librarys_selectors_have_the_regret_of_the_induction():
    horizon, num_worlds = 30, 4000
    rules = {
        "optimistic Gittins": optimistic_gittins,
        "Bayes-UCB": bayes_ucb,
        "double sampling": double_sampling,
        "Thompson": thompson,
    }
    # Four standard errors each: a false alarm in one of 4,000 such tests.
    for name, (mean, error) in simulated(2, horizon, num_worlds).items():
        assert abs(mean - bayes_regret(rules[name](horizon), horizon)) < 4.0 * error, name
