"""What a journal says without the program: counts, one decision's story, a table of everything."""

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bandit.journal.events import DECIDED, IMPORTED, Event
from ppl_bandit.journal.opening import Facts, facts_of
from ppl_bandit.journal.records import PENDING_STATUS, REWARDED_STATUS, Record, record_of
from ppl_bandit.journal.stores.contract import JournalError
from ppl_bandit.journal.stores.sql import SqlStore

if TYPE_CHECKING:
    import pandas

__all__ = ["status_of", "story_of", "table_of", "when"]


def status_of(store: SqlStore, name: str) -> dict[str, Any]:
    """Return what an experiment is and how far it got, in plain JSON values."""
    facts = _facts(store, name)
    events = store.read(name, whole=True)
    records = _records(events)
    arms = []
    sums = [np.zeros(0)] * len(facts.names)
    outcome = facts.identity["outcomes"][0]
    for event in events:
        if event.kind == IMPORTED:
            for index in set(event.body["arms"]):
                values = np.asarray(event.body["rewards"][outcome])[np.asarray(event.body["arms"]) == index]
                sums[index] = np.concatenate([sums[index], values])
    for index, arm in enumerate(facts.names):
        own = [record for record in records if record.decided.arm == index]
        values = [record.reward[outcome] for record in own if record.status == REWARDED_STATUS]
        rewards = np.concatenate([sums[index], values])
        arms.append(
            {
                "arm": arm,
                "is_retired": index in facts.retired,
                "num_decisions": len(own),
                "num_pending": sum(record.status == PENDING_STATUS for record in own),
                "num_rewards": int(rewards.size),
                f"mean_{outcome}": float(rewards.mean()) if rewards.size else None,
            }
        )
    last = next((event for event in reversed(events) if event.kind == DECIDED), None)
    return {
        "name": name,
        "num_events": len(events),
        "opened": when(events[0].time),
        "last_event": when(events[-1].time),
        "engine": facts.identity["engine"]["name"],
        "selector": facts.identity["selector"]["name"],
        "num_samples": facts.identity["num_samples"],
        "num_changes": sum(event.kind == "changed" for event in events),
        "num_corrections": sum(record.num_corrections for record in records),
        "arms": arms,
        "last_best_arm_probs": None if last is None else last.body["best_arm_probs"],
        "first_broken_position": store.first_broken(name),
    }


def story_of(store: SqlStore, name: str, decision: str) -> dict[str, Any]:
    """Return all that is recorded about one decision, in plain JSON values.

    Raises:
        JournalError: if there is no such decision.
    """
    facts = _facts(store, name)
    found = store.find(name, [decision]).get(decision)
    if not found:
        raise JournalError(f"the experiment {name!r} has no decision {decision!r}")
    record = record_of(found)
    made = record.decided
    return {
        "decision": decision,
        "position": made.position,
        "decided": when(made.time),
        "arm": made.body["name"],
        "propensity": made.body["propensities"][made.arm],
        "arms": facts.names[: len(made.body["propensities"])],
        "propensities": made.body["propensities"],
        "best_arm_probs": made.body["best_arm_probs"],
        "num_candidates": made.body["num_candidates"],
        "allowed": made.body["allowed"],
        "context": dict(zip(facts.context_columns, _flat(record.context), strict=False)) or None,
        "number": made.number,
        "lane": made.lane,
        "absorbed": made.body["absorbed"],
        "status": record.status,
        "reward": record.reward or None,
        "events": [
            {"position": event.position, "kind": event.kind, "time": when(event.time)} | _told(event)
            for event in found[1:]
        ],
    }


def table_of(store: SqlStore, name: str, *, is_pending: bool = False, until: float | None = None) -> "pandas.DataFrame":
    """Return one row per decision and per play that was decided elsewhere, in the order of the stream.

    Args:
        is_pending: whether only decisions that wait are wanted.
        until: latest time of a decision.
    """
    import pandas

    facts = _facts(store, name)
    events = store.read(name, whole=True)
    outcomes = facts.identity["outcomes"]
    rows: list[tuple[int, dict[str, Any]]] = []
    for record in _records(events):
        made = record.decided
        if (is_pending and record.status != PENDING_STATUS) or (until is not None and made.time > until):
            continue
        row = {
            "decision": made.decision,
            "decided": when(made.time),
            "arm": str(made.body["name"]),
            "propensity": made.body["propensities"][made.arm],
            "num_candidates": made.body["num_candidates"],
            "status": record.status,
            "settled": "" if record.settled is None else when(record.settled),
            "num_corrections": record.num_corrections,
        }
        row |= {outcome: record.reward.get(outcome, np.nan) for outcome in outcomes}
        rows.append((made.position, row | dict(zip(facts.context_columns, _flat(record.context), strict=False))))
    for event in () if is_pending else events:
        if event.kind == IMPORTED:
            rows += [(event.position, row) for row in _imported(facts, event, outcomes)]
    rows.sort(key=lambda pair: pair[0])
    columns = ["decision", "decided", "arm", "propensity", "num_candidates", "status", "settled", "num_corrections"]
    return pandas.DataFrame([row for _, row in rows], columns=[*columns, *outcomes, *facts.context_columns])


def when(time: float) -> str:
    """Write a time in UTC."""
    return datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="milliseconds")


def _facts(store: SqlStore, name: str) -> Facts:
    facts = facts_of(store, name)
    if facts is None:
        known = ", ".join(store.experiments()) or "none"
        raise JournalError(f"there is no experiment {name!r} here; there are: {known}; choose one with --name")
    return facts


def _records(events: Sequence[Event]) -> list[Record]:
    grouped: dict[str, list[Event]] = {}
    for event in events:
        if event.decision is not None:
            grouped.setdefault(event.decision, []).append(event)
    return [record_of(own) for own in grouped.values()]


def _imported(facts: Facts, event: Event, outcomes: Sequence[str]) -> list[dict[str, Any]]:
    body, made = event.body, []
    for row, arm in enumerate(body["arms"]):
        leaves = None if body["contexts"] is None else [leaf[row] for leaf in body["contexts"]]
        facts_of_row = {
            "decision": "",
            "decided": "",
            "arm": str(facts.names[arm]),
            "propensity": np.nan,
            "num_candidates": 0,
            "status": REWARDED_STATUS,
            "settled": when(event.time),
            "num_corrections": 0,
        }
        facts_of_row |= {outcome: body["rewards"][outcome][row] for outcome in outcomes}
        made.append(facts_of_row | dict(zip(facts.context_columns, _flat(leaves), strict=False)))
    return made


def _flat(leaves: Sequence[Any] | None) -> list[Any]:
    return [value for leaf in leaves or [] for value in np.ravel(np.asarray(leaf)).tolist()]


def _told(event: Event) -> dict[str, Any]:
    return {key: event.body[key] for key in ("reward", "reason", "of", "expired") if event.body.get(key) is not None}
