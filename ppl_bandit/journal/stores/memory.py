"""Event streams in memory, for a bandit without a journal.

Nobody else writes them, so decisions and rewards get into the tables together: written one by one they make a step 1.4 times as
long.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

from ppl_bandit.journal.events import DECIDED, REWARDED, Event
from ppl_bandit.journal.stores.appending import VERSION, AppendRequest, Beside, append_requests
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import Conflict, Key, timed_lock

_MAX_UNWRITTEN = 64
_END = (
    "SELECT (SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?), (SELECT MAX(position) FROM ppl_bandit_events "
    "WHERE experiment = ? AND kind <> 'decided' AND kind <> 'checkpoint')"
)


class MemoryStore(SqlStore):
    """Event streams in memory."""

    def __init__(self) -> None:
        super().__init__(_MemoryBackend())
        # Recorded events that no table has yet, each with the position of the last that a posterior depends on.
        self._unwritten: list[tuple[str, Event, int]] = []

    def append(
        self,
        experiment: str,
        events: Sequence[Event],
        after: int | None = None,
        keys: Sequence[Key] = (),
        beside: Beside = (),
    ) -> list[Event]:
        """See `SqlStore.append`."""
        with self._writing:
            is_plain = not (keys or beside) and all(event.kind in (DECIDED, REWARDED) for event in events)
            if not is_plain or any(name != experiment for name, *_ in self._unwritten[-1:]):
                self._write_all()
            if not is_plain:
                return super().append(experiment, events, after, keys, beside)
            position, last_learnt = self._end(experiment)
            if after is not None and last_learnt > after:
                raise Conflict
            recorded, unwritten = list[Event](), list[tuple[str, Event, int]]()
            for event in events:
                position += 1
                event = event._replace(position=position)
                last_learnt = last_learnt if event.kind == DECIDED else position
                recorded.append(event)
                unwritten.append((experiment, event, last_learnt))
            self._unwritten.extend(unwritten)
            if len(self._unwritten) >= _MAX_UNWRITTEN:
                self._write_all()
            return recorded

    def read(self, experiment: str, after: int = 0, before: int | None = None, **options: Any) -> list[Event]:
        """See `SqlStore.read`."""
        for name, last, _ in self._unwritten[-1:]:
            if name == experiment and after >= last.position:
                return []
        return super().read(experiment, after, before, **options)

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """See `SqlStore.find`."""
        found, asked = dict[str, list[Event]](), frozenset(decisions)
        for _, event, _ in self._unwritten[:]:
            if event.decision in asked and (event.kind == DECIDED or event.decision in found):
                found.setdefault(str(event.decision), []).append(event)
        return found if len(found) == len(decisions) else super().find(experiment, decisions)

    def _end(self, experiment: str) -> tuple[int, int]:
        """Return the last position of a stream, and that of the last event that a posterior depends on."""
        for _, event, last_learnt in self._unwritten[-1:]:
            return event.position, last_learnt
        last, last_learnt = self._query(_END, (experiment, experiment))[0]
        return last or 0, last_learnt or 0

    def _query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple]:
        if self._unwritten:
            with self._writing:
                self._write_all()
        return super()._query(statement, parameters)

    def _write_all(self) -> None:
        """Write the events that no table has yet; the caller holds `_writing`."""
        unwritten = self._unwritten[:]
        if not unwritten:
            return
        experiment = unwritten[0][0]
        statement = "SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ?"
        written = self._backend.read(statement, (experiment,))[0][0] or 0
        # Ctrl-C may have ended an earlier call of this after its commit.
        request = AppendRequest(experiment, [event for _, event, _ in unwritten if event.position > written])
        self._record(append_requests, [request])
        if request.error is not None:
            raise request.error
        del self._unwritten[: len(unwritten)]


class _MemoryBackend(SqliteBackend):
    """A SQLite database without a file: one connection, and no other process."""

    timeout = 86_400.0  # threads that learn may wait for one that compiles

    def __init__(self) -> None:
        self.label, self.read_only, self.version = "memory", False, VERSION
        self._is_immutable, self._busy, self._file = False, 0, None
        self._reading = self._writing = timed_lock(self.timeout)
        self._reader = self._writer = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._create_tables(self._writer, 0)
