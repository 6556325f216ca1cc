"""Threads that call at the same time: the first does the work of all (group commit)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, TypeVar

__all__ = ["GroupedCalls", "Request"]


class Request:
    """What a thread wants; it is done once it has a result or an error."""

    result: Any = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has a result."""
        return self.result is not None or self.error is not None


AnyRequest = TypeVar("AnyRequest", bound=Request)


class GroupedCalls(Generic[AnyRequest]):
    """Collects the requests of threads that wait for a lock.

    Args:
        lock: returns the context that is held during the work.
        work: does some requests; it must do the first, and may leave others to their own threads.
    """

    def __init__(self, lock: Callable[[], AbstractContextManager], work: Callable[[Sequence[AnyRequest]], None]):
        self._lock, self._work = lock, work
        self._queue: list[AnyRequest] = []  # appended to by every thread, shortened by the one that holds the lock

    def add(self, requests: Sequence[AnyRequest]) -> None:
        """Let the next call do these requests too, as far as it can."""
        self._queue.extend(requests)

    def __call__(self, request: AnyRequest) -> Any:
        """Do a request, and those of the threads that wait, or wait until another thread has done it; return its result."""
        self._queue.append(request)
        with self._lock():
            if not request.is_done:
                taken = self._queue[:]
                del self._queue[: len(taken)]
                # A request that another thread took and left, also because of Ctrl-C, is no longer in the queue.
                self._work([request, *(other for other in taken if other is not request)])
        if request.error is not None:
            raise request.error
        return request.result
