"""The events of an experiment, and the chain of digests over its stream.

A stream is append-only. Positions count from 1 without a gap. The digest of an event covers the event and the digest before it,
so that an edited, removed or inserted event is detected.
"""

import hashlib
import os
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import orjson

__all__ = [
    "ARMS",
    "CHANGED",
    "CHECKPOINT",
    "CORRECTED",
    "DECIDED",
    "DISCARDED",
    "FORGOTTEN",
    "IMPORTED",
    "LOOKED",
    "OPENED",
    "REWARDED",
    "Event",
    "decode",
    "digest_of",
    "encode",
    "group_by_decision",
    "new_event",
    "new_id",
    "new_ids",
]

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


def encode(body: dict[str, Any]) -> str:
    """Write a body as JSON; floats are restored to the last bit by `decode`."""
    text = orjson.dumps(body, default=_as_list, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
    if b"null" in text:  # orjson writes a number that is not finite as null
        _refuse_nan(body)
    return text.decode()


def decode(text: str) -> dict[str, Any]:
    """Read a body written by `encode`."""
    return orjson.loads(text)


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else list(value)


def _refuse_nan(value: Any) -> None:
    if isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            _refuse_nan(item)
    elif isinstance(value, float | np.ndarray | np.floating) and not np.all(np.isfinite(value)):
        raise ValueError(f"{value} is not finite: an event cannot hold it")


def digest_of(before: str, experiment: str, event: Event, body: str) -> str:
    """Return the digest of an event at its position, given the digest before it."""
    fields = [before, experiment, *event[:8], repr(float(event.time)), body]
    return hashlib.sha256("\x1f".join(map(str, fields)).encode()).hexdigest()


def group_by_decision(events: Iterable[Event]) -> list[list[Event]]:
    """Return the events of each decision, in the order of the decisions."""
    grouped: dict[str, list[Event]] = {}
    for event in events:
        if event.decision is not None:
            grouped.setdefault(event.decision, []).append(event)
    return list(grouped.values())
