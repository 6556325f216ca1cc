"""The same promises with PostgreSQL: a real server on loopback, stopped and started in the middle."""

import sys
import threading
from pathlib import Path

import pytest

from ppl_bandit import Bandit, Journal, JournalError
from ppl_bandit.journal.stores import postgres

pytest.importorskip("psycopg", reason="psycopg is not installed: pip install ppl_bandit[postgres]")
sys.path.insert(0, str(Path(__file__).parent))
import journal_children  # noqa: E402
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
    plain = Bandit(journal_children.conversion, 3, num_samples=100)
    options = dict(num_samples=100, journal=server.url, name="restart")
    bandit = Bandit(plain.model, **options)
    assert [step(bandit, i % 2) for i in range(5)] == [step(plain, i % 2) for i in range(5)]
    server.stop()  # at once, as after a power cut
    threading.Timer(0.5, server.start).start()
    assert step(bandit, 1) == step(plain, 1)  # waits, and is recorded once
    decision, expected = bandit.select(), plain.select()
    server.stop()
    monkeypatch.setattr(postgres, "_RETRY_DELAYS", (0.1,))
    with pytest.raises(JournalError, match="may or may not have been recorded: call again") as error:
        bandit.update(decision, 1)
    assert "s3cret" not in str(error.value) and "s3cret" not in repr(bandit._journal)
    server.start()
    monkeypatch.undo()
    bandit.update(decision, 1)
    bandit.update(decision, 1)
    plain.update(expected, 1)
    again = Bandit(plain.model, **options)
    assert again.num_rewards == plain.num_rewards == 7
    assert again.select().arm == plain.select().arm
    with Journal(server.url) as journal:
        assert journal.store.first_broken("restart") is None
        assert "s3cret" not in repr(journal)
        assert all("s3cret" not in str(event) for event in journal.events("restart"))
        assert len(journal.store.pending("restart")) == 1


@pytest.mark.slow
def test_four_processes_on_postgresql_decide_and_learn_as_one(server):
    from test_journal_faults import run_four_processes

    run_four_processes(server.url, 500)
