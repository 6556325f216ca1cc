"""What every place that keeps streams can do, and how it says that it cannot."""

from collections.abc import Sequence
from typing import Protocol

from ppl_bandit.journal.events import Event

__all__ = ["Conflict", "JournalError", "NumberTaken", "Store"]


class JournalError(RuntimeError):
    """A journal cannot be opened, read or written; the message says why, what is safe, and what to do."""


class Conflict(Exception):
    """Something was learnt since the position that an event builds on: follow the stream and try again."""


class NumberTaken(Exception):
    """Another process has made the decision of this number."""


class Store(Protocol):
    """Streams of events by the name of their experiment. One store may be used by many threads."""

    is_durable: bool

    def append(self, experiment: str, events: Sequence[Event], after: int | None = None) -> list[Event]:
        """Record events, all or none, and return them with their positions; what was returned is kept.

        Args:
            after: the position that they build on.

        Raises:
            Conflict: if the stream has an event other than a decision beyond `after`.
            NumberTaken: if a decision in the common lane has a number that was taken.
        """

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
        """Return the events beyond a position, in order; unless `whole`, decisions come without their bodies."""

    def last_position(self, experiment: str) -> int:
        """Return the position of the last event; 0 for an experiment that does not exist."""

    def find(self, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
        """Return all events of some decisions, in order; unknown decisions are left out."""

    def pending(self, experiment: str, until: float | None = None) -> list[Event]:
        """Return the decisions made until a time that still wait for a reward, oldest first."""

    def decisions(self, experiment: str) -> list[list[Event]]:
        """Return the events of every decision, by decision, oldest first."""

    def checkpoint(self, experiment: str) -> tuple[int, bytes] | None:
        """Return the last posterior kept, with the position that it has absorbed."""

    def keep_checkpoint(self, experiment: str, position: int, contents: bytes) -> None:
        """Keep a posterior, so that opening need not learn from the first reward on."""

    def experiments(self) -> list[str]:
        """Name the experiments."""

    def close(self) -> None:
        """Give back what the store holds open."""
