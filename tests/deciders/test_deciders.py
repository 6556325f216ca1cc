"""Several deciders and one bandit that learns, on a real PostgreSQL server."""

import asyncio
import contextlib
import math
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_models import bernoulli_bandit, bernoulli_parts

from ppl_bandit import (
    AlreadyRewarded,
    Bandit,
    Decider,
    Design,
    ExperimentStopped,
    Journal,
    JournalError,
    JournalTimeout,
    RequestIdReused,
    Sealer,
    UnknownDecision,
)
from ppl_bandit.commands.cli import main
from ppl_bandit.journal.audit import knowledge_age
from ppl_bandit.journal.checkpoints import save_checkpoint
from ppl_bandit.journal.events import ARMS, DECIDED, REWARDED
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.repeats import decision_events
from ppl_bandit.journal.replay import replay
from ppl_bandit.journal.stores.appending import AppendRequest
from ppl_bandit.journal.stores.staged import keys_lock
from ppl_bandit.journal.stores.store import Key

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install ppl_bandit[postgres]")
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "journal")]
import load_under_kills  # noqa: E402
import postgres_server  # noqa: E402

pytestmark = pytest.mark.skipif(
    postgres_server.find_binaries() is None, reason="no PostgreSQL server here: install Debian's postgresql"
)


PROGRAM = """
import numpyro
import numpyro.distributions as dist

num_arms = 2
context = {"age": 1.0}


def clicks(arm, context):
    with numpyro.plate("arms", 2):
        rate = numpyro.sample("rate", dist.Normal(0.0, 1.0))
    numpyro.sample("reward", dist.Normal(rate[arm] * context["age"], 1.0))
"""


@pytest.fixture(scope="module")
def server():
    server = postgres_server.Server()
    yield server
    server.remove()


def open_decider(url, name, **options):
    model, engine = bernoulli_parts(3)
    return Decider(url, name, model, engine=engine, **({"max_staleness": 60.0} | options))


def change(url, statement, *parameters):
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(statement, parameters).rowcount


def wait_for(condition, seconds=60.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)


def follows(decider, bandit):
    """Return a condition: whether the decider has learnt what is recorded now. A snapshot adds an event of its own."""
    name = bandit._experiment.name
    last = max(event.position for event in bandit._journal.events(name) if event.kind in (REWARDED, ARMS))
    return lambda: decider.health().version >= last


def replayed(bandit):
    experiment = bandit._experiment
    initial = experiment.initial
    last_change = read_header(experiment.store, experiment.name).last_change
    return replay(experiment.store, experiment.name, last_change, initial.task, initial.prior, experiment._build)


def test_decisions_of_two_deciders_are_sealed_rewarded_and_replayed(server):
    name = "two"
    with bernoulli_bandit(journal=server.url, name=name) as bandit, Sealer(bandit, publish_every=0.02) as sealer:
        with open_decider(server.url, name) as first, open_decider(server.url, name) as second:
            made, errors = [], []

            def work(decider):
                try:
                    for _ in range(15):
                        made.extend([decider.select(), *decider.select_many(num_decisions=3)])
                except Exception as error:  # a thread's failure must fail the test
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(decider,)) for decider in (first, second) for _ in range(2)]
            for thread in threads:
                thread.start()
            num_rewarded = 0
            while any(thread.is_alive() for thread in threads):
                for decision in made[num_rewarded : num_rewarded + 5]:
                    bandit.update(decision.id, num_rewarded % 2)  # whether it is sealed or not
                    num_rewarded += 1
            for thread in threads:
                thread.join()
            assert not errors
            rewarded = [event for event in bandit._journal.events(name) if event.kind == REWARDED]
            wait_for(lambda: min(first.health().version, second.health().version) >= rewarded[-1].position)
            assert first.health().is_working and first.health().num_decisions == 120
            assert first.health().stream != second.health().stream
            last = first.select()
            assert last.version == sealer.health().version
        bandit.update(last, 1)
        assert len({decision.id for decision in made}) == len(made) == 240
        assert len(bandit.pending()) == 240 - num_rewarded
        decided = [event for event in bandit._journal.events(name) if event.kind == DECIDED]
        assert {event.decision for event in decided} == {decision.id for decision in [*made, last]}
        assert len({(event.stream, event.number) for event in decided}) == 241
        result = replayed(bandit)
        assert (result.num_decisions, result.num_checked, result.position) == (241, 241, None)
        assert len({event.body["absorbed"] for event in decided}) > 1  # they followed the posterior
        bandit._journal.verify(name)


