"""Decisions and slates, as `Bandit.select` returns them, and requests for them that may be repeated."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ppl_bandit.engines.laws.mixture import INFINITE_MEAN_TEXT
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.projection import Projection
from ppl_bandit.journal.repeats import Ask, Known, check_unit, find_known
from ppl_bandit.journal.stores.store import Key, KeyTaken
from ppl_bandit.posterior.learning import Learner, draw
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import RequestIdReused

_NUM_CHECKED_DRAWS = 200  # of the posterior, where arguments may leave their domains


@dataclass(frozen=True, eq=False)
class Decision:
    """One decision: the arm to play, and the probabilities behind it.

    Attributes:
        id: unique id; `Bandit.update` takes it in place of the decision.
        arm: the arm to play, by name if the bandit's arms have names.
        best_arm_probs: (A,), the posterior probability that each arm is best (p-hat).
        num_candidates: number of candidate arms that the selector drew; 0 if it draws none.
        propensity: the probability with which this arm was played.
        propensities: (A,), the probability with which each arm would have been played.
        context: the context of the decision, or None.
        notes: warnings about these numbers; usually empty.
        unit: that the decision is for, or None.
        version: position of the last event that it knew.
        is_new: whether the call that returns it recorded it; False if the unit or the request had it before.
    """

    id: str
    arm: Any
    best_arm_probs: np.ndarray
    num_candidates: int
    propensity: float
    propensities: np.ndarray = field(repr=False)
    context: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    unit: str | None = None
    version: int = 0
    is_new: bool = field(default=True, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON values, for a message or a log."""
        return {
            "id": self.id,
            "arm": self.arm,
            "best_arm_probs": self.best_arm_probs.tolist(),
            "num_candidates": self.num_candidates,
            "propensity": self.propensity,
            "propensities": self.propensities.tolist(),
            "context": jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), self.context),
            "notes": list(self.notes),
            "unit": self.unit,
            "version": self.version,
        }


@dataclass(frozen=True, eq=False)
class Slate:
    """Distinct arms in order, one decision for each place; `Bandit.update` takes their rewards by place.

    Attributes:
        decisions: of the places, in order; the propensities of each are given the arms in the places before.
    """

    decisions: tuple[Decision, ...]

    @property
    def arms(self) -> list[Any]:
        """The arms, by place."""
        return [decision.arm for decision in self.decisions]

    @property
    def propensity(self) -> float:
        """The probability of this slate: the product of the propensities of its places."""
        return math.prod(decision.propensity for decision in self.decisions)

    @property
    def propensities(self) -> np.ndarray:
        """(places, A), the probability of each arm in each place, given the arms in the places before."""
        return np.stack([decision.propensities for decision in self.decisions])

    @property
    def context(self) -> Any:
        """The context of the slate, or None."""
        return self.decisions[0].context

    def to_dict(self) -> dict[str, Any]:
        """Return the slate as JSON values, for a message or a log."""
        decisions = [decision.to_dict() for decision in self.decisions]
        return {"arms": self.arms, "propensity": self.propensity, "decisions": decisions}


def decision_from_event(event: Event, context: Any, task: Task, learner: Learner | None = None) -> Decision:
    """Return the decision that an event records.

    Args:
        learner: that it was made with, for its notes; None for a decision that was recorded before.
    """
    notes: tuple[str, ...] = ()
    if learner is not None and (
        learner.doubts or learner.engine.capabilities.infinite_means is not None or _may_have_notes(task.model)
    ):
        notes = _decision_notes(task, learner, context)
    body, propensities = event.body, np.asarray(event.body["propensities"])
    return Decision(
        str(event.decision),
        body["name"],
        np.asarray(body["best_arm_probs"]),
        body["num_candidates"],
        propensities.item(int(event.arm or 0)),
        propensities,
        context,
        notes,
        body.get("unit"),
        body["absorbed"],
        learner is not None,
    )


def _decision_notes(task: Task, learner: Learner, context: Any) -> tuple[str, ...]:
    """Return the warnings about the numbers of a decision: rough expected rewards, doubted draws, infinite means."""
    outside = domain_doubt(task.model, learner, [context])
    notes = tuple(filter(None, (task.model.expected_reward_note, learner.doubts, outside)))
    has_infinite_mean = learner.engine.capabilities.infinite_means
    if has_infinite_mean is None:
        return notes
    flags = zip(task.arms.names, has_infinite_mean(learner.state, context), strict=True)
    names = ", ".join(str(name) for name, is_infinite in flags if is_infinite)
    return (*notes, f"expected reward of {names}: {INFINITE_MEAN_TEXT}") if names else notes


