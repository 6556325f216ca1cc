"""PostgreSQL backend: processes on several machines share one experiment.

An advisory lock per experiment makes positions gapless and ordered by commit. It is taken in READ COMMITTED, so that the
statements after it see what its last holder committed, whatever isolation the server has as its default. A transaction takes
three round trips: begin and lock; read the end of the stream; write and commit.

A broken connection is opened again. The next attempt first looks up whether the last one was committed, so that nothing is
recorded twice. There is one connection for reading and one for writing: a writer that waits for a lock blocks no reader.
A third one is opened when processes were seen to learn at the same time; they then take turns.
"""

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ppl_bandit.journal.stores.appending import Execute
from ppl_bandit.journal.stores.deadline import held, seconds_left
from ppl_bandit.journal.stores.sql import Result
from ppl_bandit.journal.stores.store import JournalError, JournalTimeout
from ppl_bandit.journal.stores.tables import HEADS_OF_EVENTS, TABLES, VERSION, VERSION_WITH_HEADS

__all__ = ["PostgresBackend"]

_RETRY_DELAYS = (0.1, 0.4, 1.0, 2.0, 4.0, 8.0)  # seconds between attempts to connect again
_GRACE = 1.0  # seconds that the server gets to end a statement itself, before the connection is closed
_TURN_TIMEOUT = 1.0  # seconds to wait for the turn to learn, which only avoids conflicts
_SECRET_KEYWORDS = ("password", "sslpassword", "passfile", "sslkey", "oauth_client_secret")


