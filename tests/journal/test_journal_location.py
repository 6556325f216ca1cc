"""Where a journal is: paths, URLs and connection strings are understood or refused, and no password is shown."""

import os
import traceback

import pytest

from ppl_bandit import Journal, JournalError
from ppl_bandit.commands.cli import main

PASSWORDS = {
    "plain": "postgresql://user:hunter2@127.0.0.1:1/db",
    "hash": "postgresql://user:x#hunter2@127.0.0.1:1/db",
    "question mark": "postgresql://user:x?hunter2@127.0.0.1:1/db",
    "at": "postgresql://user:x@hunter2@127.0.0.1:1/db",
    "slash": "postgresql://user:x/hunter2@127.0.0.1:1/db",
    "no host": "postgresql://user:hunter2",
    "bad escape": "postgresql://user:hunter2%zz@127.0.0.1:1/db",
    "query": "postgresql://user@127.0.0.1:1/db?password=hunter2",
    "other secret": "postgresql://user@127.0.0.1:1/db?sslpassword=hunter2",
    "encoded key": "postgresql://user@127.0.0.1:1/db?%70assword=hunter2",
    "capital key": "postgresql://user@127.0.0.1:1/db?PASSWORD=hunter2",
    "capital scheme": "POSTGRESQL://user:hunter2@127.0.0.1:1/db",
    "no slashes": "postgresql:user:hunter2@127.0.0.1:1/db",
    "no scheme": "user:hunter2@127.0.0.1:1/db",
    "keywords": "host=127.0.0.1 port=1 dbname=db password=hunter2",
    "capital keywords": "HOST=127.0.0.1 PORT=1 PASSWORD=hunter2",
    "quoted keywords": "host=127.0.0.1 port=1 password='hunter2 '",
    "another driver": "postgresql+psycopg://user:hunter2@127.0.0.1:1/db",
    "another database": "mysql://user:hunter2@127.0.0.1:1/db",
}


@pytest.mark.parametrize("given", PASSWORDS)
def test_no_password_is_shown_and_no_file_made(given, tmp_path, monkeypatch, capsys):
    pytest.importorskip("psycopg")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((JournalError, ValueError)) as error:
        Journal(PASSWORDS[given], timeout=2)
    assert "hunter2" not in "".join(traceback.format_exception(error.value))
    assert main(["journal", PASSWORDS[given], "status"]) == 2
    said = capsys.readouterr()
    assert "hunter2" not in said.out + said.err and said.err
    assert not os.listdir(tmp_path)


def test_an_error_shows_host_port_and_database(capsys):
    pytest.importorskip("psycopg")
    for given in ("plain", "hash", "query", "keywords", "encoded key", "capital scheme"):
        with pytest.raises(JournalError, match="^postgresql://127.0.0.1:1/db cannot be opened: "):
            Journal(PASSWORDS[given])


@pytest.mark.parametrize(
    "given", ["sqlite://", "sqlite:///", ":memory:", "sqlite:///:memory:", "sqlite://here/j.db", "sqlite:j.db"]
    + ["sqlite:///j.db?mode=ro", "file:j.db", "file:///j.db", "FILE:j.db?mode=memory", "", " ", "\t\n"]
    + ["a\0b.db", "\ud800.db", b"j.db", None, 5, ["j.db"]],
)  # fmt: skip
def test_what_names_no_file_is_refused_and_no_file_made(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="url"):
        Journal(given)
    assert not os.listdir(tmp_path)


def test_paths_with_unusual_characters_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for given in ("a b?c#d%20.db", "x=1.db", "sqlite:///100%.db", tmp_path / "host=here.db"):
        Journal(given).close()
    assert sorted(os.listdir()) == ["100%.db", "a b?c#d%20.db", "host=here.db", "x=1.db"]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 10**400, "1", True])
def test_a_timeout_that_is_no_time_is_refused(timeout, tmp_path):
    with pytest.raises(ValueError, match="timeout must be"):
        Journal(tmp_path / "j.db", timeout=timeout)
