"""Append the events of several calls to the stream of one experiment, in one transaction.

The end of the stream is read by one statement, and the rows are written by two: a round trip to a server costs more than the
work that it asks for.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ppl_bandit.journal.events import CHECKPOINT, DECIDED, Event
from ppl_bandit.journal.stores.calls import Request
from ppl_bandit.journal.stores.personal import split, unit_key
from ppl_bandit.journal.stores.store import Conflict, JournalError, Key, KeyTaken
from ppl_bandit.journal.stores.tables import digest_of, encode

__all__ = ["MAX_PARAMETERS", "AppendRequest", "Beside", "End", "Execute", "append_requests", "find_keys"]

Execute = Callable[..., list[tuple]]
Beside = Callable[[Sequence[Event]], list[tuple[str, list[tuple]]]]

MAX_PARAMETERS = 500  # of one statement
_NEW_PERSONAL = "INSERT INTO ppl_bandit_personal VALUES (?, ?, ?, ?, ?)"
_NEW_KEY = (
    "INSERT INTO ppl_bandit_keys VALUES (?, ?, ?, ?, ?) ON CONFLICT (experiment, name) DO UPDATE SET value = excluded.value, "
    "owner = excluded.owner, arguments = excluded.arguments"
)
_LAST = "FROM ppl_bandit_events WHERE experiment = ? ORDER BY position DESC LIMIT 1"
_END = (
    f"(SELECT position {_LAST}), (SELECT digest {_LAST}), "
    "(SELECT position FROM ppl_bandit_heads WHERE experiment = ?), (SELECT digest FROM ppl_bandit_heads WHERE experiment = ?), "
    "(SELECT MAX(position) FROM ppl_bandit_events WHERE experiment = ? AND kind <> 'decided' AND kind <> 'checkpoint')"
)


class End(NamedTuple):
    """The end of a stream: its last position and digest, and the position of the last event that a posterior depends on.

    A posterior depends on neither decisions nor checkpoints.
    """

    position: int
    digest: str
    last_learnt: int


class AppendRequest(Request):
    """Events that a thread wants to append; the result is the recorded events.

    Args:
        after: see `SqlStore.append`.
        keys: see `SqlStore.append`.
        beside: given the recorded events, returns what the same transaction writes to other tables: statements with rows.
    """

    def __init__(
        self,
        experiment: str,
        events: Sequence[Event],
        after: int | None,
        keys: Sequence[Key] = (),
        beside: Beside | None = None,
    ):
        self.experiment, self.events, self.after, self.keys, self.beside = experiment, events, after, keys, beside
        self.is_tried = False


def append_requests(
    execute: Execute, experiment: str, requests: Sequence[AppendRequest], is_again: bool, end: End | None
) -> tuple[list[list[Event] | Exception], End]:
    """Append events and return, for each request, the events with their positions, or the reason why they were refused.

    Args:
        is_again: whether the transaction may have been committed before.
        end: of the stream, if it is known.

    Returns:
        The results, and the end of the stream after them.

    Raises:
        JournalError: if events were removed from the end of the stream.
    """
    if end is None:
        row = execute(f"SELECT {_END}", [experiment] * 5)[0]
        end = End(row[0] or 0, row[1] or "", row[4] or 0)
        _check_head(experiment, end[:2], (row[2] or 0, row[3] or ""))
    position, digest, last_learnt = end
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
                others.setdefault(_NEW_KEY, []).extend((experiment, *key[:4]) for key in request.keys)
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
    return results, End(position, digest, last_learnt)


def _check_head(experiment: str, last: tuple[int, str], head: tuple[int, str]) -> None:
    if last[0] < head[0] or (last[0] == head[0] and last[1] != head[1]):
        raise JournalError(
            f"the experiment {experiment!r} had {head[0]} events, and its stream ends at position {last[0]} or differs there: "
            "events were removed or edited; nothing was recorded: restore the journal from a copy"
        )


def _find_recorded(execute: Execute, request: AppendRequest) -> list[Event]:
    """Return the events of a request that was committed before its connection broke, or before its thread was interrupted."""
    if not request.events:
        return []
    batches = list({event.batch: None for event in request.events})
    rows = execute(
        f"SELECT position FROM ppl_bandit_events WHERE experiment = ? AND batch IN ({', '.join('?' * len(batches))}) "
        "ORDER BY position",
        (request.experiment, *batches),
    )
    return [event._replace(position=row[0]) for event, row in zip(request.events, rows, strict=False)]


def find_keys(execute: Execute, experiment: str, requests: Sequence[AppendRequest]) -> dict[str, str]:
    """Return the values of the keys that the requests record, as they are now."""
    names = sorted({key.name for request in requests for key in request.keys})
    found: dict[str, str] = {}
    for start in range(0, len(names), MAX_PARAMETERS):
        some = names[start : start + MAX_PARAMETERS]
        statement = (
            f"SELECT name, value FROM ppl_bandit_keys WHERE experiment = ? AND name IN ({', '.join('?' * len(some))})"
        )
        found |= {row[0]: row[1] for row in execute(statement, (experiment, *some))}
    return found
