"""One event of an experiment, and the chain of digests that ties a stream together.

A stream is append-only: positions count from 1 without a gap, and each event's digest covers the event and the digest
before it, so that an edited, removed or inserted event shows.
"""

import hashlib
import json
import os
import time
from typing import Any, NamedTuple

__all__ = [
    "ARMS",
    "CHANGED",
    "CORRECTED",
    "DECIDED",
    "DISCARDED",
    "IMPORTED",
    "OPENED",
    "REWARDED",
    "Event",
    "decode",
    "digest_of",
    "encode",
    "new_event",
    "new_id",
    "new_ids",
]

OPENED = "opened"  # the experiment as it was opened: program, settings, versions
CHANGED = "changed"  # its user went on with another program or other settings
ARMS = "arms"  # arms were added or retired
DECIDED = "decided"
REWARDED = "rewarded"  # some or all outcomes of a decision
IMPORTED = "imported"  # rewards of plays that were decided elsewhere
CORRECTED = "corrected"  # another reward in place of one given before, or after a decision was discarded
DISCARDED = "discarded"  # no reward will be learnt; with `of`, not the one given before either


class Event(NamedTuple):
    """One event.

    Attributes:
        position: in the stream, from 1; 0 as long as it is not recorded.
        kind: one of the names above.
        decision: id of the decision that it is about, or None.
        batch: id of the call that recorded it; events of one call stand together and are learnt together.
        number: of a decision, counted from 0: its step, and the seed of its random numbers.
        lane: empty for one process after another; processes that decide at the same time draw from lanes of their own.
        arm: index of the arm, of a decision or its reward.
        settles: whether its decision waits no longer.
        time: in seconds since 1970.
        body: everything else, plain JSON values.
    """

    position: int
    kind: str
    decision: str | None
    batch: str
    number: int | None
    lane: str
    arm: int | None
    settles: bool
    time: float
    body: dict[str, Any]


def new_id() -> str:
    """Return an id that no other call, process or machine returns."""
    return os.urandom(16).hex()


def new_ids(num: int) -> list[str]:
    """Return several at once, which costs little more than one."""
    digits = os.urandom(16 * num).hex()
    return [digits[start : start + 32] for start in range(0, 32 * num, 32)]


def new_event(
    kind: str,
    body: dict[str, Any],
    *,
    decision: str | None = None,
    batch: str | None = None,
    number: int | None = None,
    lane: str = "",
    arm: int | None = None,
    settles: bool = False,
) -> Event:
    """Return an event of now, not yet recorded."""
    batch = new_id() if batch is None else batch
    return Event(0, kind, decision, batch, number, lane, arm, settles, time.time(), body)


def encode(body: dict[str, Any]) -> str:
    """Write a body as JSON; floats come back as they were, to the last bit."""
    return json.dumps(body, separators=(",", ":"), allow_nan=False, default=lambda array: array.tolist())


def decode(text: str) -> dict[str, Any]:
    """Read what `encode` wrote."""
    return json.loads(text)


def digest_of(before: str, experiment: str, event: Event, body: str) -> str:
    """Return the digest of an event at its position, given the digest before it."""
    facts = [before, experiment, *event[:8], repr(float(event.time)), body]
    return hashlib.sha256("\x1f".join(map(str, facts)).encode()).hexdigest()
