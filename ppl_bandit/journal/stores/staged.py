"""Decisions that deciders have recorded beside the stream, until they are sealed: ordered and chained like all other events.

A row holds the events of one call, so they stay together. Sealing moves rows into the stream in one transaction under the
experiment's lock, so that it may be done by any process, at any time, and twice.

The keys of units and requests are written in the transaction that stages their decisions. The table of keys has each name
once, so of two deciders one is refused, and reads what the other has recorded. Deciders share the lock of the keys, and a
process that records keys in the stream holds it alone.
"""

from collections.abc import Sequence

from ppl_bandit.journal.events import Event
from ppl_bandit.journal.stores.appending import MAX_PARAMETERS, AppendRequest, Execute, append_requests, find_keys
from ppl_bandit.journal.stores.store import DamagedEvent, KeyTaken
from ppl_bandit.journal.stores.tables import decode, encode

__all__ = ["STAGING_TABLES", "find_staged", "has_staging", "keys_lock", "read_staged", "seal_staged", "stage"]

STAGING_TABLES = (
    """CREATE TABLE IF NOT EXISTS ppl_bandit_staged (
        experiment TEXT NOT NULL, batch TEXT NOT NULL, number BIGSERIAL, num_decisions BIGINT NOT NULL, events TEXT NOT NULL,
        PRIMARY KEY (experiment, batch))""",
    "CREATE INDEX IF NOT EXISTS ppl_bandit_staged_order ON ppl_bandit_staged (experiment, number)",
    "ALTER TABLE ppl_bandit_staged ADD COLUMN IF NOT EXISTS ids TEXT[]",  # of decisions with keys, which are asked for again
    "CREATE INDEX IF NOT EXISTS ppl_bandit_staged_ids ON ppl_bandit_staged USING gin (ids) WHERE ids IS NOT NULL",
    # When a sealer last said that the newest checkpoint is the newest posterior.
    "CREATE TABLE IF NOT EXISTS ppl_bandit_sealers (experiment TEXT PRIMARY KEY, time DOUBLE PRECISION NOT NULL)",
)


def has_staging(execute: Execute) -> bool:
    """Return whether the tables exist: they are created for the first decider or sealer of a database."""
    return execute("SELECT to_regclass('ppl_bandit_staged')")[0][0] is not None


def keys_lock(experiment: str) -> str:
    """Return the name of the lock of an experiment's keys."""
    return f"{experiment}\x1fkeys"


def stage(execute: Execute, requests: Sequence[AppendRequest], is_again: bool) -> list[AppendRequest]:
    """Record the decisions of some calls, which have no key in common, and return those that another process has a key of.

    Args:
        is_again: whether an earlier attempt may have been committed; its rows may be sealed by now.

    Raises:
        KeyTaken: if another process was faster just now: the transaction has to be made again.
    """
    refused: list[AppendRequest] = []
    if any(request.keys for request in requests):
        values = find_keys(execute, requests[0].experiment, requests)
        refused = [r for r in requests if any(values.get(key.name) != key.expected for key in r.keys)]
        requests = [request for request in requests if request not in refused]
        _write_keys(execute, requests)
    calls = [request for request in requests if request.events]
    if is_again and calls:
        sealed = _sealed(execute, calls[0].experiment, [request.events for request in calls])
        calls = [request for request in calls if request.events[0].decision not in sealed]
    rows = [
        (
            request.experiment,
            request.events[0].batch,
            len(request.events),
            encode({"events": [list(event) for event in request.events]}),
            [event.decision for event in request.events] if request.keys else None,
        )
        for request in calls
    ]
    if rows:
        execute(
            "INSERT INTO ppl_bandit_staged (experiment, batch, num_decisions, events, ids) VALUES "
            f"{', '.join(['(?, ?, ?, ?, ?)'] * len(rows))} ON CONFLICT (experiment, batch) DO NOTHING",
            [value for row in rows for value in row],
        )
    return refused


def _write_keys(execute: Execute, requests: Sequence[AppendRequest]) -> None:
    """Write the keys in the order of their names, so that processes do not wait for each other in a circle."""
    keys = sorted((key for request in requests for key in request.keys), key=lambda key: key.name)
    new = [(requests[0].experiment, *key[:4]) for key in keys if key.expected is None]
    for start in range(0, len(new), MAX_PARAMETERS):
        some = new[start : start + MAX_PARAMETERS]
        written = execute(
            f"INSERT INTO ppl_bandit_keys VALUES {', '.join(['(?, ?, ?, ?, ?)'] * len(some))} "
            "ON CONFLICT (experiment, name) DO NOTHING RETURNING name",
            [value for row in some for value in row],
        )
        if len(written) < len(some):
            raise KeyTaken
    for key in (key for key in keys if key.expected is not None):
        statement = (
            "UPDATE ppl_bandit_keys SET value = ?, owner = ?, arguments = ? "
            "WHERE experiment = ? AND name = ? AND value = ? RETURNING name"
        )
        given = key.value, key.owner, key.arguments, requests[0].experiment, key.name, key.expected
        if not execute(statement, given):
            raise KeyTaken


def find_staged(execute: Execute, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
    """Return the staged events of some decisions that have keys; others are left out."""
    statement = "SELECT batch, events FROM ppl_bandit_staged WHERE experiment = ? AND ids && ?"
    rows = execute(statement, (experiment, list(decisions)))
    events = [event for row in rows for event in _from_text(experiment, *row)]
    return {str(event.decision): [event] for event in events if event.decision in decisions}


def read_staged(execute: Execute, experiment: str) -> list[list[Event]]:
    """Return the oldest staged calls, at most 500.

    Raises:
        DamagedEvent: if one cannot be read.
    """
    rows = execute(
        "SELECT batch, events FROM ppl_bandit_staged WHERE experiment = ? ORDER BY number LIMIT ?",
        (experiment, MAX_PARAMETERS),
    )
    return [_from_text(experiment, *row) for row in rows]


def seal_staged(execute: Execute, experiment: str) -> int:
    """Append the oldest staged calls to the stream, and return their number; the caller holds the experiment's lock."""
    calls = read_staged(execute, experiment)
    if not calls:
        return 0
    sealed = _sealed(execute, experiment, calls)
    events = [event for call in calls if call[0].decision not in sealed for event in call]
    if events:
        (result,), _ = append_requests(execute, experiment, [AppendRequest(experiment, events, None)], False, None)
        if isinstance(result, Exception):
            raise result
    statement = "DELETE FROM ppl_bandit_staged WHERE experiment = ? AND batch = ?"
    execute(statement, [(experiment, call[0].batch) for call in calls], True)
    return len(calls)


def _sealed(execute: Execute, experiment: str, calls: Sequence[Sequence[Event]]) -> set[str]:
    """Return the first decisions of those calls that are in the stream."""
    ids = [call[0].decision for call in calls]
    statement = (
        "SELECT decision FROM ppl_bandit_events WHERE experiment = ? AND kind = 'decided' "
        f"AND decision IN ({', '.join('?' * len(ids))})"
    )
    return {row[0] for row in execute(statement, (experiment, *ids))}


def _from_text(experiment: str, batch: str, text: str) -> list[Event]:
    try:
        events = [Event._make(fields) for fields in decode(text)["events"]]
        if not events or any(event.batch != batch or event.kind != "decided" for event in events):
            raise ValueError("its events are not the decisions of this call")
        return events
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedEvent(
            f"the staged call {batch!r} of the experiment {experiment!r} cannot be read ({error}), so nothing can be sealed: "
            "it was edited or damaged; restore the journal from a copy, or delete this row of ppl_bandit_staged"
        ) from None
