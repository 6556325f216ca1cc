"""Append the events of several calls to the stream of one experiment, in one transaction.

The end of the stream is read by one statement, and the rows are written by two: a round trip to a server costs more than the
work that it asks for.

The personal part of an event: the unit, and the contexts of its decisions and rewards.

It is stored beside the event, with a random salt. The event itself, and so the chain of digests, holds a digest of both, which
tells nothing once the salt is blanked.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from ppl_bandit.journal.events import CHECKPOINT, DECIDED, ERASED, Event
from ppl_bandit.journal.stores.calls import Request
from ppl_bandit.journal.stores.store import Conflict, JournalError, Key, KeyTaken
from ppl_bandit.journal.stores.tables import decode, digest_of, encode


class Personal(NamedTuple):
    """The personal part of an event, as it is stored."""

    salt: str
    contents: str


def unit_key(unit: str) -> str:
    """Return the key of a unit."""
    return f"unit:{hashlib.sha256(unit.encode()).hexdigest()}"


def split(event: Event) -> tuple[dict[str, Any], Personal]:
    """Return the body to store with an event, and its personal part: the entries that `body["personal"]` names."""
    names = event.body["personal"]
    part = Personal(os.urandom(16).hex(), encode({name: event.body[name] for name in names}))
    rest = {name: value for name, value in event.body.items() if name not in names}
    return rest | {"personal": _digest(part)}, part


def joined(event: Event, part: Personal | None) -> Event:
    """Return an event with its personal part; without it, the event says that it was erased.

    Raises:
        ValueError: if the part is not the one that was recorded.
    """
    if part is None or not part.contents.strip():
        return event._replace(body=event.body | {ERASED: True})
    if _digest(part) != event.body["personal"]:
        raise ValueError("its personal part is not the one that was recorded")
    own = decode(part.contents)
    return event._replace(body=event.body | own | {"personal": list(own)})


def _digest(part: Personal) -> str:
    return hashlib.sha256((part.salt + part.contents).encode()).hexdigest()


Execute = Callable[..., list[tuple]]  # (statement, parameters, is_many=False) -> rows
Result = TypeVar("Result")
Beside = Callable[[Sequence[Event]], list[tuple[str, list[tuple]]]]

MAX_PARAMETERS = 500  # of one statement
_NEW_PERSONAL = "INSERT INTO ppl_bandit_personal VALUES (?, ?, ?, ?, ?)"
NEW_KEY = (
    "INSERT INTO ppl_bandit_keys VALUES (?, ?, ?, ?, ?) ON CONFLICT (experiment, name) DO UPDATE SET value = excluded.value, "
    "owner = excluded.owner, arguments = excluded.arguments"
)
_LAST = "FROM ppl_bandit_events WHERE experiment = ? ORDER BY position DESC LIMIT 1"
_END = (
    f"SELECT (SELECT position {_LAST}), (SELECT digest {_LAST}), "
    "(SELECT position FROM ppl_bandit_heads WHERE experiment = ?), (SELECT digest FROM ppl_bandit_heads WHERE experiment = ?), "
    "(SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ? AND kind <> 'decided' AND kind <> 'checkpoint')"
)


@dataclass(eq=False)
class AppendRequest(Request):
    """Events that a thread wants to append; the result is the recorded events.

    Attributes:
        after, keys: see `SqlStore.append`.
        beside: given the recorded events, returns what the same transaction writes to other tables: statements with rows.
        is_tried: whether a transaction was begun for it, which may have been committed.
    """

    experiment: str
    events: Sequence[Event]
    after: int | None = None
    keys: Sequence[Key] = ()
    beside: Beside | None = None
    is_tried: bool = field(default=False, init=False)


def append_requests(
    execute: Execute, experiment: str, requests: Sequence[AppendRequest], is_again: bool
) -> list[list[Event] | Exception]:
    """Append events and return, for each request, the events with their positions, or the reason why they were refused.

    Args:
        is_again: whether the transaction may have been committed before.

    Raises:
        JournalError: if events were removed from the end of the stream.
    """
    last, last_digest, head, head_digest, learnt = execute(_END, [experiment] * 5)[0]
    # A posterior depends on neither decisions nor checkpoints: they make no conflict.
    position, digest, last_learnt = last or 0, last_digest or "", learnt or 0
    if position < (head or 0) or (position == head and digest != head_digest):
        raise _damaged_end(experiment, position, head)
    values = find_keys(execute, experiment, requests) if any(request.keys for request in requests) else {}
    results: list[list[Event] | Exception] = []
    rows: list[tuple] = []
    others: dict[str, list[tuple]] = {}
    for request in requests:
        recorded = _find_recorded(execute, request) if is_again or request.is_tried else []
        request.is_tried = True
        if recorded:
            results.append(recorded)
        elif request.after is not None and last_learnt > request.after:
            results.append(Conflict())
        elif request.keys and any(values.get(key.name) != key.expected for key in request.keys):
            results.append(KeyTaken())
        else:
            for event in request.events:
                position += 1
                event = event._replace(position=position)
                stored = event.body
                if "personal" in stored:
                    stored, personal = split(event)
                    row_beside = (experiment, position, unit_key(event.body["unit"]), *personal)
                    others.setdefault(_NEW_PERSONAL, []).append(row_beside)
                body = encode(stored)
                digest = digest_of(digest, experiment, event, body)
                rows.append((experiment, *event[:7], int(event.settles), event.time, body, digest))
                recorded.append(event)
                last_learnt = last_learnt if event.kind in (DECIDED, CHECKPOINT) else position
            if request.keys:
                values |= {key.name: key.value for key in request.keys}
                others.setdefault(NEW_KEY, []).extend((experiment, *key[:4]) for key in request.keys)
            for statement, own in request.beside(recorded) if request.beside is not None else ():
                others.setdefault(statement, []).extend(own)
            results.append(recorded)
    if rows:
        execute(f"INSERT INTO ppl_bandit_events VALUES ({', '.join('?' * 12)})", rows, True)
        execute(
            "INSERT INTO ppl_bandit_heads VALUES (?, ?, ?) "
            "ON CONFLICT (experiment) DO UPDATE SET position = excluded.position, digest = excluded.digest",
            [(experiment, position, digest)],
            True,
        )
    for statement, own in others.items():
        execute(statement, own, True)
    return results


def _damaged_end(experiment: str, position: int, head: int) -> JournalError:
    return JournalError(
        f"the experiment {experiment!r} had {head} events, and its stream ends at position {position} or differs there: "
        "events were removed or edited; nothing was recorded: restore the journal from a copy"
    )


def _find_recorded(execute: Execute, request: AppendRequest) -> list[Event]:
    """Return the events of a request that was committed before its connection broke, or before its thread was interrupted."""
    batches = list({event.batch: None for event in request.events})
    rows = sorted(rows_in(execute, "position", "events", request.experiment, "batch", batches))
    return [event._replace(position=row[0]) for event, row in zip(request.events, rows, strict=False)]


def find_keys(execute: Execute, experiment: str, requests: Sequence[AppendRequest]) -> dict[str, str]:
    """Return the values of the keys that the requests record, as they are now."""
    names = sorted({key.name for request in requests for key in request.keys})
    return {row[0]: row[1] for row in rows_in(execute, "name, value", "keys", experiment, "name", names)}


def rows_in(
    execute: Execute, columns: str, table: str, experiment: str, column: str, values: Sequence[Any]
) -> list[tuple]:
    """Return the rows of an experiment in which a column has one of some values, in any order.

    Args:
        columns: to return.
        table: its name without the prefix.
    """
    rows: list[tuple] = []
    for start in range(0, len(values), MAX_PARAMETERS):
        some = values[start : start + MAX_PARAMETERS]
        marks = ", ".join("?" * len(some))
        statement = f"SELECT {columns} FROM ppl_bandit_{table} WHERE experiment = ? AND {column} IN ({marks})"
        rows += execute(statement, (experiment, *some))
    return rows
