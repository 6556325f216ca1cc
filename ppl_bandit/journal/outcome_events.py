"""From reported rewards to events: delayed, partial, repeated, corrected, missing.

A repeated report of the same reward makes no event. A different value is refused unless it is a correction. Outcomes may be
reported one at a time; each is learnt when no value that its density depends on is missing (`posterior.partial_rows`), and the
others when they come. An outcome that the program masks, given
those that are known, does not matter; it is recorded as 0, which counts for nothing. Late entries of the context come with the
reward, and the row is learnt with them.

What is reported is a value with a method `events`, which `Experiment.learn` calls with the latest projection.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.inputs.late_entries import impossible_outcome, irrelevant_outcomes, late_numbers
from ppl_bandit.journal.events import (
    CORRECTED,
    DISCARDED,
    DISCARDED_STATUS,
    IMPORTED,
    PENDING_STATUS,
    REWARDED,
    REWARDED_STATUS,
    DecisionRecord,
    Event,
    fold_decision,
    new_event,
    new_ids,
)
from ppl_bandit.journal.projection import LearningStep, Projection, context_from_leaves, learn_events
from ppl_bandit.journal.repeats import Repeat
from ppl_bandit.journal.stores.appending import Beside
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import Key, Request
from ppl_bandit.posterior.task import Rows, Task, why_not_in_part
from ppl_bandit.program.outcomes import separable_outcomes
from ppl_bandit.types import AlreadyRewarded, InvalidContext, UnknownDecision


class Reported(NamedTuple):
    """What is reported about one decision.

    Attributes:
        values: {outcome: value}.
        late: {late entry of the context: value}.
        unchanged: other entries of the context, which must be those of the decision.
        shown: index of the arm that was shown, if the caller says so.
        propensity: the probability with which it was shown; None if that is not known.
    """

    values: Mapping[str, float]
    late: Mapping[str, Any] = MappingProxyType({})
    unchanged: Mapping[str, Any] = MappingProxyType({})
    shown: int | None = None
    propensity: float | None = None


class Rewards(NamedTuple):
    """Rewards of decisions, {decision: what is reported}."""

    reported: Mapping[str, Reported]
    is_correction: bool = False

    def events(self, store: SqlStore, name: str, projection: Projection) -> list[Event]:
        """Return the events to record; none for what is known."""
        task, batch, events = projection.task, new_ids(1)[0], list[Event]()
        for id, record in _records(store, name, list(self.reported)).items():
            reported = self.reported[id]
            event = _reward_event(projection, record, reported, self.is_correction, batch)
            if event is None:
                continue
            window, is_first = task.windows.reward, event.settles and record.status == PENDING_STATUS
            if is_first and window is not None and event.time - record.decided.time > window:
                event = event._replace(body=event.body | {"is_late": True})  # it has not expired yet
            if not event.settles:
                context = context_from_leaves(task.model, record.context)
                _refuse_impossible(task, [int(event.arm or 0)], context, reported.values)
            events.append(event)
        return events


class Import(NamedTuple):
    """Rows that another system decided, with the probability of each play if it is known."""

    rows: Rows
    propensity: np.ndarray | None = None

    def events(self, store: SqlStore, name: str, projection: Projection) -> list[Event]:
        """Return the event to record."""
        arms, rewards, contexts, *_ = jax.tree.map(np.array, self.rows)  # copies: the caller may change the arrays
        leaves = None if contexts is None else jax.tree.leaves(contexts)
        body = {"arms": arms, "rewards": rewards, "contexts": leaves}
        return [new_event(IMPORTED, body if self.propensity is None else body | {"propensity": self.propensity})]


class Discard(NamedTuple):
    """Decisions that will get no reward."""

    decisions: Sequence[str]
    is_correction: bool = False

    def events(self, store: SqlStore, name: str, projection: Projection) -> list[Event]:
        """Return the events to record; none for decisions that were discarded before."""
        records, batch = _records(store, name, self.decisions), new_ids(1)[0]
        for id, record in records.items():
            if record.status == REWARDED_STATUS and not self.is_correction:
                raise AlreadyRewarded(
                    f"decision {id!r} has the reward {_format(record.reward)}: pass correct=True to remove it"
                )
        open_records = [record for record in records.values() if record.status != DISCARDED_STATUS]
        return [_discard_event(record, batch, "discarded", self.is_correction) for record in open_records]


class Expiry(NamedTuple):
    """All pending decisions made until a time, between two positions: discarded, or rewarded with given values.

    Outcomes and late entries that were reported before are kept.

    Attributes:
        reward: to record for them; None discards them.
        after: a position up to which none is pending.
    """

    until: float
    reward: Reported | None
    after: int = 0
    before: int | None = None

    def events(self, store: SqlStore, name: str, projection: Projection) -> list[Event]:
        """Return the events to record."""
        reward, place = self.reward, (self.until, self.after, self.before)
        pending = [str(event.decision) for event in store.pending(name, *place)]
        records, batch = _records(store, name, pending), new_ids(1)[0]
        if reward is None:
            return [_discard_event(record, batch, "expired") for record in records.values()]
        events = list[Event]()
        if not records and projection.task.model.context is None:  # a wrong reward would be noticed too late
            _refuse_impossible(projection.task, range(projection.task.model.num_arms), None, reward.values)
        for record in records.values():
            values = {name: value for name, value in reward.values.items() if name not in record.reward}
            late = {name: value for name, value in reward.late.items() if name not in record.late}
            event = _reward_event(projection, record, Reported(values, late), False, batch)
            if event is not None:
                events.append(event._replace(body=event.body | {"expired": True}))
        return events


Report = Rewards | Import | Discard | Expiry


@dataclass(eq=False)
class LearnRequest(Request):
    """A thread's call that learns from what is reported; the result is the recorded events, diagnostics and warnings."""

    report: Report
    repeat: Repeat | None = None


