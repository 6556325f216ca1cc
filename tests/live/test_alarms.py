"""Alarms ring seldom while nothing is wrong, and soon once something is."""

import json
import math
from datetime import UTC, datetime
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
from shared_models import FLOORED, bernoulli_bandit, prior_engine

from ppl_bandit import Bandit, RewardModel, engines
from ppl_bandit.commands.cli import main
from ppl_bandit.journal.events import DECIDED, FORGOTTEN, REWARDED, new_event
from ppl_bandit.live.alarm_processes import (
    concentration_process,
    drift_process,
    first_alarm,
    missing_process,
    new_bets,
    new_drift,
    sample_ratio_process,
    sample_ratio_start,
    sample_ratio_steps,
)
from ppl_bandit.live.alarms import AlarmSettings, AlarmWatch
from ppl_bandit.types import Capabilities


def ratio(arms, probs):
    return sample_ratio_process(sample_ratio_steps(arms, probs), sample_ratio_start(probs.shape[1]))[0]


def missing(is_missing):
    return missing_process(np.cumsum(is_missing), np.arange(1, len(is_missing) + 1), 0.05)


def drift(values, ties):
    return drift_process(values, ties, new_drift())[0]


def concentration(best_arm_probs):
    return concentration_process(best_arm_probs, 1000, new_bets())[0]


def gaussian_beliefs(rng, truth=None, precision=1.0, num_rows=2000):
    """Estimates of P(best) from 1,000 draws, of two arms with standard normal priors that Thompson sampling plays.

    Args:
        truth: the expected rewards; None draws them from the prior.
        precision: of a reward, as the program believes; it is 1.
    """
    means = rng.normal(size=2) if truth is None else truth
    noise, uniforms = rng.normal(size=num_rows), rng.random(num_rows)
    total, weight, found = [0.0, 0.0], [1.0, 1.0], []
    for row in range(num_rows):
        gap = total[1] / weight[1] - total[0] / weight[0]
        prob = 0.5 * math.erfc(-gap / math.sqrt(2.0 * (1.0 / weight[0] + 1.0 / weight[1])))
        share = rng.binomial(1000, prob) / 1000
        found.append([1.0 - share, share])
        arm = int(uniforms[row] < share)
        total[arm] += precision * (means[arm] + noise[row])
        weight[arm] += precision
    return found


def share_of_alarms(make, num_runs, threshold):
    return np.mean([first_alarm(make(np.random.default_rng(run)), threshold) is not None for run in range(num_runs)])


def thompson_stream(rng, num_rows=2000):
    """Three arms whose probabilities change slowly."""
    probs = np.exp(np.cumsum(0.05 * rng.normal(size=(num_rows, 3)), axis=0))
    probs /= probs.sum(axis=1, keepdims=True)
    return (rng.random((num_rows, 1)) > probs.cumsum(axis=1)).sum(axis=1), probs


