"""One time limit for a whole call: for the locks it waits for, its statements, and its attempts to connect again."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from ppl_bandit.journal.stores.store import JournalTimeout
from ppl_bandit.runtime.process_exit import begin_call, end_call

__all__ = ["call_within", "held", "seconds_left"]


_UNLIMITED = 3600.0  # seconds
_UNCHANGED = contextlib.nullcontext()
_STALE = 5.0  # seconds after its limit at which no call is still running


class _Call(threading.local):
    deadline: float | None = None  # of the call that this thread is in, by the monotonic clock
    seconds = 0.0


_CALL = _Call()


def call_within(seconds: float) -> contextlib.AbstractContextManager:
    """Return the context of a call of limited time; within another call, the earlier of the two limits holds."""
    outer, now = _CALL.deadline, time.monotonic()
    if outer is not None and now - _STALE <= outer <= now + seconds:
        return _UNCHANGED
    return _limited(now, seconds)


@contextlib.contextmanager
def _limited(now: float, seconds: float) -> Iterator[None]:
    outer = _CALL.deadline, _CALL.seconds
    if outer[0] is not None and outer[0] < now - _STALE:  # left by a call that Ctrl-C ended
        outer = (None, 0.0)
    try:
        if outer[0] is None:
            begin_call()
        _CALL.deadline, _CALL.seconds = now + seconds, seconds
        yield
    finally:
        _CALL.deadline, _CALL.seconds = outer
        if outer[0] is None:
            end_call()


def seconds_left() -> float:
    """Return how long the call may still take, at least a millisecond; a day outside of any call."""
    return 86_400.0 if _CALL.deadline is None else max(_CALL.deadline - time.monotonic(), 0.001)


def held(lock: Any) -> contextlib.AbstractContextManager:
    """Return the context that holds a lock, for which the call waits no longer than its limit.

    Without a limit it is the lock itself, which Ctrl-C cannot leave behind.

    Raises:
        JournalTimeout: if another thread holds it that long.
    """
    return lock if seconds_left() > _UNLIMITED else _Held(lock)


class _Held:
    """A lock with a limit; a generator takes four times as long."""

    __slots__ = ("_lock",)

    def __init__(self, lock: Any):
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=seconds_left()):
            raise JournalTimeout(
                f"no answer within {_CALL.seconds:g} seconds: another thread was writing all the time; this call may or may "
                "not be recorded: call again with the same decision and reward, which counts once, or wait longer with "
                "Journal(url, timeout=...)"
            )

    def __exit__(self, *error: Any) -> None:
        self._lock.release()
