"""Rare rewards, units of rewards: intervals cover or are refused, sequences are never wrong more often than they say."""

import numpy as np
import pytest
from scipy import stats
from simulated_logs import bernoulli_logs, gaussian_logs, log_of
from vectorised_intervals import intervals

from ppl_bandit.evaluation.estimators import effective_events, needed_events
from ppl_bandit.evaluation.evaluate import evaluate_arms
from ppl_bandit.evaluation.evaluation import evaluate_decisions
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions


@pytest.mark.parametrize(
    ("num_rows", "rates", "floor", "num_runs"),
    [
        (200, (0.02, 0.02), None, 1000),
        (500, (0.05, 0.03), 0.0, 500),
        *(
            pytest.param(num_rows, rates, floor, 4000, marks=pytest.mark.slow)
            for num_rows in (200, 500, 1000, 2000)
            for rates in ((0.01, 0.01), (0.02, 0.02), (0.05, 0.05), (0.01, 0.03))
            for floor in (None, 0.0, 0.05)
        ),
    ],
)
def test_rare_rewards_are_covered_or_refused(num_rows, rates, floor, num_runs):
    """At least .93 of the intervals of each arm and of the difference cover, and none has the width 0."""
    for target, truth in ((0, rates[0]), (1, rates[1]), ((1, 0), rates[1] - rates[0])):
        covered, refused = [], []
        for seed in range(max(num_runs // 1000, 1)):
            size = min(num_runs, 1000)
            data = bernoulli_logs(np.random.default_rng(seed), size, num_rows, rates, floor)
            low, high = intervals(target, *data)
            shown = ~np.isnan(low)
            assert (high[shown] > low[shown]).all()
            covered.append((low <= truth) & (truth <= high))
            refused.append(~shown)
        covered, refused = np.concatenate(covered), np.concatenate(refused)
        share = covered[~refused].mean()
        print(num_rows, rates, floor, target, f"refused {refused.mean():.4f}, covered {share:.4f}")
        # Three standard errors of .93: .012 at 4,000 runs, .024 at 1,000.
        assert share >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / num_runs)


def test_normal_intervals_of_rare_rewards_miss_little_more_than_they_say_at_every_level():
    """Sums of binomial probabilities: at most 1.45 times what they say, and 1.4 at 95%, so that many arms together cover .93.

    From 20 events on, each of 20 arms at 95% together missed 2.7 times what it says.
    """
    levels = np.array([0.5, 0.8, 0.9, 0.95, 0.975, 1 - 0.05 / 3, 0.99, 0.995, 0.9975, 0.999, 0.9995])
    quantiles, needed = stats.norm.ppf(0.5 + 0.5 * levels), np.array([needed_events(level) for level in levels])
    worst = np.zeros(levels.size)
    for num_rows in (200, 300, 500, 1000, 2000, 4000, 20000):
        for rate in np.arange(0.002, 0.1, 0.002):
            low, high = stats.binom.ppf([1e-9, 1 - 1e-9], num_rows, rate)
            num_ones = np.arange(low, high + 1)
            share = num_ones / num_rows
            variance = share * (1.0 - share)
            events = num_rows * variance / (1.0 - 2.0 * share) ** 2  # n over the squared skewness
            distance = np.abs(share - rate) / np.sqrt(np.maximum(variance, 1e-12) / num_rows)
            is_missed = (distance > quantiles[:, None]) & (events >= needed[:, None])
            worst = np.maximum(worst, is_missed @ stats.binom.pmf(num_ones, num_rows, rate))
    assert (worst <= 1.45 * (1.0 - levels)).all() and worst[3] <= 0.07, worst / (1.0 - levels)


@pytest.mark.slow
@pytest.mark.parametrize("floor", [None, 0.05])
@pytest.mark.parametrize("rate", [0.01, 0.02, 0.05])
@pytest.mark.parametrize("num_rows", [500, 2000])
def test_intervals_of_both_arms_hold_together(num_rows, rate, floor):
    """As `evaluate_arms` asks for them: 97.5% each, so that both cover in .93 of the runs or more."""
    both = []
    for seed in range(4):
        data = bernoulli_logs(np.random.default_rng(seed), 1000, num_rows, (rate, rate), floor)
        ends = [intervals(arm, *data, 0.975) for arm in (0, 1)]
        shown = ~np.isnan(ends[0][0] + ends[1][0])
        both.append(np.all([(low <= rate) & (rate <= high) for low, high in ends], axis=0)[shown])
    share = np.concatenate(both).mean()
    print(num_rows, rate, floor, f"refused {1 - np.concatenate(both).size / 4000:.4f}, both covered {share:.4f}")
    assert share >= 0.93 - 3 * np.sqrt(0.93 * 0.07 / 4000)


def test_the_effective_events_of_rare_rewards_are_those_of_the_sum():
    rewards = np.repeat([1.0, 0.0], [30, 970])
    assert effective_events(np.ones(1000), rewards, 0.995)[-1] == pytest.approx(30 * 0.97 / 0.94**2)


def test_all_arms_together_need_more_events_each_than_one_alone():
    """Ten arms of 400 rows with 40 events each: 95% for one, 99.5% for each of ten, which needs 84 events."""
    arms, rewards = np.tile(np.arange(10), 400), np.tile(np.repeat([1.0, 0.0], [10, 90]), 40)
    every = np.full((4000, 10), 0.1)
    ten = LoggedDecisions(tuple("abcdefghij"), arms, rewards, every[:, 0], every)
    assert evaluate_decisions(ten, "a").is_normal
    found = evaluate_arms(ten)
    assert found["standard_error"].isna().all() and not found["is_refused"].any()
    np.testing.assert_allclose(found[["lower", "upper"]], found[["sequence_lower", "sequence_upper"]])
    assert found["verdict"].str.contains("a normal interval at 99.5% needs 84").all()


@pytest.mark.parametrize("floor", [None, 0.0])
@pytest.mark.parametrize("level", [0.95, 0.8, 0.995])
def test_vectorised_intervals_are_those_of_evaluate(floor, level):
    data = bernoulli_logs(np.random.default_rng(2), 6, 1000 if level > 0.95 else 400, (0.05, 0.15), floor)
    kinds = set()
    for target in (0, 1, (1, 0)):
        low, high = intervals(target, *data, level)
        for run in range(6):
            found = evaluate_decisions(log_of(run, *data), target, level=level)
            kinds.add(found.is_normal)
            np.testing.assert_allclose((low[run], high[run]), found.interval, rtol=1e-9, atol=1e-12)
    assert kinds == {True, False}


def log(rewards, arms=None):
    arms = np.arange(rewards.size) % 2 if arms is None else arms
    return LoggedDecisions(("a", "b"), arms, rewards, np.full(rewards.size, 0.5), np.full((rewards.size, 2), 0.5))


def test_an_arm_without_an_event_has_the_interval_of_its_sequence_and_the_number_of_events_that_a_narrower_one_needs():
    rewards = np.zeros(200)
    rewards[1:60:6] = 1.0  # ten of the 100 of b, none of a: 10 (1 - .1) / (1 - .2)^2 = 14 events
    found = evaluate_decisions(log(rewards), "a")
    # The beta-binomial sequence of 0 of 100: by test inversion, as in test_confidence_sequences.py.
    assert found.interval[0] == 0.0 and 0.03 < found.interval[1] < 0.08 and not found.is_normal
    assert found.interval == tuple(found.sequence.iloc[-1][["lower", "upper"]])
    assert "needs at least 20 events" in found.verdict and np.isnan(found.standard_error)
    assert found.table()[["standard_error", "lower", "upper"]].isna().all(axis=None)
    few = evaluate_decisions(log(rewards), "b")
    assert few.interval[0] > 0 and "about 80 more decisions" in few.verdict


def test_rare_rewards_of_an_unknown_size_are_refused_with_the_number_of_events_that_is_needed():
    rng = np.random.default_rng(0)
    rewards = np.where(rng.random(400) < 0.02, 50.0 * rng.exponential(size=400), 0.0)
    found = evaluate_decisions(log(rewards), "a")
    assert found.is_refused and "needs 20" in found.verdict and "more decisions" in found.verdict
    assert np.isinf(found.sequence["upper"]).all() and "Remedy: give the smallest and the largest" in found.verdict
    known = evaluate_decisions(log(rewards), "a", bounds=(0.0, 1000.0))
    assert not known.is_refused and 0 <= known.interval[0] < known.interval[1]


@pytest.mark.parametrize(("low", "high"), [(0.0, 100.0), (5000.0, 5100.0), (0.0, 0.01)])
def test_two_rewards_are_0_and_1_in_another_unit_and_the_verdict_says_so(low, high):
    for num_events in (2, 5, 60):
        rewards = np.zeros(200)
        rewards[1 : 3 * num_events : 3] = 1.0
        plain, other = (evaluate_decisions(log(own), ("b", "a")) for own in (rewards, low + (high - low) * rewards))
        np.testing.assert_allclose(other.interval, (high - low) * np.array(plain.interval), rtol=1e-6)
        assert other.is_normal == plain.is_normal == (num_events == 60) and not (other.is_refused or plain.is_refused)
        assert not plain.cautions and f"all rewards are {low:g} or {high:g}" in other.verdict.splitlines()[1]
        assert not evaluate_decisions(log(low + (high - low) * rewards), "a", bounds=(low, high)).cautions


def test_an_amount_that_came_once_is_not_taken_for_the_largest():
    rewards = np.zeros(200)
    rewards[7] = 37.5
    found = evaluate_decisions(log(rewards), "b")
    assert found.is_refused and "Remedy: give the smallest and the largest possible reward" in found.verdict


@pytest.mark.parametrize("kind", ["gaussian", "binary", "rare"])
def test_a_change_of_unit_changes_the_unit_of_the_answer_and_nothing_else(kind):
    rng = np.random.default_rng(3)
    rewards = rng.normal(2.0, 1.0, 400) if kind == "gaussian" else (rng.random(400) < 0.3).astype(float)
    if kind == "rare":
        rewards = np.where(rng.random(400) < 0.03, rng.normal(size=400), 0.0)
    arms = rng.integers(0, 2, 400)
    for target in ("a", ("b", "a"), {"a": 0.4, "b": 0.6}):
        plain = evaluate_decisions(log(rewards, arms), target)
        for unit, shift in ((100.0, 0.0), (1e-6, 0.0), (100.0, 5000.0)):
            other = evaluate_decisions(log(unit * rewards + shift, arms), target)
            moved = 0.0 if isinstance(target, tuple) else shift
            assert other.is_refused == plain.is_refused and other.is_normal == plain.is_normal
            assert other.sequence_kind == plain.sequence_kind
            np.testing.assert_allclose(other.interval, unit * np.array(plain.interval) + moved, rtol=1e-6)
            np.testing.assert_allclose(other.estimate, unit * plain.estimate + moved, rtol=1e-6)
            np.testing.assert_allclose(
                other.sequence.iloc[1:], unit * plain.sequence.iloc[1:] + moved, 1e-6, 1e-12 * unit
            )


@pytest.mark.parametrize("num_runs", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_the_asymptotic_sequence_is_as_good_in_every_unit(num_runs, scale):
    """Two Gaussian arms under Thompson sampling with a floor: rewards of an sd of 100 were ever missed in .475 of the runs."""
    data = gaussian_logs(np.random.default_rng(1), num_runs, 500, (0.5 * scale, 0.0), scale, 0.05)
    wrong = 0
    for run in range(num_runs):
        sequence = evaluate_decisions(log_of(run, *data), 1).sequence
        wrong += ((sequence["lower"] > 0) | (sequence["upper"] < 0)).any()
    assert wrong / num_runs < 0.05 + 3 * np.sqrt(0.05 * 0.95 / num_runs)
