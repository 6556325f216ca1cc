"""Entries of the context that are known only with the reward: a rate with the days of follow-up as exposure, Gamma-Poisson."""

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import prior_engine

from ppl_bandit import Bandit, Journal, RewardModel, evaluate, selectors
from ppl_bandit.inputs.late_entries import check_late_names, check_late_values
from ppl_bandit.journal.replay import replay

EXAMPLE = {"days": 30.0, "is_new": 0.0}


def churn(arm, context):
    with numpyro.plate("plans", 2):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 40.0))
    numpyro.sample("reward", dist.Poisson(rate[arm] * context["days"] * (1.0 + context["is_new"])))
    numpyro.deterministic("expected_reward", jnp.exp(-rate[arm] * context["days"]))


SELECTOR = selectors.with_floor(selectors.thompson(), 0.2)


@functools.cache
def model():
    return RewardModel(churn, 2, EXAMPLE)


def make(late=("days",), **settings):
    return Bandit(model(), late=late, num_samples=50, selector=SELECTOR, **settings)


def gamma(bandit):
    found = bandit.posterior_parameters()["rate"]
    return found["concentration"], found["rate"]


def expected(rows):
    """The textbook posterior: shape 2 + events, rate 40 + days."""
    shape, rate = np.full(2, 2.0), np.full(2, 40.0)
    for arm, reward, days in rows:
        shape[arm] += reward
        rate[arm] += days
    return shape, rate


def assert_gamma(bandit, rows):
    for found, right in zip(gamma(bandit), expected(rows), strict=True):
        np.testing.assert_allclose(found, right, rtol=1e-10)  # a few roundings of float64


@pytest.mark.slow
def test_the_days_that_come_with_the_reward_are_the_exposure_that_is_learnt():
    bandit = make()
    first, second, third = bandit.select({"is_new": 0.0}), *bandit.select_many({"is_new": [0.0, 0.0]})
    assert float(first.context["days"]) == 30.0  # the example value, at which the decision was made
    bandit.update(first, 1, context={"days": 12.0})
    bandit.update_many(decisions=[second.id, third.id], rewards=[0, 2], contexts={"days": [7.0, 25.0]})
    rows = [(first.arm, 1, 12.0), (second.arm, 0, 7.0), (third.arm, 2, 25.0)]
    assert_gamma(bandit, rows)
    assert bandit.history()["days"].tolist() == [12.0, 7.0, 25.0]
    assert bandit.update(first, 1, context={"days": 12.0}) is None  # a repeated report counts once
    bandit.update(second, 0, context={"days": 9.0}, correct=True)
    bandit.update(third, 3, correct=True)  # keeps its days
    rows[1:] = [(second.arm, 0, 9.0), (third.arm, 3, 25.0)]
    assert_gamma(bandit, rows)
    fourth = bandit.select({"is_new": 0.0})
    assert bandit.pending()["waiting_for"].tolist() == ["reward, days"]
    assert bandit.expire(0.0, 0, context={"days": 60.0}) == 1
    assert_gamma(bandit, [*rows, (fourth.arm, 0, 60.0)])
    assert "decisions and expected rewards use the example value (days = 30.0)" in bandit.explain()


@pytest.mark.slow
def test_late_entries_survive_a_crash_a_file_and_a_replay(tmp_path):
    path = tmp_path / "journal.db"
    bandit = make(journal=path)
    decisions = bandit.select_many({"is_new": np.zeros(3)})
    for decision, days in zip(decisions[:2], (12.0, 30.0), strict=True):
        bandit.update(decision.id, 1, context={"days": days})
    rows = [(decision.arm, 1, days) for decision, days in zip(decisions[:2], (12.0, 30.0), strict=True)]
    bandit.save(tmp_path / "bandit.bin")
    del bandit  # nothing is flushed at the end: what a killed process leaves
    again = make(journal=path)
    assert_gamma(again, rows)
    again.update(decisions[2].id, 0, context={"days": 5.0})
    again.update(decisions[0].id, 2, context={"days": 13.0}, correct=True)
    rows = [(decisions[0].arm, 2, 13.0), rows[1], (decisions[2].arm, 0, 5.0)]
    assert_gamma(again, rows)
    assert_gamma(make(journal=path), rows)
    projection = again._experiment.projection
    replayed = replay(again._experiment.store, "default", 0, projection.task, projection.prior, again._build)
    assert replayed.position is None and replayed.num_checked == 3
    loaded = Bandit.load(tmp_path / "bandit.bin", model())
    loaded.update(decisions[2].id, 0, context={"days": 5.0})
    assert loaded.history()["days"].tolist() == [12.0, 30.0, 5.0]
    with pytest.raises(Exception, match="late: it was"):
        make(late=(), journal=path)
    # Expectations before a decision use the context that the decision had; the model learns from the completed one.
    log = again.logged_decisions()
    assert np.asarray(log.contexts["days"]).tolist() == [30.0] * 3
    assert sorted(np.asarray(log.learnt_contexts["days"]).tolist()) == [5.0, 13.0, 30.0]
    found = evaluate(Journal(path), 0, outcome="reward", model=again.model)
    assert found.is_refused, found


def test_wrong_late_entries_are_refused_with_the_remedy():
    bandit = make(engine=prior_engine)
    decision = bandit.select({"is_new": 0.0})
    with pytest.raises(ValueError, match=r"missing 'days'.*update\(decision, reward, context=\{'days': ...\}\)"):
        bandit.update(decision, 1)
    with pytest.raises(ValueError, match="late= does not have 'is_new'"):
        bandit.update(decision, 1, context={"days": 3.0, "is_new": 1.0})
    with pytest.raises(ValueError, match="the entries of the context are"):
        bandit.update(decision, 1, context={"weeks": 3.0})
    assert len(bandit.pending()) == 1
    bandit.update(decision, 1, context={"days": 3.0, "is_new": 0.0})
    with pytest.raises(ValueError, match=r"context\['days'\]=3.0, and 4.0 was given: pass correct=True"):
        bandit.update(decision, 1, context={"days": 4.0})
    with pytest.raises(ValueError, match="must name different entries of the example context"):
        check_late_names(model(), ("weeks",))
    with pytest.raises(
        ValueError, match=r"must be declared: Bandit\(..., context=\{'days': 30.0\}, late=\('days',\)\)"
    ):
        check_late_values(model(), (), {"days": 12.0}, None, "context")
