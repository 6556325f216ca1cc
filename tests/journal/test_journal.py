"""Experiments that survive: what is recorded continues, is never lost or doubled, and is the same experiment or refused."""

import functools
import os
import pickle
import sqlite3
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import FLOORED, bernoulli_parts

from ppl_bandit import Bandit, Journal, JournalError, RewardModel, engines, selectors
from ppl_bandit.journal import outcome_events
from ppl_bandit.journal.events import DECIDED, REWARDED, new_event, new_id
from ppl_bandit.journal.identity import fingerprint
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.repeats import choose_arms
from ppl_bandit.journal.replay import replay
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import Conflict, DamagedEvent
from ppl_bandit.posterior.task import History, Rows

ARMS = ["control", "low", "high"]


def hurdle(arm):
    rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
    size = numpyro.sample("size", dist.Gamma(2.0, 2.0).expand([2]))
    numpyro.deterministic("expected_reward", rate[arm])  # no test here looks at a decision
    sale = numpyro.sample("sale", dist.Bernoulli(rate[arm]))
    with numpyro.handlers.mask(mask=sale == 1):
        numpyro.sample("amount", dist.Exponential(size[arm]))


@pytest.fixture(scope="module")
def parts():
    return bernoulli_parts(3)


@pytest.fixture(scope="module")
def hurdle_parts():
    model = RewardModel(hurdle, 2, outcomes=("sale", "amount"))
    engine = engines.conjugate(model)
    return model, lambda _: engine


def make(parts, **options):
    model, engine = parts
    options = {"arms": ARMS} | options if model.num_arms == 3 else options
    return Bandit(model, engine=engine, num_samples=200, **options)


def counts(bandit):
    found = bandit.posterior_parameters()["rate"]
    return found["concentration1"].tolist(), found["concentration0"].tolist()


def step(bandit, reward):
    decision = bandit.select()
    bandit.update(decision.id, reward)
    return decision.arm


def test_the_same_openings_make_the_same_decisions_and_an_interrupted_run_loses_nothing(parts, tmp_path):
    whole = make(parts, seed=5)
    expected = [step(whole, i % 2) for i in range(6)]
    runs = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        arms = []
        for _ in range(4):  # nothing is closed or saved: the process might as well have been killed
            bandit = make(parts, seed=5, journal=tmp_path / folder / "j.db")
            arms += [step(bandit, i % 2) for i in range(6)]
        runs.append(arms)
    assert runs[0] == runs[1]
    assert runs[0][:6] == expected  # the first opening draws what a bandit without a journal draws
    with Journal(tmp_path / "one" / "j.db") as journal:
        made = [event for event in journal.events() if event.kind == DECIDED]
    assert [event.stream for event in made] == [stream for stream in ("", "1", "2", "3") for _ in range(6)]
    assert [event.number for event in made] == list(range(24))
    plain = make(parts)
    for number, arm in enumerate(runs[0]):
        plain.update(arm=arm, reward=number % 2)
    again = make(parts, seed=5, journal=f"sqlite:///{tmp_path}/one/j.db")
    assert counts(again) == counts(plain)
    assert again.num_rewards == 24


def test_a_saved_bandit_continues_its_random_stream(parts, tmp_path):
    for _ in range(2):
        bandit = make(parts, journal=tmp_path / "j.db")
        step(bandit, 1)
    bandit.save(tmp_path / "saved")
    loaded = [Bandit.load(tmp_path / "saved", parts[0], engine=parts[1]) for _ in range(2)]
    decisions = [one.select() for one in (bandit, *loaded)]
    assert {float(decision.best_arm_probs[0]) for decision in decisions} == {float(decisions[0].best_arm_probs[0])}
    assert loaded[0]._experiment.stream == bandit._experiment.stream == "1"


