"""One time limit for a whole call: for the locks it waits for, its statements, and its attempts to connect again."""

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from ppl_bandit.journal.stores.store import JournalTimeout

__all__ = ["call_within", "held", "seconds_left"]


_STALE = 5.0  # seconds after its limit at which no call is still running


class _Call(threading.local):
    deadline: float | None = None  # of the call that this thread is in, by the monotonic clock
    seconds = 0.0


_CALL = _Call()


@contextlib.contextmanager
def call_within(seconds: float) -> Iterator[None]:
    """Limit the time of a call; within another call, the earlier of the two limits holds."""
    outer, now = (_CALL.deadline, _CALL.seconds), time.monotonic()
    if outer[0] is not None and outer[0] < now - _STALE:  # left by a call that Ctrl-C ended
        outer = (None, 0.0)
    try:
        _CALL.deadline, _CALL.seconds = outer
        if outer[0] is None or now + seconds < outer[0]:
            _CALL.deadline, _CALL.seconds = now + seconds, seconds
        yield
    finally:
        _CALL.deadline, _CALL.seconds = outer


def seconds_left() -> float:
    """Return how long the call may still take, at least a millisecond; a day outside of any call."""
    return 86_400.0 if _CALL.deadline is None else max(_CALL.deadline - time.monotonic(), 0.001)


@contextlib.contextmanager
def held(lock: Any) -> Iterator[None]:
    """Hold a lock, for which the call waits no longer than its limit.

    Raises:
        JournalTimeout: if another thread holds it that long.
    """
    if not lock.acquire(timeout=seconds_left()):
        raise JournalTimeout(
            f"no answer within {_CALL.seconds:g} seconds: another thread was writing all the time; this call may or may not be "
            "recorded: call again with the same decision and reward, which counts once, or wait longer with "
            "Journal(url, timeout=...)"
        )
    try:
        yield
    finally:
        lock.release()