class Plan(NamedTuple):
    """Events to record.

    Attributes:
        after: the projection after them, but for its position, its numbers of decisions, and the new rows of its history.
        keys, beside: see `SqlStore.append`.
        calls: what was learnt for which call from its own events, in order; the call gets its result once they are recorded.
        is_complete: whether no call is left out, which may be for events that this process has not read.
    """

    events: list[Event]
    after: Projection
    keys: Sequence[Key] = ()
    beside: Beside = ()
    calls: Sequence[tuple[LearnRequest, list[Event], LearningStep]] = ()
    is_complete: bool = True


def learn_requests(store: SqlStore, name: str, requests: Sequence[LearnRequest], projection: Projection) -> Plan:
    """Learn from the events of several calls, one after another; return those to record.

    Calls that are refused, or have no events, get their result. Only first rewards of different decisions are learnt in one
    group, because other events are checked against those that are recorded; a call that must wait is left as it is.
    """
    repeats = [request.repeat.name for request in requests if request.repeat is not None]
    found, later = store.keys(name, repeats) if repeats else {}, list[str]()
    events, keys = list[Event](), list[Key]()
    calls: list[tuple[LearnRequest, list[Event], LearningStep]] = []
    decisions: set[str | None] = {None}  # rows of no decision are learnt alone
    after, history = projection, projection.history
    for request in requests:
        request.result = request.error = None  # of an attempt before
        try:
            if request.repeat is not None and request.repeat.name in later:
                continue  # it is a repetition of a request in the group
            is_repeated = request.repeat is not None and request.repeat.is_recorded(found)
            own = [] if is_repeated else request.report.events(store, name, after)
            if request.repeat is not None and not is_repeated and not own:  # nothing new, but its id is
                known = store.find(name, list(request.report.reported)) if isinstance(request.report, Rewards) else {}
                keys.append(request.repeat.key([event for events_of in known.values() for event in events_of]))
                later.append(request.repeat.name)
            if not own:
                request.result = [], None, []
                continue
            is_grouped = len(requests) > 1 and _are_first_rewards(own, decisions)
            if calls and not is_grouped:
                continue
            step = learn_events(after, own)
        except Exception as error:
            request.error = error
            continue
        if not calls:
            history = step.projection.history
        calls.append((request, own, step))
        events += own
        keys += [request.repeat.key(own)] if request.repeat is not None else []
        after = step.projection
        if not is_grouped:
            break
        later += [request.repeat.name] if request.repeat is not None else []
        decisions.update(event.decision for event in own)
        # The positions are not known yet: no later step of the group reads them.
        after = after._replace(history=after.history.with_rows(step.rows, [0] * len(own)))
    return Plan(events, after._replace(history=history), keys, (), calls, len(calls) == len(requests))


