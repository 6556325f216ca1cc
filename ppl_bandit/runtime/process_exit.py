"""Calls of daemon threads at the end of the process.

While Python shuts down, a daemon thread that asks for the interpreter's lock is unwound where it is. XLA's C++ code cannot be
unwound there, and the process aborts. So the calls that run end first, and no new one begins.
"""

import atexit
import os
import threading
import time

__all__ = ["begin_call", "end_call"]

_LONGEST_WAIT = 30.0  # seconds: compiling takes that long; a thread that waits for a database is outside of XLA

_RUNNING = set[int]()  # identifiers of the threads that are in a call
_IS_EXITING = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_RUNNING.clear)  # the child has none of the other threads


def begin_call() -> None:
    """Count this thread as running until `end_call`; while the process exits, a daemon thread waits here for its end."""
    _RUNNING.add(threading.get_ident())
    if _IS_EXITING.is_set() and threading.current_thread().daemon:
        end_call()
        threading.Event().wait()


def end_call() -> None:
    """End what `begin_call` began."""
    _RUNNING.discard(threading.get_ident())


@atexit.register
def _wait_for_calls() -> None:
    _IS_EXITING.set()
    until = time.monotonic() + _LONGEST_WAIT
    while _RUNNING - {threading.get_ident()} and time.monotonic() < until:
        time.sleep(0.001)
