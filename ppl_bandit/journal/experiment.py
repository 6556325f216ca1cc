"""An experiment is a fold over its stream of events: deciding and learning append to it, and everyone follows it.

What is known at a position is a value (`Standing`), replaced whole, so that threads decide from it without waiting for one
that learns. A decision records the position it had absorbed, its number and its lane; from these and the stream anyone
derives it again. Learning is ordered: a reward is recorded only if nothing was learnt since the position that it was
checked at, so every process folds the same events in the same order into the same posterior.
"""

import functools
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.journal.events import ARMS, CHANGED, DECIDED, OPENED, Event, new_event, new_id, new_ids
from ppl_bandit.journal.lessons import Learnt, Standing, learnt, lessons, relearnt
from ppl_bandit.journal.rows import joined_rows
from ppl_bandit.journal.stores.contract import Conflict, JournalError, NumberTaken, Store
from ppl_bandit.posterior.deciding import Chosen, decide, decide_many
from ppl_bandit.posterior.history import History
from ppl_bandit.posterior.learning import Learner, Rows
from ppl_bandit.posterior.task import Task

__all__ = ["Experiment", "batches", "in_lane"]

_PAGE = 10_000  # events read at once


class Experiment:
    """One experiment of one store, as one process sees it; many threads may use it.

    Args:
        standing: before the first event.
        grow: names of the arms -> the task and the prior for as many.
        burn_in: decisions that every arm gets before the selector may choose among all.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        standing: Standing,
        grow: Callable[[list[Any]], tuple[Task, Learner]],
        burn_in: int = 0,
        identity: Mapping[str, Any] | None = None,
    ):
        self.store, self.name, self.burn_in = store, name, burn_in
        self.standing = standing  # replaced whole: whatever interrupts, all of it is of one position
        self.identity = identity
        self.learning = threading.RLock()  # held by whoever moves `standing` on
        self._grow = grow
        self._counting = threading.Lock()
        self._next_number = 0
        self._lane = ""

    @property
    def history(self) -> History:
        """All rows that were learnt."""
        return self.standing.history

    @property
    def num_decisions(self) -> int:
        """The number that the next decision gets."""
        return self._next_number

    def follow(self, *, is_waiting: bool = True) -> Standing:
        """Absorb what was recorded since; without waiting, unless another thread is at it already."""
        if self.learning.acquire(blocking=is_waiting):
            try:
                self._catch_up()
            finally:
                self.learning.release()
        return self.standing

    def decide(self, standing: Standing, allowed: np.ndarray, contexts: Any, num_rows: int | None) -> list[Event]:
        """Decide and record.

        Args:
            contexts: one context, or, where `num_rows` is given, as many with a leading axis.
            num_rows: decisions to make in one batch; None for a single one.
        """
        while True:
            with self._counting:
                mask = self._playable(standing, allowed)
                first, last = self._next_number, self._next_number + (num_rows or 1)
                self._next_number, lane = last, self._lane
            task, learner = in_lane(standing, lane)
            try:
                if num_rows is None:
                    chosen = decide(task, learner, first, contexts, mask)
                else:
                    chosen = decide_many(task, learner, np.arange(first, last), contexts, mask)
                events = _decided(standing, chosen, first, lane, mask, contexts, is_batch=num_rows is not None)
                return self.store.append(self.name, events)
            except NumberTaken:  # another process decides too: from here on in a lane of our own
                self._lane = self._lane or new_id()[:12]
                standing = self.follow()
            except BaseException:
                with self._counting:
                    if self._next_number == last:  # nobody counted on: the next decision is this one again
                        self._next_number = first
                raise

    def learn(self, make_events: Callable[[Standing], list[Event]]) -> tuple[Any, list[str]]:
        """Record what teaches, or settles decisions without teaching, and learn it.

        Args:
            make_events: what to record, given all that was recorded before; raising refuses, an empty list does nothing.

        Returns:
            The engine's evidence, None where nothing was learnt, and warnings for the user.
        """
        with self.learning:
            while True:
                self._catch_up()
                standing = self.standing
                events = make_events(standing)
                if not events:
                    return None, []
                after = learnt(standing, events)
                try:
                    recorded = self.store.append(self.name, events, after=standing.position)
                except Conflict:
                    continue
                if recorded[0].position > standing.position + 1:
                    self._catch_up(before=recorded[0].position)  # decisions of others
                self._take(after, recorded)
                return after.info, after.notes

    def rearrange(self, names: list[Any], retired: frozenset[int]) -> None:
        """Record other arms, more than before or some retired, and go on with them."""
        with self.learning:
            while True:
                self._catch_up()
                event = new_event(ARMS, {"arms": names, "retired": sorted(retired)})
                standing = self._rearranged(self.standing, event)
                try:
                    recorded = self.store.append(self.name, [event], after=self.standing.position)
                except Conflict:
                    continue
                self._catch_up(before=recorded[0].position)
                self.standing = standing._replace(
                    position=recorded[0].position, num_played=_longer(self.standing.num_played, len(names))
                )
                return

    def resume(self, position: int, learner: Learner | None) -> None:
        """Read the stream from its beginning; up to a position nothing is learnt again, only remembered.

        Args:
            learner: what had been learnt at that position; None to learn it from the rows remembered.
        """
        with self.learning:
            for batch in batches(self.store, self.name, 0):
                if batch[-1].position > position:
                    if self.standing.position <= position:
                        self.settle(learner)
                    self.absorb(batch)
                else:
                    self.remember(batch)
            if self.standing.position <= position:
                self.settle(learner)

    def restore(self, history: History, learner: Learner, position: int, next_number: int, num_played: Any) -> None:
        """Take over what a file holds."""
        self._next_number = next_number
        self.standing = self.standing._replace(
            learner=learner, position=position, history=history, num_played=np.asarray(num_played, np.int64)
        )

    def _playable(self, standing: Standing, allowed: np.ndarray) -> np.ndarray:
        mask = allowed
        if standing.retired:
            mask = allowed.copy()
            mask[list(standing.retired)] = False
            if not mask.any():
                names = [standing.task.arms.names[i] for i in sorted(standing.retired)]
                raise ValueError(f"allowed leaves no arm to play: {names} are retired; allow another")
        if self.burn_in:
            fresh = mask & (standing.num_played < self.burn_in)
            mask = fresh if fresh.any() else mask
        return mask

    def _catch_up(self, before: int | None = None) -> None:
        for batch in batches(self.store, self.name, self.standing.position, before):
            self.absorb(batch)

    def absorb(self, batch: list[Event]) -> None:
        """Fold the events of one call."""
        kind, position = batch[0].kind, batch[-1].position
        if kind == DECIDED:
            self.standing = self._counted(batch)
        elif kind == ARMS:
            self.standing = self._rearranged(self.standing, batch[0])._replace(position=position)
        elif kind in (OPENED, CHANGED):
            if self.identity is not None and batch[0].body["identity"] != self.identity:
                raise JournalError(
                    f"the experiment {self.name!r} was {kind} otherwise by another process: restart this one with the same "
                    "program and settings"
                )
            self.standing = self.standing._replace(position=position)
        else:
            self._take(learnt(self.standing, batch), batch)

    def remember(self, batch: list[Event]) -> None:
        """Fold the events of one call into everything but the posterior."""
        kind, standing = batch[0].kind, self.standing
        if kind == DECIDED:
            standing = self._counted(batch)
        elif kind == ARMS:
            standing = standing._replace(retired=frozenset(batch[0].body["retired"]))
        elif kind not in (OPENED, CHANGED):
            edits, rows = lessons(standing.task, batch)
            history = standing.history.edited(edits) if edits else standing.history
            standing = standing._replace(history=_written(history, rows, batch))
        self.standing = standing._replace(position=batch[-1].position)

    def settle(self, learner: Learner | None) -> None:
        """Take over what was learnt at this position; None learns it from the rows remembered."""
        if learner is None:
            learner = relearnt(self.standing, self.standing.history)[0]
        self.standing = self.standing._replace(learner=learner)

    def _take(self, after: Learnt, recorded: Sequence[Event]) -> None:
        history = _written(after.history, after.rows, recorded)
        self.standing = self.standing._replace(learner=after.learner, history=history, position=recorded[-1].position)

    def _counted(self, batch: Sequence[Event]) -> Standing:
        """Return what is known after decisions, whose numbers are taken from here on."""
        standing, num_played = self.standing, self.standing.num_played.copy()
        for event in batch:
            num_played[event.arm] += 1
        with self._counting:
            self._next_number = max(self._next_number, *(int(event.number or 0) + 1 for event in batch))
        return standing._replace(position=batch[-1].position, num_played=num_played)

    def _rearranged(self, standing: Standing, event: Event) -> Standing:
        names = event.body["arms"]
        if len(names) > len(standing.task.arms):
            task, prior = self._grow(names)
            standing = standing._replace(task=task, prior=prior)
            standing = standing._replace(learner=relearnt(standing, standing.history)[0])
        num_played = _longer(standing.num_played, len(standing.task.arms))
        return standing._replace(retired=frozenset(event.body["retired"]), num_played=num_played)


def _longer(num_played: np.ndarray, num_arms: int) -> np.ndarray:
    return np.concatenate([num_played, np.zeros(num_arms - num_played.size, np.int64)])


def _written(history: History, rows: Sequence[tuple[int, Rows]], recorded: Sequence[Event]) -> History:
    """Return a history with the rows that events bring, by the positions at which those are recorded."""
    if not rows:
        return history
    positions, joined = np.array([recorded[i].position for i, _ in rows]), joined_rows([piece for _, piece in rows])
    if joined.arms.size > 1:
        positions = positions.repeat([piece.arms.size for _, piece in rows])
    return history.extended(*joined, positions)


def _decided(
    standing: Standing, chosen: Chosen, first: int, lane: str, mask: np.ndarray, contexts: Any, *, is_batch: bool
) -> list[Event]:
    """Return the events of decisions that are numbered from `first` on; `contexts` as in `Experiment.decide`."""
    position, names, now = standing.position, standing.task.arms.names, time.time()
    leaves = None if contexts is None else jax.tree.leaves(contexts)
    for leaf in leaves or ():
        leaf.flags.writeable = False  # the record and the caller's decision share it
    playable = mask.tolist()
    allowed = None if all(playable) else playable
    by_row: Iterable[Any] = zip(*leaves, strict=True) if is_batch and leaves else itertools.repeat(leaves or ())
    batch, *ids = new_ids(1 + len(chosen.arms))
    events = []
    # Column by column: of thousands of decisions, indexing every row takes as long as writing it down.
    columns = zip(ids, *chosen, by_row, strict=False)
    for row, (name, arm, best_arm_probs, num_candidates, propensities, context) in enumerate(columns):
        body = {
            "absorbed": position,
            "name": names[arm],
            "best_arm_probs": best_arm_probs,
            "num_candidates": num_candidates,
            "propensities": propensities,
            "allowed": allowed,
            "context": None if leaves is None else list(context),
        }
        if is_batch:
            body["row"] = row
        events.append(Event(0, DECIDED, name, batch, first + row, lane, arm, False, now, body))
    return events


def batches(
    store: Store, name: str, after: int, before: int | None = None, whole: bool = False
) -> Iterator[list[Event]]:
    """Yield the events beyond a position, those of one call together."""
    size = _PAGE
    while True:
        events = store.read(name, after, before, limit=size, whole=whole)
        is_last = len(events) < size
        batch: list[Event] = []
        for event in events:
            if batch and event.batch != batch[0].batch:
                yield batch
                after, batch = batch[-1].position, []
            batch.append(event)
        if is_last:
            if batch:
                yield batch
            return
        size = _PAGE if len(batch) < size else 2 * size  # the last call's events may go on beyond this page


def in_lane(standing: Standing, lane: str) -> tuple[Task, Learner]:
    """Return the task and the learner to decide with in a lane; the empty lane draws from the task's own seed."""
    if not lane:
        return standing.task, standing.learner
    number, seed = _lane_seed(standing.task.seed, lane)
    return standing.task._replace(seed=number), standing.learner._replace(seed=seed)


@functools.lru_cache(maxsize=1024)
def _lane_seed(seed: int, lane: str) -> tuple[int, jax.Array]:
    number = int.from_bytes(hashlib.sha256(f"{seed}:{lane}".encode()).digest()[:7])
    with jax.enable_x64(True):
        return number, jnp.asarray(number)
