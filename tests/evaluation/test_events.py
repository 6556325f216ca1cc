"""How the events of an experiment enter its evaluation: late and corrected rewards, changed settings, arms, expiry."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import FLOORED, bernoulli_bandit

from ppl_bandit import Bandit, Journal, evaluate, selectors

ARMS = ["a", "b"]


def any_arms(arm, *, num_arms):
    with numpyro.plate("arms", num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def with_floor(floor):
    return selectors.with_floor(selectors.thompson(), floor)


def test_late_rewards_stand_where_their_decision_was_made_and_corrected_ones_count_with_their_last_value():
    bandit = bernoulli_bandit(selector=FLOORED)
    first, second, third = (bandit.select() for _ in range(3))
    bandit.update(third, 0.0)
    bandit.update(second, 0.0)
    bandit.update(first, 1.0)
    bandit.update(second, 1.0, correct=True)
    log = bandit.logged_decisions()
    assert log.reward.tolist() == [1.0, 1.0, 0.0]
    assert [log.names[arm] for arm in log.arm] == [first.arm, second.arm, third.arm]
    assert log.propensity.tolist() == [first.propensity, second.propensity, third.propensity]


def test_after_a_change_of_settings_every_decision_keeps_the_propensities_that_it_was_made_with(tmp_path):
    def play(bandit, num):
        for _ in range(num):
            bandit.update(bandit.select(), 1.0 if bandit.select().arm == "a" else 0.0)

    path = tmp_path / "journal.db"
    bandit = bernoulli_bandit(arms=[*ARMS, "c"], selector=FLOORED, journal=path)
    play(bandit, 10)
    before = bandit.logged_decisions()
    changed = bernoulli_bandit(arms=[*ARMS, "c"], selector=with_floor(0.3), journal=path, allow_changed=True)
    play(changed, 10)
    after = changed.logged_decisions()
    assert before.arm.size == 10 and after.arm.size == 20
    assert (after.propensities[:10] == before.propensities).all() and before.propensities[1:].min() < 0.3
    assert after.propensities[10:].min() >= 0.3
    with Journal(path) as journal:
        assert evaluate(journal, "a").diagnostics["smallest_propensity"] == before.propensities[:, 0].min()


@pytest.mark.slow  # compiles for two and for three arms
def test_arms_added_and_retired_and_expired_decisions_have_their_treatment():
    """An arm has propensity 0 before it was added and after it was retired; an expired decision has its given reward."""
    bandit = Bandit(any_arms, arms=ARMS, selector=with_floor(0.1), num_samples=50)
    rng = np.random.default_rng(0)

    def play(num):
        for _ in range(num):
            bandit.update(bandit.select(), float(rng.random() < 0.4))

    play(30)
    bandit.add_arm("c")
    play(30)
    bandit.retire_arm("b")
    play(30)
    bandit.select()
    bandit.expire(older_than=0.0, reward=0.0)
    log = bandit.logged_decisions()
    assert log.names == ("a", "b", "c") and log.arm.size == 91
    assert (log.propensities[:30, 2] == 0).all() and (log.propensities[30:60] > 0).all()
    assert (log.propensities[60:, 1] == 0).all() and log.reward[-1] == 0.0 and log.num_unrewarded == 0
    found = bandit.evaluate("c")
    assert found.diagnostics["share_of_zero_propensities"] == pytest.approx(30 / 91)
    assert bandit.evaluate(("b", "c")).diagnostics["num_decisions"] == 91
