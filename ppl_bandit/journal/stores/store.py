"""The interface of an event store, and its errors."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ppl_bandit.journal.events import Event

__all__ = [
    "Conflict",
    "DamagedEvent",
    "DecisionNumberTaken",
    "JournalError",
    "JournalTimeout",
    "Key",
    "KeyTaken",
    "Store",
    "read_batches",
    "ReadingEvent",
]

_PAGE = 10_000  # events read at once
_CONTENT_ERRORS = (LookupError, TypeError, ValueError, AttributeError, AssertionError)


class JournalError(RuntimeError):
    """A journal cannot be opened, read or written; the message gives the cause, what is recorded, and what to do."""


class JournalTimeout(JournalError):
    """A call took longer than the journal's `timeout`; the message says whether it may have been recorded."""


class DamagedEvent(JournalError):
    """A recorded event cannot be read or learnt; the message gives its position."""


class Conflict(Exception):
    """An event other than a decision was appended since the given position: read it and try again."""


class DecisionNumberTaken(Exception):
    """Another process has recorded the decision of this number."""


class KeyTaken(Exception):
    """Another call has recorded a decision for the same request or unit: read it."""


class Key(NamedTuple):
    """The id of a request, or a unit, as a digest.

    Attributes:
        name: the kind of call or "unit", and the digest.
        value: ids of the decisions that it stands for, with commas between.
        owner: key of the unit that erases it; None if none does.
        arguments: salted digest of the arguments of the request; "" for a unit.
        expected: to record a key, the value that it has until then; None if it does not exist.
    """

    name: str
    value: str
    owner: str | None
    arguments: str
    expected: str | None = None


class ReadingEvent(NamedTuple):
    """A context that turns errors which the contents of a recorded event cause into `DamagedEvent`."""

    experiment: str
    position: int

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Raise `DamagedEvent`, if there was such an error."""
        if isinstance(error, _CONTENT_ERRORS):
            raise DamagedEvent(
                f"the event at position {self.position} of the experiment {self.experiment!r} cannot be read "
                f"({type(error).__name__}: {error}): it was edited or damaged; `ppl-bandit journal status` gives the first "
                "position at which the digests differ; restore the journal from a copy"
            ) from error


class Store(Protocol):
    """What deciding and learning need of event streams, one per experiment. Threads may share a store."""

    @property
    def timeout(self) -> float:
        """Seconds that a call may take."""

    def append(
        self, experiment: str, events: Sequence[Event], after: int | None = None, keys: Sequence[Key] = ()
    ) -> list[Event]:
        """Append events, all or none, and return them with their positions; they are durable when this returns.

        Args:
            after: the last position that the caller has read; None if the events depend on no earlier event.
            keys: to record with the events.

        Raises:
            KeyTaken: if a key has another value than expected.
            Conflict: if the stream has an event other than a decision beyond `after`.
            DecisionNumberTaken: if a decision in the empty lane has a number that is already recorded.
        """

    def read(
        self,
        experiment: str,
        after: int = 0,
        before: int | None = None,
        *,
        limit: int | None = None,
        whole: bool = False,
    ) -> list[Event]:
        """Return the events between two positions, both excluded, in order; unless `whole`, decisions have no body."""

    def turn(self, experiment: str) -> AbstractContextManager:
        """Wait until no other process learns, if the store can; a hint that avoids conflicts."""

    def keys(self, experiment: str, names: Sequence[str] | None) -> dict[str, Key]:
        """Return the keys with some names, or all; unknown ones are left out."""

    def owned(self, experiment: str, owner: str) -> list[Event]:
        """Return the events with a personal part of a unit, given its key, that was not erased."""

    def erase(self, experiment: str, owner: str, events: Sequence[Event], after: int, checkpoint: bytes) -> list[Event]:
        """Blank the personal parts of a unit, and append events: the last announces a checkpoint, which replaces all others."""

    def scrub(self) -> None:
        """Remove what the database keeps of contents that were blanked."""

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions, in order; unknown decisions are left out."""

    def pending(self, experiment: str, until: float | None = None, after: int = 0) -> list[Event]:
        """Return the decisions made until a time, and beyond a position, whose reward is pending, oldest first."""

    def num_pending(self, experiment: str, until: float | None = None) -> int:
        """Return the number of decisions made until a time whose reward is pending."""

    def first_after(self, experiment: str, until: float, after: int) -> int:
        """Return the first position beyond another of a decision made after a time; the next position if there is none."""

    def decisions(self, experiment: str, after: int = 0, limit: int | None = None) -> list[list[Event]]:
        """Return the events of every decision beyond a position, or of the first so many, grouped by decision, oldest first."""

    def ping(self) -> None:
        """Raise JournalError if nothing can be written now."""

    def imported(self, experiment: str) -> list[Event]:
        """Return the imported plays whose propensities were given, oldest first."""


def read_batches(
    store: Store, experiment: str, after: int, before: int | None = None, whole: bool = False
) -> Iterator[list[Event]]:
    """Yield the events between two positions, those of one call together."""
    size = _PAGE
    while True:
        events = store.read(experiment, after, before, limit=size, whole=whole)
        is_last_page = len(events) < size
        batch: list[Event] = []
        for event in events:
            if batch and event.batch != batch[0].batch:
                yield batch
                after, batch = batch[-1].position, []
            batch.append(event)
        if is_last_page:
            if batch:
                yield batch
            return
        size = _PAGE if len(batch) < size else 2 * size  # the events of the last call may continue on the next page
