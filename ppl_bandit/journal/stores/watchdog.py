"""End calls to a server that does not answer, also if its process is stopped and cannot end them itself."""

import contextlib
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator

__all__ = ["Watchdog"]


class Watchdog:
    """Shuts down the socket of a call that takes too long; the driver then raises as for a broken connection.

    Args:
        seconds: that a call may take.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._lock = threading.Lock()
        self._calls: dict[str, tuple[float, int]] = {}  # deadline and socket of the running calls, by connection
        self._fired: set[str] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = threading.Event()

    @contextlib.contextmanager
    def watching(self, key: str, fileno: int) -> Iterator[None]:
        """Shut down a socket if the body takes too long; `key` is its connection."""
        if self._thread is None:
            period = min(1.0, self._seconds / 4)
            arguments = weakref.ref(self), self._is_stopped, period
            self._thread = threading.Thread(target=_watch, args=arguments, name="ppl_bandit watchdog", daemon=True)
            self._thread.start()
        with self._lock:
            self._fired.discard(key)
            self._calls[key] = time.monotonic() + self._seconds, fileno
        try:
            yield
        finally:
            with self._lock:
                self._calls.pop(key, None)

    def has_fired(self, key: str) -> bool:
        """Return whether the last call of a connection was ended."""
        return key in self._fired

    def stop(self) -> None:
        """End the thread."""
        self._is_stopped.set()

    def _check(self) -> None:
        with self._lock:  # a call cannot end, and its socket cannot be closed, in the meantime
            for key, (deadline, fileno) in list(self._calls.items()):
                if time.monotonic() > deadline:
                    del self._calls[key]
                    self._fired.add(key)
                    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fileno)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)


def _watch(reference: "weakref.ref[Watchdog]", is_stopped: threading.Event, period: float) -> None:
    while not is_stopped.wait(period):
        watchdog = reference()
        if watchdog is None:
            return
        watchdog._check()
        del watchdog
