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
from ppl_bandit.journal.stores.store import Conflict

__all__ = ["MAX_PENDING", "MemoryStore"]

MAX_PENDING = 100_000
_LARGE_FIELDS = ("best_arm_probs", "allowed")  # dropped once a decision has its reward


class MemoryStore:
    """One experiment's stream in memory; see `Store`.

    Args:
        position: of the last event before this stream continues.
        events: those of the decisions up to that position.
    """

    def __init__(self, position: int = 0, events: Sequence[Event] = ()):
        self._lock = threading.Lock()
        self._indexed = position  # the last event that is in the index by decision
        self._last_not_decision = position
        self._unread: list[Event] = []
        self._pending: OrderedDict[str, list[Event]] = OrderedDict()
        self._rewarded: dict[str, list[Event]] = {}
        self._discarded: OrderedDict[str, list[Event]] = OrderedDict()
        self._imported: list[Event] = []
        self.num_dropped = 0
        for event in events:
            self._index(event)

    def append(self, experiment: str, events: Sequence[Event], after: int | None = None) -> list[Event]:
        """Append events."""
        with self._lock:
            self._index_unread()
            if after is not None and self._last_not_decision > after:
                raise Conflict
            recorded = [Event(self._indexed + i, *event[1:]) for i, event in enumerate(events, 1)]
            self._unread.extend(recorded)
            self._index_unread()
            return recorded

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
        """Return the events beyond a position, and drop those up to it."""
        with self._lock:
            self._index_unread()
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

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions whose reward is pending."""
        with self._lock:
            self._index_unread()
            return [events[0] for events in self._pending.values() if until is None or events[0].time <= until]

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision in memory."""
        with self._lock:
            self._index_unread()
            groups = [*self._rewarded.values(), *self._pending.values(), *self._discarded.values()]
            return sorted(map(list, groups), key=lambda events: events[0].position)

    def imported(self, experiment: str) -> list[Event]:
        """Return the imported plays whose propensities were given."""
        with self._lock:
            self._index_unread()
            return list(self._imported)

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
        first = events[0]
        if "best_arm_probs" in first.body:
            small = {key: value for key, value in first.body.items() if key not in _LARGE_FIELDS}
            events = [Event._make((*first[:-1], small)), *events[1:]]
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
