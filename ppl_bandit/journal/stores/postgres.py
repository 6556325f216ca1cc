"""PostgreSQL backend: processes on several machines share one experiment.

An advisory lock per experiment makes positions gapless and ordered by commit. It is taken in READ COMMITTED, so that the
statements after it see what its last holder committed, whatever isolation the server has as its default. A transaction takes
three round trips: begin and lock; read the end of the stream; write and commit.

Connections come from a pool, so a writer that waits for a lock blocks no reader. A call whose connection breaks is made again,
within its limit, and first looks up whether it was committed, so that nothing is recorded twice. This also finds connections
that broke while they were idle, so the pool does not check them, which would cost each call a round trip. An error says that
nothing was recorded only if no attempt came as far as its commit.
"""

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ppl_bandit.journal.stores.appending import TABLES, VERSION, Execute, Result, upgrades_from
from ppl_bandit.journal.stores.staged import OF_KEYS, has_staging
from ppl_bandit.journal.stores.store import JournalError, JournalTimeout, call_within, seconds_left

_MAX_CONNECTIONS = 4  # threads that append share one; the others read
_SECONDS_TO_RECONNECT = 2.0  # after which the pool begins anew: its pauses double until then
_TURN_TIMEOUT = (
    1.0  # seconds to wait for the turn to learn, which only avoids conflicts: 2.4 times as fast in four processes
)
_MAX_IDLE = 1.0  # seconds that a process which is stopped keeps the lock of the keys; it tries again when it goes on
_IDLE_PER_EVENT = 1e-4  # further seconds, for the work between two statements: it takes .01 ms for each
_GRACE = 1.0  # seconds that the server gets to end a statement itself, before the connection is closed
_SECRET_KEYWORDS = ("password", "sslpassword", "passfile", "sslkey", "oauth_client_secret")