def test_checkpoints_change_no_decision_and_are_not_believed_when_damaged(parts, tmp_path, monkeypatch):
    monkeypatch.setattr("ppl_bandit.live.bandit._EVENTS_PER_CHECKPOINT", 10)
    bandit = make(parts, journal=tmp_path / "j.db")
    for i in range(12):
        step(bandit, i % 2)
    store = bandit._experiment.store
    position, contents, _ = next(store.checkpoints("default"))
    assert 0 < position < store.last_position("default")
    resumed = make(parts, journal=tmp_path / "j.db")
    assert counts(resumed) == counts(bandit)
    edit = "UPDATE ppl_bandit_checkpoints SET contents = ?"
    with sqlite3.connect(tmp_path / "j.db") as file:
        file.execute(edit, (contents[:-40] + bytes(40),))
    assert counts(make(parts, journal=tmp_path / "j.db")) == counts(bandit)


@pytest.mark.parametrize("num_each", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_threads_share_a_bandit_and_nothing_is_lost(parts, tmp_path, num_each):
    for place in (None, tmp_path / "j.db"):
        num_threads = 8
        bandit = make(parts, journal=place)
        seen, failures = [], []

        def work(bandit=bandit, seen=seen, failures=failures):
            try:
                for i in range(num_each):
                    decision = bandit.select()
                    bandit.update(decision, i % 2)
                    seen.append(decision.id)
            except Exception as error:  # a thread's failure must fail the test
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = num_threads * num_each
        assert not failures
        assert len(set(seen)) == bandit.num_rewards == total
        ones, zeros = counts(bandit)
        assert sum(ones) - 3 == sum(zeros) - 3 == total / 2
        assert len(bandit.pending()) == 0
    with Journal(tmp_path / "j.db") as journal:
        numbers = [event.number for event in journal.events() if event.kind == DECIDED]
    assert sorted(numbers) == list(range(8 * num_each))


def test_two_openings_of_one_experiment_follow_each_other(parts, tmp_path):
    first, second = (make(parts, journal=tmp_path / "j.db") for _ in range(2))
    decisions = [bandit.select() for bandit in (first, second, first, second)]
    for decision, bandit in zip(decisions, (second, first, first, second), strict=True):
        bandit.update(decision.id, 1)  # a reward may be reported to either
    assert counts(first) == counts(second)
    # One that has not followed takes a number that another has taken, in its own random stream.
    stale = second._experiment
    first.select()
    (event,) = stale.decide(stale.projection, np.ones(3, bool), None, None)
    assert (event.number, event.stream, first._experiment.stream) == (4, "1", "")
    # In another random stream: the same numbers, the same posterior, but other draws.
    fresh = first._experiment
    fresh.catch_up()
    assert (first.health().num_decisions, fresh.num_decisions) == (6, 5)
    draws = []
    for stream in ("", "1", "2"):
        made = [choose_arms(fresh.projection, stream, [i], None, np.ones(3, bool), is_batch=False) for i in range(5)]
        draws.append([float(one.best_arm_probs[0]) for (one,) in made])
    assert draws[0] != draws[1] != draws[2] != draws[0]
    assert check_replay(first, "default").position is None


def check_replay(bandit, name):
    experiment = bandit._experiment
    header = read_header(experiment.store, name)
    task, prior = bandit._build(list(header.identity["arms"]))
    return replay(experiment.store, name, header.last_change, task, prior, bandit._build)


def test_replay_derives_every_decision_and_finds_the_first_that_differs(parts, tmp_path):
    bandit = make(parts, journal=tmp_path / "j.db", burn_in=2)
    for i in range(8):
        step(bandit, i % 2)
    many = bandit.select_many(num_decisions=5)
    bandit.update_many(decisions=many[:3], rewards=[1, 0, 1])
    bandit.update(many[0], 0, correct=True)
    bandit.select(allowed=["low", "high"])
    found = check_replay(bandit, "default")
    assert (found.num_decisions, found.num_checked, found.position) == (14, 14, None)
    assert bandit._experiment.store.find_damage("default") is None
    with sqlite3.connect(tmp_path / "j.db") as edit:
        edit.execute("UPDATE ppl_bandit_events SET arm = (arm + 1) % 3 WHERE kind = 'decided' AND number = 6")
    found = check_replay(bandit, "default")
    broken = bandit._experiment.store.find_damage("default").position
    assert found.position == broken
    assert "the recorded arm is" in found.difference


def test_a_reward_counts_once_and_a_correction_is_as_if_the_first_had_never_been(parts, tmp_path):
    for place in (None, tmp_path / "j.db"):
        bandit = make(parts, journal=place)
        decisions = bandit.select_many(num_decisions=6)
        bandit.update_many(decisions=[d.id for d in decisions], rewards=[1, 0, 1, 0, 1, 0])
        before = counts(bandit)
        assert bandit.update(decisions[2], 1) is None
        assert counts(bandit) == before
        with pytest.raises(ValueError, match="already has the reward 1, and 0 was given: pass correct=True"):
            bandit.update(decisions[2], 0)
        bandit.update(decisions[2], 0, correct=True)
        bandit.discard(decisions[0], correct=True)
        plain = make(parts)
        plain.update_many(arms=[d.arm for d in decisions[1:]], rewards=[0, 0, 0, 1, 0])
        assert counts(bandit) == counts(plain)
        assert bandit.num_rewards == 5
        with pytest.raises(ValueError, match="was discarded: pass correct=True"):
            bandit.update(decisions[0], 1)
        bandit.update(decisions[0], 1, correct=True)
        assert bandit.num_rewards == 6
        with pytest.raises(ValueError, match="'forged' was not made by this bandit"):
            bandit.update("forged", 1)
        with pytest.raises(ValueError, match="outside the support"):
            bandit.update(bandit.select(), 7)
        table = bandit.history()
        assert set(table["decision"]) == {d.id for d in decisions}
        assert table["propensity"].between(0, 1).all()


@pytest.mark.slow
def test_outcomes_come_one_by_one_and_expire_as_the_user_says(hurdle_parts, tmp_path):
    for place in (None, tmp_path / "j.db"):
        bandit = make(hurdle_parts, journal=place)
        first, second, third = (bandit.select() for _ in range(3))
        assert bandit.update(first, {"sale": 1}) is None
        assert bandit.num_rewards == 0
        assert bandit.pending()["sale"].tolist()[0] == 1.0
        with pytest.raises(ValueError, match="already has the reward"):
            bandit.update(first, {"sale": 0})
        bandit.update(first, {"amount": 2.5})
        assert bandit.num_rewards == 1
        bandit.update(second, {"sale": 0})
        assert len(bandit.pending(older_than=timedelta(hours=1))) == 0
        assert bandit.expire(older_than=3600) == 0
        assert bandit.expire(older_than=0, reward={"sale": 0, "amount": 0.0}) == 1  # a sale of 0 was learnt at once
        assert bandit.history()["sale"].tolist() == [1.0, 0.0, 0.0]
        fourth = bandit.select()
        assert bandit.expire(older_than=0) == 1
        assert bandit.num_rewards == 3
        bandit.update(fourth, {"sale": 1, "amount": 1.0})  # a late reward is a correction
        assert bandit.num_rewards == 4
        assert {third.id, second.id} <= set(bandit.history()["decision"])


def test_memory_holds_the_events_that_a_journal_holds(parts, tmp_path):
    streams = []
    for place in (None, tmp_path / "j.db"):
        with make(parts, journal=place, seed=3) as bandit:
            decisions = [bandit.select(unit="someone"), bandit.select(), *bandit.select_many(num_decisions=20)]
            bandit.update_many(decisions=decisions[2:], rewards=[i % 2 for i in range(20)])
            bandit.update(decisions[1], 1)
            bandit.update(decisions[1], 0, correct=True)
            bandit.update_many(arms=["low", "low"], rewards=[0, 1], propensity=[0.5, 0.2])
            assert bandit.erase("someone") == 1
            store = bandit._experiment.store
            assert store.find_damage("default") is None
            events = [event for event in store.read("default", whole=True) if event.kind != "opened"]
            numbers = {decision.id: number for number, decision in enumerate(decisions)}
            num_before = events[0].position - 1
            kept = [
                {
                    name: value
                    for name, value in event.body.items()
                    if name not in ("absorbed", "of", "row", "contents", "position", "personal")
                }
                for event in events
            ]
            fields = [
                (e.kind, numbers.get(e.decision), e.number, e.arm, e.settles, e.position - num_before) for e in events
            ]
            streams.append((fields, kept))
    assert streams[0] == streams[1]


CHANGES = {
    "selector": (dict(selector=FLOORED), "selector: it was double_sampling"),
    "num_samples": (dict(num_samples=300), "num_samples: it was 200, now it is 300"),
    "draws": (dict(draws=True), "draws: it was False, now it is True"),
    "seed": (dict(seed=1), "seed: it was 0, now it is 1"),
    "burn_in": (dict(burn_in=3), "burn_in: it was 0, now it is 3"),
    "arms": (dict(arms=["control", "low", "top"]), "arms: it was .*'high'.*, now it is .*'top'"),
}


# Another number of draws is compiled anew, and compared as the seed is.
@pytest.mark.parametrize(
    "change", [pytest.param(name, marks=pytest.mark.slow) if name == "num_samples" else name for name in CHANGES]
)
def test_another_experiment_is_refused_with_what_differs(parts, tmp_path, change):
    model, engine = parts
    options, words = CHANGES[change]
    opened = {"arms": ARMS, "engine": engine, "num_samples": 200}
    bandit = Bandit(model, journal=tmp_path / "j.db", **opened)
    step(bandit, 1)
    with pytest.raises(JournalError, match=words):
        Bandit(model, journal=tmp_path / "j.db", **opened | options)
    changed = Bandit(model, journal=tmp_path / "j.db", allow_changed=True, **opened | options)
    assert changed.num_rewards == 1
    with Journal(tmp_path / "j.db") as journal:
        assert journal.events()[-1].kind == "changed"
    with pytest.raises(JournalError, match="another process has changed the experiment"):
        bandit.select()


@pytest.mark.slow
def test_an_engines_settings_and_a_programs_numbers_are_part_of_the_experiment(parts, tmp_path):
    model, _ = parts
    steady = dict(arms=ARMS, num_samples=200, journal=tmp_path / "j.db")
    Bandit(model, engine=engines.conjugate, **steady)
    with pytest.raises(JournalError, match=r"conjugate\(discount=1.0\), .*now it is conjugate\(discount=0.9\)"):
        Bandit(model, engine=functools.partial(engines.conjugate, discount=0.9), **steady)

    def priced(price):
        @jax.jit
        def helper(rate):
            return rate * jnp.asarray(price)

        def program(arm):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([2]))
            numpyro.deterministic("expected_reward", helper(rate)[arm])
            numpyro.sample("reward", dist.Bernoulli(rate[arm]))

        return RewardModel(program, 2)

    prints = [fingerprint(priced(np.array(price))) for price in ([1.0, 2.0], [1.0, 2.0], [1.0, 3.0])]
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.slow
def test_arms_are_added_and_retired_and_the_stream_knows(tmp_path):
    def conversion(arm, *, num_arms):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0).expand([num_arms]))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    model = RewardModel(functools.partial(conversion, num_arms=3), 3)
    options = dict(arms=ARMS, num_samples=200, engine=engines.conjugate, journal=tmp_path / "j.db")
    bandit = Bandit(model, **options)
    for i in range(6):
        step(bandit, i % 2)
    ones, zeros = counts(bandit)
    assert bandit.add_arm("top") == "top"
    np.testing.assert_allclose(counts(bandit), (ones + [1.0], zeros + [1.0]), rtol=1e-9)  # a new arm is at its prior
    other = Bandit(model, **options)
    assert other._experiment.checkpoint_position == bandit._experiment.checkpoint_position > 0  # it learnt no row again
    bandit.retire_arm("control")
    assert other.select().propensities[0] == 0.0  # the other process follows
    assert {other.select().arm for _ in range(30)} <= {"low", "high", "top"}
    assert (other.arms, other.retired) == ([*ARMS, "top"], ["control"])
    other.add_arm("control")
    assert bandit.select().propensities[0] > 0
    assert check_replay(bandit, "default").position is None
    with pytest.raises(ValueError, match="allowed leaves no arm"):
        bandit.retire_arm("low")
        bandit.select(allowed=["low"])


