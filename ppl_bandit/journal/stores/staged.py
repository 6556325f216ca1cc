"""Decisions that deciders have recorded beside the stream, until they are sealed: ordered and chained like all other events.

A row holds the events of one call, so they stay together. Sealing moves rows into the stream in one transaction under the
experiment's lock, so that it may be done by any process, at any time, and twice.
"""

from collections.abc import Sequence

from ppl_bandit.journal.events import Event, decode, encode
from ppl_bandit.journal.stores.appending import MAX_PARAMETERS, AppendRequest, Execute, append_requests
from ppl_bandit.journal.stores.store import DamagedEvent

__all__ = ["STAGING_TABLES", "has_staging", "read_staged", "seal_staged", "stage"]

STAGING_TABLES = (
    """CREATE TABLE IF NOT EXISTS ppl_bandit_staged (
        experiment TEXT NOT NULL, batch TEXT NOT NULL, number BIGSERIAL, num_decisions BIGINT NOT NULL, events TEXT NOT NULL,
        PRIMARY KEY (experiment, batch))""",
    "CREATE INDEX IF NOT EXISTS ppl_bandit_staged_order ON ppl_bandit_staged (experiment, number)",
    # When a sealer last said that the newest checkpoint is the newest posterior.
    "CREATE TABLE IF NOT EXISTS ppl_bandit_sealers (experiment TEXT PRIMARY KEY, time DOUBLE PRECISION NOT NULL)",
)


def has_staging(execute: Execute) -> bool:
    """Return whether the tables exist: they are created for the first decider or sealer of a database."""
    return execute("SELECT to_regclass('ppl_bandit_staged')")[0][0] is not None


def stage(execute: Execute, requests: Sequence[AppendRequest], is_again: bool) -> None:
    """Record the decisions of some calls in one statement.

    Args:
        is_again: whether an earlier attempt may have been committed; its rows may be sealed by now.
    """
    if is_again:
        requests = [request for request in requests if not _sealed(execute, request.experiment, [request.events])]
    rows = [
        (request.experiment, request.events[0].batch, len(request.events), _to_text(request.events))
        for request in requests
    ]
    if rows:
        execute(
            "INSERT INTO ppl_bandit_staged (experiment, batch, num_decisions, events) VALUES "
            f"{', '.join(['(?, ?, ?, ?)'] * len(rows))} ON CONFLICT (experiment, batch) DO NOTHING",
            [value for row in rows for value in row],
        )


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


def _to_text(events: Sequence[Event]) -> str:
    return encode({"events": [list(event) for event in events]})


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
