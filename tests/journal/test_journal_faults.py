"""Journals under faults: processes that are really killed, full disks, files that are no journals."""

import contextlib
import gc
import json
import multiprocessing
import os
import random
import resource
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import Bandit, Journal, JournalError
from ppl_bandit.journal.events import DECIDED, REWARDED, new_event
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.replay import replay
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend

sys.path.insert(0, str(Path(__file__).parent))
import journal_children  # noqa: E402


def check_acknowledged(store, name, acknowledged):
    """Check that every acknowledged event is there, none twice, and that the chain holds."""
    events = store.read(name)
    found = [(event.kind, event.decision) for event in events if event.kind in (DECIDED, REWARDED)]
    assert len(set(found)) == len(found)
    assert acknowledged <= set(found)
    assert [event.position for event in events] == list(range(1, len(events) + 1))
    assert store.find_damage(name) is None
    return len(found)


def kill_recorders(path, num_kills, seed):
    """Kill processes that record, at random moments; return how many events they had been promised."""
    rng, acknowledged = random.Random(seed), set()
    for _ in range(num_kills):
        child = subprocess.Popen(
            [sys.executable, journal_children.__file__, str(path)], stdout=subprocess.PIPE, text=True
        )
        child.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.1))
        child.kill()
        lines = child.communicate()[0].splitlines(keepends=True)
        acknowledged |= {tuple(line.split()) for line in lines if line.endswith("\n")}
        store = SqlStore(SqliteBackend(path))
        check_acknowledged(store, "x", acknowledged)
        store.close()
    return len(acknowledged)


def test_killed_recorders_lose_nothing_that_was_acknowledged(tmp_path):
    assert kill_recorders(tmp_path / "j.db", 12, 0) > 12


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(10))
def test_five_hundred_killed_recorders_lose_nothing(tmp_path, chunk):
    assert kill_recorders(tmp_path / "j.db", 50, 1 + chunk) > 50


@pytest.mark.slow
def test_processes_that_ask_the_same_get_one_decision_also_if_one_is_killed(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ppl_bandit", "journal_children"])
    url, num_requests = str(tmp_path / "j.db"), 60
    journal_children.open_bandit(url).close()
    barrier, children, pipes = context.Barrier(3), [], []
    for own in range(3):
        ours, theirs = context.Pipe()
        children.append(
            context.Process(target=journal_children.ask_by_request, args=(url, own, num_requests, theirs, barrier))
        )
        children[-1].start()
        theirs.close()
        pipes.append(ours)
    pipes[2].recv()
    children[2].kill()  # which has asked for more than it told
    one, two = ({i: answer for i, *answer in (pipe.recv() for _ in range(num_requests))} for pipe in pipes[:2])
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, -signal.SIGKILL]
    assert one == two
    with journal_children.open_bandit(url) as bandit:
        assert sorted(bandit.pending()["decision"]) == sorted(name for name, _ in one.values())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(50))
def test_killed_bandits_lose_nothing_and_every_decision_can_be_derived_again(tmp_path, chunk):
    """50 x 10 = 500 kills of a process that decides and learns."""
    context = multiprocessing.get_context("forkserver")  # forks before jax starts its threads
    context.set_forkserver_preload(["ppl_bandit", "journal_children"])
    url, rng, acknowledged = str(tmp_path / "j.db"), random.Random(chunk), set()
    bandit = journal_children.open_bandit(None)
    for _ in range(10):
        ours, theirs = context.Pipe()
        child = context.Process(target=journal_children.decide_forever, args=(url, theirs))
        child.start()
        theirs.close()
        assert ours.poll(120), "the child did not come up"
        ours.recv()
        time.sleep(rng.uniform(0.0, 0.3))
        child.kill()
        child.join()
        try:
            while True:
                kind, name, _ = ours.recv()
                acknowledged.add((kind, name))
        except (EOFError, OSError):
            pass
        with Journal(url) as journal:
            check_acknowledged(journal.store, "default", acknowledged)
            header = read_header(journal.store, "default")
            task, prior = bandit._build(list(header.identity["arms"]))
            found = replay(journal.store, "default", 0, task, prior, bandit._build)
        assert found.position is None, found.difference
    assert len(acknowledged) > 10
    gc.collect()  # frees compiled programs, of which a process can hold some 500 (memory maps, 65,530 on Linux)


def fill_the_disk(path):
    """Decide until the system lets the file grow no more; print how many were acknowledged and what was said."""
    bandit = journal_children.open_bandit(path)
    bandit.update(bandit.select(), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path + "-wal") + 40_000, resource.RLIM_INFINITY))
    made = []
    try:
        while True:
            made.append(bandit.select().id)
    except JournalError as error:
        said = str(error)
    assert bandit._experiment.num_decisions == len(made) + 1  # the next decision is the one that failed
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    after = [bandit.select().arm for _ in range(3)]  # goes on
    print(json.dumps({"made": made, "said": said, "after": after}))


