"""Read a journal without the program: counts, the details of one decision, a table of all, what was verified."""

import bisect
import datetime
import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_bandit.journal.events import (
    ARMS,
    CHANGED,
    CORRECTED,
    DISCARDED,
    IMPORTED,
    LOOKED,
    PENDING_STATUS,
    REWARDED,
    REWARDED_STATUS,
    DecisionRecord,
    Event,
    fold_decision,
)
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import ReadingEvent
from ppl_bandit.types import UnknownDecision

if TYPE_CHECKING:
    import pandas

_NEWEST = 10_000  # decisions of deciders of which the age is told: 0.2 s
_NUM_CHANGES = 10  # of which late decisions are told
_CHANGES = (ARMS, CHANGED, LOOKED)  # which arms are played, and how
_LEARNT = (REWARDED, CORRECTED, DISCARDED, IMPORTED, *_CHANGES)
# Columns of the tables, among those of `_row`.
_TABLE = "decision decided arm propensity num_candidates status settled num_corrections".split()
_RECORD = "decision position time arm propensity unit context status reward num_corrections".split()
_DETAILS = (
    "decision position decided arm propensity propensities best_arm_probs num_candidates allowed context number stream "
    "absorbed status reward"
).split()
_OF_BODY = "propensities best_arm_probs num_candidates allowed absorbed unit".split()


class KnowledgeAge(NamedTuple):
    """How old the posterior behind the newest decisions of deciders was.

    Decisions of deciders have the time of the server, other events that of the process that recorded them.

    Attributes:
        num_decisions: that were looked at.
        median, largest: seconds between the first event that a decision had not learnt and the decision.
        num_after_change: decisions that came after one of the last ten changes of arms, pauses or looks, not knowing it.
        latest: seconds that the last of those came after the change.
    """

    num_decisions: int
    median: float
    largest: float
    num_after_change: int
    latest: float

    @property
    def text(self) -> str:
        """The figures in words."""
        found = (
            f"the posterior behind the newest {self.num_decisions:,} decisions of deciders was {self.median:.2g} s old in the "
            f"median, {self.largest:.2g} s at most"
        )
        if not self.num_after_change:
            return found
        return f"{found}; {self.num_after_change:,} came after a change of the arms, {self.latest:.2g} s late at most"


