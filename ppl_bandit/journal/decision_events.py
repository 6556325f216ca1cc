"""The events of decisions: choose arms at a projection, record them, and fold what became of each decision."""

import functools
import hashlib
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.journal.events import CORRECTED, DECIDED, DISCARDED, REWARDED, Event, new_ids
from ppl_bandit.journal.projection import Projection
from ppl_bandit.journal.stores.personal import ERASED
from ppl_bandit.posterior.deciding import decide_many, decide_once
from ppl_bandit.types import Selection

__all__ = [
    "DISCARDED_STATUS",
    "PENDING_STATUS",
    "REWARDED_STATUS",
    "DecisionRecord",
    "choose_arms",
    "decision_events",
    "fold_decision",
]

PENDING_STATUS, REWARDED_STATUS, DISCARDED_STATUS = "pending", "rewarded", "discarded"


class DecisionRecord(NamedTuple):
    """A decision and its outcome so far.

    Attributes:
        decided: the event of the decision.
        status: pending, rewarded or discarded.
        reward: {outcome: value} observed so far.
        row: position of the event that added its row to the history; None if no row was learnt.
        settled: time of the last event that settled it; None while its reward is pending.
        num_corrections: how often its reward was corrected.
        context: the leaves of its context, with the late entries that are known; None for a program without context.
        late: the late entries that are known.
        counted: the outcomes that its row has.
        irrelevant: outcomes that the program masks given the others; their value is 0 and was not reported.
        arm: that was shown, whose reward is learnt.
        shown: the probability with which another system showed it, None if that is not known; empty if none did.
        is_expired: whether it was settled because its reward had been pending for too long.
        is_erased: whether its unit was erased.
        is_late: whether a reward came after it had expired.
    """

    decided: Event
    status: str
    reward: dict[str, float]
    row: int | None
    settled: float | None
    num_corrections: int
    context: Any
    late: frozenset[str] = frozenset()
    irrelevant: frozenset[str] = frozenset()
    counted: frozenset[str] = frozenset()
    arm: int = 0
    shown: tuple[float | None, ...] = ()
    is_expired: bool = False
    is_erased: bool = False
    is_late: bool = False

    @property
    def reported(self) -> dict[str, float]:
        """The outcomes that were reported."""
        return {name: value for name, value in self.reward.items() if name not in self.irrelevant}

    @property
    def propensity(self) -> float | None:
        """The probability with which its arm was played; None if another system showed it with an unknown one."""
        if self.shown:
            return self.shown[0]
        body = self.decided.body  # files of earlier releases keep this number alone once the decision is settled
        return body["propensity"] if "propensity" in body else body["propensities"][self.decided.arm]


def fold_decision(events: Sequence[Event]) -> DecisionRecord:
    """Fold the events of one decision; the decision is the first."""
    status, context, num_corrections = PENDING_STATUS, events[0].body.get("context"), 0
    reward: dict[str, float] = {}
    row: int | None = None
    settled: float | None = None
    late: frozenset[str] = frozenset()
    irrelevant = counted = late
    arm, is_expired, is_late = int(events[0].arm or 0), False, False
    shown: tuple[float | None, ...] = ()
    for event in events[1:]:
        if event.kind == DISCARDED:
            status, settled, is_expired = DISCARDED_STATUS, event.time, event.body.get("reason") == "expired"
            row = (
                row if event.body.get("of") is None else None
            )  # outcomes that were learnt stay, unless they are removed
            continue
        context, late = event.body.get("context", context), late.union(event.body.get("late", ()))
        irrelevant, is_late = frozenset(event.body.get("irrelevant", ())), is_late or "is_late" in event.body
        if "shown" in event.body:
            arm, shown = int(event.arm or 0), (event.body["shown"],)
        if event.kind == REWARDED:
            reward = reward | event.body["reward"]
        elif event.kind == CORRECTED:
            reward, num_corrections = event.body["reward"], num_corrections + 1
        if event.settles or "counted" in event.body:
            replaced = event.body.get("of")
            row = event.position if replaced is None else replaced
            counted = counted.union(event.body.get("counted", reward))
        if event.settles:
            status, settled, is_expired = REWARDED_STATUS, event.time, "expired" in event.body
    known = (events[0], status, reward, row, settled, num_corrections, context, late, irrelevant, counted)
    return DecisionRecord(*known, arm, shown, is_expired, ERASED in events[0].body, is_late)


