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
from ppl_bandit.journal.stores.store import DamagedEvent, Key, KeyTaken

# One statement: the server begins and ends it without the client, which may be stopped at any time.
_NEW_KEYS = NEW_KEY.replace(
    "VALUES (?, ?, ?, ?, ?)", "SELECT ?, * FROM unnest(?::text[], ?::text[], ?::text[], ?::text[])"
)
_MAX_DECISIONS = 5_000  # sealed in one transaction, unless one call has more: 0.2 s
STAGING_TABLES = (
    """CREATE TABLE IF NOT EXISTS ppl_bandit_staged (
        experiment TEXT NOT NULL, batch TEXT NOT NULL, number BIGSERIAL, num_decisions BIGINT NOT NULL, events TEXT NOT NULL,
        PRIMARY KEY (experiment, batch))""",
    "CREATE INDEX IF NOT EXISTS ppl_bandit_staged_order ON ppl_bandit_staged (experiment, number)",
    "ALTER TABLE ppl_bandit_staged ADD COLUMN IF NOT EXISTS ids TEXT[]",  # of decisions with keys, which are asked for again
    "CREATE INDEX IF NOT EXISTS ppl_bandit_staged_ids ON ppl_bandit_staged USING gin (ids) WHERE ids IS NOT NULL",
    "ALTER TABLE ppl_bandit_staged ADD COLUMN IF NOT EXISTS time DOUBLE PRECISION NOT NULL DEFAULT "
    "extract(epoch FROM clock_timestamp())",
    # Rewards that were reported to deciders, until the process that learns has answered them.
    """CREATE TABLE IF NOT EXISTS ppl_bandit_reported (
        id TEXT PRIMARY KEY, experiment TEXT NOT NULL, number BIGSERIAL, arguments TEXT NOT NULL, answer TEXT,
        time DOUBLE PRECISION NOT NULL DEFAULT extract(epoch FROM clock_timestamp()))""",
    "CREATE INDEX IF NOT EXISTS ppl_bandit_reported_new ON ppl_bandit_reported (experiment, number) WHERE answer IS NULL",
    # When a sealer last said that the newest checkpoint is the newest posterior.
    "CREATE TABLE IF NOT EXISTS ppl_bandit_sealers (experiment TEXT PRIMARY KEY, time DOUBLE PRECISION NOT NULL)",
)


def has_staging(execute: Execute) -> bool:
    """Return whether the tables exist: they are created for the first decider or sealer of a database."""
    return execute("SELECT to_regclass('ppl_bandit_staged')")[0][0] is not None


OF_KEYS = "\x1fkeys"


def keys_lock(experiment: str) -> str:
    """Return the name of the lock of an experiment's keys, for which every process waits that records a unit."""
    return f"{experiment}{OF_KEYS}"


def stage_requests(
    execute: Execute, experiment: str, requests: Sequence[AppendRequest]
) -> list[list[Event] | Exception]:
    """Record the decisions of some calls, and return, for each call, its events, or the reason why they were refused."""
    recorded = _recorded(execute, experiment, [request for request in requests if request.is_tried])
    values = find_keys(execute, experiment, requests)
    results: list[list[Event] | Exception] = []
    keys: dict[str, Key] = {}
    rows: list[tuple] = []
    for request in requests:
        request.is_tried = True
        events = request.events
        if events and events[0].batch in recorded:  # its keys are taken by itself
            results.append(list(events))
            continue
        if any(values.get(key.name) != key.expected for key in request.keys):
            results.append(KeyTaken())
            continue
        results.append(list(events))
        values |= {key.name: key.value for key in request.keys}
        keys |= {key.name: key for key in request.keys}
        if events:
            ids = [event.decision for event in events] if request.keys else None
            text = encode({"events": [list(event) for event in events]})
            rows.append((experiment, events[0].batch, len(events), text, ids))
    if keys:
        execute(_NEW_KEYS, [experiment, *map(list, zip(*[key[:4] for key in keys.values()], strict=True))])
    if rows:
        execute(
            "INSERT INTO ppl_bandit_staged (experiment, batch, num_decisions, events, ids) VALUES "
            f"{', '.join(['(?, ?, ?, ?, ?)'] * len(rows))} ON CONFLICT (experiment, batch) DO NOTHING",
            [value for row in rows for value in row],
        )
    return results


