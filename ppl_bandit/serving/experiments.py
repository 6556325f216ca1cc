"""One served experiment: its bandit, and the queues of its decisions, its rewards and its readers, each with one thread.

What arrived together is recorded together; a row that is refused does not refuse the others of its batch, unless they are one
request of the caller. What is read is computed once for all who ask at the same time.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import orjson

from ppl_bandit.journal.events import CORRECTED, IMPORTED, LOOKED, REWARDED
from ppl_bandit.journal.stores.sql import read_batches
from ppl_bandit.journal.stores.store import JournalError, call_within
from ppl_bandit.live.bandit import Bandit
from ppl_bandit.live.decisions import Decision, Slate
from ppl_bandit.live.designs import due_look
from ppl_bandit.serving.batches import BatchQueue, Limits
from ppl_bandit.serving.messages import BatchDecision, DecisionBatch, DecisionRequest, RewardRequest
from ppl_bandit.serving.metrics import Metrics
from ppl_bandit.serving.problems import Problem, as_problem, or_raise
from ppl_bandit.types import ExperimentStopped, InvalidContext

logger = logging.getLogger("ppl_bandit.serving")

_MAX_QUEUE_SHARE = 0.8  # above it the experiment is not ready
_SECONDS_BETWEEN_CHECKS = 2.0  # of the journal
_MAX_SECONDS_UNWRITTEN = 5.0  # of the journal; then the experiment is not ready
_DEFAULT_LIMITS = Limits()
_PAUSE_PER_COUNT = 50  # times as long as counting pending decisions and alarms took
_SECONDS_FOR_READING = 30.0  # until a reader is answered; what it asked for is kept, and is there when it asks again
_SECONDS_BETWEEN_READINGS = 1.0  # of the same report, however many ask for it
_REPORTED = (REWARDED, IMPORTED, CORRECTED)
_FAILED = ""  # in place of the name of a reading: the journal could not be read
_PAUSE_PER_READING = 9  # times as long as it took, so that open dashboards take at most a tenth of the process


class ServedExperiment:
    """An experiment behind an address.

    Args:
        name: in the address.
        values: {arm: value} of its OpenFeature flag; None gives the arms themselves.
    """

    def __init__(
        self, name: str, bandit: Bandit, *, values: Mapping[Any, Any] | None = None, limits: Limits = _DEFAULT_LIMITS
    ):
        self.name, self.bandit, self.values, self.limits = name, bandit, values, limits
        self.metrics: Metrics | None = None
        self.decisions = BatchQueue("decisions", self._decide, limits)
        self.rewards = BatchQueue("rewards", self._learn, limits)
        self._readers = BatchQueue("readers", self._read, limits._replace(batch=1, deadline=_SECONDS_FOR_READING))
        self.queues = (self.decisions, self.rewards, self._readers)
        self.state = "compiling"
        self._journal_failure, self._written = "", time.monotonic()
        self._counts, self._next_count = {"pending": 0, "overdue": 0, "alarms": 0}, 0.0
        self._newest_reward, self._seen = time.time(), 0  # its time, and the position up to which none is newer
        self._readings: dict[str | None, tuple[float, Any]] = {}

    def compile(self) -> None:
        """Compile what the queues will call."""
        begun = time.monotonic()
        logger.info("%s: compiling; decisions are refused until then", self.name)
        try:
            self.bandit.warm_up(batches=True)
            self.check_journal()
            self.count(checks_alarms=False)
        except Exception as error:
            self.state = "failed"
            logger.error("%s cannot be served: %s: %s", self.name, type(error).__name__, error)
            return
        self.state = "ready"
        logger.info("%s: ready after %.1f s", self.name, time.monotonic() - begun)

    def not_ready(self) -> str:
        """Return why the experiment is not ready; empty if it is."""
        if self.state != "ready":
            return self.state
        if self._journal_failure:
            return "the journal failed"
        if time.monotonic() - self._written > _MAX_SECONDS_UNWRITTEN:
            return f"the journal was not written for {_MAX_SECONDS_UNWRITTEN:g} s"
        full = [queue.name for queue in self.queues[:2] if queue.depth > _MAX_QUEUE_SHARE * queue.limits.waiting]
        return f"the queue of {full[0]} is nearly full" if full else ""

    def submit(self, queue: BatchQueue, request: Any, num_rows: int = 1) -> Any:
        """Add a request to a queue, and return the future of its result.

        Raises:
            Problem: 503 while the experiment is compiling, or if the queue is full.
        """
        if self.state != "ready":
            raise Problem(503, "not_ready", f"the experiment is {self.state}; nothing was recorded: repeat it later", 2)
        return queue.put(request, num_rows)

    def watch(self, stopping: threading.Event) -> None:
        """Check until the end whether the journal can be written: a thread of its own, since a journal may answer late."""
        while not stopping.wait(_SECONDS_BETWEEN_CHECKS):
            try:
                self.check_journal()
            except Exception as error:
                logger.error("%s: checking the journal failed: %s", self.name, as_problem(error).code)

    def check_journal(self) -> None:
        """Try whether the journal can be written now."""
        health = self.bandit.health()
        if health.is_writable and self._journal_failure:
            logger.info("%s: the journal works again", self.name)
        elif not health.is_writable and not self._journal_failure:
            logger.error("%s: the journal failed: %s", self.name, health.reason)
        self._journal_failure = health.reason
        if health.is_writable:
            self._written = time.monotonic()

    def count(self, checks_alarms: bool = True) -> None:
        """Count again what takes a reading of the journal, if that is due; alarms read all of it the first time."""
        if not self._journal_failure and time.monotonic() >= self._next_count:
            begun = time.monotonic()
            experiment, window = self.bandit._experiment, self.bandit._windows.reward
            alarms = len(self.bandit.alarms()) if checks_alarms else 0  # it catches up with other processes
            overdue = 0 if window is None else experiment.store.num_pending(experiment.name, time.time() - window)
            self._counts = {"pending": self.num_pending(), "overdue": overdue, "alarms": alarms}
            self._find_newest_reward()
            now = time.monotonic()
            self._next_count = now + _PAUSE_PER_COUNT * (now - begun) if checks_alarms else now

    def num_pending(self) -> int:
        """Return the number of decisions without a reward, after the events of other processes were read."""
        self.bandit._catch_up()
        return self.bandit._experiment.store.num_pending(self.bandit._experiment.name)

    def _find_newest_reward(self) -> None:
        """Find when the newest reward was reported, to any process: backwards from the last event to those seen before."""
        experiment = self.bandit._experiment
        last = before = experiment.projection.position
        width = 100
        while before > self._seen:
            after = max(before - width, self._seen)
            events = experiment.store.read(experiment.name, after, before + 1, kinds=_REPORTED)
            if times := [event.time for event in events if "expired" not in event.body]:
                self._newest_reward = times[-1]
                break
            before, width = after, 4 * width
        else:  # no reward is newer
            if not self._seen and (first := experiment.store.read(experiment.name, limit=1)):
                self._newest_reward = first[0].time
        self._seen = last

    def gauges(self) -> dict[str, float]:
        """Return the numbers of the metrics."""
        return {
            "ready": float(not self.not_ready()),
            "posterior_age": time.time() - self._newest_reward,
            **{name: float(count) for name, count in self._counts.items()},
        }

    def arm_shares(self) -> dict[Any, float]:
        """Return the share of each arm in all decisions; none before the first."""
        projection = self.bandit._experiment.projection
        total = projection.num_played.sum()
        shares = zip(projection.task.arms.names, (projection.num_played / max(total, 1)).tolist(), strict=False)
        return dict(shares) if total else {}

    def close(self) -> None:
        """Close the bandit."""
        self.bandit.close()

    async def read(self, name: str | None, read: Callable[[], Any]) -> Any:
        """Return what a function reads, which a thread computes at most once a second.

        Args:
            name: of the reading; None for one that is not kept.

        Raises:
            Problem: 503 or 504 if the journal does not answer, or many wait.
        """
        return or_raise(await self._readers.put((name, read)))

    def _read(self, requests: Sequence[tuple[str | None, Callable[[], Any]]]) -> list[Any]:
        """Return the result of one reading, or its refusal; after a failure of the journal, for a second all get this one."""
        [(name, read)] = requests
        readings, begun = self._readings, time.monotonic()
        kept: str | None
        for kept in (name, _FAILED):
            if kept in readings and begun < readings[kept][0]:
                return [readings[kept][1]]
        try:
            with call_within(self.limits.deadline):
                found, kept = read(), name
        except Exception as error:
            found, kept = as_problem(error), _FAILED if isinstance(error, JournalError) else name
        ends = time.monotonic()
        pause = 0.0 if isinstance(found, Problem) else _PAUSE_PER_READING * (ends - begun)
        if kept is not None:
            readings[kept] = ends + max(_SECONDS_BETWEEN_READINGS, pause), found
        return [found]

    def looks(self) -> list[dict[str, Any]]:
        """Return the looks of a designed experiment, oldest first."""
        if self.bandit._design is None:
            return []
        batches = read_batches(self.bandit._experiment.store, self.bandit._experiment.name, 0)
        return [{"time": event.time, **event.body} for batch in batches for event in batch if event.kind == LOOKED]

    def change(self, change: Callable[[], Any]) -> Any:
        """Change the bandit; the next reading sees it."""
        with call_within(self.limits.deadline):
            found = change()
        self._readings = {}
        return found

    def _decide(self, requests: Sequence[Any]) -> list[Any]:
        """Return the decisions of each request, or its refusal."""
        results: list[Any] = [None] * len(requests)
        together: dict[Any, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            if isinstance(request, DecisionBatch):
                results[index] = self._attempt(partial(self._select, request.requests, request.allowed))
            elif request.size is not None:
                results[index] = self._attempt(partial(self._select_slate, request))
            else:
                together[None if request.allowed is None else tuple(request.allowed)].append(index)
        for allowed, indices in together.items():
            given = None if allowed is None else list(allowed)
            rows = [requests[index] for index in indices]
            found = self._row_by_row(rows, partial(self._select, allowed=given))
            for index, result in zip(indices, found, strict=True):
                results[index] = result
        made = [one for result in results for one in (result if isinstance(result, list) else [result])]
        each = [one for entry in made for one in (entry.decisions if isinstance(entry, Slate) else [entry])]
        new = {one.id: one.arm for one in each if isinstance(one, Decision) and one.is_new}  # rows of a unit share one
        if self.metrics is not None:
            self.metrics.count_decisions(self.name, new.values())
        return results

    def take_look(self) -> bool:
        """Take the planned look that is due, since nobody is there to call `look`; return whether one was taken."""
        design = self.bandit._design
        if design is None or due_look(self.bandit._experiment.projection, design) is None:
            return False
        verdict = self.bandit.look()
        if verdict.is_due:
            logger.info("%s: %s", self.name, verdict.verdict.partition("\n")[0])
        return verdict.is_due

    def _select(self, rows: Sequence[BatchDecision], allowed: list[Any] | None) -> list[Decision]:
        units: Any = [row.unit for row in rows]
        ids: Any = [row.request_id for row in rows]
        if len(rows) == 1:
            row = rows[0]
            return [self.bandit.select(row.context, allowed, unit=row.unit, request_id=row.request_id)]
        contexts = self._stacked([row.context for row in rows])
        return self.bandit.select_many(
            contexts,
            num_decisions=len(rows) if contexts is None else None,
            allowed=allowed,
            units=units if any(unit is not None for unit in units) else None,
            request_ids=ids if any(id is not None for id in ids) else None,
        )

    def _select_slate(self, row: DecisionRequest) -> Slate:
        assert row.size is not None
        given: Any = {} if row.unit is None else {"unit": row.unit}  # which the library refuses, with the remedy
        return self.bandit.select(row.context, row.allowed, size=row.size, request_id=row.request_id, **given)

    def _stacked(self, contexts: list[Any]) -> Any:
        """Return contexts with a leading axis.

        Raises:
            InvalidContext: if they are not alike; a context alone is checked by the library, with a better message.
        """
        example, late = self.bandit.model.context, self.bandit._late
        if example is None:
            if any(context is not None for context in contexts):
                raise InvalidContext("context was given, but the program takes arm alone: leave it out")
            return None
        if late and isinstance(example, Mapping):
            example = {name: value for name, value in example.items() if name not in late}
        try:  # the leaves of the example are arrays; what is at their places, also a list, is one row of each
            return jax.tree.map(lambda leaf, *rows: list(rows), example, *contexts)
        except ValueError as error:
            raise InvalidContext(f"the contexts are not as the program's example context: {error}") from None

    def _learn(self, requests: Sequence[Any]) -> list[Any]:
        """Return for each request whether something new was recorded (for a batch: of each row), or its refusal."""
        results: list[Any] = [None] * len(requests)
        rows: list[RewardRequest] = []
        for index, request in enumerate(requests):
            if isinstance(request, str):  # the decision was not shown
                results[index] = self._attempt(partial(self.bandit.discard, request))
            else:
                rows += request if isinstance(request, list) else [request]
        recorded: list[Any] = []
        for part in self._learnt_together(rows):
            result = self._attempt(partial(self.bandit.update_each, list(map(_update_arguments, part))))
            recorded += [result] * len(part) if isinstance(result, Problem) else result
        found = [as_problem(one) if isinstance(one, Exception) else one for one in recorded]
        if self.metrics is not None:
            self.metrics.count_rewards(self.name, found.count(True), found.count(False))
        by_row = iter(found)
        for index, request in enumerate(requests):
            if isinstance(request, list):
                results[index] = [next(by_row) for _ in request]
            elif not isinstance(request, str):
                results[index] = next(by_row)
        return results

    def _learnt_together(self, rows: Sequence[Any]) -> Sequence[Sequence[Any]]:
        """Return the rows in the parts that one update learns."""
        is_single = self.bandit._experiment.projection.learner.learns_singly
        return [[row] for row in rows] if is_single else [rows] if rows else []

    def _row_by_row(self, rows: Sequence[Any], work: Callable[[Sequence[Any]], Sequence[Any]]) -> list[Any]:
        """Do work on rows together; if they are refused, on each half, so that only the wrong rows are refused in the end."""
        result = self._attempt(lambda: work(rows))
        if not isinstance(result, Problem):
            return list(result)
        if len(rows) == 1 or result.status in (503, 504):
            return [result] * len(rows)
        middle = len(rows) // 2
        return self._row_by_row(rows[:middle], work) + self._row_by_row(rows[middle:], work)

    def _attempt(self, work: Callable[[], Any]) -> Any:
        """Do work, and return its result or the refusal; remember whether the journal works."""
        try:
            try:
                found = work()
            except ExperimentStopped:  # the refused call has read what other processes did
                if not self.take_look():
                    raise
                found = work()
            self._written = time.monotonic()
            return found
        except Exception as error:
            if isinstance(error, JournalError):
                self._journal_failure = str(error)
            return as_problem(error)


def rows_of(table: Any) -> list[dict[str, Any]]:
    """Return a DataFrame as rows of JSON values; times are texts."""
    return orjson.loads(table.to_json(orient="records", date_format="iso", date_unit="us", double_precision=15))


def _update_arguments(row: RewardRequest) -> dict[str, Any]:
    """Return the arguments of `Bandit.update`."""
    names = ("context", "shown", "propensity", "request_id", "correct")
    more = {name: value for name in names if (value := getattr(row, name, None)) is not None}
    return {"decision": row.decision, "reward": row.value, **more}
