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
    "no colon": "postgres//user:hunter2@127.0.0.1:1/db",
    "one slash": "postgresql:/user:hunter2@127.0.0.1:1/db",
    "slashes alone": "//user:hunter2@127.0.0.1:1/db",
    "a slash in it": "postgres//user:x/hunter2@127.0.0.1:1/db",
    "a line end": "user:x\nhunter2@127.0.0.1:1/db",
    "encoded signs": "postgresql%3A//user%3Ahunter2%40127.0.0.1/db",
    "a driver before it": "jdbc:postgresql://user:hunter2@127.0.0.1:1/db",
    "a URL as database": "dbname=postgresql://user:hunter2@127.0.0.1:1/db",
    "keywords as database": "dbname='host=127.0.0.1 port=1 password=hunter2'",
    "a URL as host": "host=user:hunter2@127.0.0.1 port=1 dbname=db",
    "a URL as database of a URL": "postgresql://127.0.0.1:1/postgresql%3A%2F%2Fuser%3Ahunter2%40h%2Fdb",
    "another system's settings": "Server=127.0.0.1;Database=db;Pwd=hunter2",
    "colons for signs": "server: 127.0.0.1, password: hunter2",
    "an environment variable": "PGPASSWORD=hunter2 psql",
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
    for given in (
        "a b?c#d%20.db",
        "x=1.db",
        "sqlite:///100%.db",
        tmp_path / "host=here.db",
        tmp_path / "a:b@c.db",
        "12:30.db",
    ):
        Journal(given).close()
    assert sorted(os.listdir()) == ["100%.db", "12:30.db", "a b?c#d%20.db", "a:b@c.db", "host=here.db", "x=1.db"]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), 10**400, "1", True])
def test_a_timeout_that_is_no_time_is_refused(timeout, tmp_path):
    with pytest.raises(ValueError, match="timeout must be"):
        Journal(tmp_path / "j.db", timeout=timeout)
