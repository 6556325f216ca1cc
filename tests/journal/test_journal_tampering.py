"""Edited, shortened, deleted and replaced journals are noticed; files are private and reading writes nothing."""

import os
import shutil
import sqlite3

import pytest
from shared_models import bernoulli_bandit

from ppl_bandit import Journal, JournalError
from ppl_bandit.commands.cli import main
from ppl_bandit.journal.events import DECIDED, new_event
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import DamagedEvent


def record(store, num, first=0):
    for i in range(first, first + num):
        store.append("x", [new_event(DECIDED, {"absorbed": 0}, decision=str(i), number=i, arm=0)])


@pytest.fixture
def path(tmp_path):
    store = SqlStore(SqliteBackend(tmp_path / "j.db"))
    record(store, 5)
    store.close()
    return tmp_path / "j.db"


def edit(path, *statements):
    with sqlite3.connect(path) as file:
        for statement in statements:
            file.execute(statement)
    file.close()


REMOVED = "DELETE FROM ppl_bandit_events WHERE position > 3"
TAMPERED = {
    "an edited event": (["UPDATE ppl_bandit_events SET arm = 1 WHERE position = 2"], 2),
    "a removed event": (["DELETE FROM ppl_bandit_events WHERE position = 2"], 2),
    "removed last events": ([REMOVED], 4),
    "all events removed": (["DELETE FROM ppl_bandit_events"], 1),
    "a removed head": (["DELETE FROM ppl_bandit_heads"], 5),
    "a head with another digest": (["UPDATE ppl_bandit_heads SET digest = 'x'"], 5),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_a_tampered_stream_is_noticed_with_its_position(path, kind):
    statements, position = TAMPERED[kind]
    edit(path, *statements)
    store = SqlStore(SqliteBackend(path))
    assert store.find_damage("x").position == position
    store.close()


def test_nothing_is_appended_after_the_last_events_were_removed(path):
    store = SqlStore(SqliteBackend(path))
    edit(path, REMOVED)
    with pytest.raises(JournalError, match="had 5 events, and its stream ends at position 3"):
        record(store, 1, first=3)
    store.close()
    assert SqlStore(SqliteBackend(path)).head("x")[0] == 3


def test_a_head_that_was_kept_shows_what_the_journal_alone_cannot(path, capsys):
    assert main(["journal", str(path), "head"]) == 0
    head = capsys.readouterr().out.strip()
    assert main(["journal", str(path), "verify", "--head", head]) == 0
    store = SqlStore(SqliteBackend(path))
    record(store, 2, first=5)  # a longer stream still agrees
    assert main(["journal", str(path), "verify", "--head", head]) == 0
    store.close()
    # Who may write everything removes events and makes the head fit.
    digest = "(SELECT digest FROM ppl_bandit_events WHERE position = 3)"
    edit(path, REMOVED, f"UPDATE ppl_bandit_heads SET position = 3, digest = {digest}")
    assert main(["journal", str(path), "verify"]) == 0
    capsys.readouterr()
    assert main(["journal", str(path), "verify", "--head", head]) == 1
    assert "damaged at position 4: events were removed: the given head is at position 5" in capsys.readouterr().out
    assert main(["journal", str(path), "verify", "--head", "5:xyz"]) == 2


def test_a_journal_without_heads_is_opened_and_gains_them(path):
    edit(path, "DROP TABLE ppl_bandit_heads", "PRAGMA user_version=1")
    with Journal(path, read_only=True) as journal:
        journal.verify("x")
    edit(path, "INSERT INTO ppl_bandit_checkpoints VALUES ('x', 1, 'y')")  # still version 1
    with Journal(path) as journal:
        journal.verify("x")
        record(journal.store, 1, first=5)
    edit(path, "DELETE FROM ppl_bandit_events WHERE position = 6")
    with Journal(path) as journal, pytest.raises(JournalError, match="events were removed"):
        journal.verify("x")


def test_a_bandit_does_not_open_a_shortened_journal(tmp_path):
    bandit = bernoulli_bandit(journal=tmp_path / "j.db")
    bandit.update(bandit.select(), 1)
    edit(tmp_path / "j.db", "DELETE FROM ppl_bandit_events WHERE kind = 'rewarded'")
    with pytest.raises(DamagedEvent, match="damaged at position 3: events were removed"):
        bernoulli_bandit(journal=tmp_path / "j.db")
    with pytest.raises(JournalError, match="events were removed"):
        bandit.select()


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_deleted_or_replaced_acknowledges_nothing(path, tmp_path, is_replaced, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = SqlStore(SqliteBackend("j.db"))
    shutil.copy("j.db", "copy.db")
    monkeypatch.chdir("/")  # a relative path stays the same file
    record(store, 1, first=5)
    os.remove(path)
    if is_replaced:
        os.rename(tmp_path / "copy.db", path)
    for use in (lambda: record(store, 1, first=6), lambda: store.read("x")):
        with pytest.raises(JournalError, match="was deleted or replaced while it was open"):
            use()


def test_a_new_journal_is_readable_by_its_owner_only(tmp_path):
    mask = os.umask(0)
    try:
        store = SqlStore(SqliteBackend(tmp_path / "j.db"))
        record(store, 1)
    finally:
        os.umask(mask)
    names = sorted(os.listdir(tmp_path))
    assert names == ["j.db", "j.db-shm", "j.db-wal"]
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in names] == [0o600] * 3


def test_reading_writes_nothing(path, tmp_path, capsys):
    before = path.read_bytes(), path.stat().st_mtime_ns
    for action in ("head", "verify", "pending"):
        main(["journal", str(path), action])
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before and os.listdir(tmp_path) == ["j.db"]
    with Journal(path, read_only=True) as reader:
        with pytest.raises(JournalError, match="opened to read only"):
            record(reader.store, 1, first=5)
        with Journal(path) as writer:  # while a reader has the closed file open
            record(writer.store, 1, first=5)
            assert reader.store.last_position("x") == 6
            record(writer.store, 1, first=6)
            assert reader.store.last_position("x") == 7
        assert reader.store.last_position("x") == 7
    with pytest.raises(JournalError, match="there is no journal"):
        Journal(tmp_path / "other.db", read_only=True)