QUIET = {
    "sample_ratio": (lambda rng: ratio(*thompson_stream(rng)), 20.0),
    "missing_rewards": (lambda rng: missing(rng.random(2000) < 0.05), 20.0),
    # Each arm's own level is .05 over the number of arms: of one arm alone, all of it.
    "drift": (lambda rng: drift((rng.random(2000) < 0.3) * 1.0, rng.random(2000)), 20.0),
    "drift of real rewards": (lambda rng: drift(rng.standard_cauchy(2000), rng.random(2000)), 20.0),
    "concentration": (lambda rng: concentration(gaussian_beliefs(rng)), 20.0),
    "concentration of equal arms": (lambda rng: concentration(gaussian_beliefs(rng, (0.0, 0.0))), 20.0),
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
        first = first_alarm(drift(rewards, rng.random(rewards.size)), 40.0)  # one of two arms
        delays.append(math.inf if first is None else first - num_before)
    # The standard error of the median is about 25 at 40 runs; it is 170 to 190.
    assert np.median(delays) < 300


def test_wrong_allocation_and_missing_rewards_ring():
    rng = np.random.default_rng(0)
    arms, probs = thompson_stream(rng)
    arms[rng.random(2000) < 0.2] = 0  # something sends a fifth of the visitors to the first arm
    assert first_alarm(ratio(arms, probs), 20.0) < 700
    assert first_alarm(missing(rng.random(2000) < 0.15), 20.0) < 300
    assert math.isinf(ratio(np.array([1]), np.array([[1.0, 0.0]]))[0])


def test_processes_have_expectation_one():
    """Over all outcomes of six decisions, by enumeration."""
    total = 0.0
    for code in range(2**6):
        arms = np.array([code >> i & 1 for i in range(6)])
        probs = np.array([[0.3, 0.7]] * 6)
        total += np.prod(probs[np.arange(6), arms]) * np.exp(ratio(arms, probs)[-1])
    assert total == pytest.approx(1.0)
    total = 0.0
    for code in range(2**6):
        is_missing = np.array([code >> i & 1 for i in range(6)])
        total += np.prod(np.where(is_missing, 0.05, 0.95)) * np.exp(missing(is_missing)[-1])
    assert total == pytest.approx(1.0)
    assert drift(np.zeros(0), np.zeros(0)).size == 0 == ratio(np.zeros(0, int), np.zeros((0, 2))).size
    with pytest.raises(ValueError, match="share of rewards that may be missing"):
        missing_process(np.zeros(3), np.ones(3), 0.0)


def test_a_bandit_has_no_alarms_until_something_is_wrong(tmp_path, capsys):
    path = tmp_path / "j.db"
    bandit = bernoulli_bandit(2, arms=["a", "b"], selector=FLOORED, journal=path)
    assert bandit.alarms().empty and len(bandit.alarms().attrs["checked"]) == 5
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


def test_a_posterior_that_is_too_certain_concentrates_faster_than_the_evidence():
    """Rewards whose precision is believed to be four times as large, as if each was learnt four times."""
    runs = [concentration(gaussian_beliefs(np.random.default_rng(run), (0.0, 0.0), 4.0)) for run in range(60)]
    # The share is .39; three standard errors at 60 runs are .19.
    assert np.mean([first_alarm(log, 20.0) is not None for log in runs]) > 0.15
    one = concentration([[0.5, 0.5], [0.001, 0.999], [0.002, 0.998], [0.9, 0.1], [0.95, 0.05], [0.96, 0.04]])
    # All three bets open at .999, are divided by (2 + 1) / 1001, and are paid .96 after the fall below .1.
    np.testing.assert_allclose(one, [0.0] * 5 + [math.log(0.96 * 1001 / 3)], atol=1e-12)


@pytest.mark.parametrize("kind", ["ratio", "missing", "drift", "concentration"])
def test_a_process_continues_where_it_stopped(kind):
    rng = np.random.default_rng(0)
    arms, probs = thompson_stream(rng, 450)
    values, ties, beliefs = rng.normal(size=450), rng.random(450), gaussian_beliefs(rng, num_rows=450)
    run, start = {
        "ratio": (
            lambda rows, s: sample_ratio_process(sample_ratio_steps(arms[rows], probs[rows]), s),
            [np.zeros((3, 8))],
        ),
        "missing": (lambda rows, s: (missing_process(np.arange(450)[rows] // 9, np.arange(450)[rows], 0.05), s), [0]),
        "drift": (lambda rows, s: drift_process(values[rows], ties[rows], s), [new_drift(), new_drift()]),
        "concentration": (lambda rows, s: concentration_process(beliefs[rows], 1000, s), [new_bets()]),
    }[kind]
    whole, _ = run(slice(0, 450), start[0])
    first, state = run(slice(0, 130), start[-1])
    second, _ = run(slice(130, 450), state)
    np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=1e-9)


def played(bandit, num, rate, seed=0):
    rng, decisions = np.random.default_rng(seed), bandit.select_many(num_decisions=num)
    bandit.update_many(decisions=decisions, rewards=(rng.random(num) < rate) * 1.0)


def test_a_call_reads_new_events_alone_and_finds_what_one_reading_finds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ppl_bandit.live.alarms._PAGE", 150)
    path = tmp_path / "j.db"
    bandits = [bernoulli_bandit(2, selector=FLOORED, **place) for place in ({"journal": path}, {}, {})]
    often, memory, once = bandits
    for bandit in bandits:
        for number, rate in enumerate((0.7, 0.7, 0.1)):
            played(bandit, 250, rate, number)
            bandit.discard(bandit.select_many(num_decisions=1)[0])
            if bandit is not once:
                bandit.alarms()
    tables = [bandit.alarms().drop(columns="since") for bandit in bandits]
    assert set(tables[0].alarm) == {"drift"}
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0], rtol=1e-9)  # sums in another order
    assert main(["journal", str(path), "alarms", "--json"]) == 0
    assert [row["figure"] for row in json.loads(capsys.readouterr().out)] == pytest.approx(tables[0].figure.tolist())
    read, store = [], often._experiment.store
    monkeypatch.setattr(
        store, "read", lambda *args, _read=store.read, **kw: read.append(_read(*args, **kw)) or read[-1]
    )
    often.select()
    assert often.alarms().drop(columns="since").equals(tables[0])
    assert max(map(len, read)) == 1


@pytest.mark.parametrize("propensity", [None, 0.9])
def test_arms_that_are_shown_instead_ring_unless_their_probability_is_known(propensity):
    bandit = bernoulli_bandit(2, selector=FLOORED)
    for decision in bandit.select_many(num_decisions=120):
        bandit.update(decision, 1, shown=0, propensity=propensity)
    found = bandit.alarms()
    assert found.alarm.tolist() == (["sample_ratio"] if propensity is None else [])


@pytest.mark.parametrize("default", [None, 0])
def test_overdue_rewards_are_missing_unless_they_have_a_default(default, monkeypatch):
    """Clicks come at once and the others by default after the window: judged as they came, they would be a drift."""
    bandit = bernoulli_bandit(2, selector=FLOORED, reward_window=60, default_reward=default)
    now = __import__("time").time()
    for start in (0, 61):
        monkeypatch.setattr("time.time", lambda start=start: now + start)
        for decision in bandit.select_many(num_decisions=200)[::3]:
            bandit.update(decision, 1)
        assert bandit.alarms().alarm.tolist() == ([] if default == 0 or not start else ["missing_rewards"])
    assert bandit.alarms(overdue_after=1e6).empty == (default == 0)


def test_a_reward_that_is_erased_while_it_waits_for_earlier_ones_is_not_judged():
    watch = AlarmWatch(AlarmSettings(("reward",), 1000, False, False, is_ordered=True))
    probs = {"propensities": [0.5, 0.5], "best_arm_probs": [0.5, 0.5]}
    made = [new_event(DECIDED, probs, decision=id, arm=0) for id in "ab"]
    late, early = (new_event(REWARDED, {"reward": {"reward": 1.0}}, decision=id, arm=0, settles=True) for id in "ab")
    events = [*made, early, new_event(FORGOTTEN, {"rows": [3]}), late]
    events = [event._replace(position=number) for number, event in enumerate(events, 1)]
    watch.read(SimpleNamespace(read=lambda *_, **settings: events[watch._position :]), "default", 0.0)
    assert watch._num_settled == 1 and not watch._open


def test_added_arms_begin_with_the_capital_of_the_others():
    start = sample_ratio_start(2)
    start[0] -= 1.0
    grown = sample_ratio_start(5, start)
    assert np.log(np.mean(np.exp(grown))) == pytest.approx(np.log(np.mean(np.exp(start))))


def line(arm, context):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]))
    numpyro.sample("reward", dist.Normal(slope[arm] * context, 1.0))


