"""From rewards that callers report to the events that are recorded: late, partial, repeated, wrong, never.

A repeated report records nothing; another value is refused unless it is a correction; outcomes may come one by one, and a
row is learnt when the last is known.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.journal.events import CORRECTED, DISCARDED, IMPORTED, REWARDED, Event, new_event, new_id
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.lessons import Standing
from ppl_bandit.journal.records import DISCARDED_STATUS, PENDING_STATUS, REWARDED_STATUS, Record, record_of
from ppl_bandit.posterior.learning import Rows

__all__ = ["discarding", "expiring", "importing", "rewarding"]

Make = Callable[[Standing], list[Event]]


def rewarding(experiment: Experiment, given: Mapping[str, Mapping[str, float]], is_correction: bool) -> Make:
    """Return what makes the events of rewards, {decision: {outcome: value}}."""

    def make(standing: Standing) -> list[Event]:
        records, batch = _records(experiment, list(given)), new_id()
        outcomes = standing.task.model.outcomes
        events = (_rewarded(records[name], values, outcomes, is_correction, batch) for name, values in given.items())
        return [event for event in events if event is not None]

    return make


def importing(rows: Rows) -> Make:
    """Return what makes the event of rows that were decided elsewhere."""
    body = {  # arrays, which become lists where they are written: a million rows need not
        "arms": np.array(rows.arms),
        "rewards": {name: np.array(values) for name, values in rows.rewards.items()},
        "contexts": None if rows.contexts is None else [np.array(leaf) for leaf in jax.tree.leaves(rows.contexts)],
    }
    return lambda standing: [new_event(IMPORTED, body)]


def discarding(experiment: Experiment, decisions: Sequence[str], is_correction: bool) -> Make:
    """Return what makes the events of decisions that no reward is expected for any more."""

    def make(standing: Standing) -> list[Event]:
        records, batch = _records(experiment, decisions), new_id()
        for name, record in records.items():
            if record.status == REWARDED_STATUS and not is_correction:
                raise ValueError(
                    f"decision {name!r} has the reward {_shown(record.reward)}: pass correct=True to take it back"
                )
        return [
            _discarded(record, batch, "discarded") for record in records.values() if record.status != DISCARDED_STATUS
        ]

    return make


def expiring(experiment: Experiment, until: float, reward: Mapping[str, float] | None) -> Make:
    """Return what makes the events of decisions that waited too long: never rewarded, or rewarded with a value."""

    def make(standing: Standing) -> list[Event]:
        waiting = [str(event.decision) for event in experiment.store.pending(experiment.name, until)]
        records, batch = _records(experiment, waiting), new_id()
        if reward is None:
            return [_discarded(record, batch, "expired") for record in records.values()]
        outcomes, events = standing.task.model.outcomes, []
        for record in records.values():
            missing = {name: value for name, value in reward.items() if name not in record.reward}
            event = _rewarded(record, missing, outcomes, False, batch)
            if event is not None:
                events.append(event._replace(body=event.body | {"expired": True}))
        return events

    return make


def _records(experiment: Experiment, decisions: Sequence[str]) -> dict[str, Record]:
    found = experiment.store.find(experiment.name, decisions)
    for name in decisions:
        if name not in found:
            raise ValueError(
                f"decision {name!r} was not made by this bandit{_dropped(experiment)}: pass a decision of its own, or arm= and "
                "context= for a play that was decided elsewhere"
            )
    return {name: record_of(found[name]) for name in decisions}


def _dropped(experiment: Experiment) -> str:
    count = getattr(experiment.store, "num_dropped", 0)
    return f", or was among the {count} oldest that were let go (a journal keeps all)" if count else ""


def _rewarded(
    record: Record, values: Mapping[str, float], outcomes: Sequence[str], is_correction: bool, batch: str
) -> Event | None:
    decided, known = record.decided, record.reward
    name = decided.decision
    wrong = {o: value for o, value in values.items() if o in known and known[o] != value}
    if record.status != DISCARDED_STATUS and not wrong and all(o in known for o in values):
        return None  # said before
    if wrong and not is_correction:
        raise ValueError(
            f"decision {name!r} already has its reward, {_shown(known)}, and now {_shown(values)} was given: pass correct=True "
            "if this is the right one"
        )
    merged = {**known, **values}
    if record.status == DISCARDED_STATUS:
        if not is_correction:
            raise ValueError(
                f"decision {name!r} was discarded: pass correct=True to learn from its reward all the same"
            )
        merged = dict(values)
        missing = [o for o in outcomes if o not in merged]
        if missing:
            raise ValueError(
                f"decision {name!r} was discarded: give all of its outcomes at once, {missing} are missing"
            )
    is_complete = all(o in merged for o in outcomes)
    body: dict[str, Any] = {"reward": merged if is_complete else dict(values)}
    if is_complete:
        body["context"] = record.context
    kind = REWARDED if record.status == PENDING_STATUS else CORRECTED
    if kind == CORRECTED:
        body["of"] = record.row
    return new_event(kind, body, decision=name, batch=batch, arm=decided.arm, settles=is_complete)


def _discarded(record: Record, batch: str, reason: str) -> Event:
    body = {"reason": reason, "of": record.row}
    return new_event(
        DISCARDED, body, decision=record.decided.decision, batch=batch, arm=record.decided.arm, settles=True
    )


def _shown(reward: Mapping[str, float]) -> str:
    return f"{next(iter(reward.values())):g}" if len(reward) == 1 else str({k: float(v) for k, v in reward.items()})
