"""The current state of one decision: the fold of its events."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from ppl_bandit.journal.events import CORRECTED, DISCARDED, REWARDED, Event

__all__ = ["DISCARDED_STATUS", "PENDING_STATUS", "REWARDED_STATUS", "DecisionRecord", "fold_decision"]

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

    @property
    def reported(self) -> dict[str, float]:
        """The outcomes that were reported."""
        return {name: value for name, value in self.reward.items() if name not in self.irrelevant}

    @property
    def propensity(self) -> float:
        """The probability with which its arm was played."""
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
    for event in events[1:]:
        if event.kind == DISCARDED:
            status, settled = DISCARDED_STATUS, event.time
            row = (
                row if event.body.get("of") is None else None
            )  # outcomes that were learnt stay, unless they are removed
            continue
        context, late = event.body.get("context", context), late.union(event.body.get("late", ()))
        irrelevant = frozenset(event.body.get("irrelevant", ()))
        if event.kind == REWARDED:
            reward = reward | event.body["reward"]
        elif event.kind == CORRECTED:
            reward, num_corrections = event.body["reward"], num_corrections + 1
        if event.settles or "counted" in event.body:
            replaced = event.body.get("of")
            row = event.position if replaced is None else replaced
            counted = counted.union(event.body.get("counted", reward))
        if event.settles:
            status, settled = REWARDED_STATUS, event.time
    return DecisionRecord(events[0], status, reward, row, settled, num_corrections, context, late, irrelevant, counted)
