"""Event streams in a relational database: the same tables and statements for SQLite and PostgreSQL.

A backend runs a function in a transaction; all differences between the databases are in the backends. Threads that append at
the same time share one transaction, and so one flush to disk (group commit).
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ppl_bandit.journal.events import DECIDED, Event, decode, digest_of, encode, group_by_decision
from ppl_bandit.journal.stores.store import Conflict, DecisionNumberTaken, JournalError, reading_event

__all__ = ["Backend", "Execute", "Result", "SqlStore", "TABLES", "VERSION"]

VERSION = 1
TABLES = (
    """CREATE TABLE IF NOT EXISTS ppl_bandit_events (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, kind TEXT NOT NULL, decision TEXT, batch TEXT NOT NULL,
        number BIGINT, lane TEXT NOT NULL, arm BIGINT, settles INTEGER NOT NULL, time DOUBLE PRECISION NOT NULL,
        body TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (experiment, position))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_by_decision ON ppl_bandit_events (experiment, decision)
        WHERE decision IS NOT NULL""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_learnt ON ppl_bandit_events (experiment, position) WHERE kind <> 'decided'""",
    """CREATE UNIQUE INDEX IF NOT EXISTS ppl_bandit_numbers ON ppl_bandit_events (experiment, number)
        WHERE kind = 'decided' AND lane = ''""",
    """CREATE UNIQUE INDEX IF NOT EXISTS ppl_bandit_ids ON ppl_bandit_events (experiment, decision)
        WHERE kind = 'decided'""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_checkpoints (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, contents {blob} NOT NULL, PRIMARY KEY (experiment, position))""",
)
_COLUMNS = "position, kind, decision, batch, number, lane, arm, settles, time, body"
_COLUMNS_WITHOUT_DECISION_BODY = _COLUMNS.replace("body", "CASE WHEN kind = 'decided' THEN '{}' ELSE body END")
_MAX_PARAMETERS = 500  # of one statement

Execute = Callable[..., list[tuple]]
Result = TypeVar("Result")


class Backend(Protocol):
    """A database connection.

    `run` passes to `work` a function (statement, parameters, is_many=False) -> rows, and a flag: whether an earlier attempt may
    have been committed before its connection broke. Statements mark parameters with `?`; with `is_many` they run once per row.

    Attributes:
        label: path or URL, without password, for messages.
    """

    label: str

    def run(self, work: Callable[[Execute, bool], Result], locks: Sequence[str] = ()) -> Result:
        """Run work in one transaction; with locks, as the only writer of these experiments."""

    def close(self) -> None:
        """Close the connection."""


class _AppendRequest:
    """Events that a thread wants to append, and the result."""

    def __init__(self, experiment: str, events: Sequence[Event], after: int | None):
        self.experiment, self.events, self.after = experiment, events, after
        self.is_tried = False
        self.recorded: list[Event] | None = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.recorded is not None or self.error is not None


class SqlStore:
    """Event streams in a database; see `Store`."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._queueing = threading.Lock()
        self._queue: list[_AppendRequest] = []

    def append(self, experiment: str, events: Sequence[Event], after: int | None = None) -> list[Event]:
        """Append events; the first thread appends those of all threads in the queue."""
        request = _AppendRequest(experiment, events, after)
        with self._queueing:
            self._queue.append(request)
        with self._writing:
            if not request.is_done:
                with self._queueing:
                    requests, self._queue = self._queue, []
                # The queue lacks this request if the thread that took it was interrupted.
                self._append_all(requests if request in requests else [request, *requests])
        if request.error is not None:
            raise request.error
        assert request.recorded is not None  # done without an error
        return request.recorded

    def read(
        self,
        experiment: str,
        after: int = 0,
        before: int | None = None,
        *,
        kinds: Sequence[str] = (),
        limit: int | None = None,
        whole: bool = False,
    ) -> list[Event]:
        """Return the events between two positions; with `kinds`, which excludes decisions, those of some kinds."""
        columns = _COLUMNS if whole else _COLUMNS_WITHOUT_DECISION_BODY
        statement = f"SELECT {columns} FROM ppl_bandit_events WHERE experiment = ? AND position > ?"
        parameters: list[Any] = [experiment, after]
        if before is not None:
            statement += " AND position < ?"
            parameters.append(before)
        if kinds:
            statement += f" AND kind <> 'decided' AND kind IN ({', '.join('?' * len(kinds))})"
            parameters += kinds
        statement += " ORDER BY position"
        if limit is not None:
            statement += " LIMIT ?"
            parameters.append(limit)
        return [_event(experiment, row) for row in self._query(statement, *parameters)]

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event; 0 for an experiment that does not exist."""
        return self._query("SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?", experiment)[0][0] or 0

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions."""
        found: dict[str, list[Event]] = defaultdict(list)
        for start in range(0, len(decisions), _MAX_PARAMETERS):
            some = decisions[start : start + _MAX_PARAMETERS]
            rows = self._query(
                f"SELECT {_COLUMNS} FROM ppl_bandit_events WHERE experiment = ? AND decision IS NOT NULL AND decision IN "
                f"({', '.join('?' * len(some))})",
                experiment,
                *some,
            )
            # Sorted here: with ORDER BY position SQLite scans the whole stream instead of using the index by decision.
            for row in sorted(rows, key=lambda row: row[0]):
                event = _event(experiment, row)
                found[str(event.decision)].append(event)
        return dict(found)

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions whose reward is pending."""
        columns = ", ".join(f"made.{name}" for name in _COLUMNS.split(", "))
        rows = self._query(
            f"SELECT {columns} FROM ppl_bandit_events made WHERE made.experiment = ? AND made.kind = 'decided' "
            "AND made.time <= ? AND NOT EXISTS (SELECT 1 FROM ppl_bandit_events later WHERE later.decision IS NOT NULL "
            "AND later.experiment = made.experiment AND later.decision = made.decision AND later.settles = 1) "
            "ORDER BY made.position",
            experiment,
            1e300 if until is None else until,
        )
        return [_event(experiment, row) for row in rows]

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision."""
        return group_by_decision(self.read(experiment, whole=True))

    def checkpoint(self, experiment: str) -> tuple[int, bytes] | None:
        """Return the position and the contents of the last checkpoint; None if there is none."""
        rows = self._query(
            "SELECT position, contents FROM ppl_bandit_checkpoints WHERE experiment = ? ORDER BY position DESC LIMIT 1",
            experiment,
        )
        return (int(rows[0][0]), bytes(rows[0][1])) if rows else None

    def write_checkpoint(self, experiment: str, position: int, contents: bytes) -> None:
        """Store a checkpoint in place of earlier ones."""

        def work(execute: Execute, is_again: bool) -> None:
            execute("DELETE FROM ppl_bandit_checkpoints WHERE experiment = ? AND position <= ?", (experiment, position))
            execute("INSERT INTO ppl_bandit_checkpoints VALUES (?, ?, ?)", (experiment, position, contents))

        with self._writing:
            self._run(work, [experiment])

    def experiments(self) -> list[str]:
        """Return the names of the experiments."""
        return [row[0] for row in self._query("SELECT DISTINCT experiment FROM ppl_bandit_events ORDER BY experiment")]

    def first_broken(self, experiment: str) -> int | None:
        """Return the first position whose event does not match its digest; None if all match."""
        digest = ""
        rows = self._query(
            f"SELECT {_COLUMNS}, digest FROM ppl_bandit_events WHERE experiment = ? ORDER BY position", experiment
        )
        for position, (*columns, recorded) in enumerate(rows, 1):
            digest = digest_of(digest, experiment, _event(experiment, (*columns[:-1], "{}")), columns[-1])
            if columns[0] != position or recorded != digest:
                return position
        return None

    def close(self) -> None:
        """Close the connection."""
        self._backend.close()

    def _query(self, statement: str, *parameters: Any) -> list[tuple]:
        return self._run(lambda execute, is_again: execute(statement, parameters))

    def _run(self, work: Callable[[Execute, bool], Result], locks: Sequence[str] = ()) -> Result:
        if os.getpid() != self._pid:
            raise JournalError(
                f"{self._backend.label} was opened before this process was forked: open the journal in each process, after the "
                "fork"
            )
        return self._backend.run(work, locks)

    def _append_all(self, requests: list[_AppendRequest]) -> None:
        """Append the events of all requests in one transaction; if the database fails, none of them is recorded."""
        results: list[list[Event] | Exception] = []

        def work(execute: Execute, is_again: bool) -> None:
            results.clear()
            for request in requests:
                may_be_recorded, request.is_tried = is_again or request.is_tried, True
                try:
                    results.append(_insert(execute, request, may_be_recorded))
                except (Conflict, DecisionNumberTaken) as error:
                    results.append(error)

        try:
            self._run(work, sorted({request.experiment for request in requests}))
        except Exception as error:
            for request in requests:
                request.error = error
            if not isinstance(error, JournalError):
                raise
            return
        for request, result in zip(requests, results, strict=True):
            if isinstance(result, Exception):
                request.error = result
            else:
                request.recorded = result


