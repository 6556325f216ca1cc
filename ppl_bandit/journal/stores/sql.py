"""Streams of events in a relational database: the same tables and statements for SQLite and PostgreSQL.

A backend runs work in a transaction; all that differs between databases is there. Threads that record at the same time
share one transaction, and so one wait for the disk.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from ppl_bandit.journal.events import DECIDED, Event, decode, digest_of, encode
from ppl_bandit.journal.stores.contract import Conflict, JournalError, NumberTaken

__all__ = ["Backend", "SqlStore", "TABLES", "VERSION"]

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
_HEADS = _COLUMNS.replace("body", "CASE WHEN kind = 'decided' THEN '{}' ELSE body END")
_CHUNK = 500  # parameters of one statement

Execute = Callable[..., list[tuple]]
T = TypeVar("T")


class Backend(Protocol):
    """A database.

    `run` hands `work` a function (statement, parameters, is_many=False) -> rows, and a flag: whether an earlier try may have
    been committed before its connection broke. Statements mark parameters with `?`; with `is_many` they run once per row.
    """

    def run(self, work: Callable[[Execute, bool], T], locks: Sequence[str] = ()) -> T:
        """Run work in one transaction; with locks, as the only writer of these experiments."""

    def close(self) -> None:
        """Close the connection."""


class _Ticket:
    """Events that wait to be recorded, and what became of them."""

    def __init__(self, experiment: str, events: Sequence[Event], after: int | None):
        self.experiment, self.events, self.after = experiment, events, after
        self.is_tried = False
        self.recorded: list[Event] | None = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.recorded is not None or self.error is not None


class SqlStore:
    """Streams in a database; see `contract.Store`."""

    is_durable = True

    def __init__(self, backend: Backend):
        self._backend = backend
        self._writing = threading.Lock()
        self._queueing = threading.Lock()
        self._queue: list[_Ticket] = []

    def append(self, experiment: str, events: Sequence[Event], after: int | None = None) -> list[Event]:
        """Record events; whoever comes first records those of all threads that wait."""
        ticket = _Ticket(experiment, events, after)
        with self._queueing:
            self._queue.append(ticket)
        with self._writing:
            if not ticket.is_done:
                with self._queueing:
                    group, self._queue = self._queue, []
                # Not among them if a thread that took it to record it was interrupted.
                self._record(group if ticket in group else [ticket, *group])
        if ticket.error is not None:
            raise ticket.error
        assert ticket.recorded is not None  # done without an error
        return ticket.recorded

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
        """Return the events beyond a position."""
        statement = (
            f"SELECT {_COLUMNS if whole else _HEADS} FROM ppl_bandit_events WHERE experiment = ? AND position > ?"
        )
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
        return [_event(row) for row in self._query(statement, *parameters)]

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event."""
        return self._query("SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?", experiment)[0][0] or 0

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions."""
        found: dict[str, list[Event]] = defaultdict(list)
        for start in range(0, len(decisions), _CHUNK):
            some = decisions[start : start + _CHUNK]
            rows = self._query(
                f"SELECT {_COLUMNS} FROM ppl_bandit_events WHERE experiment = ? AND decision IS NOT NULL AND decision IN "
                f"({', '.join('?' * len(some))})",
                experiment,
                *some,
            )
            # Sorted here: asked for an order, SQLite reads the whole stream in that order instead of looking ids up.
            for event in sorted(map(_event, rows), key=lambda event: event.position):
                found[str(event.decision)].append(event)
        return dict(found)

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions that wait for a reward."""
        columns = ", ".join(f"made.{name}" for name in _COLUMNS.split(", "))
        rows = self._query(
            f"SELECT {columns} FROM ppl_bandit_events made WHERE made.experiment = ? AND made.kind = 'decided' "
            "AND made.time <= ? AND NOT EXISTS (SELECT 1 FROM ppl_bandit_events later WHERE later.decision IS NOT NULL "
            "AND later.experiment = made.experiment AND later.decision = made.decision AND later.settles = 1) "
            "ORDER BY made.position",
            experiment,
            1e300 if until is None else until,
        )
        return [_event(row) for row in rows]

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision."""
        grouped: dict[str, list[Event]] = {}
        for event in self.read(experiment, whole=True):
            if event.decision is not None:
                grouped.setdefault(event.decision, []).append(event)
        return list(grouped.values())

    def checkpoint(self, experiment: str) -> tuple[int, bytes] | None:
        """Return the last posterior kept."""
        rows = self._query(
            "SELECT position, contents FROM ppl_bandit_checkpoints WHERE experiment = ? ORDER BY position DESC LIMIT 1",
            experiment,
        )
        return (int(rows[0][0]), bytes(rows[0][1])) if rows else None

    def keep_checkpoint(self, experiment: str, position: int, contents: bytes) -> None:
        """Keep a posterior in place of earlier ones."""

        def work(execute: Execute, is_again: bool) -> None:
            execute("DELETE FROM ppl_bandit_checkpoints WHERE experiment = ? AND position <= ?", (experiment, position))
            execute("INSERT INTO ppl_bandit_checkpoints VALUES (?, ?, ?)", (experiment, position, contents))

        with self._writing:
            self._backend.run(work, [experiment])

    def experiments(self) -> list[str]:
        """Name the experiments."""
        return [row[0] for row in self._query("SELECT DISTINCT experiment FROM ppl_bandit_events ORDER BY experiment")]

    def first_broken(self, experiment: str) -> int | None:
        """Return the position of the first event that does not follow from the one before, or None: all do."""
        before = ""
        rows = self._query(
            f"SELECT {_COLUMNS}, digest FROM ppl_bandit_events WHERE experiment = ? ORDER BY position", experiment
        )
        for place, (*facts, digest) in enumerate(rows, 1):
            before = digest_of(before, experiment, _event((*facts[:-1], "{}")), facts[-1])
            if facts[0] != place or digest != before:
                return place
        return None

    def close(self) -> None:
        """Close the connection."""
        self._backend.close()

    def _query(self, statement: str, *parameters: Any) -> list[tuple]:
        return self._backend.run(lambda execute, is_again: execute(statement, parameters))

    def _record(self, group: list[_Ticket]) -> None:
        """Record all tickets in one transaction; a failure of the database leaves none of them recorded."""
        outcomes: list[list[Event] | Exception] = []

        def work(execute: Execute, is_again: bool) -> None:
            outcomes.clear()
            for ticket in group:
                may_be_there, ticket.is_tried = is_again or ticket.is_tried, True
                try:
                    outcomes.append(_insert(execute, ticket, may_be_there))
                except (Conflict, NumberTaken) as error:
                    outcomes.append(error)

        try:
            self._backend.run(work, sorted({ticket.experiment for ticket in group}))
        except Exception as error:
            for ticket in group:
                ticket.error = error
            if not isinstance(error, JournalError):
                raise
            return
        for ticket, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, Exception):
                ticket.error = outcome
            else:
                ticket.recorded = outcome


def _insert(execute: Execute, ticket: _Ticket, may_be_there: bool) -> list[Event]:
    experiment, events = ticket.experiment, ticket.events
    if may_be_there:  # the connection broke on the way, or a thread was interrupted
        batch = events[0].batch
        rows = execute(
            f"SELECT {_COLUMNS} FROM ppl_bandit_events WHERE experiment = ? AND batch = ? ORDER BY position",
            (experiment, batch),
        )
        if rows:
            return [_event(row) for row in rows]
    if ticket.after is not None and execute(
        "SELECT 1 FROM ppl_bandit_events WHERE experiment = ? AND position > ? AND kind <> 'decided' LIMIT 1",
        (experiment, ticket.after),
    ):
        raise Conflict
    numbers = [int(event.number or 0) for event in events if event.kind == DECIDED and not event.lane]
    if numbers and execute(
        "SELECT 1 FROM ppl_bandit_events WHERE experiment = ? AND kind = 'decided' AND lane = '' AND number BETWEEN ? AND ? "
        "LIMIT 1",
        (experiment, min(numbers), max(numbers)),
    ):
        raise NumberTaken
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


def _event(row: Sequence[Any]) -> Event:
    position, kind, decision, batch, number, lane, arm, settles, time, body = row
    return Event(position, kind, decision, batch, number, lane, arm, bool(settles), time, decode(body))