def _are_first_rewards(events: Sequence[Event], decisions: set[str | None]) -> bool:
    """Return whether all events are the first rewards of decisions other than some."""
    is_new = all(event.kind == REWARDED and event.body.get("of") is None for event in events)
    return is_new and decisions.isdisjoint({event.decision for event in events})


def _records(store: SqlStore, name: str, decisions: Sequence[str]) -> dict[str, DecisionRecord]:
    """Return what became of some decisions.

    Raises:
        UnknownDecision: if one is not known.
    """
    found = store.find(name, decisions)
    for id in decisions:
        if id not in found:
            raise UnknownDecision(
                f"decision {id!r} was not made by this bandit: pass one of its decisions, or arm= and context= for a play that "
                "another system decided"
            )
    return {id: fold_decision(found[id]) for id in decisions}


def _reward_event(
    projection: Projection, record: DecisionRecord, reported: Reported, is_correction: bool, batch: str
) -> Event | None:
    task = projection.task
    values, outcomes, decided = reported.values, task.model.outcomes, record.decided
    known = record.reported if record.irrelevant else record.reward
    id = decided.decision
    if record.is_erased and task.model.context is not None:
        raise UnknownDecision(
            f"decision {id!r} was erased with its unit: its reward cannot be learnt without its context"
        )
    is_correction = is_correction or record.is_expired
    context, is_context_changed = record.context, False
    if task.late:
        context, is_context_changed = _completed_context(task, record, reported, is_correction)
    shown = record.shown if reported.shown is None else (reported.propensity,)
    arm = record.arm if reported.shown is None else reported.shown
    if reported.shown == decided.arm:
        own = record.decided_propensity
        if reported.propensity in (None, own):  # the decision was shown as it was made
            shown = record.shown and (own,)
    is_same_arm = (arm, shown) == (record.arm, record.shown)
    differs = any(name in known and known[name] != value for name, value in values.items())
    differs |= bool(known) and not is_same_arm
    is_repeated = not differs and not is_context_changed and values.keys() <= known.keys()
    if record.status != DISCARDED_STATUS and is_repeated:
        return None
    if differs and not is_correction:
        names = task.arms.names
        was, now = ("", "") if is_same_arm else (f" of arm {names[record.arm]!r}", f" of arm {names[arm]!r}")
        raise AlreadyRewarded(
            f"decision {id!r} already has the reward {_format(known)}{was}, and {_format(values)}{now} was given: pass "
            "correct=True to replace it"
        )
    merged = {**known, **values}
    if record.status == DISCARDED_STATUS:
        if not is_correction:
            raise ValueError(f"decision {id!r} was discarded: pass correct=True to learn from its reward")
        merged = dict(values)
    irrelevant: tuple[str, ...] = ()
    missing = [name for name in outcomes if name not in merged]
    if missing:
        at = context_from_leaves(task.model, context)
        irrelevant = irrelevant_outcomes(task.model, arm, at, merged)
        merged |= dict.fromkeys(irrelevant, 0.0)
        missing = [name for name in missing if name not in irrelevant]
    if missing and record.status != PENDING_STATUS:
        raise ValueError(
            f"decision {id!r} was {record.status}: give all of its outcomes that matter at once; {missing} are missing"
        )
    late = record.late.union(reported.late)
    if task.late and not missing:
        _refuse_missing_late(task, late)
    body: dict[str, Any] = {"reward": dict(values) if missing else merged}
    if context is not None and (not missing or reported.late):
        body["context"] = context
    if task.late:
        body["late"] = sorted(late)
    if shown:
        body["shown"] = shown[0]
    if record.is_expired:
        body["is_late"] = True
    if irrelevant and not missing:
        body["irrelevant"] = list(irrelevant)
    kind = CORRECTED if record.status != PENDING_STATUS or (differs and record.row is not None) else REWARDED
    if kind == CORRECTED or record.row is not None:
        body["of"] = record.row
    if record.status == PENDING_STATUS and len(outcomes) > 1:
        body |= _learnt_in_part(projection, record, merged, missing, late, is_anew=kind == CORRECTED)
        if "counted" in body:
            body |= {"reward": merged} | ({} if context is None else {"context": context})
        elif missing:
            body.pop("of", None)  # nothing more to learn yet
    if "unit" in decided.body:
        body["unit"] = decided.body["unit"]
        body["personal"] = ["unit", "context"] if "context" in body else ["unit"]
    return new_event(kind, body, decision=id, batch=batch, arm=arm, settles=not missing)


