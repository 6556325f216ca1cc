"""PostgreSQL backend: processes on several machines share one experiment.

An advisory lock per experiment makes positions gapless and ordered by commit. A broken connection is opened again. The next
attempt first looks up whether the last one was committed, so that nothing is recorded twice.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from ppl_bandit.journal.stores.sql import TABLES, VERSION, Execute, Result
from ppl_bandit.journal.stores.store import JournalError

__all__ = ["PostgresBackend", "without_password"]

_RETRY_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts to connect again


def without_password(url: str) -> str:
    """Return a URL with its password, also one among the query parameters, replaced by stars."""
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")
        user = host[0].partition(":")[0]
        query = "&".join(
            "password=***" if item.partition("=")[0] == "password" else item for item in parts.query.split("&")
        )
    except ValueError:
        return url.partition("://")[0] + "://***"
    shown = (f"{user}:***@" if ":" in host[0] else host[0] + host[1]) + host[2]
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
        self._url, self.label = url, without_password(url)
        self._lock = threading.RLock()
        self._connection: Any = None
        self._is_closed, self._was_open = False, False
        self.run(self._prepare, ["ppl_bandit tables"])

    def run(self, work: Callable[[Execute, bool], Result], locks: Sequence[str] = ()) -> Result:
        """Run work in one transaction; connect again if the connection is broken."""
        with self._lock:
            if self._is_closed:
                raise JournalError(f"{self.label}: the journal was closed: open it again")
            is_again, delays = False, list(_RETRY_DELAYS if self._was_open else ())
            while True:
                try:
                    return self._run_once(work, locks, is_again)
                except self._psycopg.OperationalError as error:
                    # The flag stays set when reconnecting fails: the commit of the first attempt is still in doubt.
                    is_again = is_again or self._connection is not None
                    self._drop()
                    if not delays and not self._was_open:
                        raise JournalError(
                            f"{self.label} cannot be opened: {self._scrubbed(error)}; check the server and the URL"
                        ) from None
                    if not delays:
                        raise JournalError(
                            f"{self.label} cannot be reached: {self._scrubbed(error)}; this call may or may not have been "
                            "recorded: call again with the same decision and reward; it counts once"
                        ) from None
                    time.sleep(delays.pop(0))
                except self._psycopg.Error as error:
                    raise JournalError(f"{self.label}: {self._scrubbed(error)}; nothing was recorded") from None

    def close(self) -> None:
        """Close the connection."""
        with self._lock:
            self._is_closed = True
            self._drop()

    def _run_once(self, work: Callable[[Execute, bool], Result], locks: Sequence[str], is_again: bool) -> Result:
        if self._connection is None:
            self._connection = self._psycopg.connect(
                self._url, autocommit=True, connect_timeout=10, application_name="ppl_bandit", prepare_threshold=None
            )
        connection, self._was_open = self._connection, True

        def execute(statement: str, parameters: Sequence[Any] = (), is_many: bool = False) -> list[tuple]:
            statement = statement.replace("?", "%s")
            if is_many and len(parameters) > 1:  # one round trip for all rows
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
                f"{self.label} holds a journal of version {found[0][0]}, this release reads up to {VERSION}: "
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
        """Return the driver's message in one line and without the password."""
        text = " ".join(str(error).split())
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
            text = text.replace(secret, "***")
        return text