class Verification(NamedTuple):
    """What `verify` has found to be as it was recorded; a difference raises JournalError instead.

    Attributes:
        name: of the experiment.
        head: POSITION:DIGEST of its last event.
        is_compared: whether the chain was compared with a head that was kept elsewhere.
        num_posteriors: number of stored posteriors: checkpoints, and snapshots for deciders.
        num_recomputed: how many of them were learnt again from the events; None if no program is known.
        num_unsealed: decisions of deciders that are recorded and not in the stream yet.
    """

    name: str
    head: str
    is_compared: bool
    num_posteriors: int
    num_recomputed: int | None
    num_unsealed: int

    @property
    def text(self) -> str:
        """The finding in words."""
        compared = ", and agrees with the given head" if self.is_compared else ""
        lines = [f"{self.name}: the chain of digests is whole{compared}; its head is {self.head}"]
        num, done = self.num_posteriors, self.num_recomputed
        if num and done is None:
            lines.append(
                f"{num} stored posteriors were compared with their digests, and NOT recomputed from the events, because no "
                "program is known: call Bandit.verify, or give `ppl-bandit journal URL verify` the option --model"
            )
        elif num:
            lines.append(f"{done} of {num} stored posteriors recomputed from the events: they agree")
        if done is not None and done < num:
            lines.append(
                f"{num - done} could NOT be recomputed: their contexts were erased, or they are of an earlier program or "
                "engine; those are read by no bandit"
            )
        if self.num_unsealed:
            lines.append(
                f"{self.num_unsealed} decisions of deciders are recorded beside it and not sealed yet: a Sealer does that"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text


def experiment_status(store: SqlStore, name: str) -> dict[str, Any]:
    """Return the settings of an experiment and its counts for each arm, as JSON values."""
    header, num_events = read_header(store, name), store.last_position(name)
    outcome, num_corrections, last = header.identity["outcomes"][0], 0, None
    rewards: list[list[float]] = [[] for _ in header.names]
    num_decisions, num_pending = [0] * len(rewards), [0] * len(rewards)
    for play in store.imported(name):
        rewards[play.arm].append(play.reward[outcome])
    for record in store.decisions(name):
        last, num_corrections = record.decided, num_corrections + record.num_corrections
        with ReadingEvent(name, last.position):
            num_decisions[int(last.arm or 0)] += 1
            num_pending[int(last.arm or 0)] += record.status == PENDING_STATUS
            if record.status == REWARDED_STATUS:
                rewards[record.arm].append(record.reward[outcome])
    arms = [
        {
            "arm": arm,
            "is_retired": index in header.retired,
            "num_decisions": num_decisions[index],
            "num_pending": num_pending[index],
            "num_rewards": len(rewards[index]),
            f"mean_{outcome}": float(np.mean(rewards[index])) if rewards[index] else None,
        }
        for index, arm in enumerate(header.names)
    ]
    damage = store.find_damage(name)
    times = [store.read(name, after, limit=1)[0].time for after in (0, num_events - 1)]
    return {
        "name": name,
        "num_events": num_events,
        "opened": utc_time(times[0]),
        "last_event": utc_time(times[1]),
        "engine": header.identity["engine"]["name"],
        "selector": header.identity["selector"]["name"],
        "num_samples": header.identity["num_samples"],
        "num_changes": len(store.read(name, kinds=(CHANGED,))),
        "num_corrections": num_corrections,
        "arms": arms,
        "last_best_arm_probs": None if last is None else last.body["best_arm_probs"],
        "first_broken_position": None if damage is None else damage.position,
        "damage": None if damage is None else damage.reason,
    }


def decision_details(store: SqlStore, name: str, decision: str) -> dict[str, Any]:
    """Return all that is recorded about one decision, as JSON values.

    Raises:
        UnknownDecision: if the experiment has no such decision.
    """
    header = read_header(store, name)
    events = store.find(name, [decision]).get(decision)
    if not events:
        raise UnknownDecision(
            f"the experiment {name!r} has no decision {decision!r}: check the id, or give the name of another experiment"
        )
    with ReadingEvent(name, events[0].position):
        row = _row(fold_decision(events), header.context_columns)
        arms = header.names[: len(row["propensities"])]
        return {name: row[name] for name in _DETAILS} | {"arms": arms, "events": list(map(_event_summary, events[1:]))}


def decision_records(store: SqlStore, name: str, columns: Sequence[str], after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield one JSON row per decision beyond a position, in the order of the stream, without keeping them.

    Args:
        columns: names of the numbers in a context, in the order of its leaves.
    """
    for record in store.decisions(name, after):
        with ReadingEvent(name, record.decided.position):
            row = _row(record, columns)
            row |= {"time": row["decided"], "propensity": record.decided_propensity, "reward": record.reported or None}
        yield {name: row[name] for name in [*_RECORD, "is_shown_by_another", "is_erased"]}


def decision_table(store: SqlStore, name: str) -> "pandas.DataFrame":
    """Return one row per decision and per imported play, in the order of the stream."""
    import pandas

    header = read_header(store, name)
    outcomes, columns, rows = header.identity["outcomes"], header.context_columns, list[dict[str, Any]]()
    for record in heapq.merge(store.decisions(name), store.imported(name), key=lambda record: record.decided.position):
        with ReadingEvent(name, record.decided.position):
            row = _row(record, columns)
            if record.decided.decision is None:  # of a play that was imported, only the time of its reward is known
                row |= {"decision": "", "decided": "", "arm": header.names[record.arm], "num_candidates": 0}
            propensity = np.nan if row["propensity"] is None else row["propensity"]
            row |= {"arm": str(row["arm"]), "settled": row["settled"] or "", "propensity": propensity}
            own = dict.fromkeys(outcomes, np.nan) | record.reward | (row["context"] or {})
        rows.append({name: row[name] for name in _TABLE} | own)
    return pandas.DataFrame(rows, columns=[*_TABLE, *outcomes, *columns])


def _row(record: DecisionRecord, columns: Sequence[str]) -> dict[str, Any]:
    """Return what is recorded about a decision as JSON values, of which each table chooses some.

    Args:
        columns: names of the numbers in a context, in the order of its leaves.
    """
    decided, body = record.decided, record.decided.body
    numbers = [value for leaf in record.context or [] for value in np.ravel(np.asarray(leaf)).tolist()]
    return {name: body.get(name) for name in _OF_BODY} | {
        "decision": decided.decision,
        "position": decided.position,
        "decided": utc_time(decided.time),
        "arm": body.get("name"),
        "propensity": record.propensity,
        "context": dict(zip(columns, numbers, strict=False)) or None,
        "number": decided.number,
        "stream": decided.stream,
        "status": record.status,
        "reward": record.reward or None,
        "settled": None if record.settled is None else utc_time(record.settled),
        "num_corrections": record.num_corrections,
        "is_shown_by_another": bool(record.shown),
        "is_erased": record.is_erased,
    }


def knowledge_age(store: SqlStore, name: str) -> KnowledgeAge | None:
    """Return how old the posterior behind the newest decisions of deciders was; None if there is no such decision."""
    made = store.newest_decisions(name, _NEWEST) if store.stages() else []
    made = [event for event in made if "snapshot" in event.body]
    if not made:
        return None
    learnt = store.read(name, min(event.body["absorbed"] for event in made), kinds=_LEARNT)
    ages = _seconds_since_unknown(made, learnt)
    changes, late, after = store.read(name, kinds=_CHANGES), list[float](), 0
    for change in changes[-_NUM_CHANGES:]:
        after, found = max(after, change.position), [0.0]
        while found:  # deciders hear of a change soon: the decisions that did not know it are the first behind it
            page = store.next_decisions(name, after, _NEWEST)
            found = [seconds for seconds in _seconds_since_unknown(page, changes) if seconds > 0.0]
            late, after = late + found, page[-1].position if page else after
    return KnowledgeAge(len(made), float(np.median(ages)), max(ages), len(late), max(late, default=0.0))


def _seconds_since_unknown(made: Sequence[Event], learnt: Sequence[Event]) -> list[float]:
    """Return the seconds from the first event that each decider's decision had not learnt to it; 0 if there was none.

    A decision may be sealed behind events that came after it, so that its time counts, not its position.
    """
    positions, found = [event.position for event in learnt], []
    for event in made:
        index = bisect.bisect_right(positions, event.body["absorbed"])
        is_unknown = "snapshot" in event.body and index < len(learnt) and positions[index] < event.position
        found.append(max(event.time - learnt[index].time, 0.0) if is_unknown else 0.0)
    return found


def utc_time(time: float) -> str:
    """Return a time in seconds since 1970 as text."""
    return datetime.datetime.fromtimestamp(time, datetime.UTC).isoformat(timespec="milliseconds")


def _event_summary(event: Event) -> dict[str, Any]:
    details = {key: event.body[key] for key in ("reward", "reason", "of", "expired") if event.body.get(key) is not None}
    return {"position": event.position, "kind": event.kind, "time": utc_time(event.time)} | details
