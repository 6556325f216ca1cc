"""The same promises with PostgreSQL: a real server on loopback, stopped and started in the middle."""

import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import Journal, JournalError
from ppl_bandit.journal.events import DECIDED, new_event
from ppl_bandit.journal.stores import store as calls

psycopg = pytest.importorskip("psycopg", reason="psycopg is not installed: pip install ppl_bandit[postgres]")
sys.path.insert(0, str(Path(__file__).parent))
import postgres_server  # noqa: E402

pytestmark = pytest.mark.skipif(
    postgres_server.find_binaries() is None, reason="no PostgreSQL server here: install Debian's postgresql"
)


@pytest.fixture(scope="module")
def server():
    server = postgres_server.Server()
    yield server
    server.remove()


def step(bandit, reward):
    decision = bandit.select()
    bandit.update(decision.id, reward)
    return decision.arm


def test_an_experiment_goes_on_through_a_server_that_is_killed_and_started(server, monkeypatch):
    plain = bernoulli_bandit()
    options = dict(journal=server.url, name="restart")
    bandit = bernoulli_bandit(**options)
    assert [step(bandit, i % 2) for i in range(5)] == [step(plain, i % 2) for i in range(5)]
    server.stop()  # at once, as after a power cut
    threading.Timer(0.5, server.start).start()
    assert step(bandit, 1) == step(plain, 1)  # waits, and is recorded once
    decision, expected = bandit.select(), plain.select()
    server.stop()
    monkeypatch.setattr(bandit._journal.store, "timeout", 1.0)
    monkeypatch.setattr(bandit._journal.store._backend, "timeout", 1.0)
    with pytest.raises(JournalError, match="may or may not have been recorded: call again") as error:
        bandit.update(decision, 1)
    assert "s3cret" not in str(error.value) and "s3cret" not in repr(bandit._journal)
    server.start()
    monkeypatch.undo()
    bandit.update(decision, 1)
    bandit.update(decision, 1)
    plain.update(expected, 1)
    again = bernoulli_bandit(**options)
    assert again.num_rewards == plain.num_rewards == 7
    again.select()
    with Journal(server.url) as journal:
        assert journal.store.find_damage("restart") is None
        assert "s3cret" not in repr(journal)
        assert all("s3cret" not in str(event) for event in journal.events("restart"))
        assert len(journal.store.pending("restart")) == 1


def decided(number):
    return new_event(DECIDED, {"absorbed": 0}, decision=f"d{number}", number=number, arm=0)


def append_from_threads(url, name, num_threads, num_each):
    """Append decisions with one connection per thread; return the errors."""
    errors = []

    def work(thread):
        try:
            with Journal(url) as journal:
                for i in range(num_each):
                    journal.store.append(name, [decided(thread * num_each + i)])
        except Exception as error:  # a thread's failure must fail the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_the_servers_isolation_level_makes_no_append_fail(server, isolation):
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute(f"ALTER ROLE tester SET default_transaction_isolation TO '{isolation}'")
    try:
        assert append_from_threads(server.url, isolation, 6, 10) == []
    finally:
        with psycopg.connect(server.url, autocommit=True) as admin:
            admin.execute("ALTER ROLE tester RESET default_transaction_isolation")
    with Journal(server.url, read_only=True) as journal:
        journal.verify(isolation)
        assert journal.store.last_position(isolation) == 60


def test_a_lock_that_another_session_holds_is_an_error_in_time_and_blocks_no_reader(server):
    with Journal(server.url, timeout=1.5) as journal, psycopg.connect(server.url) as other:
        journal.store.append("locked", [decided(0)])
        other.execute("LOCK TABLE ppl_bandit_events IN SHARE MODE")  # allows reads
        started, errors = time.monotonic(), []

        def write():
            with pytest.raises(JournalError) as error:
                journal.store.append("locked", [decided(1)])
            errors.append((str(error.value), time.monotonic() - started))

        writer = threading.Thread(target=write)
        writer.start()
        time.sleep(0.3)
        assert journal.store.last_position("locked") == 1
        assert time.monotonic() - started < 1.2 and writer.is_alive()  # read while the writer was waiting
        writer.join()
        ((said, seconds),) = errors
        assert "no answer within 1.5 seconds" in said and "nothing was recorded: call again" in said
        assert 1.0 < seconds < 8.0
        other.rollback()
        other.execute("LOCK TABLE ppl_bandit_events")  # allows nothing
        with pytest.raises(JournalError, match="no answer within 1.5 seconds"):
            journal.store.read("locked")
        other.rollback()
        journal.store.append("locked", [decided(1)])  # the connections still work
        assert journal.store.find_damage("locked") is None


