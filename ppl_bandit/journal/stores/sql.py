"""Event streams in a relational database: the same tables and statements for SQLite and PostgreSQL.

A backend runs a function in a transaction; all differences between the databases are in the backends. Threads that append at
the same time share one transaction, and so one flush to disk (group commit).
"""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

from ppl_bandit.journal.events import IMPORTED, Event, digest_of, group_by_decision
from ppl_bandit.journal.stores.appending import AppendRequest, Execute, append_requests
from ppl_bandit.journal.stores.grouped_calls import GroupedCalls
from ppl_bandit.journal.stores.store import DamagedEvent, JournalError
from ppl_bandit.journal.stores.tables import COLUMNS, VERSION_WITH_HEADS, event_from_row

__all__ = ["Backend", "Damage", "Result", "SqlStore"]

_COLUMNS_WITHOUT_DECISION_BODY = COLUMNS.replace("body", "CASE WHEN kind = 'decided' THEN '{}' ELSE body END")
_MAX_PARAMETERS = 500  # of one statement
_PAGE = 10_000  # rows read at once to check the chain

Result = TypeVar("Result")


class Backend(Protocol):
    """A database connection.

    `run` passes to `work` a function (statement, parameters, is_many=False) -> rows, and a flag: whether an earlier attempt may
    have been committed before its connection broke. Statements mark parameters with `?`. With `is_many` they run once per
    row, and may run as late as at the end of the transaction.

    Attributes:
        label: for messages: path, or host, port and database.
        version: of the journal's tables.
        read_only: whether nothing can be written.
    """

    label: str
    version: int
    read_only: bool

    def run(self, work: Callable[[Execute, bool], Result], locks: Sequence[str] = ()) -> Result:
        """Run work in one transaction; with locks, as the only writer of these experiments."""

    def turn(self, experiment: str) -> AbstractContextManager:
        """See `SqlStore.turn`; it may be without effect."""

    def close(self) -> None:
        """Close the connection."""


class Damage(NamedTuple):
    """The first fault of a stream: its position, and what is wrong there."""

    position: int
    reason: str