def _insert(execute: Execute, request: _AppendRequest, may_be_recorded: bool) -> list[Event]:
    experiment, events = request.experiment, request.events
    if may_be_recorded:  # the connection broke during the commit, or a thread was interrupted
        rows = execute(
            f"SELECT {_COLUMNS} FROM ppl_bandit_events WHERE experiment = ? AND batch = ? ORDER BY position",
            (experiment, events[0].batch),
        )
        if rows:
            return [_event(experiment, row) for row in rows]
    if request.after is not None and execute(
        "SELECT 1 FROM ppl_bandit_events WHERE experiment = ? AND position > ? AND kind <> 'decided' LIMIT 1",
        (experiment, request.after),
    ):
        raise Conflict
    numbers = [int(event.number or 0) for event in events if event.kind == DECIDED and not event.lane]
    if numbers and execute(
        "SELECT 1 FROM ppl_bandit_events WHERE experiment = ? AND kind = 'decided' AND lane = '' AND number BETWEEN ? AND ? "
        "LIMIT 1",
        (experiment, min(numbers), max(numbers)),
    ):
        raise DecisionNumberTaken
    last = execute(
        "SELECT position, digest FROM ppl_bandit_events WHERE experiment = ? ORDER BY position DESC LIMIT 1",
        (experiment,),
    )
    position, digest = last[0] if last else (0, "")
    recorded, rows = [], []
    for event in events:
        position += 1
        event, body = event._replace(position=position), encode(event.body)
        digest = digest_of(digest, experiment, event, body)
        rows.append((experiment, *event[:7], int(event.settles), event.time, body, digest))
        recorded.append(event)
    execute(f"INSERT INTO ppl_bandit_events VALUES ({', '.join('?' * 12)})", rows, True)
    return recorded


def _event(experiment: str, row: Sequence[Any]) -> Event:
    position, kind, decision, batch, number, lane, arm, settles, time, body = row
    with reading_event(experiment, position):
        contents = decode(body)
    return Event(position, kind, decision, batch, number, lane, arm, bool(settles), time, contents)
