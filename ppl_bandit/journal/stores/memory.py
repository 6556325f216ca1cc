"""A stream that lives and dies with its process: what a bandit without a journal keeps.

It has one reader, which follows it from the front, so that events are let go as soon as they were read; what stays is what
can be asked for by decision. Decisions that wait for a reward are kept up to a number; the oldest are let go first.

An interruption (Ctrl-C) may come between any two steps of Python. Events are recorded by one step, and what follows from them
is brought up to date by whoever comes next; doing that twice changes nothing.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from ppl_bandit.journal.events import DECIDED, DISCARDED, Event
from ppl_bandit.journal.stores.contract import Conflict

__all__ = ["MAX_PENDING", "MemoryStore"]

MAX_PENDING = 100_000
_BULKY = ("best_arm_probs", "propensities", "allowed")


class MemoryStore:
    """One experiment's stream in memory; see `contract.Store`."""

    is_durable = False

    def __init__(self, position: int = 0, kept: Sequence[Event] = ()):
        self._lock = threading.Lock()
        self._filed = position  # up to here events are filed under their decisions
        self._learnt_at = position
        self._unread: list[Event] = []
        self._pending: OrderedDict[str, list[Event]] = OrderedDict()
        self._settled: dict[str, list[Event]] = {}
        self._discarded: OrderedDict[str, list[Event]] = OrderedDict()
        self.num_dropped = 0
        for event in kept:
            self._file(event)

    def append(self, experiment: str, events: Sequence[Event], after: int | None = None) -> list[Event]:
        """Record events."""
        with self._lock:
            self._bring_up_to_date()
            if after is not None and self._learnt_at > after:
                raise Conflict
            recorded = [Event(self._filed + i, *event[1:]) for i, event in enumerate(events, 1)]
            self._unread.extend(recorded)
            self._bring_up_to_date()
            return recorded

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
        """Return the events beyond a position, and let go of those up to it."""
        with self._lock:
            self._bring_up_to_date()
            if after >= self._filed:  # mostly there is nothing new
                self._unread = []
                return []
            self._unread = [event for event in self._unread if event.position > after]
            found = [event for event in self._unread if before is None or event.position < before]
            return [event for event in found if not kinds or event.kind in kinds][:limit]

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event."""
        with self._lock:
            self._bring_up_to_date()
            return self._filed

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions."""
        with self._lock:
            self._bring_up_to_date()
            places = (self._pending, self._settled, self._discarded)
            return {name: list(place[name]) for name in decisions for place in places if name in place}

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions that wait for a reward."""
        with self._lock:
            self._bring_up_to_date()
            return [events[0] for events in self._pending.values() if until is None or events[0].time <= until]

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision that is kept."""
        with self._lock:
            self._bring_up_to_date()
            kept = [*self._settled.values(), *self._pending.values(), *self._discarded.values()]
            return sorted(map(list, kept), key=lambda events: events[0].position)

    def checkpoint(self, experiment: str) -> tuple[int, bytes] | None:
        """Return None: nothing outlives the process."""
        return None

    def keep_checkpoint(self, experiment: str, position: int, contents: bytes) -> None:
        """Do nothing."""

    def experiments(self) -> list[str]:
        """Return nothing: a stream in memory has no name."""
        return []

    def close(self) -> None:
        """Do nothing."""

    def _bring_up_to_date(self) -> None:
        """File what was recorded since; mostly nothing, or what was recorded just now."""
        if not self._unread or self._unread[-1].position <= self._filed:
            return
        first = max(self._filed + 1 - self._unread[0].position, 0)  # positions have no gaps
        for event in self._unread[first:]:
            if event.kind != DECIDED:
                self._learnt_at = event.position
            self._file(event)
            self._filed = event.position

    def _file(self, event: Event) -> None:
        """Keep an event under its decision; once, however often it is called."""
        name = event.decision
        if name is None:
            return
        if event.kind == DECIDED:
            self._keep_some(self._pending, name, [event])
            return
        places: tuple[Any, ...] = (self._pending, self._settled, self._discarded)
        found = [place for place in places if name in place]
        if not found:  # it was let go
            return
        place = found[0] if len(found) == 1 else max(found, key=lambda place: place[name][-1].position)
        events = place[name]
        if events[-1].position < event.position:
            place[name] = events = [*events, event]
        if not event.settles:
            return
        first = events[0]
        if "propensities" in first.body:
            slim = {key: value for key, value in first.body.items() if key not in _BULKY}
            slim["propensity"] = float(first.body["propensities"][first.arm])
            events = [Event._make((*first[:-1], slim)), *events[1:]]
        target: Any = self._discarded if event.kind == DISCARDED else self._settled
        if target is self._discarded:
            self._keep_some(target, name, events)
        else:
            target[name] = events
        for place in places:
            if place is not target:
                place.pop(name, None)

    def _keep_some(self, place: OrderedDict[str, list[Event]], name: str, events: list[Event]) -> None:
        place[name] = events
        if len(place) > MAX_PENDING:
            place.popitem(last=False)
            self.num_dropped += 1