def choose_arms(
    projection: Projection, stream: str, numbers: Sequence[int], contexts: Any, allowed: np.ndarray, *, is_batch: bool
) -> list[Selection]:
    """Choose the arms of some decisions; the result depends on the arguments alone.

    Args:
        stream: random number stream of the decisions; the empty one uses the experiment's seed.
        numbers: of the decisions.
        contexts: with a leading axis in a batch; one context otherwise.
    """
    task, learner = projection.task, projection.learner
    allocation = projection.allocation
    if stream:
        seed, device_seed = _seed_of(task.seed, stream)
        task, learner = task._replace(seed=seed), learner._replace(seed=device_seed)
    if is_batch:
        chosen = decide_many(task, learner, np.array(numbers), contexts, allowed)
    else:
        chosen = [decide_once(task, learner, numbers[0], contexts, allowed)]
    return chosen if allocation is None else _randomize(chosen, allocation, allowed, task.seed, numbers)


def _randomize(
    chosen: list[Selection], allocation: Sequence[float], allowed: np.ndarray, seed: int, numbers: Sequence[int]
) -> list[Selection]:
    """Return decisions whose arms are drawn with given probabilities; P(best) stays as the posterior has it."""
    probs = np.where(allowed, allocation, 0.0)
    probs = np.where(allowed, 1.0, 0.0) if probs.sum() == 0.0 else probs
    probs /= probs.sum()
    probs.flags.writeable = False
    uniforms = [np.random.default_rng((seed, number)).random() for number in numbers]
    arms = np.searchsorted(np.cumsum(probs)[:-1], uniforms, side="right").tolist()
    fields: Any = [(arm, selection.best_arm_probs, 0, probs) for arm, selection in zip(arms, chosen, strict=True)]
    return list(map(Selection._make, fields))


def decision_events(
    projection: Projection,
    chosen: list[Selection],
    first: int,
    stream: str,
    allowed: np.ndarray,
    contexts: Any,
    *,
    is_batch: bool,
    units: Sequence[str | None] = (),
    replaces: Sequence[Mapping[str, str] | None] = (),
) -> list[Event]:
    """Return the events of decisions that are numbered from `first`; other arguments as in `choose_arms`.

    Args:
        units: of the decisions; empty if none has one.
        replaces: the decisions of these units that do not stand any more, and why.
    """
    position, names, now = projection.position, projection.task.arms.names, time.time()
    leaves = None if contexts is None else jax.tree.leaves(contexts)
    for leaf in leaves or ():
        leaf.flags.writeable = False  # the event and the caller's Decision share it
    mask = allowed.tolist()
    recorded_mask = None if all(mask) else mask
    by_row: Iterable[Any] = zip(*leaves, strict=True) if is_batch and leaves else itertools.repeat(leaves or ())
    batch, *ids = new_ids(1 + len(chosen))
    events = []
    for row, (decision, selection, context) in enumerate(zip(ids, chosen, by_row, strict=False)):
        arm: Any = selection.arm
        body = {
            "absorbed": position,
            "name": names[arm],
            "best_arm_probs": selection.best_arm_probs,
            "num_candidates": selection.num_candidates,
            "propensities": selection.propensities,
        }
        if projection.digest:
            body["snapshot"] = projection.digest
        if recorded_mask is not None:
            body["allowed"] = recorded_mask
        if leaves is not None:
            body["context"] = list(context)
        if is_batch:
            body["row"] = row
        if units and units[row] is not None:
            body["unit"] = units[row]
            body["personal"] = ["unit"] if leaves is None else ["unit", "context"]
            if replaces[row] is not None:
                body["replaces"] = dict(replaces[row] or {})
        events.append(Event(0, DECIDED, decision, batch, first + row, stream, arm, False, now, body))
    return events


@functools.lru_cache(maxsize=1024)
def _seed_of(seed: int, stream: str) -> tuple[int, jax.Array]:
    number = int.from_bytes(hashlib.sha256(f"{seed}:{stream}".encode()).digest()[:7])
    with jax.enable_x64(True):
        return number, jnp.asarray(number)