def _recorded(execute: Execute, experiment: str, requests: Sequence[AppendRequest]) -> set[str]:
    """Return the ids of those calls that were committed, though their answer was lost: staged, or sealed since."""
    calls = {request.events[0].batch: request.events for request in requests if request.events}
    staged = {row[0] for row in rows_in(execute, "batch", "staged", experiment, "batch", list(calls))}
    sealed = _sealed(execute, experiment, list(calls.values()))
    return staged | {batch for batch, events in calls.items() if events[0].decision in sealed}


def find_staged(execute: Execute, experiment: str, decisions: Sequence[str]) -> dict[str, list[Event]]:
    """Return the staged events of some decisions that have keys; others are left out."""
    statement = "SELECT batch, events, time FROM ppl_bandit_staged WHERE experiment = ? AND ids && ?"
    rows = execute(statement, (experiment, list(decisions)))
    events = [event for row in rows for event in _from_text(experiment, *row)]
    return {str(event.decision): [event] for event in events if event.decision in decisions}


def read_staged(execute: Execute, experiment: str, after: int = 0) -> tuple[list[list[Event]], int]:
    """Return the oldest staged calls beyond a number, and the number of the last.

    They are at most 500 calls, and as few as have 5,000 decisions, so that sealing them takes a fraction of a second.

    Raises:
        DamagedEvent: if one cannot be read.
    """
    rows = execute(
        "SELECT batch, events, time, number FROM "
        "(SELECT *, SUM(num_decisions) OVER (ORDER BY number) - num_decisions AS before FROM "
        "(SELECT * FROM ppl_bandit_staged WHERE experiment = ? AND number > ? ORDER BY number LIMIT ?) oldest) counted "
        "WHERE before < ? ORDER BY number",
        (experiment, after, MAX_PARAMETERS, _MAX_DECISIONS),
    )
    return [_from_text(experiment, *row[:3]) for row in rows], rows[-1][3] if rows else after


def seal_staged(execute: Execute, experiment: str) -> tuple[int, bool]:
    """Append the oldest staged calls to the stream; the caller holds the experiment's lock.

    Returns:
        The number of calls, and whether there may be more.
    """
    calls, _ = read_staged(execute, experiment)
    if not calls:
        return 0, False
    sealed = _sealed(execute, experiment, calls)
    events = [event for call in calls if call[0].decision not in sealed for event in call]
    if events:
        (result,) = append_requests(execute, experiment, [AppendRequest(experiment, events)])
        if isinstance(result, Exception):
            raise result
    statement = "DELETE FROM ppl_bandit_staged WHERE experiment = ? AND batch = ?"
    execute(statement, [(experiment, call[0].batch) for call in calls], True)
    return len(calls), len(calls) == MAX_PARAMETERS or sum(map(len, calls)) >= _MAX_DECISIONS


def _sealed(execute: Execute, experiment: str, calls: Sequence[Sequence[Event]]) -> set[str]:
    """Return the first decisions of those calls that are in the stream."""
    ids = [call[0].decision for call in calls if call]
    rows = rows_in(execute, "decision, kind", "events", experiment, "decision", ids)
    return {decision for decision, kind in rows if kind == DECIDED}


def _from_text(experiment: str, batch: str, text: str, time: float) -> list[Event]:
    """Return the events of a call; their time is that of the server, so that no clock of a decider matters."""
    try:
        events = [Event._make(fields)._replace(time=time) for fields in decode(text)["events"]]
        if not events or any(event.batch != batch or event.kind != DECIDED for event in events):
            raise ValueError("its events are not the decisions of this call")
        if not all(type(event.body["absorbed"]) is int and type(event.body["snapshot"]) is str for event in events):
            raise ValueError("it does not name the snapshot behind its decisions")
        return events
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedEvent(
            f"the staged call {batch!r} of the experiment {experiment!r} cannot be read ({error}), so nothing can be sealed: "
            "it was edited or damaged; restore the journal from a copy, or delete this row of ppl_bandit_staged"
        ) from None
