"""A stream that lives and dies with its process: what a bandit without a journal keeps.

It has one reader, which follows it from the front, so that events are let go as soon as they were read; what stays is what
can be asked for by decision. Decisions that wait for a reward are kept up to a number; the oldest are let go first.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence

from ppl_bandit.live.journal.contract import Conflict
from ppl_bandit.live.journal.events import DECIDED, DISCARDED, Event

__all__ = ["MAX_PENDING", "MemoryStore"]

MAX_PENDING = 100_000
_BULKY = ("best_arm_probs", "propensities", "allowed")


class MemoryStore:
    """One experiment's stream in memory; see `contract.Store`."""

    is_durable = False

    def __init__(self, position: int = 0, kept: Sequence[Event] = ()):
        self._lock = threading.Lock()
        self._position = position
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
            if after is not None and self._learnt_at > after:
                raise Conflict
            recorded = [Event(self._position + i, *event[1:]) for i, event in enumerate(events, 1)]
            self._position += len(recorded)
            for event in recorded:
                if event.kind != DECIDED:
                    self._learnt_at = event.position
                self._file(event)
            self._unread += recorded
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
        if self._position <= after:  # the common case; what is recorded meanwhile is read the next time
            self._unread.clear()
            return []
        with self._lock:
            self._unread = [event for event in self._unread if event.position > after]
            found = [event for event in self._unread if before is None or event.position < before]
            return [event for event in found if not kinds or event.kind in kinds][:limit]

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event."""
        return self._position

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions."""
        with self._lock:
            places = (self._pending, self._settled, self._discarded)
            return {name: list(place[name]) for name in decisions for place in places if name in place}

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions that wait for a reward."""
        with self._lock:
            return [events[0] for events in self._pending.values() if until is None or events[0].time <= until]

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision that is kept."""
        with self._lock:
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

    def _file(self, event: Event) -> None:
        """Keep an event under its decision."""
        name = event.decision
        if name is None:
            return
        if event.kind == DECIDED:
            self._keep_some(self._pending, name, [event])
            return
        places = (self._pending, self._settled, self._discarded)
        place = next((place for place in places if name in place), None)
        if place is None:  # it was let go
            return
        events = place[name]
        events.append(event)
        if not event.settles:
            return
        del place[name]
        body = events[0].body
        if "propensities" in body:
            slim = {key: value for key, value in body.items() if key not in _BULKY}
            events[0] = events[0]._replace(body=slim | {"propensity": float(body["propensities"][events[0].arm])})
        if event.kind == DISCARDED:
            self._keep_some(self._discarded, name, events)
        else:
            self._settled[name] = events

    def _keep_some(self, place: OrderedDict[str, list[Event]], name: str, events: list[Event]) -> None:
        place[name] = events
        if len(place) > MAX_PENDING:
            place.popitem(last=False)
            self.num_dropped += 1