class PostgresBackend:
    """A PostgreSQL database; see `sql.Backend`.

    Args:
        connection: URL or connection string.
        timeout: seconds that a call may take, with all that it waits for.
        read_only: whether to refuse a database without a journal, and to write nothing.
    """

    def __init__(self, connection: str, timeout: float, *, read_only: bool = False):
        try:
            import psycopg
        except ImportError:
            raise JournalError(
                "a journal in PostgreSQL needs psycopg 3: install it with `pip install ppl_bandit[postgres]`"
            ) from None
        self._psycopg = psycopg
        self.timeout, self.read_only = timeout, read_only
        self._settings = self._parse(connection)
        self.label = _label(self._settings)
        self._locks = {role: threading.RLock() for role in ("reader", "writer", "turn")}
        self._connections: dict[str, Any] = dict.fromkeys(self._locks)
        self._is_closed, self._was_open = False, False
        self.version = VERSION
        if read_only:
            self.version = self.run(self._recorded_version)
        else:
            self.run(self._prepare, ["ppl_bandit tables"])

    def run(self, work: Callable[[Execute, bool], Result], locks: Sequence[str] = ()) -> Result:
        """Run work in one transaction; connect again if the connection is broken."""
        role = "writer" if locks else "reader"
        with held(self._locks[role]):
            if self._is_closed:
                raise JournalError(f"{self.label}: the journal was closed: open it again")
            is_again, delays = False, list(_RETRY_DELAYS if self._was_open else ())
            while True:
                try:
                    return self._run_once(work, locks, is_again)
                except (self._psycopg.errors.QueryCanceled, self._psycopg.errors.LockNotAvailable) as error:
                    raise JournalTimeout(
                        f"{self.label}: no answer within {self.timeout:g} seconds ({self._scrubbed(error)}): another session "
                        "holds a lock, or the server is overloaded; nothing was recorded: call again, or wait longer with "
                        "Journal(url, timeout=...)"
                    ) from None
                except self._psycopg.OperationalError as error:
                    # The flag stays set when reconnecting fails: the commit of the first attempt is still in doubt.
                    is_again = is_again or self._connections[role] is not None
                    self._drop(role)
                    if not delays and not self._was_open:
                        raise JournalError(
                            f"{self.label} cannot be opened: {self._scrubbed(error)}; check the server and the URL"
                        ) from None
                    is_late = seconds_left() <= 0.001
                    if not delays or is_late:
                        raise (JournalTimeout if is_late else JournalError)(
                            f"{self.label} cannot be reached: {self._scrubbed(error)}; this call may or may not have been "
                            "recorded: call again with the same decision and reward; it counts once"
                        ) from None
                    time.sleep(min(delays.pop(0), seconds_left()))
                except self._psycopg.Error as error:
                    raise JournalError(f"{self.label}: {self._scrubbed(error)}; nothing was recorded") from None

    blank_statement = "DELETE FROM ppl_bandit_personal WHERE experiment = ? AND owner = ?"

    def scrub(self) -> None:
        """Write the tables anew: PostgreSQL keeps deleted rows in their pages."""

        def work(execute: Execute, is_again: bool) -> None:
            for table in ("ppl_bandit_personal", "ppl_bandit_checkpoints"):
                execute(f"VACUUM FULL {table}")

        with held(self._locks["reader"]):
            self.run(work)

    @contextlib.contextmanager
    def turn(self, experiment: str) -> Iterator[None]:
        """Hold a lock of the session; who cannot get it within a second goes on without it."""
        try:
            self._call_in_turn("pg_advisory_lock", experiment)
            yield
        finally:
            self._call_in_turn("pg_advisory_unlock", experiment)

    def _call_in_turn(self, function: str, experiment: str) -> None:
        try:
            if self._connections["turn"] is None and function == "pg_advisory_lock":
                self._connections["turn"] = self._connect(min(self.timeout, _TURN_TIMEOUT))
            connection = self._connections["turn"]
            if connection is not None:
                connection.execute(f"SELECT {function}(hashtextextended(%s, 1347439683))", (experiment,))
        except self._psycopg.Error as error:
            if not isinstance(error, self._psycopg.errors.LockNotAvailable | self._psycopg.errors.QueryCanceled):
                self._drop("turn")

    def close(self) -> None:
        """Close the connections."""
        self._is_closed = True
        for role, lock in self._locks.items():
            with lock:
                self._drop(role)

    def _run_once(self, work: Callable[[Execute, bool], Result], locks: Sequence[str], is_again: bool) -> Result:
        role = "writer" if locks else "reader"
        if self._connections[role] is None:
            self._connections[role] = self._connect(self.timeout)
        connection, self._was_open = self._connections[role], True
        writes: list[tuple[str, Sequence[Any]]] = []

        def execute(statement: str, parameters: Sequence[Any] = (), is_many: bool = False) -> list[tuple]:
            statement = statement.replace("?", "%s")
            if is_many:
                writes.append((statement, parameters))
                return []
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

        if not locks:
            return work(execute, is_again)
        with self._transaction(connection, locks):
            result = work(execute, is_again)
            with self._pipeline(connection):
                for statement, rows in writes:
                    connection.cursor().executemany(statement, rows)
                connection.execute("COMMIT")
        return result

    @contextlib.contextmanager
    def _transaction(self, connection: Any, locks: Sequence[str]) -> Iterator[None]:
        """Begin a transaction and take the locks; the caller commits, an exception rolls back."""
        idle = self._psycopg.pq.TransactionStatus.IDLE
        if connection.info.transaction_status != idle:  # Ctrl-C interrupted an earlier call before its rollback
            connection.execute("ROLLBACK")
        literal = self._psycopg.sql.Literal
        begin = ["BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE", "SET LOCAL synchronous_commit TO on"]
        begin += [
            f"SELECT pg_advisory_xact_lock(hashtextextended({literal(name).as_string(connection)}, 1347439682))"
            for name in locks
        ]
        try:
            connection.execute("; ".join(begin))  # without parameters: several statements in one round trip
            yield
        except BaseException:
            if connection.info.transaction_status != idle and not connection.closed:
                with contextlib.suppress(self._psycopg.Error):
                    connection.execute("ROLLBACK")
            raise

    def _pipeline(self, connection: Any) -> contextlib.AbstractContextManager:
        """Send several statements without waiting for the answer to each, if libpq can."""
        return connection.pipeline() if self._psycopg.Pipeline.is_supported() else contextlib.nullcontext()

    def _connect(self, timeout: float) -> Any:
        milliseconds = int(1000 * timeout)
        defaults: dict[str, Any] = {
            "connect_timeout": int(max(2, min(10, timeout, seconds_left()))),  # libpq waits for at least 2 seconds
            "application_name": "ppl_bandit",
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": milliseconds,
        }
        settings = defaults | self._settings
        connect = _limited_connection().connect
        connection = connect(**settings, autocommit=True, prepare_threshold=None)
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        statements = [f"SET {name} TO {milliseconds}" for name in names]
        statements += ["SET default_transaction_isolation TO 'read committed'"]
        statements += ["SET default_transaction_read_only TO on"] if self.read_only else []
        connection.execute("; ".join(statements))
        return connection

    def _prepare(self, execute: Execute, is_again: bool) -> None:
        found = self._find_version(execute)
        if found is not None and found >= VERSION:
            return
        for statement in TABLES:
            execute(statement.format(blob="BYTEA"))
        execute("CREATE TABLE IF NOT EXISTS ppl_bandit_journal (version INTEGER NOT NULL)")
        if found is None or found < VERSION_WITH_HEADS:
            execute(HEADS_OF_EVENTS)
        execute("DELETE FROM ppl_bandit_journal")
        execute("INSERT INTO ppl_bandit_journal VALUES (?)", (VERSION,))

    def _recorded_version(self, execute: Execute, is_again: bool) -> int:
        found = self._find_version(execute)
        if found is None:
            raise JournalError(f"there is no journal in {self.label}: give the URL that the bandit was given")
        return found

    def _find_version(self, execute: Execute) -> int | None:
        if execute("SELECT to_regclass('ppl_bandit_journal')")[0][0] is None:
            return None
        found = execute("SELECT version FROM ppl_bandit_journal")
        if found and found[0][0] > VERSION:
            raise JournalError(
                f"{self.label} holds a journal of version {found[0][0]}, this release reads up to {VERSION}: "
                "upgrade ppl_bandit"
            )
        return found[0][0] if found else None

    def _drop(self, role: str) -> None:
        connection, self._connections[role] = self._connections[role], None
        if connection is not None:
            with contextlib.suppress(self._psycopg.Error):
                connection.close()

    def _parse(self, connection: str) -> dict[str, Any]:
        from psycopg.conninfo import conninfo_to_dict

        try:
            settings = conninfo_to_dict(connection)
        except self._psycopg.Error:  # its message may quote a part of the password
            raise JournalError(
                "libpq cannot read the URL or connection string of the journal: use its keywords in lower case, and write "
                "special characters of the password with urllib.parse.quote(password, safe='')"
            ) from None
        nested = [
            key
            for key in ("dbname", "host", "hostaddr", "service")
            if re.search("[@=]|://", str(settings.get(key, "")))
        ]
        if nested:  # libpq reads a URL or connection string there too; it may hold a password, so it is not shown
            raise JournalError(
                f"the {nested[0]} of the journal holds a URL, a connection string or an '@': give that URL or connection "
                "string itself as the journal"
            )
        if not str(settings.get("port", "0")).replace(",", "").isdigit():  # it may be a password: not shown
            raise JournalError(
                "the port in the URL of the journal is not a number: write postgresql://user@host:port/database"
            )
        return settings

    def _scrubbed(self, error: Exception) -> str:
        """Return the driver's message in one line and without secrets."""
        text = " ".join(str(error).split())
        for keyword in _SECRET_KEYWORDS:
            secret = self._settings.get(keyword)
            text = text.replace(str(secret), "***") if secret else text
        return text


@functools.cache
def _limited_connection() -> Any:
    """Return a class of connections that close when the call that uses them is over its limit."""
    import psycopg

    class LimitedConnection(psycopg.Connection):
        """A server process that is stopped ends no statement itself, so the client stops waiting."""

        def wait(self, gen: Any, interval: float = 0.1, timeout: float | None = None) -> Any:
            """Wait for the answer to a statement, within the limit of the call."""
            limit = seconds_left() + _GRACE
            try:
                return super().wait(gen, interval, limit if timeout is None else min(timeout, limit))
            except psycopg.errors._WaitTimeout as error:
                self.close()
                raise psycopg.OperationalError("the server does not answer") from error

    return LimitedConnection


def _label(settings: dict[str, Any]) -> str:
    """Return scheme, host, port and database, and nothing else."""
    host, port, database = (settings.get(key) for key in ("host", "port", "dbname"))
    place = host or settings.get("hostaddr") or ""
    return f"postgresql://{place}{f':{port}' if port else ''}/{database or ''}"