def _learnt_in_part(
    projection: Projection,
    record: DecisionRecord,
    merged: Mapping[str, float],
    missing: Sequence[str],
    late: frozenset[str],
    *,
    is_anew: bool,
) -> dict[str, Any]:
    """Return which outcomes an event brings to the posterior, {} if all or none of them.

    Args:
        merged: the outcomes that are known.
        missing: those that are not.
        late: the late entries of the context that are known.
        is_anew: whether the row is learnt again as a whole.
    """
    task = projection.task
    if not missing:
        if record.row is None or is_anew:
            return {}
        return {"counted": [name for name in merged if name not in record.counted]}
    known = separable_outcomes(task.model, frozenset(merged))
    counted = [name for name in known if is_anew or name not in record.counted]
    if not counted or not late.issuperset(task.late):
        return {}
    if why_not_in_part(task, projection.prior.engine):
        return {}
    return {"counted": counted, "known": list(known)}


def _completed_context(
    task: Task, record: DecisionRecord, reported: Reported, is_correction: bool
) -> tuple[list[Any], bool]:
    """Return the leaves of a decision's context with its late entries, and whether this changes them.

    Raises:
        ValueError: for another value of an entry that is known.
    """
    leaves, is_changed = list(record.context), False
    numbers = late_numbers(task.model, [*reported.late, *reported.unchanged])
    for name, value in {**reported.unchanged, **reported.late}.items():
        before, is_late = leaves[numbers[name]], name in reported.late
        is_same = np.array_equal(np.asarray(before), value)
        is_known = not is_late or name in record.late
        if is_known and not is_same and not (is_late and is_correction):
            remedy = "pass correct=True to replace it" if is_late else f"late= does not have {name!r}; leave it out"
            raise InvalidContext(
                f"decision {record.decided.decision!r} has context[{name!r}]={np.asarray(before).tolist()}, and "
                f"{value.tolist()} was given: {remedy}",
                f"[{name!r}]",
            )
        leaves[numbers[name]] = value
        is_changed |= not (is_known and is_same)
    return leaves, is_changed


def _refuse_missing_late(task: Task, known: frozenset[str]) -> None:
    missing = [name for name in task.late if name not in known]
    if missing:
        entries = ", ".join(f"{name!r}: ..." for name in missing)
        raise InvalidContext(
            f"context is missing {', '.join(map(repr, missing))}, which late= says is known with the reward: pass it with the "
            f"reward, as in update(decision, reward, context={{{entries}}})",
            f"[{missing[0]!r}]",
        )


def _refuse_impossible(task: Task, arms: Sequence[int], context: Any, values: Mapping[str, float]) -> None:
    """Raise for an outcome that the program can produce on none of the arms; an update checks complete rewards."""
    names = [impossible_outcome(task.model, arm, context, values) for arm in arms]
    if None not in names:
        where = "every arm" if len(arms) > 1 else f"arm {task.arms.names[arms[0]]!r}"
        raise ValueError(
            f"{names[0]}={values[str(names[0])]:g} is outside the support of the outcome '{names[0]}' on {where}: the "
            "program cannot produce it; correct the reward or the program"
        )


def _discard_event(record: DecisionRecord, batch: str, reason: str, is_correction: bool = False) -> Event:
    is_removed = record.status == REWARDED_STATUS or is_correction
    decided, body = record.decided, {"reason": reason, "of": record.row if is_removed else None}
    return new_event(DISCARDED, body, decision=decided.decision, batch=batch, arm=decided.arm, settles=True)


def _format(reward: Mapping[str, float]) -> str:
    return f"{next(iter(reward.values())):g}" if len(reward) == 1 else str({k: float(v) for k, v in reward.items()})