@pytest.mark.parametrize("left_by_ctrl_c", [None, 86_000.0, -60.0], ids=["", "a later limit is left", "an earlier one"])
def test_a_server_process_that_is_stopped_is_an_error_in_time(server, left_by_ctrl_c, monkeypatch):
    name = f"stopped {left_by_ctrl_c}"
    with Journal(server.url, timeout=1.0) as journal:
        if left_by_ctrl_c is not None:  # by a call on another journal
            monkeypatch.setattr(calls.CALL, "deadline", time.monotonic() + left_by_ctrl_c)
        journal.store.append(name, [decided(0)])
        ((process,),) = journal.store._query("SELECT pg_backend_pid()")  # of its one connection
        os.kill(process, signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(JournalError, match="may or may not have been recorded: call again"):
                journal.store.append(name, [decided(1)])
            assert time.monotonic() - started < 10.0  # timeout + 2 s, and the machine may be busy
        finally:
            os.kill(process, signal.SIGCONT)
        assert journal.store.last_position(name) == 1
        journal.store.append(name, [decided(1)])
        journal.verify(name)


def test_a_refusal_after_a_commit_whose_answer_was_lost_does_not_say_that_nothing_was_recorded(server, monkeypatch):
    """As by a standby that takes over: the numbers of the decision are not used again."""
    with bernoulli_bandit(journal=server.url, name="lost") as bandit:
        bandit.select()
        backend, attempts = bandit._journal.store._backend, []
        run_once = type(backend)._run_once

        def lose_the_answer(self, connection, work, locks, *num_events):
            if locks:
                attempts.append(connection)
            if len(attempts) == 2:
                raise psycopg.errors.ReadOnlySqlTransaction("cannot execute INSERT in a read-only transaction")
            result = run_once(self, connection, work, locks, *num_events)
            if attempts:
                connection.close()
                raise psycopg.OperationalError("server closed the connection unexpectedly")
            return result

        with monkeypatch.context() as patch:
            patch.setattr(type(backend), "_run_once", lose_the_answer)
            with pytest.raises(JournalError, match="may or may not have been recorded: call again"):
                bandit.select()
        bandit.select()
        made = [event for event in bandit._journal.events("lost") if event.kind == DECIDED]
        assert [event.number for event in made] == [0, 1, 2]


def test_a_journal_of_version_1_gains_heads_and_reading_creates_nothing(server):
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("CREATE DATABASE other")
    url = server.url.removesuffix("postgres") + "other"
    with pytest.raises(JournalError, match="there is no journal in postgresql://127.0.0.1:"):
        Journal(url, read_only=True)
    with Journal(url) as journal:
        for number in range(3):
            journal.store.append("old", [decided(number)])
    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("DROP TABLE ppl_bandit_heads")
        admin.execute("UPDATE ppl_bandit_journal SET version = 1")
    with Journal(url, read_only=True) as journal:
        journal.verify("old")
    with Journal(url) as journal:
        journal.verify("old")
        with psycopg.connect(url, autocommit=True) as admin:
            admin.execute("DELETE FROM ppl_bandit_events WHERE position = 3")
        with pytest.raises(JournalError, match="damaged at position 3: events were removed"):
            journal.verify("old")


@pytest.mark.slow
def test_four_processes_on_postgresql_decide_and_learn_as_one(server):
    from test_journal_faults import run_four_processes

    run_four_processes(server.url, 500)


def test_units_requests_and_erasure_on_postgresql(server):
    options = {"journal": server.url, "name": "units"}
    bandit = bernoulli_bandit(**options)
    first = bandit.select(unit="somebody@example.org", request_id="r")
    bandit.update(first, 1)
    other = bernoulli_bandit(**options)
    assert (
        other.select(unit="somebody@example.org").id
        == other.select(request_id="r", unit="somebody@example.org").id
        == first.id
    )
    many = other.select_many(num_decisions=3, units=["a", "somebody@example.org", "a"])
    assert many[1].id == first.id and many[0].id == many[2].id
    head = bandit._journal.head("units")
    assert bandit.erase("somebody@example.org") == 1
    bandit._journal.verify("units", head=head)
    with psycopg.connect(server.url, autocommit=True) as admin:
        admin.execute("CHECKPOINT")
        for table in ("events", "personal", "keys", "checkpoints", "heads"):
            rows = admin.execute(f"SELECT t::text FROM ppl_bandit_{table} t").fetchall()
            assert "somebody" not in str(rows)
        names = ("personal", "keys", "checkpoints", "personal_of", "keys_of")
        paths = [admin.execute(f"SELECT pg_relation_filepath('ppl_bandit_{name}')").fetchone()[0] for name in names]
    digest = hashlib.sha256(b"somebody@example.org").hexdigest().encode()
    for path in paths:
        found = (Path(server.data) / path).read_bytes()
        assert b"somebody" not in found and digest not in found
    assert other.select(unit="somebody@example.org").id != first.id
    assert other.num_rewards == bandit.num_rewards == 1
    other.close()
    bandit.close()


def test_an_erasure_says_if_the_role_may_not_write_the_tables_anew(server):
    name = "of another owner"
    with (
        bernoulli_bandit(journal=server.url, name=name) as owner,
        psycopg.connect(server.url, autocommit=True) as admin,
    ):
        owner.select(unit="another@example.org")
        admin.execute("CREATE ROLE writer LOGIN PASSWORD 'word'")
        admin.execute("GRANT ALL ON ALL TABLES IN SCHEMA public TO writer")
        url = server.url.replace(f"tester:{postgres_server.PASSWORD}", "writer:word")
        with bernoulli_bandit(journal=url, name=name) as bandit:
            with pytest.raises(
                JournalError, match="the unit is erased, but .* let the owner of the tables run VACUUM FULL"
            ):
                bandit.erase("another@example.org")
        assert owner.erase("another@example.org") == 0  # it is erased, and now the pages are written anew
        admin.execute("CHECKPOINT")
        (path,) = admin.execute("SELECT pg_relation_filepath('ppl_bandit_personal')").fetchone()
        assert b"another@" not in (Path(server.data) / path).read_bytes()


def test_rewriting_the_tables_may_take_longer_than_a_call(server):
    with Journal(server.url, timeout=1.0) as journal, psycopg.connect(server.url) as reader:
        bandit = bernoulli_bandit(journal=journal, name="slow")
        bandit.select(unit="somebody@example.org")
        reader.execute("SELECT * FROM ppl_bandit_personal").fetchall()  # it holds a lock until its transaction ends
        threading.Timer(0.5, reader.rollback).start()
        assert bandit.erase("somebody@example.org") == 1
        reader.execute("SELECT * FROM ppl_bandit_personal").fetchall()
        bandit.select(unit="other")
        with pytest.raises(JournalError, match="the unit is erased, but .*lock timeout.*call erase again"):
            bandit.erase("other")