class PostgresBackend:
    """A PostgreSQL database; `sql` says what a backend does.

    Args:
        connection: URL or connection string.
        timeout: seconds that a call may take, with all that it waits for.
        read_only: whether to refuse a database without a journal, and to write nothing.
    """

    def __init__(self, connection: str, timeout: float, *, read_only: bool = False):
        try:
            import psycopg
            import psycopg_pool
        except ImportError:
            raise JournalError(
                "a journal in PostgreSQL needs psycopg 3 with its pool: install them with `pip install ppl_bandit[postgres]`"
            ) from None
        self._psycopg, self._pools = psycopg, psycopg_pool
        self.timeout, self.read_only = timeout, read_only
        self._settings = self._parse(connection)
        self.label = _label(self._settings)
        self.version, self._turn = VERSION, threading.Lock()
        self._prepare()
        self._pool = psycopg_pool.ConnectionPool(
            kwargs=self._options(),
            connection_class=_limited_connection(),
            configure=self._configure,
            min_size=0,
            max_size=_MAX_CONNECTIONS,
            num_workers=2,
            reconnect_timeout=_SECONDS_TO_RECONNECT,
            reconnect_failed=lambda pool: pool.check(),  # connects anew, for the calls that wait
            name=self.label,
            open=True,
        )

    def read(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple]:
        """Return the rows that a statement finds."""
        return self.run(lambda execute: execute(statement, parameters))

    def run(self, work: Callable[[Execute], Result], locks: Sequence[str] = (), num_events: int = 0) -> Result:
        """Run work, which records so many events, in one transaction, again if its connection breaks."""
        may_be_recorded = False
        while True:
            connection = None
            try:
                with self._pool.connection(seconds_left()) as connection:
                    connection.may_commit = False
                    return self._run_once(connection, work, locks, num_events)
            except self._psycopg.Error as error:
                is_refused = connection is not None and not connection.closed
                may_be_recorded |= connection is not None and connection.closed and connection.may_commit
                is_closed = isinstance(error, self._pools.PoolClosed)
                if is_closed and not may_be_recorded:
                    raise JournalError(f"{self.label}: the journal was closed: open it again") from None
                if is_refused and not may_be_recorded:
                    raise self._refusal(error) from None
                if is_refused or is_closed or seconds_left() <= 0.001:
                    raise JournalTimeout(
                        f"{self.label} cannot be reached: {self._scrubbed(error)}; this call may or may not have been "
                        "recorded: call again with the same decision and reward; it counts once"
                    ) from None

    blank_statement = "DELETE FROM ppl_bandit_personal WHERE experiment = ? AND position = ?"

    can_stage = True

    def scrub(self) -> None:
        """Write the tables anew, however long that takes: PostgreSQL keeps deleted rows in their pages."""
        tables = "personal", "keys", "checkpoints", *(["staged", "reported"] if self.run(has_staging) else [])
        try:
            with self._psycopg.connect(**self._options()) as connection:
                connection.execute(f"SET statement_timeout TO 0; SET lock_timeout TO {int(1000 * self.timeout)}")
                notices: list[str] = []  # a table of another owner is left out with a warning
                connection.add_notice_handler(lambda notice: notices.append(notice.message_primary or ""))
                for table in tables:
                    connection.execute(f"VACUUM FULL ppl_bandit_{table}")
                why = "; ".join(notices)
        except self._psycopg.Error as error:
            why = self._scrubbed(error)
        if why:
            names = ", ".join(f"ppl_bandit_{table}" for table in tables)
            raise JournalError(
                f"{self.label}: the unit is erased, but the pages of its rows could not be written anew ({why}): call erase "
                f"again, or let the owner of the tables run VACUUM FULL {names}"
            )

    @contextlib.contextmanager
    def turn(self, experiment: str) -> Iterator[None]:
        """Hold a lock, in a transaction of its own; who cannot get it within a second goes on without it."""
        connection = None
        is_first = self._turn.acquire(blocking=False)  # turns of several experiments would take all connections
        try:
            with contextlib.suppress(self._psycopg.Error):
                if is_first:
                    connection = self._pool.getconn(min(_TURN_TIMEOUT, seconds_left()))
                    lock = f"SELECT pg_advisory_xact_lock({self._key(connection, experiment, 1347439683)})"
                    connection.execute(f"BEGIN; SET LOCAL lock_timeout TO {int(1000 * _TURN_TIMEOUT)}; {lock}")
            yield
        finally:
            if connection is not None:
                with contextlib.suppress(self._psycopg.Error):
                    connection.rollback()
                self._pool.putconn(connection)
            if is_first:
                self._turn.release()

    @contextlib.contextmanager
    def listen(self, channel: str) -> Iterator[Callable[[float], bool]]:
        """Listen to a channel on a connection of its own.

        Yields:
            A function that waits for a notification, at most so many seconds, and returns whether one came.
        """
        with self._psycopg.connect(**self._options()) as connection:
            connection.execute(self._psycopg.sql.SQL("LISTEN {}").format(self._psycopg.sql.Identifier(channel)))
            yield lambda seconds: any(True for _ in connection.notifies(timeout=seconds, stop_after=1))

    @contextlib.contextmanager
    def lead(self, experiment: str) -> Iterator[Callable[[], bool]]:
        """Try to be the only process that leads an experiment, on a connection of its own.

        Yields:
            A function that returns whether this process leads now; it raises an error if the connection was lost.
        """
        is_leader = False
        with _limited_connection().connect(**self._options()) as connection:
            lock = f"SELECT pg_try_advisory_lock({self._key(connection, experiment, 1347439684)})"

            def leads() -> bool:
                nonlocal is_leader
                found = connection.execute("SELECT true" if is_leader else lock).fetchone()
                is_leader = bool(found and found[0])
                return is_leader

            yield leads

    def close(self) -> None:
        """Close the connections."""
        self._pool.close(timeout=1.0)

    def _run_once(
        self, connection: Any, work: Callable[[Execute], Result], locks: Sequence[str], num_events: int = 0
    ) -> Result:
        writes: list[tuple[str, Sequence[Any]]] = []

        def execute(statement: str, parameters: Sequence[Any] = (), is_many: bool = False) -> list[tuple]:
            statement = statement.replace("?", "%s")
            if is_many:
                writes.append((statement, parameters))
                return []
            cursor = connection.execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

        if not locks:
            connection.may_commit = True  # with every statement
            return work(execute)
        begin = ["BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"]
        if any(name.endswith(OF_KEYS) for name in locks):
            idle = min(_MAX_IDLE + _IDLE_PER_EVENT * num_events, self.timeout)
            begin.append(f"SET LOCAL idle_in_transaction_session_timeout TO {int(1000 * idle)}")
        for name in locks:
            begin.append(f"SELECT pg_advisory_xact_lock({self._key(connection, name, 1347439682)})")
        connection.execute("; ".join(begin))  # without parameters: several statements in one round trip
        result, connection.may_commit = work(execute), True
        is_supported = self._psycopg.Pipeline.is_supported()
        with connection.pipeline() if is_supported else contextlib.nullcontext():  # one round trip
            for statement, rows in writes:
                connection.cursor().executemany(statement, rows)
            connection.execute("COMMIT")
        return result  # after an exception, the context of the connection rolls back

    def _key(self, connection: Any, name: str, seed: int) -> str:
        """Return the key of an advisory lock, as SQL."""
        return f"hashtextextended({self._psycopg.sql.Literal(name).as_string(connection)}, {seed})"

    def _options(self) -> dict[str, Any]:
        """Return the settings of a connection."""
        defaults: dict[str, Any] = {
            "connect_timeout": int(max(2, min(10, self.timeout))),  # libpq waits for at least 2 seconds
            "application_name": "ppl_bandit",
            "keepalives": 1,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": int(1000 * self.timeout),
        }
        return defaults | self._settings | {"autocommit": True, "prepare_threshold": None}

    def _configure(self, connection: Any) -> None:
        """Set the server's own limits for a new connection."""
        names = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
        statements = [f"SET {name} TO {int(1000 * self.timeout)}" for name in names]
        statements += ["SET default_transaction_isolation TO 'read committed'", "SET synchronous_commit TO on"]
        statements += ["SET default_transaction_read_only TO on"] if self.read_only else []
        connection.execute("; ".join(statements))

    def _prepare(self) -> None:
        """Create the tables, or look for them; a server that cannot be reached is an error at once."""
        connection = None
        try:
            with call_within(self.timeout), _limited_connection().connect(**self._options()) as connection:
                self._configure(connection)
                if self.read_only:
                    self.version = self._run_once(connection, self._recorded_version, ())
                else:
                    self._run_once(connection, self._create_tables, ["ppl_bandit tables"])
        except self._psycopg.Error as error:
            if connection is not None and not connection.closed:
                raise self._refusal(error) from None
            raise JournalError(
                f"{self.label} cannot be opened: {self._scrubbed(error)}; check the server and the URL"
            ) from None

    def _create_tables(self, execute: Execute) -> None:
        found = self._find_version(execute)
        if found is not None and found >= VERSION:
            return
        for statement in TABLES:
            execute(statement.format(blob="BYTEA"))
        execute("CREATE TABLE IF NOT EXISTS ppl_bandit_journal (version INTEGER NOT NULL)")
        for statement in upgrades_from(found or 0):
            execute(statement)
        execute("DELETE FROM ppl_bandit_journal")
        execute("INSERT INTO ppl_bandit_journal VALUES (?)", (VERSION,))

    def _recorded_version(self, execute: Execute) -> int:
        found = self._find_version(execute)
        if found is None:
            raise JournalError(f"there is no journal in {self.label}: give the URL that the bandit was given")
        return found

    def _refusal(self, error: Exception) -> JournalError:
        """Return what the server's refusal of a statement means; its transaction is rolled back."""
        text = self._scrubbed(error)
        if not isinstance(error, self._psycopg.errors.QueryCanceled | self._psycopg.errors.LockNotAvailable):
            return JournalError(f"{self.label}: {text}; nothing was recorded")
        return JournalTimeout(
            f"{self.label}: no answer within {self.timeout:g} seconds ({text}): another session holds a lock, or the server is "
            "overloaded; nothing was recorded: call again, or wait longer with Journal(url, timeout=...)"
        )

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

        may_commit = False  # whether the call that uses it has sent what may commit

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
