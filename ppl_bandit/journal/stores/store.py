"""The errors of an event store, and the keys of requests and units."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from ppl_bandit.runtime.cpu_threads import IS_EXITING, RUNNING, wait_for_exit

_CONTENT_ERRORS = (LookupError, TypeError, ValueError, AttributeError, AssertionError)


class JournalError(RuntimeError):
    """A journal cannot be opened, read or written; the message gives the cause, what is recorded, and what to do."""


class JournalTimeout(JournalError):
    """A call took longer than the journal's `timeout`, or broke off; the message says whether it may have been recorded."""


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


_UNLIMITED = 3600.0  # seconds
_UNCHANGED = contextlib.nullcontext()
STALE = 5.0  # seconds after its limit at which no call is still running


class _Call(threading.local):
    """The call that a thread is in: its end by the monotonic clock, None outside of any call, and its limit in seconds."""

    deadline: float | None = None
    seconds = 0.0


CALL = _Call()


def call_within(seconds: float) -> AbstractContextManager:
    """Return the context of a call of limited time; within another call, the earlier of the two limits holds."""
    outer, now = CALL.deadline, time.monotonic()
    if outer is not None and now - STALE <= outer <= now + seconds:
        return _UNCHANGED
    return _limited(now, seconds)


@contextlib.contextmanager
def _limited(now: float, seconds: float) -> Iterator[None]:
    outer = CALL.deadline, CALL.seconds
    if outer[0] is not None and outer[0] < now - STALE:  # left by a call that Ctrl-C ended
        outer = (None, 0.0)
    thread = threading.get_ident()
    try:
        if outer[0] is None:
            RUNNING.add(thread)
            if IS_EXITING.is_set():
                wait_for_exit()
        CALL.deadline, CALL.seconds = now + seconds, seconds
        yield
    finally:
        CALL.deadline, CALL.seconds = outer
        if outer[0] is None:
            RUNNING.discard(thread)


def seconds_left() -> float:
    """Return how long the call may still take, at least a millisecond; a day outside of any call."""
    return 86_400.0 if CALL.deadline is None else max(CALL.deadline - time.monotonic(), 0.001)


_RLock: Any = type(threading.RLock())


class _TimedLock(_RLock):
    """A lock for which a call waits no longer than its limit; a thread may hold it several times."""

    def __enter__(self) -> bool:
        if self.acquire(False) or self.acquire(timeout=seconds_left()):
            return True
        raise JournalTimeout(
            f"no answer within {CALL.seconds:g} seconds: another thread was writing all the time; this call may or may "
            "not be recorded: call again with the same decision and reward, which counts once, or wait longer with "
            "Journal(url, timeout=...)"
        )


def timed_lock(timeout: float) -> Any:
    """Return a lock for calls of at most so many seconds; without a limit an ordinary one, which Ctrl-C never leaves held."""
    return threading.RLock() if timeout > _UNLIMITED else _TimedLock()


@dataclass(eq=False)
class Request:
    """What a thread wants; it is done once it has a result or an error."""

    result: Any = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)


AnyRequest = TypeVar("AnyRequest", bound=Request)


class GroupedCalls(Generic[AnyRequest]):
    """Collects the requests of threads that wait for a lock: the first does the work of all (group commit).

    Args:
        lock: held during the work.
        work: does some requests; it must do the first, and may leave others to their own threads.
    """

    def __init__(self, lock: AbstractContextManager, work: Callable[[Sequence[AnyRequest]], None]):
        self._lock, self._work = lock, work
        self._queue: list[AnyRequest] = []  # appended to by every thread, shortened by the one that holds the lock

    def add(self, requests: Sequence[AnyRequest]) -> None:
        """Let the next call do these requests too, as far as it can."""
        self._queue.extend(requests)

    def __call__(self, request: AnyRequest) -> Any:
        """Do a request, and those of the threads that wait, or wait until another thread has done it; return its result."""
        self._queue.append(request)
        with self._lock:
            if request.result is None and request.error is None:
                taken = self._queue[:]
                del self._queue[: len(taken)]
                # A request that another thread took and left, also because of Ctrl-C, is no longer in the queue.
                self._work([request, *(other for other in taken if other is not request)])
        if request.error is not None:
            raise request.error
        return request.result
