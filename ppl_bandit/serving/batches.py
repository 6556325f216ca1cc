"""A bounded queue with one thread behind it, which records in one transaction what arrived during the transaction before.

There is no waiting window: a single request is taken at once, and under load a batch is what has arrived. One call wakes the
event loop for all answers of a batch.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ppl_bandit.serving.problems import Problem

logger = logging.getLogger("ppl_bandit.serving")

_SECONDS_BETWEEN_SWEEPS = 0.1


class Limits(NamedTuple):
    """Limits of each queue.

    Attributes:
        waiting: rows that may wait; further requests are refused.
        batch: rows that are recorded in one transaction, unless one request has more.
        deadline: seconds until a request is answered, if only to say that it may not be recorded.
    """

    waiting: int = 2048
    batch: int = 256
    deadline: float = 5.0


class _Waiting(NamedTuple):
    request: Any
    num_rows: int
    answer: asyncio.Future
    arrived: float


class BatchQueue:
    """A queue of requests of one kind.

    Args:
        name: of the thread, and in messages.
        work: takes requests and returns a result for each; a result may be an exception.
    """

    def __init__(self, name: str, work: Callable[[Sequence[Any]], Sequence[Any]], limits: Limits):
        self.name, self._work, self.limits = name, work, limits
        self._waiting: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._unanswered: deque[_Waiting] = deque()  # in order of arrival, which is that of the deadlines
        self._num_put = self._num_taken = 0  # one is written by the event loop, the other by the thread
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def depth(self) -> int:
        """Number of rows that wait."""
        return self._num_put - self._num_taken

    def start(self) -> None:
        """Start the thread; call it in the event loop that will submit."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._sweep = self._loop.call_later(_SECONDS_BETWEEN_SWEEPS, self._expire)

    def put(self, request: Any, num_rows: int = 1) -> asyncio.Future:
        """Add a request, and return the future of its result; it may hold an exception as its result.

        Raises:
            Problem: 503 if the queue is full or closed; nothing is recorded then.
        """
        if self._is_closed or self._loop is None:
            raise Problem(503, "stopping", "the service is stopping; nothing was recorded: repeat the request", 1)
        if self.depth + num_rows > self.limits.waiting:
            raise Problem(503, "queue_full", "too many requests are waiting; nothing was recorded: repeat it later", 1)
        waiting = _Waiting(request, num_rows, self._loop.create_future(), time.monotonic())
        self._num_put += num_rows
        self._unanswered.append(waiting)
        self._waiting.put(waiting)
        return waiting.answer

    def close(self, timeout: float) -> bool:
        """Refuse further requests, wait until those that wait are done, and return whether they are."""
        self._is_closed = True
        if self._thread.is_alive():
            self._waiting.put(None)
            self._thread.join(timeout)
        if self._sweep is not None:
            self._sweep.cancel()
        return not self._thread.is_alive()

    def _run(self) -> None:
        is_open = True
        while is_open:
            taken, num_rows = [], 0
            found = self._waiting.get()
            while found is not None:
                self._num_taken += found.num_rows
                if not found.answer.done():  # otherwise its deadline has passed: it is not recorded
                    taken.append(found)
                    num_rows += found.num_rows
                if num_rows >= self.limits.batch:
                    break
                try:
                    found = self._waiting.get_nowait()
                except queue.Empty:
                    break
            is_open = found is not None
            if taken:
                self._answer(taken)

    def _answer(self, taken: list[_Waiting]) -> None:
        results: Sequence[Any]
        try:
            results = self._work([waiting.request for waiting in taken])
        except BaseException as error:
            results = [error] * len(taken)
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_deliver, taken, results)
        except RuntimeError:  # the event loop has ended, and nobody waits for the answers
            logger.warning("%s: %d recorded answers were not sent: the event loop has ended", self.name, len(taken))

    def _expire(self) -> None:
        """Answer the requests whose deadline has come."""
        assert self._loop is not None
        late = time.monotonic() - self.limits.deadline + _SECONDS_BETWEEN_SWEEPS
        while self._unanswered and (self._unanswered[0].answer.done() or self._unanswered[0].arrived <= late):
            answer = self._unanswered.popleft().answer
            if not answer.done():
                detail = "no answer within the deadline; it may be recorded: repeat it with the same request_id"
                answer.set_result(Problem(504, "deadline", detail, 1))
        self._sweep = self._loop.call_later(_SECONDS_BETWEEN_SWEEPS, self._expire)


def _deliver(taken: Sequence[_Waiting], results: Sequence[Any]) -> None:
    for waiting, result in zip(taken, results, strict=True):
        if not waiting.answer.done():
            waiting.answer.set_result(result)
