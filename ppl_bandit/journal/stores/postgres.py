"""PostgreSQL as the place of a journal: processes on several machines decide for one experiment.

A lock per experiment makes its stream gapless and ordered by commit. A connection that breaks is opened again; whether what
was on its way had been committed is looked up, so that nothing is recorded twice.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ppl_bandit.journal.stores.contract import JournalError
from ppl_bandit.journal.stores.sql import TABLES, VERSION, Execute

__all__ = ["PostgresBackend", "without_password"]

_WAITS = (0.1, 0.4, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts to connect again

T = TypeVar("T")


def without_password(url: str) -> str:
    """Return a URL that may be shown: its password, also one among the parameters, is replaced by stars."""
    try:
        parts = urlsplit(url)
        place = parts.netloc.rpartition("@")
        user = place[0].partition(":")[0]
        query = "&".join(
            "password=***" if item.partition("=")[0] == "password" else item for item in parts.query.split("&")
        )
    except ValueError:
        return url.partition("://")[0] + "://***"
    shown = (f"{user}:***@" if ":" in place[0] else place[0] + place[1]) + place[2]
    return urlunsplit((parts.scheme, shown, parts.path, query if parts.query else "", ""))


class PostgresBackend:
    """A PostgreSQL database; see `sql.Backend`."""

    def __init__(self, url: str):
        try:
            import psycopg
        except ImportError:
            raise JournalError(
                "a journal in PostgreSQL needs psycopg 3: install it with `pip install ppl_bandit[postgres]`"
            ) from None
        self._psycopg = psycopg
        self._url, self._shown = url, without_password(url)
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._connection: Any = None
        self._is_closed, self._was_open = False, False
        self.run(self._prepare, ["ppl_bandit tables"])

    def run(self, work: Callable[[Execute, bool], T], locks: Sequence[str] = ()) -> T:
        """Run work in one transaction, on a new connection where the old one broke."""
        if os.getpid() != self._pid:
            raise JournalError(
                f"{self._shown} was opened before this process was forked: open the journal in each process, after the fork"
            )
        with self._lock:
            if self._is_closed:
                raise JournalError(f"{self._shown}: the journal was closed: open it again")
            is_again, waits = False, list(_WAITS if self._was_open else ())
            while True:
                try:
                    return self._run_once(work, locks, is_again)
                except self._psycopg.OperationalError as error:
                    # Also without a connection the next attempt looks whether this one had been committed.
                    is_again = is_again or self._connection is not None
                    self._drop()
                    if not waits and not self._was_open:
                        raise JournalError(
                            f"{self._shown} cannot be opened: {self._scrubbed(error)}; check the server and the URL"
                        ) from None
                    if not waits:
                        raise JournalError(
                            f"{self._shown} cannot be reached: {self._scrubbed(error)}; what was on its way may or may not "
                            "have been recorded: call again with the same decision and reward, which counts once"
                        ) from None
                    time.sleep(waits.pop(0))
                except self._psycopg.Error as error:
                    raise JournalError(f"{self._shown}: {self._scrubbed(error)}; nothing was recorded") from None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def _run_once(self, work: Callable[[Execute, bool], T], locks: Sequence[str], is_again: bool) -> T:
        if self._connection is None:
            self._connection = self._psycopg.connect(
                self._url, autocommit=True, connect_timeout=10, application_name="ppl_bandit", prepare_threshold=None
            )
        connection, self._was_open = self._connection, True

        def execute(statement: str, parameters: Sequence[Any] = (), is_many: bool = False) -> list[tuple]:
            statement = statement.replace("?", "%s")
            if is_many and len(parameters) > 1:  # one wait for all rows
                connection.cursor().executemany(statement, parameters)
                return []
            cursor = connection.execute(statement, parameters[0] if is_many else parameters)
            return cursor.fetchall() if cursor.description else []

        if not locks:
            return work(execute, is_again)
        with connection.transaction():
            execute("SET LOCAL synchronous_commit TO on")
            for name in locks:
                execute("SELECT pg_advisory_xact_lock(hashtextextended(?, 1347439682))", (name,))
            return work(execute, is_again)

    def _prepare(self, execute: Execute, is_again: bool) -> None:
        execute("CREATE TABLE IF NOT EXISTS ppl_bandit_journal (version INTEGER NOT NULL)")
        found = execute("SELECT version FROM ppl_bandit_journal")
        if found and found[0][0] > VERSION:
            raise JournalError(
                f"{self._shown} holds a journal of version {found[0][0]}, this release reads up to {VERSION}: "
                "upgrade ppl_bandit"
            )
        if not found:
            for statement in TABLES:
                execute(statement.format(blob="BYTEA"))
            execute("INSERT INTO ppl_bandit_journal VALUES (?)", (VERSION,))

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.close()
            except self._psycopg.Error:
                pass

    def _scrubbed(self, error: Exception) -> str:
        """Return what the driver said, in one line and without the password."""
        words = " ".join(str(error).split())
        secrets = {self._url}
        try:
            parts = urlsplit(self._url)
            given = [parts.netloc.rpartition("@")[0].partition(":")[2]]
        except ValueError:
            return "the URL cannot be read"
        given += [item.partition("=")[2] for item in parts.query.split("&") if item.startswith("password=")]
        for secret in filter(None, given):
            secrets |= {secret, unquote(secret), quote(secret)}
        for secret in sorted(secrets, key=len, reverse=True):
            words = words.replace(secret, "***")
        return words
