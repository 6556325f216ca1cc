"""An event stream in memory, for a bandit without a journal.

The stream has one reader, which reads it in order, so that an event is dropped once it was read. Events of decisions stay,
grouped by decision. At most `MAX_PENDING` decisions with a pending reward are kept; the oldest are dropped first.

Ctrl-C may raise between any two bytecodes. Events are appended in one operation (`list.extend`), and the index by decision is
brought up to date by the next call; indexing an event twice changes nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ppl_bandit.journal.events import DECIDED, DISCARDED, IMPORTED, Event
from ppl_bandit.journal.stores.personal import ERASED, unit_key
from ppl_bandit.journal.stores.store import Conflict, Key, KeyTaken

__all__ = ["MAX_PENDING", "MemoryStore"]

MAX_PENDING = 100_000


class MemoryStore:
    """One experiment's stream in memory; see `Store`.

    Args:
        position: of the last event before this stream continues.
        events: those of the decisions up to that position.
        keys: of units and requests.
    """

    timeout = 86_400.0  # threads that learn may wait for one that compiles

    def __init__(self, position: int = 0, events: Sequence[Event] = (), keys: Sequence[Key] = ()):
        self._lock = threading.Lock()
        self._indexed = position  # the last event that is in the index by decision
        self._last_not_decision = position
        self._unread: list[Event] = []
        self._pending: OrderedDict[str, list[Event]] = OrderedDict()
        self._rewarded: dict[str, list[Event]] = {}
        self._discarded: OrderedDict[str, list[Event]] = OrderedDict()
        self._imported: list[Event] = []
        self._keys = {key.name: key for key in keys}
        self.num_dropped = 0
        for event in sorted(events, key=lambda event: event.position):  # as they were appended
            self._index(event)

    def append(
        self, experiment: str, events: Sequence[Event], after: int | None = None, keys: Sequence[Key] = ()
    ) -> list[Event]:
        """Append events."""
        with self._lock:
            self._index_unread()
            if after is not None and self._last_not_decision > after:
                raise Conflict
            for key in keys:
                if key.expected != (self._keys[key.name].value if key.name in self._keys else None):
                    raise KeyTaken
            self._keys |= {key.name: key for key in keys}  # one without a decision, after an interruption, is replaced
            recorded = [Event(self._indexed + i, *event[1:]) for i, event in enumerate(events, 1)]
            self._unread.extend(recorded)
            self._index_unread()
            return recorded

    def keys(self, experiment: str, names: Sequence[str] | None) -> dict[str, Key]:
        """Return the keys with some names, or all."""
        with self._lock:
            if names is None:
                return dict(self._keys)
            return {name: self._keys[name] for name in names if name in self._keys}

    def owned(self, experiment: str, owner: str) -> list[Event]:
        """Return the events with a personal part of a unit."""
        with self._lock:
            self._index_unread()
            groups = (self._pending, self._rewarded, self._discarded)
            found = [event for group in groups for events in group.values() for event in events]
            return [event for event in found if "unit" in event.body and unit_key(event.body["unit"]) == owner]

    def erase(self, experiment: str, owner: str, events: Sequence[Event], after: int, checkpoint: bytes) -> list[Event]:
        """Blank the personal parts of a unit, and append events."""
        blanked = {event.position: _blanked(event) for event in self.owned(experiment, owner)}
        recorded = self.append(experiment, events, after)
        with self._lock:
            for group in (self._pending, self._rewarded, self._discarded):
                for name, own in group.items():
                    if own[0].position in blanked:
                        group[name] = [blanked.get(event.position, event) for event in own]
            self._keys = {name: key for name, key in self._keys.items() if key.owner != owner}
        return recorded

    def scrub(self) -> None:
        """Do nothing: what was blanked is gone."""

    def turn(self, experiment: str) -> AbstractContextManager:
        """Return a context without effect: no other process learns."""
        return nullcontext()

    def read(
        self,
        experiment: str,
        after: int = 0,
        before: int | None = None,
        *,
        limit: int | None = None,
        whole: bool = False,
    ) -> list[Event]:
        """Return the events beyond a position, and drop those up to it; if `whole`, those of decisions alone, and drop none."""
        with self._lock:
            self._index_unread()
            if whole:
                return self._settled_or_decided(after)[:limit]
            if after >= self._indexed:  # the common case: there is no new event
                self._unread = []
                return []
            self._unread = [event for event in self._unread if event.position > after]
            return [event for event in self._unread if before is None or event.position < before][:limit]

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions."""
        with self._lock:
            self._index_unread()
            groups = (self._pending, self._rewarded, self._discarded)
            return {name: list(group[name]) for name in decisions for group in groups if name in group}

    def first_after(self, experiment: str, until: float, after: int) -> int:
        """Return 1: there are few pending decisions, and they are in one place."""
        return 1

    def pending(self, experiment: str, until: float | None = None, after: int = 0) -> list[Event]:
        """Return the decisions whose reward is pending."""
        with self._lock:
            self._index_unread()
            return [events[0] for events in self._pending.values() if until is None or events[0].time <= until]

    def num_pending(self, experiment: str, until: float | None = None) -> int:
        """Return the number of decisions whose reward is pending."""
        return len(self.pending(experiment, until))

    def ping(self) -> None:
        """Do nothing: memory can be written."""

    def decisions(self, experiment: str, after: int = 0, limit: int | None = None) -> list[list[Event]]:
        """Return the events of every decision in memory."""
        with self._lock:
            self._index_unread()
            groups = [*self._rewarded.values(), *self._pending.values(), *self._discarded.values()]
            found = [list(events) for events in groups if events[0].position > after]
            return sorted(found, key=lambda events: events[0].position)[:limit]

    def imported(self, experiment: str) -> list[Event]:
        """Return the imported plays whose propensities were given."""
        with self._lock:
            self._index_unread()
            return list(self._imported)

    def _settled_or_decided(self, after: int) -> list[Event]:
        """Return the events beyond a position of the decisions that were made or settled beyond it; others cost nothing."""
        found: list[Event] = []
        for group in (self._pending, self._rewarded, self._discarded):
            for events in reversed(group.values()):
                new = [event for event in events if event.position > after]
                if not new:
                    break
                found += new
        return sorted(found, key=lambda event: event.position)

    def _index_unread(self) -> None:
        """Add the events that are not in the index yet, usually none or those just appended."""
        if not self._unread or self._unread[-1].position <= self._indexed:
            return
        first = max(self._indexed + 1 - self._unread[0].position, 0)  # positions have no gaps
        for event in self._unread[first:]:
            if event.kind != DECIDED:
                self._last_not_decision = event.position
            self._index(event)
            self._indexed = event.position

    def _index(self, event: Event) -> None:
        """Add an event to its decision; calling it again with the same event changes nothing."""
        name = event.decision
        if event.kind == IMPORTED and "propensity" in event.body:
            if not self._imported or self._imported[-1].position < event.position:
                self._imported.append(event)
        if name is None:
            return
        if event.kind == DECIDED:
            self._insert_bounded(self._pending, name, [event])
            return
        groups: tuple[Any, ...] = (self._pending, self._rewarded, self._discarded)
        found = [group for group in groups if name in group]
        if not found:  # the decision was dropped
            return
        # After an interruption a decision may be in two groups: the one with the later event is right.
        group = found[0] if len(found) == 1 else max(found, key=lambda group: group[name][-1].position)
        events = group[name]
        if events[-1].position < event.position:
            group[name] = events = [*events, event]
        if not event.settles:
            return
        target: Any = self._discarded if event.kind == DISCARDED else self._rewarded
        if target is self._discarded:
            self._insert_bounded(target, name, events)
        else:
            target[name] = events
        for group in groups:
            if group is not target:
                group.pop(name, None)

    def _insert_bounded(self, group: OrderedDict[str, list[Event]], name: str, events: list[Event]) -> None:
        group[name] = events
        if len(group) > MAX_PENDING:
            group.popitem(last=False)
            self.num_dropped += 1


def _blanked(event: Event) -> Event:
    kept = {name: value for name, value in event.body.items() if name not in event.body["personal"]}
    return event._replace(body=kept | {ERASED: True})
