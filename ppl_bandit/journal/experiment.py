"""An experiment: a stream of events, and the projection that this process has folded from it.

The projection is an immutable value that is replaced as a whole, so that threads decide without waiting for one that learns.
A decision records the position of its projection, its number and its random number stream; these and the events determine it.
Every opening draws from a random number stream of its own, so that no two decisions use the same numbers. Rewards are
ordered: one is recorded only if no reward was recorded since the position at which it was checked (optimistic concurrency), so
that every process folds the same events in the same order into the same posterior.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bandit.journal.events import (
    ARMS,
    CHANGED,
    CHECKPOINT,
    DECIDED,
    DISCARDED,
    FORGOTTEN,
    LOOKED,
    OPENED,
    PENDING_STATUS,
    Event,
    fold_decision,
    new_event,
    new_id,
    retired_after,
)
from ppl_bandit.journal.outcome_events import LearnRequest, Plan, learn_requests
from ppl_bandit.journal.projection import (
    Projection,
    forgotten,
    learn_events,
    learning_in_part,
    refit,
)
from ppl_bandit.journal.repeats import Known, choose_arms, decision_events
from ppl_bandit.journal.stores.sql import SqlStore, read_batches
from ppl_bandit.journal.stores.store import (
    Conflict,
    GroupedCalls,
    JournalError,
    JournalTimeout,
    Key,
    KeyTaken,
    ReadingEvent,
    call_within,
    timed_lock,
)
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import History, Task
from ppl_bandit.types import ExperimentStopped

BuildTask = Callable[[list[Any]], tuple[Task, Learner]]  # names of the arms -> the task and the prior


class Experiment:
    """One experiment in one process; threads may share it.

    Args:
        projection: before the first event.
        build: returns the task and the prior for a list of arms; called when arms are added.
        burn_in: number of decisions that each arm gets before the selector chooses among all.
        identity: program and settings as recorded; None if they are not recorded yet.
        stream: random number stream of this opening.
    """

    def __init__(
        self,
        store: SqlStore,
        name: str,
        projection: Projection,
        build: BuildTask,
        burn_in: int = 0,
        identity: Mapping[str, Any] | None = None,
        stream: str = "",
    ):
        self.store, self.name, self.burn_in = store, name, burn_in
        self.projection = self.initial = projection
        self.identity = identity
        self.fold_lock = timed_lock(store.timeout)  # a thread that learns, or replaces `projection`, holds it
        # What is reported -> the recorded events, the engine's diagnostics (None if nothing was learnt), and warnings.
        self.learn = GroupedCalls[LearnRequest](self.fold_lock, self._learn_all)
        self.settled_until = 0  # no decision up to this position is overdue
        self.checkpoint_position = 0  # of the last checkpoint that this process has read or written
        self._has_rivals = False  # whether another process was seen to learn at the same time
        self._build = build
        self._numbering = threading.Lock()
        self._next_number = 0
        self.stream = stream

    @property
    def history(self) -> History:
        """All rows that were learnt."""
        return self.projection.history

    @property
    def num_decisions(self) -> int:
        """The number of the next decision."""
        return self._next_number

    def catch_up(self, *, wait: bool = True) -> Projection:
        """Fold the events recorded since the last call, and return the projection.

        Args:
            wait: whether to wait for another thread that is folding; otherwise return the projection that it replaces.
        """
        if self.fold_lock.acquire(blocking=wait):
            try:
                if self.store.read(self.name, self.projection.position, limit=1):
                    self._fold_new_events()
            finally:
                self.fold_lock.release()
        return self.projection

    def decide(
        self,
        projection: Projection,
        allowed: np.ndarray,
        contexts: Any,
        num: int | None,
        knowns: Sequence[Known] = (),
        units: Sequence[str | None] = (),
        *,
        is_slate: bool = False,
    ) -> list[Event]:
        """Make decisions and record them.

        Args:
            contexts: one context; in a batch, contexts with a leading axis.
            num: number of decisions in the batch, or of places; None for a single decision.
            knowns: what is known of each decision's request and unit, or of the slate's; none of it has events.
            units: of the decisions.
            is_slate: whether to choose distinct arms one after another, one for each place.

        Raises:
            KeyTaken: if another call has recorded a decision for the same request or unit.
        """
        if projection.is_paused:
            raise ExperimentStopped(
                "the experiment is paused: call resume(), or play a default meanwhile; rewards may still be reported"
            )
        with self._numbering:
            first = self._next_number
            self._next_number = last = first + (num or 1)
        try:
            numbers, is_batch = range(first, last), num is not None
            if is_slate:
                events = self._slate(projection, numbers, contexts, allowed)
            else:
                mask = self._playable(projection, allowed)
                options: Any = {"units": units, "replaces": [known.replaces for known in knowns]} if knowns else {}
                events = decision_events(projection, self.stream, numbers, contexts, mask, is_batch=is_batch, **options)
            recorded = self.store.append(self.name, events, keys=_keys(knowns, events, is_slate) if knowns else ())
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, JournalTimeout):  # surely nothing was recorded
                with self._numbering:
                    if self._next_number == last:  # no other thread has taken a later number: these are used again
                        self._next_number = first
            raise
        # Own decisions are not read back, unless they are staged, events of others come first, or another thread folds.
        if self.fold_lock.acquire(blocking=False):
            try:
                if recorded[0].position == self.projection.position + 1:
                    num_played = self.projection.num_played.copy()
                    for event in recorded:
                        num_played[event.arm] += 1
                    self.projection = self.projection._replace(num_played=num_played, position=recorded[-1].position)
            finally:
                self.fold_lock.release()
        return recorded

    def _slate(self, projection: Projection, numbers: range, context: Any, allowed: np.ndarray) -> list[Event]:
        """Return one decision for each place of a slate.

        Every place has its own number, and so its own posterior draws and random choice; the arms chosen before are not
        allowed. So the probability of the slate is the product of the propensities of its places.
        """
        remaining, events = allowed.copy(), list[Event]()
        for place, number in enumerate(numbers):
            mask = self._playable(projection, remaining)
            (event,) = decision_events(projection, self.stream, [number], context, mask, is_batch=False)
            events.append(event._replace(batch=(events or [event])[0].batch, body=event.body | {"place": place}))
            remaining[event.arm] = False
        return events

    def next_propensities(
        self, projection: Projection, allowed: np.ndarray, context: Any, chosen: Sequence[int] = ()
    ) -> np.ndarray:
        """Return the probability with which the next decision would play each arm, (A,); nothing is recorded.

        Args:
            chosen: arms in the places before, for the next place of a slate.
        """
        remaining = allowed.copy()
        remaining[list(chosen)] = False
        number = self._next_number + len(chosen)
        mask = self._playable(projection, remaining)
        return np.asarray(choose_arms(projection, self.stream, [number], context, mask, is_batch=False)[0].propensities)

    def turn(self) -> contextlib.AbstractContextManager:
        """Return the context in which no rival learns, if there are any; the caller holds `fold_lock`."""
        return self.store.turn(self.name) if self._has_rivals else contextlib.nullcontext()

    def _learn_all(self, requests: Sequence[LearnRequest]) -> None:
        """Learn from the events of several threads one after another, and record them in one transaction.

        It begins from the events that this process has read. If others were recorded since, `append` refuses it, and they may
        be why a request is refused or known. With rivals that is likely, so they are read first.
        """
        requests = [request for request in requests if request.result is None and request.error is None]
        plan = functools.partial(learn_requests, self.store, self.name, requests)
        with self.turn() if self._has_rivals else contextlib.nullcontext():
            self._commit(plan, reads_first=self._has_rivals)

    def learn_each(self, requests: Sequence[LearnRequest]) -> list[list[Event] | Exception]:
        """Learn from several calls, in one transaction where they do not depend on each other.

        Returns:
            For each, the recorded events, or the error that refused it.
        """
        results: list[list[Event] | Exception] = []
        self.learn.add(requests[1:])
        for request in requests:
            try:
                results.append(self.learn(request)[0])
            except ValueError as error:
                results.append(error)
        return results

    def erase(self, owner: str, checkpoint: Callable[[Projection], tuple[Event, bytes]]) -> int:
        """Blank the personal parts of a unit, and return the number of its decisions.

        Where the program has a context, its rows leave the history, and no reward can be learnt any more.

        Args:
            owner: the key of the unit.
            checkpoint: returns the announcement and the contents of a checkpoint.
        """
        num_decisions = 0

        def make(projection: Projection) -> Plan:
            nonlocal num_decisions
            owned = self.store.owned(self.name, owner)
            decisions = [event for event in owned if event.kind == DECIDED]
            num_decisions = len(decisions)
            if not decisions:
                return Plan([], projection)
            ids = [str(event.decision) for event in decisions]
            records = [fold_decision(events) for events in self.store.find(self.name, ids).values()]
            has_context = projection.task.model.context is not None
            rows = sorted(record.row for record in records if record.row is not None) if has_context else []
            after, batch = forgotten(projection, rows, True), new_id()
            events = [new_event(FORGOTTEN, {"rows": rows, "num_decisions": num_decisions})]
            for record in records:
                if has_context and record.status == PENDING_STATUS:
                    id, body = record.decided.decision, {"reason": "erased"}
                    events.append(new_event(DISCARDED, body, decision=id, batch=batch, arm=record.arm, settles=True))
            announcement, contents = checkpoint(after)
            beside = self.store.erasure(self.name, owner, owned, contents)
            return Plan([*events, announcement], after, beside=beside)

        with call_within(self.store.timeout):
            self._record(make)
        self.store.scrub()  # also if there is nothing to erase: an earlier call may have been ended before it
        return num_decisions

    def change_arms(self, change: Callable[[Projection], dict[str, Any]]) -> Projection:
        """Record a change of the arms, or a pause, and return the projection after it; nothing if all is as it was.

        Args:
            change: returns which of "arms", "retired" and "is_paused" change, given the latest projection.
        """

        def make(projection: Projection) -> Plan:
            names, retired = list(projection.task.arms.names), sorted(projection.retired)
            before = {"arms": names, "retired": retired, "is_paused": projection.is_paused}
            body = before | change(projection)
            if body == before:
                return Plan([], projection)
            if not body["is_paused"]:
                del body["is_paused"]
            event = new_event(ARMS, body)
            return Plan([event], self._with_settings(projection, event))

        return self._record(make)

    def record_look(self, check: Callable[[Projection], dict[str, Any] | None]) -> Projection:
        """Record a look at a designed experiment, and return the projection after it.

        Args:
            check: returns the body of the event, given the latest projection; None if no look is due.
        """

        def make(projection: Projection) -> Plan:
            body = check(projection)
            if body is None:
                return Plan([], projection)
            event = new_event(LOOKED, body)
            return Plan([event], self._with_settings(projection, event))

        return self._record(make)

    def _record(self, make: Callable[[Projection], Plan]) -> Projection:
        """Record events that depend on all events before them, and return the projection after them; see `_commit`."""
        with self.fold_lock:
            self._commit(make)
            return self.projection

    def _commit(self, make: Callable[[Projection], Plan], *, reads_first: bool = True) -> None:
        """Record what follows from the projection, and fold it; if other events come in between, make it anew.

        Args:
            make: returns what to record, given the latest projection.
            reads_first: whether to fold what others have recorded before; otherwise after a conflict, or a refusal.
        """
        while True:
            if reads_first:
                self._fold_new_events()
            projection = self.projection
            events, after, keys, beside, calls, is_complete = make(projection)
            if not is_complete:
                self._fold_new_events()
                now = self.projection
                if now.history is not projection.history or now.task is not projection.task:
                    continue
            if not events and not keys:
                return
            try:
                recorded = self.store.append(self.name, events, after=projection.position, keys=keys, beside=beside)
                if not recorded:  # calls that brought nothing new
                    return
                break
            except Conflict:
                self._has_rivals = reads_first = True
            except KeyTaken:  # another process has recorded this request
                continue
        if recorded[0].position > self.projection.position + 1:
            self._fold_new_events(before=recorded[0].position)  # decisions of other threads and processes
        num_played = self.projection.num_played
        if num_played.size < after.num_played.size:
            num_played = _padded(num_played, after.num_played.size)
        history, results, start = after.history, list[tuple](), 0
        for _, own, step in calls:
            part = recorded[start : start + len(own)]
            history = history.with_rows(step.rows, [event.position for event in part])
            results.append((part, step.info, step.warnings))
            start += len(own)
        self.projection = after._replace(history=history, num_played=num_played, position=recorded[-1].position)
        for (request, *_), result in zip(calls, results, strict=True):
            request.result = result

    def resume(self, position: int) -> None:
        """Fold the stream from its beginning; the rows up to a position are learnt in one batch."""
        with self.fold_lock:
            for batch in read_batches(self.store, self.name, 0):
                if batch[-1].position > position and self.projection.position <= position:
                    self.set_posterior()
                self.fold(batch, is_learning=batch[-1].position > position)
            if self.projection.position <= position:
                self.set_posterior()

    def restore(self, projection: Projection, next_number: int, settled_until: int = 0) -> None:
        """Continue from the contents of a checkpoint or of a saved file."""
        self.projection, self._next_number, self.settled_until = projection, next_number, settled_until
        self.checkpoint_position = projection.position

    def fold(self, batch: Sequence[Event], *, is_learning: bool = True) -> None:
        """Fold the recorded events of one call into the projection.

        Args:
            is_learning: whether to update the posterior; if not, `set_posterior` does it later.
        """
        with ReadingEvent(self.name, batch[0].position):
            if batch[0].kind == DECIDED:
                self.projection = self._with_decisions(batch)
            else:
                self.projection = self._folded(batch, is_learning)._replace(position=batch[-1].position)

    def set_posterior(self) -> None:
        """Set the posterior at the current position: learn all rows of the history in one batch."""
        learner = refit(self.projection, self.projection.history)[0]
        self.projection = self.projection._replace(learner=learner)

    def _fold_new_events(self, before: int | None = None) -> None:
        for batch in read_batches(self.store, self.name, self.projection.position, before):
            self.fold(batch)

    def _with_decisions(self, batch: Sequence[Event]) -> Projection:
        """Return the projection after the decisions of one call, whose numbers increase."""
        num_played, last = self.projection.num_played.copy(), batch[-1]
        for event in batch:
            num_played[event.arm] += 1
        with self._numbering:
            self._next_number = max(self._next_number, int(last.number or 0) + 1)
        return self.projection._replace(num_played=num_played, position=last.position)

    def _folded(self, batch: Sequence[Event], is_learning: bool) -> Projection:
        """Return the projection after the events of one call that are not decisions, but for its position."""
        projection, first = self.projection, batch[0]
        if first.kind in (ARMS, LOOKED):
            return self._with_settings(projection, first, is_learning)
        if first.kind == CHECKPOINT:
            return projection
        if first.kind == FORGOTTEN:
            return forgotten(projection, first.body["rows"], is_learning)
        if first.kind in (OPENED, CHANGED):
            if is_learning and self.identity is not None and first.body["identity"] != self.identity:
                raise JournalError(
                    f"another process has {first.kind} the experiment {self.name!r} with another program or other settings: "
                    "restart this process with the same ones"
                )
            return projection
        after, rows, *_ = learn_events(projection, batch, is_learning)
        return after._replace(history=after.history.with_rows(rows, [event.position for event in batch]))

    def _with_settings(self, projection: Projection, event: Event, is_learning: bool = True) -> Projection:
        """Return the projection after an event of the arms, or after a look."""
        retired = retired_after(projection.retired, event)
        if event.kind == LOOKED:
            return projection._replace(retired=retired, look=event.body)
        names, is_paused = event.body["arms"], event.body.get("is_paused", False)
        if is_learning and len(names) > len(projection.task.arms):
            task, prior = self._build(names)
            is_partial, projection = projection.task.is_partial, projection._replace(task=task, prior=prior)
            projection = learning_in_part(projection) if is_partial else projection
            projection = projection._replace(learner=refit(projection, projection.history)[0])
        num_played = _padded(projection.num_played, len(projection.task.arms))
        return projection._replace(retired=retired, is_paused=is_paused, num_played=num_played)

    def _playable(self, projection: Projection, allowed: np.ndarray) -> np.ndarray:
        mask, num_added = allowed, projection.num_played.size - allowed.size
        if num_added:  # by another process, since the mask was made: this decision does not play them
            mask = np.concatenate([allowed, np.zeros(num_added, bool)])
        if projection.retired:
            mask = mask.copy()
            mask[list(projection.retired)] = False
            if not mask.any():
                names = [projection.task.arms.names[i] for i in sorted(projection.retired)]
                raise ValueError(f"allowed leaves no arm to play: {names} are retired; allow another arm")
        if self.burn_in:
            unplayed = mask & (projection.num_played < self.burn_in)
            mask = unplayed if unplayed.any() else mask
        return mask


def rows_until(store: SqlStore, name: str, position: int, projection: Projection) -> History:
    """Return the rows that were learnt up to a position.

    Args:
        projection: the state before the first event, with all arms.
    """
    experiment = Experiment(store, name, projection, lambda names: (projection.task, projection.prior))
    for batch in read_batches(store, name, 0, position + 1):
        experiment.fold(batch, is_learning=False)
    return experiment.history


def _padded(num_played: np.ndarray, num_arms: int) -> np.ndarray:
    return np.concatenate([num_played, np.zeros(num_arms - num_played.size, np.int64)])


def _keys(knowns: Sequence[Known], events: Sequence[Event], is_slate: bool) -> list[Key]:
    """Return the keys to record with decisions; one that has a value binds another request to a decision that is known."""
    ids = [str(event.decision) for event in events]
    values = [",".join(ids)] if is_slate else ids
    pairs = ((key, value) for known, value in zip(knowns, values, strict=False) for key in known.keys)
    return [key if key.value else key._replace(value=value) for key, value in pairs]
