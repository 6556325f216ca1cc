"""Decisions that deciders have recorded beside the stream, until they are sealed: ordered and chained like all other events.

A row holds the events of one call, so they stay together. Sealing moves rows into the stream in one transaction under the
experiment's lock, so that it may be done by any process, at any time, and twice.

The keys of units and requests are written in the transaction that stages their decisions, under the lock of the experiment's
keys. So of two deciders one is refused, and reads what the other has recorded.
"""

from collections.abc import Sequence

from ppl_bandit.journal.events import DECIDED, Event
from ppl_bandit.journal.stores.appending import (
    MAX_PARAMETERS,
    NEW_KEY,
    AppendRequest,
    Execute,
    append_requests,
    decode,
    encode,
    find_keys,
    rows_in,
)
from ppl_bandit.journal.stores.store import DamagedEvent, KeyTaken

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


def stage_requests(
    execute: Execute, experiment: str, requests: Sequence[AppendRequest]
) -> list[list[Event] | Exception]:
    """Record the decisions of some calls, and return, for each call, its events, or the reason why they were refused."""
    values = find_keys(execute, experiment, requests)
    results: list[list[Event] | Exception] = []
    calls: list[AppendRequest] = []
    for request in requests:
        if any(values.get(key.name) != key.expected for key in request.keys):
            results.append(KeyTaken())
            continue
        values |= {key.name: key.value for key in request.keys}
        results.append(list(request.events))
        calls.append(request)
    keys = [(experiment, *key[:4]) for request in calls for key in request.keys]
    if keys:
        execute(NEW_KEY, keys, True)
    # What an earlier attempt has committed may be sealed by now.
    sealed = _sealed(execute, experiment, [request.events for request in calls if request.is_tried])
    for request in calls:
        request.is_tried = True
    rows = [
        (
            experiment,
            request.events[0].batch,
            len(request.events),
            encode({"events": [list(event) for event in request.events]}),
            [event.decision for event in request.events] if request.keys else None,
        )
        for request in calls
        if request.events and request.events[0].decision not in sealed
    ]
    if rows:
        execute(
            "INSERT INTO ppl_bandit_staged (experiment, batch, num_decisions, events, ids) VALUES "
            f"{', '.join(['(?, ?, ?, ?, ?)'] * len(rows))} ON CONFLICT (experiment, batch) DO NOTHING",
            [value for row in rows for value in row],
        )
    return results


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
        (result,) = append_requests(execute, experiment, [AppendRequest(experiment, events)])
        if isinstance(result, Exception):
            raise result
    statement = "DELETE FROM ppl_bandit_staged WHERE experiment = ? AND batch = ?"
    execute(statement, [(experiment, call[0].batch) for call in calls], True)
    return len(calls)


def _sealed(execute: Execute, experiment: str, calls: Sequence[Sequence[Event]]) -> set[str]:
    """Return the first decisions of those calls that are in the stream."""
    ids = [call[0].decision for call in calls if call]
    rows = rows_in(execute, "decision, kind", "events", experiment, "decision", ids)
    return {decision for decision, kind in rows if kind == DECIDED}


def _from_text(experiment: str, batch: str, text: str) -> list[Event]:
    try:
        events = [Event._make(fields) for fields in decode(text)["events"]]
        if not events or any(event.batch != batch or event.kind != DECIDED for event in events):
            raise ValueError("its events are not the decisions of this call")
        return events
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedEvent(
            f"the staged call {batch!r} of the experiment {experiment!r} cannot be read ({error}), so nothing can be sealed: "
            "it was edited or damaged; restore the journal from a copy, or delete this row of ppl_bandit_staged"
        ) from None
