"""The events of an experiment, and what became of a decision, folded from its events.

A stream of events is append-only; positions count from 1 without a gap.
"""

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

OPENED = "opened"  # a new experiment: program, settings, versions
CHANGED = "changed"  # the experiment continues with another program or other settings
ARMS = "arms"  # arms were added or retired
LOOKED = "looked"  # a look at a designed experiment: its verdict, the arms left, and their probabilities until the next
CHECKPOINT = "checkpoint"  # a posterior was stored beside the stream: its position, and the digest of its contents
DECIDED = "decided"
REWARDED = "rewarded"  # some or all outcomes of a decision
IMPORTED = "imported"  # rewards of plays that another system decided
CORRECTED = "corrected"  # a reward that replaces an earlier one, or that of a discarded decision
FORGOTTEN = "forgotten"  # the personal parts of a unit were blanked; its rows with contexts left the history
DISCARDED = "discarded"  # no reward will be learnt; if `of` is set, the row learnt at that position is removed

ERASED = "erased"  # key of the body of an event whose personal part was erased
PENDING_STATUS, REWARDED_STATUS, DISCARDED_STATUS = "pending", "rewarded", "discarded"


class Event(NamedTuple):
    """One event.

    Attributes:
        position: sequence number in the stream, from 1; 0 before the event is recorded.
        kind: one of the constants above.
        decision: id of the decision that the event belongs to, or None.
        batch: id of the call that recorded it; the events of one call are consecutive and are learnt together.
        number: number of a decision, counted from 0: its step, and the seed of its random numbers.
        stream: random number stream of a decision: that of the opening which made it, empty for the first.
        arm: index of the arm of a decision or of its reward.
        settles: whether the reward of its decision is no longer pending.
        time: seconds since 1970.
        body: everything else, as JSON values.
    """

    position: int
    kind: str
    decision: str | None
    batch: str
    number: int | None
    stream: str
    arm: int | None
    settles: bool
    time: float
    body: dict[str, Any]


def new_id() -> str:
    """Return an id of 128 bits: a UUID of version 7, without dashes."""
    return new_ids(1)[0]


def new_ids(num: int) -> list[str]:
    """Return several ids. They begin with the time in milliseconds, so that an index by id grows at its end."""
    start = f"{time.time_ns() // 1_000_000:012x}7"
    digits = os.urandom(10 * num).hex()
    variants = "89ab"
    return [
        f"{start}{digits[at : at + 3]}{variants[int(digits[at + 3], 16) & 3]}{digits[at + 4 : at + 19]}"
        for at in range(0, 20 * num, 20)
    ]


def new_event(
    kind: str,
    body: dict[str, Any],
    *,
    decision: str | None = None,
    batch: str | None = None,
    number: int | None = None,
    arm: int | None = None,
    settles: bool = False,
) -> Event:
    """Return an event with the current time, not yet recorded."""
    batch = new_id() if batch is None else batch
    return Event(0, kind, decision, batch, number, "", arm, settles, time.time(), body)


def retired_after(retired: frozenset[int], event: Event) -> frozenset[int]:
    """Return the retired arms after an event of the arms, or after a look, which drops some."""
    if event.kind == ARMS:
        return frozenset(event.body["retired"])
    return retired.union(arm for arm, is_active in enumerate(event.body["active"]) if not is_active)


class DecisionRecord(NamedTuple):
    """A decision and its outcome so far; or a play that was imported.

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
    def is_shown_as_decided(self) -> bool:
        """Whether the arm of the decision was shown, with the probability of the decision."""
        return self.arm == self.decided.arm and self.propensity == self.decided_propensity

    @property
    def propensity(self) -> float | None:
        """The probability with which its arm was played; None if another system showed it with an unknown one."""
        return self.shown[0] if self.shown else self.decided_propensity

    @property
    def decided_propensity(self) -> float:
        """The probability with which the decision played the arm that it chose."""
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


def imported_records(event: Event) -> Iterator[DecisionRecord]:
    """Yield the plays of an imported event, as rewarded decisions that another system made."""
    body, contexts = event.body, event.body["contexts"]
    for row, arm in enumerate(body["arms"]):
        rewards = {name: values[row] for name, values in body["rewards"].items()}
        context = None if contexts is None else [leaf[row] for leaf in contexts]
        known = event, REWARDED_STATUS, rewards, event.position, event.time, 0, context
        propensity = float(body["propensity"][row]) if "propensity" in body else None
        yield DecisionRecord(*known, arm=int(arm), shown=(propensity,))