def test_a_decision_is_recorded_before_it_is_sealed_and_verify_counts_it(server, capsys):
    name = "unsealed"
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        made = decider.select_many(num_decisions=4)
        with Journal(server.url, read_only=True) as journal:
            journal.verify(name)
            assert journal.num_unsealed(name) == 4
            assert [event.kind for event in journal.events(name)] == ["opened"]
        assert main(["journal", server.url, "verify", "--name", name]) == 0
        assert "4 decisions of deciders are recorded beside it and not sealed yet" in capsys.readouterr().out
        bandit.update(made[2].id, 1)  # seals
        assert bandit._journal.num_unsealed(name) == 0
        assert list(bandit.pending()["decision"]) == [made[0].id, made[1].id, made[3].id]


def test_a_retired_arm_reaches_deciders_and_earlier_answers_stand(server, monkeypatch):
    name = "retired"
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        earlier = next(made for made in (decider.select() for _ in range(200)) if made.arm == 1)
        bandit.retire_arm(1)
        now = time.time()
        with monkeypatch.context() as patch:
            patch.setattr("ppl_bandit.journal.repeats.time.time", lambda: now - 60.0)  # its clock is behind
            after = [decider.select()]  # it holds the old version
            while after[-1].arm != 1:
                after.append(decider.select())
        late = after[-1]
        with Sealer(bandit, publish_every=0.02):
            wait_for(follows(decider, bandit))
            assert all(made.arm != 1 for made in decider.select_many(num_decisions=64))
            bandit.pause()
            wait_for(follows(decider, bandit))
            with pytest.raises(ExperimentStopped, match="paused"):
                decider.select()
            bandit.resume()
        bandit.update(earlier, 1)
        bandit.update(late, 0)
        assert bandit.num_rewards == 2
        assert replayed(bandit).position is None
        report = bandit.report()
        assert report.age.num_after_change == len(after) and 0.0 < report.age.latest <= report.age.largest < 60.0
        assert f"{len(after)} came after a change of the arms" in str(report)
        assert report.to_dict()["age"]["num_decisions"] == report.age.num_decisions
        monkeypatch.setattr("ppl_bandit.journal.audit._NEWEST", 8)  # a change is told, however long ago it was
        assert knowledge_age(bandit._experiment.store, name).num_after_change == len(after)


def test_a_posterior_that_is_too_old_is_an_alarm_and_refused_if_asked_for(server):
    name = "stale"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as decider:
            assert decider.health().staleness == math.inf
            assert "no Sealer was seen" in decider.health().reason
            assert decider.select().version == 1  # by default it goes on
        with (
            Sealer(bandit) as sealer,
            open_decider(server.url, name, max_staleness=3.0, refuse_stale=True) as decider,
        ):
            known_at = time.monotonic() - decider.health().staleness
            # Nothing has changed, and it is told so.
            wait_for(lambda: time.monotonic() - decider.health().staleness > known_at + 0.1)
            wait_for(lambda: decider.health().is_working)
            sealer.close()
            wait_for(lambda: not decider.health().is_working)
            with pytest.raises(
                JournalError, match="may be older than max_staleness=3 seconds: the last word of its Sealer"
            ):
                decider.select()
            with Sealer(bandit):
                wait_for(lambda: decider.health().is_working)