@pytest.fixture(scope="module")
def line_bandit():
    model = RewardModel(line, 2, jnp.asarray(1.0))
    engine = engines.conjugate(model)
    return lambda: Bandit(model, engine=lambda _: engine, selector=FLOORED)


def world_of_lines(seed, num_rows, change=None):
    """Events of Thompson sampling on two lines drawn from the prior, whose contexts grow; at `change` the lines turn over."""
    rng = np.random.default_rng(seed)
    slopes, total, weight, events = rng.normal(size=2), np.zeros(2), np.ones(2), []
    for row in range(num_rows):
        x = 3.0 * row / num_rows + rng.normal()
        arm = int(np.argmax(x * (total / weight + rng.normal(size=2) / np.sqrt(weight))))
        y = (slopes[arm] if change is None or row < change else -slopes[arm]) * x + rng.normal()
        total[arm], weight[arm] = total[arm] + x * y, weight[arm] + x * x
        probs = {"propensities": [0.5, 0.5], "best_arm_probs": [0.5, 0.5]}
        events.append(new_event(DECIDED, probs, decision=str(row), arm=arm))
        body = {"reward": {"reward": y}, "context": [x]}
        events.append(new_event(REWARDED, body, decision=str(row), arm=arm, settles=True))
    return [event._replace(position=number) for number, event in enumerate(events, 1)]


def drift_read_at(projection, events, calls):
    """Return the largest value of each arm's drift process, and whether one rang, if alarms are read after so many events."""
    watch = AlarmWatch(AlarmSettings(("reward",), 1000, True, False))
    for end in (*calls, len(events)):
        store = SimpleNamespace(read=lambda name, after, limit, whole, end=end: events[after : min(end, after + limit)])
        watch.read(store, "default", 0.0, projection)
    rings = [ring for (kind, *_), ring in watch._rings.items() if kind == "drift"]
    return [ring.highest for ring in rings], any(ring.since is not None for ring in rings)