def domain_doubt(model: RewardModel, learner: Learner, contexts: Sequence[Any]) -> str:
    """Return at which share of the posterior draws outcomes leave their domains, at the worst context; empty if at none."""
    if not model.may_leave_domains:
        return ""
    draws = draw(learner, _NUM_CHECKED_DRAWS, contexts[-1])
    share = max(float(_share_outside(model)(draws, context)) for context in contexts)
    if share == 0.0:
        return ""
    return (
        f"at {share:.1%} of the posterior draws an argument of an outcome is outside of its domain (a probability below 0, a "
        "negative scale): give the latents priors that stay inside"
    )


@functools.lru_cache(maxsize=8)
def _may_have_notes(model: RewardModel) -> bool:
    return bool(model.expected_reward_note) or model.may_leave_domains


@functools.lru_cache(maxsize=8)
def _share_outside(model: RewardModel) -> Callable[..., Any]:
    return jax.jit(model.share_outside_domains)


def decision_ids(decision: Any) -> list[str]:
    """Return the ids of the decisions of a slate, or that of one decision."""
    return [one.id for one in decision.decisions] if isinstance(decision, Slate) else [decision_id(decision)]


def decision_id(decision: Any) -> str:
    """Return the id of a decision, which may be given by its id.

    Raises:
        ValueError: for anything else.
    """
    name = decision.id if isinstance(decision, Decision) else decision
    if not isinstance(name, str):
        raise ValueError(f"decision must be a decision or its id, got {decision!r}")
    return name


def asks_of(
    units: Sequence[str | None] | None,
    request_ids: Sequence[str | None] | None,
    num_rows: int,
    contexts: Any,
    allowed: Any,
    names: tuple[str, str] = ("units", "request_ids"),
) -> list[Ask]:
    """Return what is asked for each row; empty if no row has a unit or the id of a request.

    Args:
        contexts: with a leading axis, or None.
        allowed: as the caller gave it.
        names: of the first two arguments, for messages.

    Raises:
        ValueError: if there is not one entry for each row, or one is not a text of at most 256 bytes.
    """
    columns = []
    for values, name in zip((units, request_ids), names, strict=True):
        values = [None] * num_rows if values is None else values
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != num_rows:
            raise ValueError(
                f"{name} must have one entry for each of {num_rows} decisions, None for none, got {values!r}"
            )
        columns.append([check_unit(value, name) for value in values])
    if not any(value is not None for column in columns for value in column):
        return []
    leaves, mask = jax.tree.leaves(contexts), plain(allowed)
    rows = zip(*columns, strict=True)
    return [
        Ask(
            unit,
            request,
            None if request is None else [unit, mask, [np.asarray(leaf[row]).tolist() for leaf in leaves]],
        )
        for row, (unit, request) in enumerate(rows)
    ]


def decide_asked(
    experiment: Experiment,
    projection: Projection,
    allowed: np.ndarray,
    contexts: Any,
    asks: Sequence[Ask],
    unit_window: float | None,
    refuse: Callable[[Projection, int], None],
    *,
    is_batch: bool = False,
    num_places: int | None = None,
) -> tuple[Projection, list[list[Event]]]:
    """Return the events of each row's decisions, recorded now or before, and the projection of the new ones.

    Args:
        contexts: with a leading axis in a batch; one context otherwise.
        refuse: raises if so many new decisions may not be made.
        num_places: of the slate that is asked for; None for one decision in each row.
    """
    while True:
        knowns = find_known(experiment.store, experiment.name, asks, projection, allowed, unit_window)
        leader, leaders = _leaders(asks, knowns)
        keys = [key for known in knowns if known.events is not None for key in known.keys]
        events = {row: known.events for row, known in enumerate(knowns) if known.events is not None}
        try:
            if leaders:
                num = len(leaders) if num_places is None else check_size(projection, allowed, num_places)
                refuse(projection, num if num_places is None else 1)  # a slate may pass a look
                merged = _merged(leader, knowns)
                merged[0] = merged[0]._replace(keys=[*merged[0].keys, *keys])
                index, units = np.array(leaders), [asks[row].unit for row in leaders]
                own = jax.tree.map(lambda leaf, index=index: leaf[index], contexts) if is_batch else contexts
                is_slate = num_places is not None
                given = projection, allowed, own, num if is_batch or is_slate else None, merged, units
                made = experiment.decide(*given, is_slate=is_slate)
                events |= (
                    {leaders[0]: made} if is_slate else {row: [one] for row, one in zip(leaders, made, strict=True)}
                )
            elif keys:
                experiment.store.append(experiment.name, [], keys=list({key.name: key for key in keys}.values()))
        except KeyTaken:
            projection = experiment.catch_up()
            continue
        return projection, [events[leader.get(row, row)] for row in range(len(asks))]


