"""Alarms ring seldom while nothing is wrong, and soon once something is."""

import json
import math

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import FLOORED, bernoulli_bandit

from ppl_bandit import Bandit
from ppl_bandit.commands.cli import main
from ppl_bandit.live.alarms import drift_process, first_alarm, missing_process, sample_ratio_process


def share_of_alarms(make, num_runs, threshold):
    return np.mean([first_alarm(make(np.random.default_rng(run)), threshold) is not None for run in range(num_runs)])


def thompson_stream(rng, num_rows=2000):
    """Three arms whose probabilities change slowly."""
    probs = np.exp(np.cumsum(0.05 * rng.normal(size=(num_rows, 3)), axis=0))
    probs /= probs.sum(axis=1, keepdims=True)
    return (rng.random((num_rows, 1)) > probs.cumsum(axis=1)).sum(axis=1), probs


QUIET = {
    "sample_ratio": (lambda rng: sample_ratio_process(*thompson_stream(rng)), 20.0),
    "missing_rewards": (lambda rng: missing_process(rng.random(2000) < 0.05, 0.05), 20.0),
    # Each arm's own level is .05 over the number of arms: of one arm alone, all of it.
    "drift": (lambda rng: drift_process((rng.random(2000) < 0.3) * 1.0, rng.random(2000)), 20.0),
    "drift of real rewards": (lambda rng: drift_process(rng.standard_cauchy(2000), rng.random(2000)), 20.0),
}


@pytest.mark.parametrize("num_runs", [60, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", QUIET)
def test_at_most_five_percent_of_quiet_streams_ever_ring(kind, num_runs):
    make, threshold = QUIET[kind]
    # Three standard errors of a share of .05.
    assert share_of_alarms(make, num_runs, threshold) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_runs)


@pytest.mark.parametrize("num_runs", [40, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_before", [300, 600])
def test_an_arm_that_falls_from_6_to_4_in_10_rings_within_300_of_its_rewards(num_before, num_runs):
    delays = []
    for run in range(num_runs):
        rng = np.random.default_rng(run)
        rewards = np.concatenate([rng.random(num_before) < 0.6, rng.random(700) < 0.4]) * 1.0
        first = first_alarm(drift_process(rewards, rng.random(rewards.size)), 40.0)  # one of two arms
        delays.append(math.inf if first is None else first - num_before)
    # The standard error of the median is about 25 at 40 runs; it is 170 to 190.
    assert np.median(delays) < 300


def test_wrong_allocation_and_missing_rewards_ring():
    rng = np.random.default_rng(0)
    arms, probs = thompson_stream(rng)
    arms[rng.random(2000) < 0.2] = 0  # something sends a fifth of the visitors to the first arm
    assert first_alarm(sample_ratio_process(arms, probs), 20.0) < 700
    assert first_alarm(missing_process(rng.random(2000) < 0.15, 0.05), 20.0) < 300
    assert math.isinf(sample_ratio_process(np.array([1]), np.array([[1.0, 0.0]]))[0])


def test_processes_have_expectation_one():
    """Over all outcomes of six decisions, by enumeration."""
    total = 0.0
    for code in range(2**6):
        arms = np.array([code >> i & 1 for i in range(6)])
        probs = np.array([[0.3, 0.7]] * 6)
        total += np.prod(probs[np.arange(6), arms]) * np.exp(sample_ratio_process(arms, probs)[-1])
    assert total == pytest.approx(1.0)
    total = 0.0
    for code in range(2**6):
        missing = np.array([code >> i & 1 for i in range(6)])
        total += np.prod(np.where(missing, 0.05, 0.95)) * np.exp(missing_process(missing, 0.05)[-1])
    assert total == pytest.approx(1.0)
    assert (
        drift_process(np.zeros(0), np.zeros(0)).size
        == sample_ratio_process(np.zeros(0, int), np.zeros((0, 2))).size
        == 0
    )
    with pytest.raises(ValueError, match="share of rewards that may be missing"):
        missing_process(np.zeros(3, bool), 0.0)


def test_a_bandit_has_no_alarms_until_something_is_wrong(tmp_path, capsys):
    path = tmp_path / "j.db"
    bandit = bernoulli_bandit(2, arms=["a", "b"], selector=FLOORED, journal=path)
    assert bandit.alarms().empty and len(bandit.alarms().attrs["checked"]) == 4
    rng = np.random.default_rng(0)
    for decisions in (bandit.select_many(num_decisions=300), bandit.select_many(num_decisions=300)):
        bandit.update_many(decisions=decisions, rewards=(rng.random(300) < 0.5) * 1.0)
    assert bandit.alarms().empty
    for decision in bandit.select_many(num_decisions=60):
        bandit.discard(decision)
    late = bandit.select_many(num_decisions=400)
    bandit.update_many(decisions=late, rewards=np.zeros(400))
    found = bandit.alarms().set_index("alarm")
    assert found.loc["missing_rewards", "figure"] >= found.loc["missing_rewards", "threshold"] == 20.0
    assert (
        "9.1%" not in found.loc["missing_rewards", "what_to_do"]
        and "5.0% tolerated" in found.loc["missing_rewards", "what_to_do"]
    )
    assert "drift" in found.index and set(found.loc[["drift"], "arm"]) <= {"a", "b"}
    assert found.loc[["drift"], "level"].tolist()[0] == pytest.approx(0.025)
    assert main(["journal", str(path), "alarms", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["alarm"] for row in rows} == set(found.index) and all(row["since"] for row in rows)


@pytest.mark.slow  # compiles a program with a context
def test_rewards_that_follow_their_contexts_are_no_drift():
    """The context drifts and the rewards with it: ranks in the posterior predictive stay uniform until the law changes."""

    def line(arm, context):
        slope = numpyro.sample("slope", dist.Normal(0.0, 3.0).expand([2]))
        numpyro.sample("reward", dist.Normal(slope[arm] * context, 1.0))

    bandit = Bandit(line, 2, context=jnp.asarray(1.0), selector=FLOORED)
    rng = np.random.default_rng(0)

    def play(level, slopes, num=400):
        contexts = level + rng.normal(size=num)
        decisions = bandit.select_many(contexts)
        arms = np.array([decision.arm for decision in decisions])
        bandit.update_many(decisions=decisions, rewards=slopes[arms] * contexts + rng.normal(size=num))

    play(0.0, np.array([1.0, 0.8]))
    play(3.0, np.array([1.0, 0.8]))
    assert bandit.alarms().empty
    play(3.0, np.array([0.0, 0.0]))
    assert "drift" in set(bandit.alarms()["alarm"])