@pytest.mark.slow
def test_a_full_disk_is_a_clear_error_loses_nothing_and_goes_on(tmp_path):
    path = str(tmp_path / "j.db")
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_journal_faults as t; "
    child = subprocess.run(
        [sys.executable, "-c", script + f"t.fill_the_disk({path!r})"], capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr[-2000:]
    told = json.loads(child.stdout.splitlines()[-1])
    assert "nothing of this call was recorded" in told["said"] and path in told["said"]
    with Journal(path) as journal:
        decided = [event.decision for event in journal.events() if event.kind == DECIDED]
    assert set(told["made"]) <= set(decided)
    assert len(decided) == len(told["made"]) + 1 + 3


def test_a_call_on_a_locked_file_ends_within_its_timeout(tmp_path):
    """The limit is for the whole call, however many statements of it wait for the lock."""
    with Journal(tmp_path / "j.db", timeout=1.0) as journal:
        bandit = bernoulli_bandit(journal=journal)
        decision = bandit.select()
        with contextlib.closing(sqlite3.connect(tmp_path / "j.db", isolation_level=None)) as lock:
            lock.execute("BEGIN IMMEDIATE")
            for call in (bandit.select, lambda: bandit.update(decision, 1), lambda: bandit.expire(0.0)):
                started = time.monotonic()
                with pytest.raises(JournalError):
                    call()
                assert time.monotonic() - started < 3.0  # 1 s, and the machine may be busy
        assert bandit.update(decision, 1) is not False and bandit.num_rewards == 1


def test_what_is_not_a_journal_is_refused_and_left_as_it_was(tmp_path):
    noise, foreign, newer, cut, alone = (tmp_path / name for name in ("noise", "foreign", "newer", "cut", "alone"))
    noise.write_bytes(b"not a database at all, but longer than a header is" * 100)
    with sqlite3.connect(foreign) as other:
        other.execute("CREATE TABLE things (x)")
    Journal(newer).close()
    with sqlite3.connect(newer) as later:
        later.execute("PRAGMA user_version=99")
    store = SqlStore(SqliteBackend(cut))
    for i in range(200):
        store.append("x", [new_event(DECIDED, {"filler": "y" * 500}, decision=str(i), number=i, arm=0)])
    store.close()
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2 + 100])
    running = SqlStore(SqliteBackend(tmp_path / "running"))
    running.append("x", [new_event(DECIDED, {}, decision="0", number=0, arm=0)])
    alone.write_bytes((tmp_path / "running").read_bytes())
    cases = {
        noise: "it is not a journal",
        foreign: "SQLite file of another application",
        newer: "version 99, this release reads up to 5: upgrade",
        cut: "damaged",
        alone: "copied without alone-wal, which has its records: copy both",
        tmp_path: "not a regular file",
        tmp_path / "nowhere" / "j.db": "does not exist: create it",
    }
    for path, words in cases.items():
        before = path.read_bytes() if path.is_file() else None
        with pytest.raises(JournalError, match=words):
            Journal(path)
        assert before is None or path.read_bytes() == before
    (tmp_path / "alone-wal").write_bytes((tmp_path / "running-wal").read_bytes())
    assert len(list(SqlStore(SqliteBackend(alone)).read("x"))) == 1
    running.close()
    with pytest.raises(ValueError, match="scheme 'mysql'"):
        Journal("mysql://somewhere/db")
    with pytest.raises(JournalError, match="there is no journal"):
        Journal(tmp_path / "j.db", must_exist=True)


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    Journal(folder / "j.db").close()
    os.chmod(folder / "j.db", 0o444)
    os.chmod(folder, 0o555)
    for parent in folder.parents:
        if os.geteuid() == 0 and parent != Path("/") and not parent.stat().st_mode & 0o005:
            os.chmod(parent, parent.stat().st_mode | 0o555)
    here, path = str(Path(__file__).parent), str(folder / "j.db")
    script = f"import sys; sys.path.insert(0, {here!r}); import journal_children as c; "
    script += f"c.record_forever({path!r}, is_nobody=True)"
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    os.chmod(folder, 0o755)
    assert "JournalError" in child.stderr, child.stderr
    assert "writable" in child.stderr.splitlines()[-1]


@pytest.mark.slow
def test_four_processes_decide_and_learn_as_one(tmp_path):
    run_four_processes(str(tmp_path / "j.db"), 500)


def run_four_processes(url, num_each):
    """Let four processes decide, report each reward to a random one of them, and check that nothing is lost or doubled."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ppl_bandit", "journal_children"])
    queues, results, is_done = [context.Queue() for _ in range(4)], context.Queue(), context.Event()
    arguments = (queues, num_each, results, is_done)
    children = [
        context.Process(target=journal_children.decide_with_others, args=(url, own, *arguments)) for own in range(4)
    ]
    for child in children:
        child.start()
    learnt, posteriors = set(), []
    while len(learnt) < 4 * num_each:
        kind, _, name = results.get(timeout=300)
        assert kind == "learnt" and name not in learnt
        learnt.add(name)
    is_done.set()
    while len(posteriors) < 4:
        posteriors.append(results.get(timeout=120)[2])
    for child in children:
        child.join(60)
    assert all(posterior == posteriors[0] for posterior in posteriors)
    with Journal(url) as journal:
        check_acknowledged(journal.store, "default", {("rewarded", name) for name in learnt})
        events = journal.events()
    assert sum(event.kind == DECIDED for event in events) == 4 * num_each
    assert sum(event.kind == REWARDED for event in events) == 4 * num_each
    assert len({event.stream for event in events if event.kind == DECIDED}) > 1  # they did decide at the same time
    one = Bandit(journal_children.conversion, 3, num_samples=100)
    for event in events:
        if event.kind == REWARDED:
            one.update(arm=event.arm, reward=event.body["reward"]["reward"])
    found = one.posterior_parameters()["rate"]
    assert (found["concentration1"].tolist(), found["concentration0"].tolist()) == posteriors[0]
    again = journal_children.open_bandit(url)
    header = read_header(again._experiment.store, "default")
    task, prior = again._build(list(header.identity["arms"]))
    replayed = replay(again._experiment.store, "default", 0, task, prior, again._build)
    assert (replayed.num_checked, replayed.position) == (4 * num_each, None)
