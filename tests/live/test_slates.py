"""Slates: ordered distinct arms, the probability of each, rewards by place; and probabilities without a decision."""

import itertools

import numpy as np
import pytest
from shared_models import THOMPSON, bernoulli_bandit

from ppl_bandit import Journal, selectors
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.replay import replay

ARMS = ["a", "b", "c", "d"]


def make(**options):
    return bernoulli_bandit(4, **{"selector": THOMPSON, "arms": ARMS} | options)


@pytest.fixture(scope="module")
def learnt():
    bandit = make()
    bandit.update_many(
        arms=["a"] * 6 + ["b"] * 6 + ["c"] * 6, rewards=[1, 1, 1, 0, 0, 0] + [1, 0, 0, 0, 0, 0] + [1, 1] + [0] * 4
    )
    return bandit


def test_a_slate_holds_distinct_arms_and_its_probability_is_the_product(learnt):
    slate = learnt.select(size=3)
    assert len(set(slate.arms)) == 3 and slate.propensities.shape == (3, 4)
    places = [slate.propensities[place, ARMS.index(arm)] for place, arm in enumerate(slate.arms)]
    assert slate.propensity == pytest.approx(np.prod(places))
    for place in range(1, 3):  # an arm of an earlier place has probability 0
        assert all(slate.propensities[place, ARMS.index(arm)] == 0.0 for arm in slate.arms[:place])
    np.testing.assert_allclose(slate.propensities.sum(axis=1), 1.0)
    assert slate.to_dict()["arms"] == slate.arms


def test_the_probabilities_of_all_slates_add_up_and_are_those_of_their_places(learnt):
    """By enumeration: Thompson sampling plays an arm with its exact probability of being best among those left."""
    first = learnt.propensities()
    np.testing.assert_allclose(first, learnt.summary().best_arm_prob, atol=1e-4)
    slates = {}
    for one, two in itertools.permutations(range(4), 2):
        rest = [arm for index, arm in enumerate(ARMS) if index != one]
        slates[one, two] = first[one] * learnt.propensities(allowed=rest)[two]
    assert sum(slates.values()) == pytest.approx(1.0)
    second = [sum(prob for (_, two), prob in slates.items() if two == arm) for arm in range(4)]
    np.testing.assert_allclose(learnt.propensities(size=2), [first, second], atol=1e-6)
    # How often each slate is chosen: 600 slates, four standard errors of a share.
    chosen = [tuple(map(ARMS.index, learnt.select(size=2).arms)) for _ in range(600)]
    for slate, prob in slates.items():
        assert chosen.count(slate) / 600 == pytest.approx(prob, abs=4.0 * np.sqrt(prob * (1 - prob) / 600))


def test_reading_probabilities_records_nothing_and_says_what_select_then_does():
    bandit = make(selector=selectors.double_sampling())
    bandit.update_many(arms=ARMS * 3, rewards=[1, 0, 0, 1] * 3)
    before = bandit.propensities()
    assert len(bandit.pending()) == 0
    np.testing.assert_array_equal(before, bandit.propensities())
    np.testing.assert_array_equal(before, bandit.select().propensities)


def test_rewards_of_a_slate_are_reported_by_place_and_learnt_as_ordinary_rewards():
    bandit = make()
    slate = bandit.select(size=3)
    bandit.update(slate, {1: 1})
    assert bandit.num_rewards == 1 and len(bandit.pending()) == 2
    bandit.update(slate, [0, None, 0])
    bandit.update(slate, [0, 1, 0])  # repeated reports count once
    history = bandit.history()
    assert bandit.num_rewards == 3 and set(history.decision) == {decision.id for decision in slate.decisions}
    by_arm = dict(zip(history.arm, history.reward, strict=True))
    assert [by_arm[arm] for arm in slate.arms] == [0.0, 1.0, 0.0]
    by_decision = history.set_index("decision").propensity
    assert np.prod([by_decision[decision.id] for decision in slate.decisions]) == pytest.approx(slate.propensity)
    other = bandit.select(size=2)
    bandit.discard(other)
    assert len(bandit.pending()) == 0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({3: 1}, r"places \[3\], expected places from 0 to 2"),
        ([1, 0], "one entry for each of its 3 places"),
        (1, "must be {place: reward} or a list"),
        ([None, None, None], "no place with a reward"),
    ],
)
def test_rewards_of_no_place_are_refused(learnt, reward, message):
    slate = learnt.select(size=3)
    with pytest.raises(ValueError, match=message):
        learnt.update(slate, reward)
    learnt.discard(slate)


def test_sizes_that_cannot_be_filled_are_refused(learnt):
    with pytest.raises(ValueError, match="size=3 places need as many distinct arms, but 2 may be played"):
        learnt.select(allowed=["a", "b"], size=3)
    with pytest.raises(ValueError, match="size"):
        learnt.select(size=0)
    with pytest.raises(ValueError, match="size=5 places"):
        learnt.propensities(size=5)


def test_a_journal_continues_and_replays_slates(tmp_path):
    path = tmp_path / "slates.db"
    bandit = make(journal=path)
    slates = [bandit.select(size=2) for _ in range(2)]
    bandit.update(slates[0], [1, 0])
    bandit.select()
    third = bandit.select(size=2)
    again = make(journal=path)
    assert again.num_rewards == 2 and len(again.pending()) == 5
    again.update(third, {0: 1})
    with Journal(path) as journal:
        header = read_header(journal.store, "default")
        task, prior = again._build(ARMS)
        found = replay(journal.store, "default", header.last_change, task, prior, again._build)
    assert found.num_decisions == found.num_checked == 7 and found.position is None