def plain(value: Any) -> Any:
    """Return an argument as JSON values that are equal for equal arguments."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, Mapping):
        return dict(sorted((str(key), plain(item)) for key, item in value.items()))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return getattr(value, "id", None) or [plain(one.id) for one in getattr(value, "decisions", ())] or repr(value)


def _leaders(asks: Sequence[Ask], knowns: Sequence[Known]) -> tuple[dict[int, int], list[int]]:
    """Return which row decides for each row that needs a decision, and the rows that decide.

    Raises:
        RequestIdReused: if rows with the same id of a request have other arguments.
    """
    leader: dict[int, int] = {}
    by_name: dict[str, int] = {}
    by_request: dict[str, int] = {}
    for row, (ask, known) in enumerate(zip(asks, knowns, strict=True)):
        if ask.request is not None:
            other = by_request.setdefault(ask.request, row)
            if known.events is None and asks[other].arguments != ask.arguments:
                raise RequestIdReused(
                    f"request_ids has {ask.request!r} in the rows {other} and {row} with other arguments"
                )
        if known.events is None:
            leader[row] = first = next((by_name[name] for name in ask.names if name in by_name), row)
            by_name |= dict.fromkeys(ask.names, first)
    return leader, [row for row, first in leader.items() if row == first]


def _merged(leader: Mapping[int, int], knowns: Sequence[Known]) -> list[Known]:
    """Return what is known of each row that decides, with the keys of the rows that it decides for."""
    keys: dict[int, dict[str, Key]] = {}
    for row, first in leader.items():
        own = keys.setdefault(first, {})
        for key in knowns[row].keys:
            own.setdefault(key.name, key)
    return [knowns[first]._replace(keys=list(own.values())) for first, own in keys.items()]


_MAX_SLATES = 2000  # that `place_propensities` adds up: one compiled decision each


def check_size(projection: Projection, allowed: np.ndarray, size: Any) -> int:
    """Return the number of places of a slate.

    Raises:
        ValueError: if it is not a count, or there are fewer arms to play.
    """
    size, num_playable = check_count(size, "size"), _num_playable(projection, allowed)
    if size > num_playable:
        raise ValueError(
            f"size={size} places need as many distinct arms, but {num_playable} may be played: allow more arms, or ask for a "
            f"slate of at most {num_playable}"
        )
    return size


def place_propensities(
    experiment: Experiment, projection: Projection, allowed: np.ndarray, context: Any, size: Any
) -> np.ndarray:
    """Return the probability of each arm in each place of the next slate, (size, A): a sum over the places before.

    Raises:
        ValueError: if there are too many slates to add up.
    """
    size = check_size(projection, allowed, size)
    num_slates = math.perm(_num_playable(projection, allowed), size - 1)
    if num_slates > _MAX_SLATES:
        raise ValueError(
            f"size={size} of {int(allowed.sum())} arms needs a sum over {num_slates} slates, the limit is {_MAX_SLATES}: allow "
            "fewer arms, or read the probabilities of one slate, select(size=...).propensities"
        )
    found = np.zeros((size, allowed.size))
    slates: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(size):
        longer: dict[tuple[int, ...], float] = {}
        for chosen, prob in slates.items():
            probs = prob * experiment.next_propensities(projection, allowed, context, chosen)
            found[place] += probs
            longer |= {(*chosen, int(arm)): float(probs[arm]) for arm in np.flatnonzero(probs)}
        slates = longer
    return found


def _num_playable(projection: Projection, allowed: np.ndarray) -> int:
    return int(allowed.sum()) - sum(bool(allowed[arm]) for arm in projection.retired)
