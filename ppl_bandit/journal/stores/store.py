"""The errors of an event store, and the keys of requests and units."""

from typing import Any, NamedTuple

_CONTENT_ERRORS = (LookupError, TypeError, ValueError, AttributeError, AssertionError)


class JournalError(RuntimeError):
    """A journal cannot be opened, read or written; the message gives the cause, what is recorded, and what to do."""


class JournalTimeout(JournalError):
    """A call took longer than the journal's `timeout`; the message says whether it may have been recorded."""


class DamagedEvent(JournalError):
    """A recorded event cannot be read or learnt; the message gives its position."""


class Conflict(Exception):
    """An event other than a decision or a checkpoint was appended since the given position: read it and try again."""


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
