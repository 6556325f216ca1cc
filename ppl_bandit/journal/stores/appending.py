"""Append the events of several calls to the stream of one experiment, in one transaction.

The end of the stream is read by one statement, and the rows are written by two: a round trip to a server costs more than the
work that it asks for.

Also here: the personal part of an event: the unit, and the contexts of its decisions and rewards.

It is stored beside the event, with a random salt. The event itself, and so the chain of digests, holds a digest of both, which
tells nothing once the salt is blanked.

The tables of a journal in a relational database, the same for SQLite and PostgreSQL, and how an event becomes a row.

The digest of an event covers the event and the digest before it, so that an edited, removed or inserted event is detected.

The head of an experiment, in a table of its own, is the position and the digest of its last event. It is written in the
transaction that appends the event, so that the removal of the last events is detected.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import orjson

from ppl_bandit.journal.events import CHECKPOINT, DECIDED, ERASED, Event
from ppl_bandit.journal.stores.store import Conflict, JournalError, Key, KeyTaken, ReadingEvent, Request

VERSION_WITH_HEADS = 2
VERSION_WITH_OPENINGS = 4
VERSION = 5
TABLES = (
    """CREATE TABLE IF NOT EXISTS ppl_bandit_events (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, kind TEXT NOT NULL, decision TEXT, batch TEXT NOT NULL,
        number BIGINT, lane TEXT NOT NULL, arm BIGINT, settles INTEGER NOT NULL, time DOUBLE PRECISION NOT NULL,
        body TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (experiment, position))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_by_decision ON ppl_bandit_events (experiment, decision)
        WHERE decision IS NOT NULL""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_learnt ON ppl_bandit_events (experiment, position) WHERE kind <> 'decided'""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_set ON ppl_bandit_events (experiment, position)
        WHERE kind IN ('opened', 'changed', 'arms', 'looked')""",
    """CREATE UNIQUE INDEX IF NOT EXISTS ppl_bandit_ids ON ppl_bandit_events (experiment, decision)
        WHERE kind = 'decided'""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_checkpoints (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, contents {blob} NOT NULL, PRIMARY KEY (experiment, position))""",
    # The personal parts of events, blanked when their unit is erased, and the keys of units and requests.
    """CREATE TABLE IF NOT EXISTS ppl_bandit_personal (
        experiment TEXT NOT NULL, position BIGINT NOT NULL, owner TEXT NOT NULL, salt TEXT NOT NULL, contents TEXT NOT NULL,
        PRIMARY KEY (experiment, position))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_personal_of ON ppl_bandit_personal (experiment, owner)""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_keys (
        experiment TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, owner TEXT, arguments TEXT NOT NULL,
        PRIMARY KEY (experiment, name))""",
    """CREATE INDEX IF NOT EXISTS ppl_bandit_keys_of ON ppl_bandit_keys (experiment, owner) WHERE owner IS NOT NULL""",
    """CREATE TABLE IF NOT EXISTS ppl_bandit_heads (
        experiment TEXT NOT NULL PRIMARY KEY, position BIGINT NOT NULL, digest TEXT NOT NULL)""",
    # How often an experiment was opened: every opening draws from a random number stream of its own.
    """CREATE TABLE IF NOT EXISTS ppl_bandit_openings (experiment TEXT NOT NULL PRIMARY KEY, num BIGINT NOT NULL)""",
)
# A journal of version 1 has no heads: they are written when it is opened.
_HEADS_OF_EVENTS = """INSERT INTO ppl_bandit_heads
    SELECT last.experiment, last.position, last.digest FROM ppl_bandit_events last
    JOIN (SELECT experiment, MAX(position) AS position FROM ppl_bandit_events GROUP BY experiment) ends
    ON last.experiment = ends.experiment AND last.position = ends.position"""
# Before version 4 processes shared the first stream, and an index refused a number of it that was taken.
_OPENINGS_OF_EXPERIMENTS = (
    "INSERT INTO ppl_bandit_openings SELECT experiment, 1 FROM ppl_bandit_heads",
    "DROP INDEX IF EXISTS ppl_bandit_numbers",
)
# Before version 5 this index held every checkpoint, so that opening took the longer the more there had been.
_SETTINGS_ALONE = "DROP INDEX IF EXISTS ppl_bandit_settings"
# The same words as in the index ppl_bandit_set, which is used for this condition.
IS_SETTING = "kind IN ('opened', 'changed', 'arms', 'looked')"
COLUMNS = "position, kind, decision, batch, number, lane, arm, settles, time, body"


def upgrades_from(version: int) -> tuple[str, ...]:
    """Return the statements that fill the tables which a journal of an earlier version did not have."""
    heads = (_HEADS_OF_EVENTS,) if version < VERSION_WITH_HEADS else ()
    openings = _OPENINGS_OF_EXPERIMENTS if version < VERSION_WITH_OPENINGS else ()
    return (*heads, *openings, _SETTINGS_ALONE)


def event_from_row(experiment: str, row: Sequence[Any]) -> Event:
    """Return the event in a row of `COLUMNS`."""
    position, kind, decision, batch, number, stream, arm, settles, time, body = row
    try:
        return Event(position, kind, decision, batch, number, stream, arm, bool(settles), time, orjson.loads(body))
    except ValueError:
        with ReadingEvent(experiment, position):
            raise


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
Beside = Sequence[tuple[str, Sequence[tuple]]]  # statements with rows for other tables, in which `LAST` may stand
LAST: Any = object()  # the position of the last event of the call

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
        beside: what the same transaction writes to other tables.
        is_tried: whether a transaction was begun for it, which may have been committed.
    """

    experiment: str
    events: Sequence[Event]
    after: int | None = None
    keys: Sequence[Key] = ()
    beside: Beside = ()
    is_tried: bool = field(default=False, init=False)


def append_requests(
    execute: Execute, experiment: str, requests: Sequence[AppendRequest]
) -> list[list[Event] | Exception]:
    """Append events and return, for each request, the events with their positions, or the reason why they were refused.

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
        recorded = _find_recorded(execute, request) if request.is_tried else []
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
            for statement, own in request.beside:
                filled = (tuple(position if value is LAST else value for value in row) for row in own)
                others.setdefault(statement, []).extend(filled)
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