@pytest.mark.parametrize("num_runs, num_rows", [(8, 400), pytest.param(1000, 2000, marks=pytest.mark.slow)])
def test_drift_with_a_context_holds_its_level_if_alarms_are_read_again_and_again(line_bandit, num_runs, num_rows):
    projection = line_bandit()._experiment.projection
    calls = [[num_rows // 10], [num_rows // 2], [num_rows], range(100, 2 * num_rows, 100)]
    rings = [drift_read_at(projection, world_of_lines(run, num_rows), calls[run % 4])[1] for run in range(num_runs)]
    print(f"{np.mean(rings):.3f} of {num_runs} quiet streams rang")
    # Three standard errors of a share of .05; ranks among draws of an older posterior rang in .8 of the streams.
    assert np.mean(rings) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_runs)


def test_drift_with_a_context_does_not_depend_on_when_alarms_are_read(line_bandit):
    projection, events = line_bandit()._experiment.projection, world_of_lines(3, 150, change=75)
    once, _ = drift_read_at(projection, events, [])
    for calls in ([55], range(20, 300, 40)):
        np.testing.assert_allclose(drift_read_at(projection, events, calls)[0], once, rtol=1e-9)


def test_alarms_compile_no_update_of_an_engine_that_stores_rows():
    """The predictive learns rows one after another, as a bandit does; an update of each number of rows takes seconds."""
    engine, sizes = prior_engine(RewardModel(line, 2, jnp.asarray(1.0))), []

    def update(key, state, rows):
        sizes.append(rows.arm.shape[0])  # when it is compiled
        return engine.update(key, state, rows)

    stores = engine._replace(
        update=update,
        explanation=engine.explanation._replace(engine="reweight"),
        capabilities=Capabilities(reserve=lambda state, num_rows: state),
    )
    projection = Bandit(line, 2, context=1.0, engine=lambda _: stores, num_samples=20)._experiment.projection
    watch = AlarmWatch(AlarmSettings(("reward",), 20, True, False))
    events = world_of_lines(0, 60)
    watch.read(SimpleNamespace(read=lambda *_, **settings: events[watch._position :]), "default", 0.0, projection)
    assert watch._predictive._own.history.num_rows > 20
    assert set(sizes) == {1}


@pytest.mark.parametrize("num_runs", [pytest.param(200, marks=pytest.mark.slow)])
def test_lines_that_turn_over_ring_soon(line_bandit, num_runs):
    projection, found = line_bandit()._experiment.projection, []
    for run in range(num_runs):
        events = world_of_lines(run, 1000, change=500)
        found.append(drift_read_at(projection, events, [1000])[1])
    print(f"{np.mean(found):.3f} of {num_runs} streams with a change rang")
    assert np.mean(found) > 0.8


def test_rewards_that_follow_their_contexts_are_no_drift(line_bandit):
    """The context drifts and the rewards with it: their ranks stay uniform until the law changes; erased rows are forgotten."""
    bandit, rng = line_bandit(), np.random.default_rng(0)

    def play(level, slopes, num=200):
        contexts = level + rng.normal(size=num)
        decisions = bandit.select_many(contexts, units=[None if level else "first", *[None] * (num - 1)])
        arms = np.array([decision.arm for decision in decisions])
        bandit.update_many(decisions=decisions, rewards=slopes[arms] * contexts + rng.normal(size=num))

    play(0.0, np.array([1.0, 0.8]))
    assert bandit.alarms().empty and bandit.erase("first") == 1
    play(3.0, np.array([1.0, 0.8]))
    bandit.update_many(arms=[0, 1], rewards=[1.0, 0.8], contexts=np.ones(2))
    assert bandit.alarms().empty
    assert bandit._watch._predictive._num_rows == 402
    play(3.0, np.array([0.0, 0.0]))
    assert "drift" in set(bandit.alarms()["alarm"])
    assert bandit.alarms(after=datetime.now(UTC)).empty


def test_a_posterior_that_is_not_trusted_is_an_alarm_with_a_time_and_a_figure():
    watch = AlarmWatch(AlarmSettings(("reward",), 1000, False, False))
    events = [new_event("looked", {})._replace(position=1, time=7.0)]
    store = SimpleNamespace(read=lambda name, after, limit, whole: events[after:])
    learner = SimpleNamespace(doubts="too few draws", num_doubted=3)
    for now in (8.0, 9.0):
        watch.read(store, "default", now, SimpleNamespace(learner=learner))
    (row,) = watch.table(["a"], learner).to_dict("records")
    assert (row["alarm"], row["since"].timestamp(), row["figure"], row["threshold"]) == (
        "untrusted_inference",
        8.0,
        3,
        1,
    )
    assert row["what_to_do"].startswith("too few draws; ") and math.isnan(row["level"])
    watch.read(store, "default", 10.0, SimpleNamespace(learner=SimpleNamespace(doubts="")))
    assert watch.table(["a"], SimpleNamespace(doubts="")).empty