class SqlStore:
    """Event streams in a database; see `Store`."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._pid = os.getpid()
        self._writing = threading.Lock()
        self._append = GroupedCalls[AppendRequest](lambda: self._writing, self._append_all)

    def append(self, experiment: str, events: Sequence[Event], after: int | None = None) -> list[Event]:
        """Append events; threads that append at the same time share a transaction."""
        return self._append(AppendRequest(experiment, events, after))

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
        columns = COLUMNS if whole else _COLUMNS_WITHOUT_DECISION_BODY
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
        return [event_from_row(experiment, row) for row in self._query(statement, *parameters)]

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event; 0 for an experiment that does not exist."""
        return self._query("SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?", experiment)[0][0] or 0

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions."""
        found: dict[str, list[Event]] = defaultdict(list)
        for start in range(0, len(decisions), _MAX_PARAMETERS):
            some = decisions[start : start + _MAX_PARAMETERS]
            rows = self._query(
                f"SELECT {COLUMNS} FROM ppl_bandit_events WHERE experiment = ? AND decision IN "
                f"({', '.join('?' * len(some))})",
                experiment,
                *some,
            )
            # With ORDER BY position, or with `decision IS NOT NULL`, SQLite reads the whole index: it is sorted here.
            for row in sorted(rows, key=lambda row: row[0]):
                event = event_from_row(experiment, row)
                found[str(event.decision)].append(event)
        return dict(found)

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions whose reward is pending."""
        columns = ", ".join(f"made.{name}" for name in COLUMNS.split(", "))
        rows = self._query(
            f"SELECT {columns} FROM ppl_bandit_events made WHERE made.experiment = ? AND made.kind = 'decided' "
            "AND made.time <= ? AND NOT EXISTS (SELECT 1 FROM ppl_bandit_events later WHERE later.decision IS NOT NULL "
            "AND later.experiment = made.experiment AND later.decision = made.decision AND later.settles = 1) "
            "ORDER BY made.position",
            experiment,
            1e300 if until is None else until,
        )
        return [event_from_row(experiment, row) for row in rows]

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision."""
        return group_by_decision(self.read(experiment, whole=True))

    def imported(self, experiment: str) -> list[Event]:
        """Return the imported plays whose propensities were given."""
        return [event for event in self.read(experiment, kinds=(IMPORTED,)) if "propensity" in event.body]

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
            old = "DELETE FROM ppl_bandit_checkpoints WHERE experiment = ? AND position <= ?"
            execute(old, [(experiment, position)], True)
            execute("INSERT INTO ppl_bandit_checkpoints VALUES (?, ?, ?)", [(experiment, position, contents)], True)

        with self._writing:
            self._run(work, [experiment])

    def experiments(self) -> list[str]:
        """Return the names of the experiments."""
        return [row[0] for row in self._query("SELECT DISTINCT experiment FROM ppl_bandit_events ORDER BY experiment")]

    def head(self, experiment: str) -> tuple[int, str]:
        """Return the position and the digest of the last event; (0, "") for an experiment that does not exist."""
        rows = self._query(
            "SELECT position, digest FROM ppl_bandit_events WHERE experiment = ? ORDER BY position DESC LIMIT 1",
            experiment,
        )
        return (int(rows[0][0]), str(rows[0][1])) if rows else (0, "")

    def find_damage(self, experiment: str, head: tuple[int, str] | None = None) -> Damage | None:
        """Check the chain of digests and the head record; return the first fault, or None.

        Args:
            head: position and digest of an event, kept elsewhere, to compare with.
        """
        heads = [] if head is None else [(*head, "given")]
        if self._backend.version >= VERSION_WITH_HEADS:  # read first: events may be appended in the meantime
            rows = self._query(
                "SELECT (SELECT position FROM ppl_bandit_heads WHERE experiment = ?), (SELECT digest FROM ppl_bandit_heads "
                "WHERE experiment = ?), (SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?)",
                *[experiment] * 3,
            )
            at, recorded, last = rows[0]
            if at is None and last is not None:
                return Damage(last, "the record of its last event was removed")
            heads += [] if at is None else [(at, recorded, "recorded")]
        position, digest = 0, ""
        for row in self._rows_with_digest(experiment):
            position += 1
            event = Event._make((*row[:7], bool(row[7]), row[8], {}))
            digest = digest_of(digest, experiment, event, row[9])
            if row[0] != position or row[10] != digest:
                return Damage(position, "the event does not follow from those before it")
            for at, expected, source in heads:
                if at == position and expected != digest:
                    return Damage(position, f"the event has another digest than the {source} head")
        for at, _, source in heads:
            if at > position:
                return Damage(position + 1, f"events were removed: the {source} head is at position {at}")
        return None

    def check(self, experiment: str, head: tuple[int, str] | None = None) -> None:
        """Check that no event was edited or removed; the argument is that of `find_damage`.

        Raises:
            DamagedEvent: with the first position at which the stream is not what was recorded.
        """
        damage = self.find_damage(experiment, head)
        if damage is not None:
            raise DamagedEvent(
                f"the experiment {experiment!r} is damaged at position {damage.position}: {damage.reason}; it was edited or is "
                f"incomplete: restore {self._backend.label} from a copy"
            )

    def check_name(self, experiment: str) -> None:
        """Check that an experiment exists.

        Raises:
            JournalError: with the names of those that do.
        """
        if not self.last_position(experiment):
            known = ", ".join(self.experiments()) or "none"
            raise JournalError(
                f"{self._backend.label} has no experiment {experiment!r}; its experiments: {known}: give one of these names"
            )

    def _rows_with_digest(self, experiment: str) -> Iterator[tuple]:
        after = 0
        while True:
            rows = self._query(
                f"SELECT {COLUMNS}, digest FROM ppl_bandit_events WHERE experiment = ? AND position > ? "
                "ORDER BY position LIMIT ?",
                experiment,
                after,
                _PAGE,
            )
            yield from rows
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def turn(self, experiment: str) -> AbstractContextManager:
        """Wait until no other process learns; a hint that avoids conflicts, given up after a second."""
        return self._backend.turn(experiment)

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
        if locks and self._backend.read_only:
            raise JournalError(f"{self._backend.label} was opened to read only; nothing was recorded")
        return self._backend.run(work, locks)

    def _append_all(self, requests: Sequence[AppendRequest]) -> None:
        """Append the events of all requests in one transaction; if the database fails, none of them is recorded."""
        by_experiment: dict[str, list[AppendRequest]] = defaultdict(list)
        for request in requests:
            by_experiment[request.experiment].append(request)
        results: dict[str, list[list[Event] | Exception]] = {}

        def work(execute: Execute, is_again: bool) -> None:
            for experiment, own in by_experiment.items():
                results[experiment] = append_requests(execute, experiment, own, is_again)

        try:
            self._run(work, sorted(by_experiment))
        except Exception as error:
            for request in requests:
                request.error = error
            if not isinstance(error, JournalError):
                raise
            return
        for experiment, own in by_experiment.items():
            for request, result in zip(own, results[experiment], strict=True):
                if isinstance(result, Exception):
                    request.error = result
                else:
                    request.result = result