def test_units_and_requests_have_one_decision_across_deciders(server):
    name = "units"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as first, open_decider(server.url, name) as second:
            found, errors = {}, []

            def work(made, thread):
                try:
                    order = np.random.default_rng(thread).permutation(12)
                    asked = {i: made.select(unit=f"unit {i}", request_id=f"r{i}").id for i in order}
                    many = made.select_many(num_decisions=12, units=[f"many {i}" for i in order])
                    found[thread] = asked | {f"many {i}": one.id for i, one in zip(order, many, strict=True)}
                except Exception as error:  # a thread's failure must fail the test
                    errors.append(error)

            pairs = [(first, 0), (second, 1), (bandit, 2), (first, 3), (second, 4)]
            threads = [threading.Thread(target=work, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert all(one == found[0] for one in found.values()) and len(set(found[0].values())) == 24
            assert first.select(request_id="r1", unit="unit 1").id == second.select(unit="unit 1").id == found[0][1]
            with pytest.raises(RequestIdReused):
                second.select(request_id="r1")
            places = first.select(size=2, request_id="slate").decisions
            assert [one.id for one in second.select(size=2, request_id="slate").decisions] == [one.id for one in places]
        bandit._experiment.store.seal(name)
        assert len(bandit.pending()) == 26
        assert replayed(bandit).position is None
        bandit._journal.verify(name)


def test_a_known_unit_is_read_from_the_staged_decisions_and_sealed_by_nobody(server):
    name = "staged unit"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as first, open_decider(server.url, name) as second:
            made = first.select(unit="somebody@example.org", request_id="r")
            again = second.select(unit="somebody@example.org")
            assert (again.id, again.arm, again.propensity) == (made.id, made.arm, made.propensity)
            others = [arm for arm in bandit.arms if arm != made.arm]
            moved = second.select(unit="somebody@example.org", allowed=others)
            assert moved.arm in others and first.select(unit="somebody@example.org", allowed=others).id == moved.id
            assert bandit._journal.num_unsealed(name) == 2
            bandit.update(made.id, 1)
            assert bandit._journal.num_unsealed(name) == 0
            first.select(unit="somebody@example.org", allowed=[made.arm])
            head = bandit._journal.head(name)
            assert bandit.erase("somebody@example.org") == 3  # the staged one too
            bandit._journal.verify(name, head)
            for table in ("staged", "events", "personal", "keys", "checkpoints"):
                with psycopg.connect(server.url, autocommit=True) as connection:
                    rows = connection.execute(f"SELECT t::text FROM ppl_bandit_{table} t").fetchall()
                    (path,) = connection.execute(f"SELECT pg_relation_filepath('ppl_bandit_{table}')").fetchone()
                    connection.execute("CHECKPOINT")
                assert "somebody" not in str(rows), table
                assert b"somebody" not in (Path(server.data) / path).read_bytes(), table
            assert first.select(unit="somebody@example.org").id not in (made.id, moved.id)
        assert replayed(bandit).position is None


def test_a_decider_that_ends_between_commit_and_answer_leaves_one_decision(server, monkeypatch):
    name = "between"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as decider:
            store = decider._store
            append = store.append

            def committed(*arguments, **options):
                append(*arguments, **options)
                raise KeyboardInterrupt

            monkeypatch.setattr(store, "append", committed)
            with pytest.raises(KeyboardInterrupt):
                decider.select(unit="u", request_id="r")
        with open_decider(server.url, name) as other:
            made = other.select(unit="u", request_id="r")
        bandit._experiment.store.seal(name)
        assert list(bandit.pending()["decision"]) == [made.id]


def change_next_transaction(monkeypatch, backend, end):
    """Let something happen at the end of the first attempt of a backend's next transaction with locks."""
    run_once = backend._run_once

    def changed(connection, work, locks, *num_events):
        if not locks:
            return run_once(connection, work, locks, *num_events)
        monkeypatch.setattr(backend, "_run_once", run_once)
        return end(connection, lambda work: run_once(connection, work, locks, *num_events), work)

    monkeypatch.setattr(backend, "_run_once", changed)


def commit_and_break(connection, run, work):
    run(work)
    connection.close()
    raise psycopg.OperationalError("the connection was lost")


def test_an_answer_that_is_lost_after_the_commit_doubles_no_decision(server, monkeypatch):
    name = "lost answer"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as decider:
            change_next_transaction(monkeypatch, decider._backend, commit_and_break)
            made = decider.select_many(num_decisions=4, units=["u", None, None, None])

            def seal_too(*arguments):
                with pytest.raises(psycopg.OperationalError):
                    commit_and_break(*arguments)
                bandit._experiment.store.seal(name)
                raise psycopg.OperationalError("the connection was lost")

            change_next_transaction(monkeypatch, decider._backend, seal_too)
            made += decider.select_many(num_decisions=2, request_ids=["r", None])
            experiment, stage = decider._experiment, decider._store._stage
            given = experiment.projection, experiment.stream, range(100, 102), None, np.ones(3, bool)
            request = AppendRequest(name, decision_events(*given, is_batch=True), keys=[Key("k", "v", None, "")])
            assert stage(request) == request.events
            request.result = None  # Ctrl-C ended the thread that did the work of others, behind its commit
            assert stage(request) == request.events
        bandit._experiment.store.seal(name)
        decided = [event for event in bandit._journal.events(name) if event.kind == DECIDED]
        assert [event.decision for event in decided] == [
            *(one.id for one in made),
            *(e.decision for e in request.events),
        ]
        assert len({(event.stream, event.number) for event in decided}) == 8
        assert replayed(bandit).position is None


def test_a_refusal_after_a_lost_answer_does_not_use_the_same_random_numbers_again(server, monkeypatch):
    name = "refused again"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as decider:

            def then_refused(connection, run, work):
                change_next_transaction(monkeypatch, decider._backend, lambda connection, run, work: run(refuse))
                commit_and_break(connection, run, work)

            def refuse(execute):
                execute("SELECT 1 / 0")

            change_next_transaction(monkeypatch, decider._backend, then_refused)
            with pytest.raises(JournalError, match="may or may not have been recorded"):
                decider.select(unit="u")
            decider.select()
        bandit._experiment.store.seal(name)
        decided = [event for event in bandit._journal.events(name) if event.kind == DECIDED]
        assert [event.number for event in decided] == [0, 1]


def test_a_decider_that_is_stopped_within_a_transaction_holds_the_others_up_for_a_second(server, monkeypatch):
    name = "stopped"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as stopped, open_decider(server.url, name) as other:
            earlier, holds, goes_on, made = other.select(), threading.Event(), threading.Event(), []

            def stop(connection, run, work):
                def stopped_work(execute):
                    found = work(execute)
                    holds.set()
                    goes_on.wait(40.0)
                    return found

                return run(stopped_work)

            change_next_transaction(monkeypatch, stopped._backend, stop)
            thread = threading.Thread(target=lambda: made.append(stopped.select(unit="u")), daemon=True)
            thread.start()
            assert holds.wait(30.0)
            begun = time.monotonic()
            assert other.select(unit="v").id != other.select(unit="u").id  # that of the stopped one is not recorded
            bandit.update(earlier.id, 1, request_id="r")  # seals
            assert time.monotonic() - begun < 20.0  # one second, and what a busy machine takes
            goes_on.set()
            thread.join()
            assert made[0].id == other.select(unit="u").id
        assert len(bandit.pending()) == 2 and not bandit._journal.num_unsealed(name)


def test_a_long_backlog_is_sealed_in_parts_and_checked_as_a_whole(server, monkeypatch):
    name = "backlog"
    monkeypatch.setattr("ppl_bandit.journal.stores.staged.MAX_PARAMETERS", 3)
    monkeypatch.setattr("ppl_bandit.journal.stores.staged._MAX_DECISIONS", 10)
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        for size in (1, 2, 3, 4, 9, 9, 30, 1):
            decider.select_many(num_decisions=size)
        newest = "experiment = %s AND number = (SELECT MAX(number) FROM ppl_bandit_staged)"
        for there, instead in (('"snapshot":"', '"snapshot":"0'), ('"absorbed"', '"absorbe"')):
            forge = f"UPDATE ppl_bandit_staged SET events = replace(events, %s, %s) WHERE {newest}"
            assert change(server.url, forge, there, instead, name) == 1
            with pytest.raises(JournalError, match="digest than the event there|cannot be read"):
                bandit._journal.verify(name)
            assert change(server.url, forge, instead, there, name) == 1
        bandit._journal.verify(name)
        store, parts = bandit._experiment.store, []
        while store.num_staged(name):
            parts.append((store.seal(name, 1e-9), store.num_staged(name)))
        assert parts == [(3, 53), (2, 40), (2, 1), (1, 0)]
        assert replayed(bandit).num_checked == 59
        decider.select_many(num_decisions=9)
        decider.select_many(num_decisions=9)
        decider.select()
        assert store.seal(name) == 3


def test_a_design_ends_for_all_deciders(server):
    name = "design"
    with bernoulli_bandit(journal=server.url, name=name, design=Design([60])) as bandit:
        with (
            Sealer(bandit, publish_every=0.02),
            open_decider(server.url, name) as first,
            open_decider(server.url, name) as second,
        ):
            made = 0
            with pytest.raises(ExperimentStopped, match="ends after 60 decisions"):
                for _ in range(60):
                    for decider in (first, second):
                        decider.select()
                        made += 1
                        time.sleep(0.02)
            assert 60 <= made < 90  # what is not published yet may come on top
        assert bandit.look().ending != "" and replayed(bandit).position is None


def test_rewards_may_go_to_a_decider_which_passes_them_on(server, monkeypatch):
    name = "passed on"
    monkeypatch.setattr("ppl_bandit.deciders.decider._SECONDS_TO_LEARN", 0.2)
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        made = decider.select_many(num_decisions=4)
        with pytest.raises(JournalTimeout, match="1 rewards are recorded and not learnt"):
            decider.update(made[0], 1)
        monkeypatch.setattr("ppl_bandit.deciders.decider._SECONDS_TO_LEARN", 60.0)
        forged = "INSERT INTO ppl_bandit_reported (id, experiment, arguments) VALUES ('a', %s, '[')"
        change(server.url, forged, name)  # it is refused alone
        with Sealer(bandit, publish_every=0.02):
            assert bandit.num_rewards == 1  # as soon as a process learns
            assert decider.update(made[0], 1) is False and decider.update(made[1].id, 0, request_id="r") is True
            with pytest.raises(AlreadyRewarded, match="already has the reward"):
                decider.update(made[0], 0)
            rows = [(made[2], 1), ("unknown", 1), (made[3], 0.5), (made[3], float("nan")), (made[3], 0), (3, 1)]
            found = decider.update_each([{"decision": one, "reward": reward} for one, reward in rows])
            assert found[0] is found[4] is True
            assert [type(one) for one in found[1:4]] == [UnknownDecision, ValueError, ValueError]
            assert isinstance(found[5], ValueError) and decider.update_each([]) == []
            with monkeypatch.context() as patch:
                patch.setattr(bandit, "_expire_overdue", lambda: int("what is overdue cannot be settled"))
                assert decider.update(made[3], 0) is False and decider.update(decider.select(), 1) is True
            wait_for(follows(decider, bandit))
        assert bandit.num_rewards == 5
        assert change(server.url, "DELETE FROM ppl_bandit_reported WHERE id = 'a' AND arguments = ''") == 1


def test_an_erasure_removes_the_rewards_that_wait(server, monkeypatch):
    monkeypatch.setattr("ppl_bandit.deciders.decider._SECONDS_TO_LEARN", 0.1)
    name = "erased"
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        for decision in (decider.select(unit="u"), decider.select()):
            with pytest.raises(JournalTimeout):
                decider.update(decision, 1, request_id="somebody@example.org")
        assert bandit.erase("u") == 1
        assert [decision.id in row for row in bandit._experiment.store.reported(name).values()] == [True]


def test_the_lock_of_the_keys_is_kept_longer_for_many_decisions(server, monkeypatch):
    monkeypatch.setattr("ppl_bandit.journal.stores.postgres._MAX_IDLE", 0.05)
    with bernoulli_bandit(journal=server.url, name="keys") as bandit:
        backend, nums = bandit._experiment.store._backend, []
        once = backend._run_once
        monkeypatch.setattr(backend, "_run_once", lambda *given: nums.append(given[3]) or once(*given))
        bandit.select_many(num_decisions=300, units=[f"u{i}" for i in range(300)])
        assert max(nums) == 300

        def work(execute):
            time.sleep(0.3)
            return execute("SELECT 1")

        assert backend.run(work, [keys_lock("keys")], 10_000) == [(1,)]


def test_a_decider_finds_the_program_that_the_journal_names(server, tmp_path):
    path = tmp_path / "clicks.py"
    path.write_text(PROGRAM)
    file = load_model(f"{path}:clicks")
    with Bandit(file.program, 2, context=file.context, journal=server.url, name="found", num_samples=50):
        with Decider(server.url, "found") as decider:
            assert decider.select({"age": 3.0}).id
        path.write_text(PROGRAM.replace("num_arms", "n"))
        with pytest.raises(
            JournalError, match=r"a decider needs the program: pass it, as in Decider\(url, name, program\)"
        ):
            Decider(server.url, "found")


def test_a_service_that_learns_closes_its_sealer_and_says_how_it_is(server, monkeypatch):
    serving = pytest.importorskip(
        "ppl_bandit.serving", reason="serving is not installed: pip install ppl_bandit[serve]"
    )
    name = "served"

    async def serve(app, sealer, decider):
        async with app.router.lifespan_context(app):
            served = app.hot._gate.experiments[name]
            while served.state != "ready":
                await asyncio.sleep(0.05)
            assert served.not_ready() == "" and served.gauges()["is_leading"] == 1.0
            decider.select()
            whole = "UPDATE ppl_bandit_staged SET events = replace(events, %s, %s) WHERE experiment = %s"
            for there, instead, is_ready in (("absorbed", "absorbe", False), ("absorbe", "absorbed", True)):
                change(server.url, whole, there, instead, name)
                try:
                    sealer._round()
                    sealer._reason = ""
                except JournalError as error:  # as in its thread
                    sealer._reason = str(error)
                served.check_journal()
                assert served.not_ready() == ("" if is_ready else "decisions of deciders are not sealed")
                line = f'ppl_bandit_unsealed_decisions{{experiment="{name}"}} {0.0 if is_ready else 1.0}'
                assert line in served.metrics.text().decode()
            decider.select()

    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        monkeypatch.setattr(bandit, "warm_up", lambda batches: None)
        sealer = Sealer(bandit, publish_every=600.0)
        asyncio.run(serve(serving.create_app({name: sealer}, closes=True), sealer, decider))
        assert not sealer.health().is_leading and bandit._is_closed
        with Journal(server.url, read_only=True) as journal:
            assert journal.num_unsealed(name) == 0


def test_a_decider_that_hears_no_notification_looks_for_snapshots(server, monkeypatch):
    name = "deaf"
    listen = contextlib.contextmanager(lambda self, channel: (yield lambda seconds: time.sleep(seconds)))
    monkeypatch.setattr("ppl_bandit.journal.stores.postgres.PostgresBackend.listen", listen)
    with bernoulli_bandit(journal=server.url, name=name) as bandit, Sealer(bandit, publish_every=0.02):
        with open_decider(server.url, name, poll_every=0.1) as decider:
            bandit.update(decider.select(), 1)
            wait_for(follows(decider, bandit))


def test_a_decision_that_is_made_while_a_snapshot_is_loaded_keeps_its_number(server, monkeypatch):
    name, others = "numbers", []
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        own = decider._experiment
        restore = own.restore

        def restore_late(*state):
            others.append(threading.Thread(target=decider.select))
            others[-1].start()
            others[-1].join(0.3)  # it waits for its number
            restore(*state)

        monkeypatch.setattr(own, "restore", restore_late)
        bandit.update(decider.select(), 1)
        with Sealer(bandit, publish_every=0.02):
            wait_for(follows(decider, bandit))
            decider.select()
        others[0].join()
        bandit._catch_up()
        numbers = [event.number for event in bandit._journal.events(name) if event.kind == DECIDED and event.stream]
        assert len(numbers) == len(set(numbers)) == 2 + len(others)


def test_exactly_one_sealer_works_and_another_takes_over(server):
    name = "takeover"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with bernoulli_bandit(journal=server.url, name=name) as standby:
            first, second = Sealer(bandit, publish_every=0.02), Sealer(standby, publish_every=0.02)
            with open_decider(server.url, name) as decider:
                assert second.health().is_working and not second.health().is_leading
                assert all(first.health().is_leading for _ in range(200))  # also while a round asks for the lock
                standby.update(decider.select(), 1)  # a reward may go to either
                wait_for(follows(decider, bandit))
                first.close()
                wait_for(lambda: second.health().is_leading)
                bandit.update(decider.select(), 1)
                wait_for(follows(decider, bandit))
                assert decider.health().is_working
                third = Sealer(bandit, publish_every=0.02)
                assert not third.health().is_leading
                server.stop()  # its connections break, and with them the lock
                server.start()
                wait_for(lambda: second.health().is_leading != third.health().is_leading)
                bandit.update(decider.select(), 1)
                wait_for(follows(decider, bandit))
                wait_for(lambda: decider.health().is_working)
                assert second.health().is_leading != third.health().is_leading
                third.close()
                second.close()
        assert replayed(bandit).position is None and bandit.verify().num_recomputed == 2


def test_older_posteriors_that_another_bandit_stores_keep_no_decider_behind(server, monkeypatch):
    name = "standby"
    with (
        bernoulli_bandit(journal=server.url, name=name) as standby,
        bernoulli_bandit(journal=server.url, name=name) as bandit,
        open_decider(server.url, name, poll_every=0.1) as decider,
    ):
        monkeypatch.setattr(decider._experiment, "refresh", lambda: False)  # it is busy
        time.sleep(0.2)
        bandit.update(bandit.select(), 1)
        with Sealer(bandit, publish_every=0.02):
            for _ in range(2):  # the last two are kept
                save_checkpoint(standby._experiment)
            monkeypatch.undo()
            wait_for(follows(decider, bandit), seconds=20.0)


def test_a_forged_snapshot_is_not_used_and_verify_finds_it(server):
    name = "forged"
    with bernoulli_bandit(journal=server.url, name=name) as bandit, open_decider(server.url, name) as decider:
        bandit.update(bandit.select(), 1)
        with Sealer(bandit):
            pass
        true_version = next(bandit._experiment.store.checkpoints(name))[1]
        change(
            server.url, "UPDATE ppl_bandit_checkpoints SET contents = contents || '\\x00' WHERE experiment = %s", name
        )
        decider._experiment._newest = 0
        before = decider.health().version
        decider._experiment.refresh()
        assert decider.health().version == before
        with pytest.raises(JournalError, match="the checkpoint there is not the one that the event announces"):
            bandit._journal.verify(name)
        change(server.url, "UPDATE ppl_bandit_checkpoints SET contents = %s WHERE experiment = %s", true_version, name)
        bandit._journal.verify(name)
        decider.select()
        bandit._experiment.store.seal(name)
        decider.select()  # from the same snapshot
        forged = 'replace(events, \'"snapshot":"\', \'"snapshot":"0\')'
        statement = f"UPDATE ppl_bandit_staged SET events = {forged} WHERE experiment = %s"
        assert change(server.url, statement, name) == 1
        with pytest.raises(JournalError, match="names a snapshot of position .* with another digest"):
            bandit._journal.verify(name)
        bandit._experiment.store.seal(name)  # the answer was given, so it is kept
        with pytest.raises(JournalError, match="names a snapshot of position .* with another digest"):
            bandit._journal.verify(name)


def test_a_staged_decision_with_another_arm_is_found_by_replay(server):
    name = "other arm"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as decider:
            decider.select()
        forged = "replace(events, '\"num_candidates\":', '\"num_candidates\":9')"
        statement = f"UPDATE ppl_bandit_staged SET events = {forged} "
        assert change(server.url, statement + "WHERE experiment = %s", name) == 1
        bandit._experiment.store.seal(name)
        assert replayed(bandit).position == 2


def test_a_staged_row_that_cannot_be_read_is_named(server):
    name = "damaged"
    with bernoulli_bandit(journal=server.url, name=name) as bandit:
        with open_decider(server.url, name) as decider:
            decider.select()
        change(server.url, "UPDATE ppl_bandit_staged SET events = '{}' WHERE experiment = %s", name)
        for action in (lambda: bandit._journal.verify(name), lambda: Sealer(bandit)):
            with pytest.raises(JournalError, match="the staged call '.*' of the experiment 'damaged' cannot be read"):
                action()
        change(server.url, "DELETE FROM ppl_bandit_staged WHERE experiment = %s", name)


def test_decisions_survive_a_server_that_is_killed_and_are_recorded_once(server):
    name = "restart"
    with bernoulli_bandit(journal=server.url, name=name) as bandit, Sealer(bandit, publish_every=0.02):
        with open_decider(server.url, name, poll_every=0.1) as decider:
            made = [decider.select()]
            server.stop()  # at once, as after a power cut
            threading.Timer(0.5, server.start).start()
            units = ["u", "v", None, None]
            made += decider.select_many(num_decisions=4, units=units, request_ids=[None, "r", "s", None])  # waits
            made[2:4] = [decider.select(unit="v", request_id="r"), decider.select(request_id="s")]  # the same
            made += [decider.select() for _ in range(5)]
            bandit.update(made[1], 1)
            wait_for(lambda: decider.health().version >= 3)  # it follows again
        wait_for(lambda: bandit._journal.num_unsealed(name) == 0)
        decided = [event.decision for event in bandit._journal.events(name) if event.kind == DECIDED]
        assert sorted(decided) == sorted(decision.id for decision in made)
        bandit._journal.verify(name)


def test_a_decision_that_another_process_seals_meanwhile_gets_its_reward(server, monkeypatch):
    with bernoulli_bandit(journal=server.url, name="meanwhile") as bandit:
        with open_decider(server.url, "meanwhile") as decider:
            decision = decider.select()
        store = bandit._experiment.store
        seal = store.seal
        monkeypatch.setattr(
            store, "seal", lambda experiment: seal(experiment) and 0
        )  # nothing is left for this process
        bandit.update(decision.id, 1)
        assert bandit.num_rewards == 1


def test_an_added_arm_reaches_open_deciders_and_earlier_decisions_stand(server):
    name = "added"

    def conversion(arm, num_arms):
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    with Bandit(conversion, arms=["a", "b"], journal=server.url, name=name, num_samples=100) as bandit:
        with Decider(server.url, name, conversion, max_staleness=60.0) as decider, Sealer(bandit, publish_every=0.02):
            earlier = decider.select(unit="u")
            bandit.update(earlier.id, 0)
            bandit.add_arm("c")
            wait_for(follows(decider, bandit), seconds=120.0)  # both build the program with three arms
            assert decider.arms == ["a", "b", "c"]
            made = [earlier, *(decider.select(allowed=["c"]) for _ in range(3)), *decider.select_many(num_decisions=40)]
            assert "c" in {one.arm for one in made} and decider.select(unit="u").id == earlier.id
            bandit.update_each([{"decision": one.id, "reward": 1} for one in made[1:]])
        assert bandit.num_rewards == len(made)
        assert replayed(bandit).position is None and bandit.verify().num_recomputed == 2


def test_clocks_that_jump_change_neither_ages_nor_times(server, monkeypatch):
    name = "clock"
    with bernoulli_bandit(journal=server.url, name=name, reward_window=3600.0, default_reward=0) as bandit:
        with (
            Sealer(bandit, publish_every=0.02) as sealer,
            open_decider(server.url, name, max_staleness=3.0, refuse_stale=True, poll_every=0.1) as decider,
        ):
            wait_for(lambda: decider.health().is_working)
            now = time.time()
            for jump in (1e6, -1e6):
                with monkeypatch.context() as patch:
                    patch.setattr(
                        "ppl_bandit.journal.repeats.time.time", lambda jump=jump: now + jump
                    )  # of the decider
                    decider.select()
            wait_for(lambda: not bandit._journal.num_unsealed(name))
            bandit.update(decider.select().id, 1)
            assert len(bandit.pending()) == 2  # the times are the server's, so none of them is overdue
            sealer.close()
            for jump in (
                3600.0,
                -7200.0,
            ):  # the server's own clock: its last word seems to come from the future, or the past
                change(server.url, "UPDATE ppl_bandit_sealers SET time = time + %s WHERE experiment = %s", jump, name)
                wait_for(lambda: not decider.health().is_working)
            with Sealer(bandit):
                wait_for(lambda: decider.health().is_working)
        assert replayed(bandit).position is None


@pytest.mark.slow
def test_nothing_is_lost_doubled_or_miscredited_under_kills_and_restarts(server, tmp_path):
    """The same for half an hour: python tests/deciders/load_under_kills.py --seconds 1800 --kills 20 --restarts 4."""
    killed = load_under_kills.play(server, tmp_path, seconds=90.0, kills=4, restarts=1, rate=100.0)
    assert killed["learner"] == killed["decider"] == 2
    found = load_under_kills.check(server, tmp_path)
    assert found["rewards"] > 100 and found["replayed"] == found["decisions"]


def test_wrong_arguments_are_refused_with_the_remedy(server, tmp_path):
    model, engine = bernoulli_parts(2)
    with pytest.raises(JournalError, match="a decider needs a journal in PostgreSQL"):
        Decider(str(tmp_path / "journal.db"), "x", model)
    with pytest.raises(JournalError, match="has no experiment 'nothing'"):
        open_decider(server.url, "nothing")
    with bernoulli_bandit() as in_memory, pytest.raises(JournalError, match="need a journal in PostgreSQL"):
        Sealer(in_memory)
    with bernoulli_bandit(journal=server.url, name="given") as bandit:
        with pytest.raises((JournalError, ValueError), match="arms"):
            Decider(server.url, "given", model, engine=engine)
        with pytest.raises(ValueError, match="publish_every must be at least"):
            Sealer(bandit, publish_every=0)
        decider = open_decider(server.url, "given")
        decider.close()
        with pytest.raises(JournalError, match="closed"):
            decider.select()
        assert not decider.health().is_working


def test_the_blocks_of_the_docs_page_run(server):
    page = (Path(__file__).parents[2] / "docs" / "deciders.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    namespace = {"__name__": "__main__"}
    for block in blocks:
        exec(block.replace("postgresql://user@host/database", server.url), namespace)
    assert len(blocks) == 2 and namespace["bandit"].num_rewards == 1
    namespace["sealer"].close()
    namespace["bandit"].close()
