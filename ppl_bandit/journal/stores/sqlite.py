"""SQLite backend: one file, used by several processes of one machine.

Write-ahead logging with `synchronous=FULL`: a committed transaction is on the disk, unless the disk reports a flush that it did
not do. Readers do not wait for writers, so there is one connection for reading and one for writing.
"""

import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ppl_bandit.journal.stores.sql import TABLES, VERSION, Execute, Result
from ppl_bandit.journal.stores.store import JournalError

__all__ = ["SqliteBackend"]

_APPLICATION = 0x50504C42  # "PPLB", in the file's header
_LOCK_TIMEOUT = 60.0  # seconds to wait while another process writes
_MAX_CHECKED_BYTES = 1 << 28  # a file up to this size is checked completely when it is opened


class SqliteBackend:
    """A SQLite file; see `sql.Backend`."""

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self.label = str(path)
        self._locks = {is_writer: threading.RLock() for is_writer in (False, True)}
        if self._path.exists() and not stat.S_ISREG(self._path.stat().st_mode):
            raise JournalError(f"{self._path} is not a regular file: give the path of a journal, or of a new file")
        if not self._path.parent.is_dir():
            raise JournalError(f"the folder {self._path.parent} does not exist: create it, or give another path")
        try:
            self._connections = {True: self._connect()}
            self._prepare(self._connections[True])
            self._connections[False] = self._connect()
        except sqlite3.Error as error:
            raise self._translated(error) from None

    def run(self, work: Callable[[Execute, bool], Result], locks: Sequence[str] = ()) -> Result:
        """Run work in one transaction; with locks, as the only writer."""
        is_writer = bool(locks)
        with self._locks[is_writer]:
            connection = self._connections[is_writer]

            def execute(statement: str, parameters: Sequence[Any] = (), is_many: bool = False) -> list[tuple]:
                run = connection.executemany if is_many else connection.execute
                return run(statement, parameters).fetchall()

            try:
                if not is_writer:
                    return work(execute, False)
                try:
                    if connection.in_transaction:  # Ctrl-C interrupted an earlier call before its rollback
                        connection.execute("ROLLBACK")
                    connection.execute("BEGIN IMMEDIATE")
                    result = work(execute, False)
                    connection.execute("COMMIT")
                    return result
                except BaseException:
                    if connection.in_transaction:
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise self._translated(error) from None

    def close(self) -> None:
        """Close both connections; SQLite then moves the write-ahead log into the file."""
        for is_writer, connection in self._connections.items():
            with self._locks[is_writer]:
                connection.close()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=_LOCK_TIMEOUT, isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Check that the file is a journal, or create the tables in an empty file."""
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        found = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()[0]
        if application != _APPLICATION and (tables or application or found):
            raise JournalError(
                f"{self._path} is a SQLite file of another application: give the path of a journal, or of a new file"
            )
        if found > VERSION:
            raise JournalError(
                f"{self._path} is a journal of version {found}, this release reads up to {VERSION}: upgrade ppl_bandit"
            )
        if self._path.stat().st_size <= _MAX_CHECKED_BYTES:
            fault = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            if fault != "ok":
                raise JournalError(f"{self._path} is damaged ({fault}): restore it from a copy")
        connection.execute("PRAGMA journal_mode=WAL")
        if application == _APPLICATION and found == VERSION:
            return
        connection.execute("BEGIN IMMEDIATE")
        for statement in TABLES:
            connection.execute(statement.format(blob="BLOB"))
        connection.execute(f"PRAGMA application_id={_APPLICATION}")
        connection.execute(f"PRAGMA user_version={VERSION}")
        connection.execute("COMMIT")

    def _translated(self, error: sqlite3.Error) -> JournalError:
        text = str(error)
        remedies = {
            "not a database": "it is not a journal: give the path of a journal, or of a new file",
            "malformed": "it is damaged: restore it from a copy",
            "full": "nothing of this call was recorded: free space on the disk, and call again",
            "I/O": "nothing of this call was recorded: check the disk, and call again",
            "readonly": "nothing was recorded: make the file and its folder writable",
            "unable to open": "make the file and its folder readable and writable",
            "locked": f"another process has been writing for {_LOCK_TIMEOUT:.0f} seconds; nothing was recorded: call again",
            "closed": "the journal was closed: open it again",
        }
        remedy = next((remedy for key, remedy in remedies.items() if key in text), "nothing of this call was recorded")
        return JournalError(f"{self._path}: {text}; {remedy}")
