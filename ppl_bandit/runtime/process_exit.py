"""Calls of daemon threads at the end of the process.

While Python shuts down, a daemon thread that asks for the interpreter's lock is unwound where it is. XLA's C++ code cannot be
unwound there, and the process aborts. So the calls that run end first, and no new one begins: a call adds its thread to
`RUNNING`, then calls `wait_for_exit` if `IS_EXITING` is set, and removes its thread at its end.
"""

import atexit
import os
import threading
import time

_LONGEST_WAIT = 30.0  # seconds: compiling takes that long; a thread that waits for a database is outside of XLA

RUNNING = set[int]()  # identifiers of the threads that are in a call
IS_EXITING = threading.Event()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=RUNNING.clear)  # the child has none of the other threads


def wait_for_exit() -> None:
    """Let a daemon thread wait here for the end of the process."""
    if threading.current_thread().daemon:
        RUNNING.discard(threading.get_ident())
        threading.Event().wait()


@atexit.register
def _wait_for_calls() -> None:
    IS_EXITING.set()
    until = time.monotonic() + _LONGEST_WAIT
    while RUNNING - {threading.get_ident()} and time.monotonic() < until:
        time.sleep(0.001)