def test_a_program_for_a_fixed_number_of_arms_says_how_to_write_one_that_grows(parts):
    with pytest.raises(ValueError, match=r"let it take num_arms, as in `def model\(arm, \*, num_arms\)"):
        make(parts).add_arm("top")


def test_burn_in_gives_every_arm_its_decisions_first(parts):
    bandit = make(parts, burn_in=4, selector=selectors.greedy())
    arms = [step(bandit, 0) for _ in range(12)]
    assert sorted(arms) == sorted(ARMS * 4)


def test_a_file_is_checked_whole_kept_in_its_mode_and_leaves_nothing_behind(parts, tmp_path):
    model, engine = parts
    path = tmp_path / "b.npz"
    bandit = make(parts)
    waiting = bandit.select()
    for i in range(5):
        step(bandit, i % 2)
    bandit.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.chmod(path, 0o640)
    bandit.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    link = tmp_path / "link.npz"
    link.symlink_to(path)
    bandit.save(link)
    assert link.is_symlink()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b.npz", "link.npz"]
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="not a regular file"):
            bandit.save(place)
    first, second = (Bandit.load(path, model) for _ in range(2))
    assert first.select().arm == second.select().arm == bandit.select().arm
    assert first.select().id != second.select().id
    first.update(waiting.id, 1)
    whole = path.read_bytes()
    for contents in (b"\0" + whole, whole[: len(whole) // 2], b"", b"noise"):
        path.write_bytes(contents)
        with pytest.raises(ValueError, match="is not a saved bandit"):
            Bandit.load(path, model)
    for change in (
        "events SET body = replace(body, 'arm', 'mra')",
        "checkpoints SET contents = x'00'",
        "heads SET digest = ''",
    ):
        path.write_bytes(whole)
        with sqlite3.connect(path) as file:
            file.execute(f"UPDATE ppl_bandit_{change}")
        file.close()
        with pytest.raises(ValueError, match="is not a saved bandit: .* is damaged"):
            Bandit.load(path, model)
    path.write_bytes(whole)
    Path(f"{path}-wal").touch()
    with pytest.raises(ValueError, match="is a journal that a process has open"):
        bandit.save(path)
    with pytest.raises(TypeError, match=r"use save\(path\)"):
        pickle.dumps(bandit)


def test_a_fork_is_told_to_open_its_own(parts, monkeypatch):
    bandit = make(parts)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="before the process was forked: build it in each process"):
        bandit.select()


def test_a_store_keeps_batches_together_and_in_order(tmp_path):
    store = SqlStore(SqliteBackend(tmp_path / "j.db"))
    batch = new_id()
    events = [new_event(DECIDED, {"absorbed": 0}, decision=f"d{i}", batch=batch, number=i, arm=0) for i in range(3)]
    assert [event.position for event in store.append("x", events)] == [1, 2, 3]
    reward = new_event(REWARDED, {"reward": {"reward": 0.1}}, decision="d1", arm=0, settles=True)
    store.append("x", [reward], after=0)
    with pytest.raises(Conflict):
        store.append("x", [reward], after=3)
    assert [event.decision for event in store.pending("x")] == ["d0", "d2"]
    assert store.find("x", ["d1", "nobody"])["d1"][1].body == {"reward": {"reward": 0.1}}
    assert store.experiments() == ["x"]


def test_a_history_edits_rows_by_position():
    history = History(("reward",))
    for position in range(1, 600):
        history = history.extended(
            Rows(
                np.array([position % 3]), {"reward": np.array([float(position)])}, None, positions=np.array([position])
            )
        )

    def other(reward, position):
        return Rows(np.array([position % 3]), {"reward": np.array([reward])}, None)

    edited = history.edited({300: other(-1.0, 300), 2: None})
    arms, rewards, *_ = edited.rows()
    assert len(edited) == arms.size == 598
    assert rewards["reward"][298] == -1.0 and edited.rows().positions[298] == 300
    assert len(history) == 599 and history.rows()[1]["reward"][299] == 300.0
    for position in range(
        599, 0, -1
    ):  # one by one, more than are kept until rows are read; some rows are not loaded yet
        edited = edited.edited({position: other(-float(position), position)})
    later = History(("reward",), 599, lambda: history).edited({7: other(0.5, 2)}, 1)
    assert edited.rows()[1]["reward"].tolist() == (-edited.rows().positions).tolist() and len(edited) == 598
    assert (later.rows()[0][6], later.rows()[1]["reward"][6], later.num_completed) == (2, 0.5, 1)


def test_rewards_of_threads_that_wait_are_recorded_together_and_a_wrong_one_is_refused_alone(
    parts, tmp_path, monkeypatch
):
    bandit, one_by_one = make(parts, journal=tmp_path / "j.db"), make(parts)
    decisions = bandit.select_many(num_decisions=4)
    experiment, appended, append = bandit._experiment, [], bandit._experiment.store.append
    monkeypatch.setattr(
        experiment.store,
        "append",
        lambda name, events, **options: appended.append(events) or append(name, events, **options),
    )
    given = [(decisions[0], 1), (decisions[1], 7), (decisions[2], 0), (decisions[0], 1), (decisions[3], 1)]
    with ThreadPoolExecutor(len(given)) as pool:
        with experiment.fold_lock:  # as if a reward was being learnt
            calls = [pool.submit(bandit.update, *pair) for pair in given]
            while len(experiment.learn._queue) < len(given):
                time.sleep(0.01)
        errors = [call.exception(60) for call in calls]
    assert [isinstance(error, ValueError) for error in errors] == [False, True, False, False, False]
    assert [len(events) for events in appended] == [3]  # one transaction; what was reported twice counts once
    assert bandit.num_rewards == 3
    for event in appended[0]:
        one_by_one.update(arm=ARMS[event.arm], reward=event.body["reward"]["reward"])
    assert counts(bandit) == counts(one_by_one) == counts(make(parts, journal=tmp_path / "j.db"))
    assert bandit.history()["reward"].tolist() == [event.body["reward"]["reward"] for event in appended[0]]
    assert check_replay(bandit, "default").position is None
    bandit.update(decisions[3], 0, correct=True)  # the row is found by its position
    assert counts(bandit) == counts(make(parts, journal=tmp_path / "j.db"))


def test_a_reward_that_is_refused_at_first_and_then_recorded_is_no_error(parts, tmp_path, monkeypatch):
    """Another process records the decision, and a reward, before the group of both rewards is recorded."""
    bandit, other = make(parts, journal=tmp_path / "j.db"), make(parts, journal=tmp_path / "j.db")
    own, theirs, later = bandit.select(), other.select(), "f" * 32
    store = bandit._journal.store
    append = store.append

    def after_another(name, events, **options):
        monkeypatch.undo()
        (event,) = store.newest_decisions(name, 1)
        append(name, [event._replace(decision=later, batch=new_id(), number=event.number + 1)])
        other.update(theirs, 0)
        return append(name, events, **options)

    monkeypatch.setattr(store, "append", after_another)
    rows = [{"decision": id, "reward": 1, "request_id": id} for id in (own.id, later)]
    assert bandit.update_each(rows) == [True, True] and bandit.num_rewards == 3


def test_decisions_do_not_wait_for_a_reward_that_is_being_learnt(parts, monkeypatch):
    bandit, plain = make(parts), make(parts)
    decision, same = bandit.select(), plain.select()
    has_begun, may_end = threading.Event(), threading.Event()
    learn_events = outcome_events.learn_events

    def slow(*arguments):
        has_begun.set()
        assert may_end.wait(60)
        return learn_events(*arguments)

    monkeypatch.setattr(outcome_events, "learn_events", slow)
    with ThreadPoolExecutor(1) as pool:
        reward = pool.submit(bandit.update, decision, 1)
        assert has_begun.wait(60)
        meanwhile = [bandit.select() for _ in range(3)]
        assert not reward.done()
        may_end.set()
        assert reward.result(60) is not None
    # From what was known: as another bandit decides that has not heard of the reward.
    assert [d.best_arm_probs.tolist() for d in meanwhile] == [plain.select().best_arm_probs.tolist() for _ in range(3)]
    plain.update(same, 1)
    np.testing.assert_array_equal(bandit.select().best_arm_probs, plain.select().best_arm_probs)


@pytest.mark.slow
def test_a_partial_outcome_outside_its_support_is_refused_when_it_is_reported(hurdle_parts):
    bandit = make(hurdle_parts)
    decision = bandit.select()
    with pytest.raises(ValueError, match="sale=7 is outside the support of the outcome 'sale' on arm"):
        bandit.update(decision, {"sale": 7})
    bandit.update(decision, {"amount": -1.0})  # possible as long as there may be no sale
    with pytest.raises(ValueError, match="amount=-1 is outside the support"):
        bandit.update(decision, {"sale": 1})
    bandit.update(decision, {"sale": 0})
    assert bandit.num_rewards == 1


EDITS = {
    "another arm": "arm = 99",
    "no JSON": "body = '{'",
    "a body without its fields": "body = '{}'",
    "a reward that is a text": """body = '{"reward": {"reward": "x"}, "context": null}'""",
    "an impossible reward": """body = '{"reward": {"reward": 7}, "context": null}'""",
    "a correction of no row": """body = '{"of": "x"}'""",
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_event_is_one_kind_of_error_with_its_position(parts, tmp_path, edit):
    bandit, other = (make(parts, journal=tmp_path / "j.db") for _ in range(2))
    for i in range(3):
        step(bandit, i % 2)
    with sqlite3.connect(tmp_path / "j.db") as file:
        file.execute(f"UPDATE ppl_bandit_events SET {EDITS[edit]} WHERE position = 5")  # the second reward
    with pytest.raises(DamagedEvent, match="the event at position 5 of the experiment 'default' cannot be read"):
        other.select()
    with pytest.raises(DamagedEvent, match="'default' is damaged at position 5: the event does not follow"):
        make(parts, journal=tmp_path / "j.db")
    assert issubclass(DamagedEvent, JournalError)


def test_late_decisions_are_replayed_from_what_they_had_read(parts, tmp_path):
    first, second = (make(parts, journal=tmp_path / "j.db") for _ in range(2))
    for i in range(4):
        old = second._experiment.catch_up()
        step(first, i % 2)
        step(first, 1)
        second._experiment.decide(old, np.ones(3, bool), None, None)
        second._experiment.decide(old, np.ones(3, bool), None, 2)
    found = check_replay(first, "default")
    assert (found.num_decisions, found.num_checked, found.position) == (20, 20, None)
    with sqlite3.connect(tmp_path / "j.db") as file:
        (position,) = file.execute("SELECT MAX(position) FROM ppl_bandit_events").fetchone()
        file.execute("UPDATE ppl_bandit_events SET arm = (arm + 1) % 3 WHERE position = ?", (position - 1,))
    assert check_replay(first, "default").position == position - 1
