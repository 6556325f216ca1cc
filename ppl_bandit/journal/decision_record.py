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
    """

    decided: Event
    status: str
    reward: dict[str, float]
    row: int | None
    settled: float | None
    num_corrections: int

    @property
    def context(self) -> Any:
        """The leaves of its context; None for a program without context."""
        return self.decided.body.get("context")

    @property
    def propensity(self) -> float:
        """The probability with which its arm was played."""
        body = self.decided.body  # files of earlier releases keep this number alone once the decision is settled
        return body["propensity"] if "propensity" in body else body["propensities"][self.decided.arm]


def fold_decision(events: Sequence[Event]) -> DecisionRecord:
    """Fold the events of one decision; the decision is the first."""
    status, reward, num_corrections = PENDING_STATUS, dict[str, float](), 0
    row: int | None = None
    settled: float | None = None
    for event in events[1:]:
        if event.kind == DISCARDED:
            status, row, settled = DISCARDED_STATUS, None, event.time
            continue
        if event.kind == REWARDED:
            reward = reward | event.body["reward"]
        elif event.kind == CORRECTED:
            reward, num_corrections = event.body["reward"], num_corrections + 1
        if event.settles:
            is_replaced = event.kind == CORRECTED and event.body["of"] is not None
            row = event.body["of"] if is_replaced else event.position
            status, settled = REWARDED_STATUS, event.time
    return DecisionRecord(events[0], status, reward, row, settled, num_corrections)
