"""The projection of a stream: arms, posterior and history after the events up to a position, as pure functions.

An event brings rows of data, edits rows that were learnt before, or neither. New rows update the posterior. An edit
refits the posterior to the edited history from the prior, in one batch, so that a corrected reward leaves no trace.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.journal.events import CORRECTED, IMPORTED, REWARDED, Event
from ppl_bandit.posterior.fallback import NotCertified, learn
from ppl_bandit.posterior.history import History, RowEdit
from ppl_bandit.posterior.learning import Learner, Rows
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.reward_model import RewardModel

__all__ = [
    "LearningStep",
    "Projection",
    "extend_history",
    "context_from_leaves",
    "initial_projection",
    "learn_events",
    "refit",
    "reward_changes",
]

_MAX_REWARD = 1e75  # beyond it squares overflow float64, or round away all earlier data
_DTYPES = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}


class Projection(NamedTuple):
    """The state of an experiment at a position of its stream.

    Attributes:
        prior: the learner before any reward; a correction refits from it.
        learner: the posterior.
        history: all rows that were learnt.
        num_played: number of decisions for each arm.
        retired: indices of the arms that are no longer played.
        look: body of the last look at a designed experiment; None before the first.
    """

    position: int
    task: Task
    prior: Learner
    learner: Learner
    history: History
    num_played: np.ndarray
    retired: frozenset[int] = frozenset()
    look: Mapping[str, Any] | None = None

    @property
    def allocation(self) -> Sequence[float] | None:
        """Probabilities of the arms that a design fixes until the next look; None lets the selector decide."""
        if self.task.design is None:
            return None
        return self.task.design.allocation if self.look is None else self.look["allocation"]


class LearningStep(NamedTuple):
    """The result of learning from events that are not recorded yet.

    Attributes:
        learner: the posterior after the events.
        history: the history with their edits, without their new rows.
        rows: the new rows, each with the index of its event.
        info: the engine's diagnostics; None if nothing was learnt.
        warnings: for the user.
    """

    learner: Learner
    history: History
    rows: list[tuple[int, Rows]]
    info: Any
    warnings: list[str]


def initial_projection(task: Task, prior: Learner) -> Projection:
    """Return the state before the first event."""
    return Projection(0, task, prior, prior, History(task.model.outcomes), np.zeros(len(task.arms), np.int64))


def learn_events(projection: Projection, events: Sequence[Event]) -> LearningStep:
    """Learn from the events of one call.

    Raises:
        ValueError: for a reward that the program cannot produce, or that is too large to learn from.
    """
    task, learner, history = projection.task, projection.learner, projection.history
    edits, rows = reward_changes(task, events)
    joined = _concatenate([piece for _, piece in rows]) if rows else None
    if edits:
        edited = history.edited(edits)
        learner, info, warnings = refit(projection, edited, joined)
        return LearningStep(learner, edited, rows, info, warnings)
    if joined is None:
        return LearningStep(learner, history, rows, None, [])
    try:
        after, info, warnings = learn(task, learner, history, joined)
    except NotCertified:
        _refuse_overflow(joined)
        raise
    if learner.engine.explanation.is_exact and not after.engine.explanation.is_exact:
        _refuse_overflow(joined)
    return LearningStep(after, history, rows, info, warnings)


class LearnRequest:
    """A thread's call that learns from events, and its result.

    Attributes:
        make_events: returns the events, given the latest projection; it may raise to refuse, or return none.
        result: the recorded events, the engine's diagnostics and warnings; None if not done.
    """

    def __init__(self, make_events: Callable[[Projection], list[Event]]):
        self.make_events = make_events
        self.result: tuple[list[Event], Any, list[str]] | None = None
        self.error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether it has a result."""
        return self.result is not None or self.error is not None


def learn_requests(
    projection: Projection, requests: Sequence[LearnRequest]
) -> list[tuple[LearnRequest, list[Event], LearningStep]]:
    """Learn from the events of several calls, one after another; return those to record.

    Requests that are refused, or have no events, get their result. Only first rewards of different decisions are learnt in one
    group, because other events are checked against those that are recorded; a request that must wait is left as it is.
    """
    planned: list[tuple[LearnRequest, list[Event], LearningStep]] = []
    decisions: set[str | None] = {None}  # rows of no decision are learnt alone
    for request in requests:
        try:
            events = request.make_events(projection)
            if not events:
                request.result = [], None, []
                continue
            own = {event.decision for event in events}
            is_first = all(event.kind == REWARDED for event in events) and decisions.isdisjoint(own)
            if planned and not is_first:
                continue
            step = learn_events(projection, events)
        except Exception as error:
            request.error = error
            continue
        planned.append((request, events, step))
        if not is_first:
            break
        decisions |= own
        # The positions are not known yet: no later step of the group reads them.
        history = extend_history(step.history, step.rows, events)
        projection = projection._replace(learner=step.learner, history=history)
    return planned


def refit(projection: Projection, history: History, more: Rows | None = None) -> tuple[Learner, Any, list[str]]:
    """Learn all rows of a history, and some more, from the prior."""
    pieces = ([Rows(*history.rows())] if len(history) else []) + ([more] if more is not None else [])
    if not pieces:
        return projection.prior, None, []
    task = projection.task
    after, info, warnings = learn(task, projection.prior, History(task.model.outcomes), _concatenate(pieces))
    is_same = after.engine.explanation.engine == projection.learner.engine.explanation.engine
    return after, info, [] if is_same else warnings


def reward_changes(task: Task, events: Sequence[Event]) -> tuple[dict[int, RowEdit | None], list[tuple[int, Rows]]]:
    """Return the edits {position of the row: change, or None to remove it}, and the new rows by index of the event.

    Raises:
        ValueError: for an arm that the experiment does not have.
    """
    edits: dict[int, RowEdit | None] = {}
    rows = []
    for index, event in enumerate(events):
        body = event.body
        if body.get("of") is not None:
            context = body["context"] if "late" in body else None
            edits[body["of"]] = RowEdit(body["reward"], context) if body.get("reward") is not None else None
        piece = _rows_of_event(task.model, event)
        if piece is not None:
            if not np.all((piece.arms >= 0) & (piece.arms < len(task.arms))):
                raise ValueError(f"its arms are not all between 0 and {len(task.arms) - 1}")
            rows.append((index, piece))
    return edits, rows


def extend_history(history: History, rows: Sequence[tuple[int, Rows]], recorded: Sequence[Event]) -> History:
    """Return a history with the rows of recorded events, each with the position of its event."""
    if not rows:
        return history
    positions, joined = np.array([recorded[i].position for i, _ in rows]), _concatenate([piece for _, piece in rows])
    return history.extended(*joined, positions.repeat([piece.arms.size for _, piece in rows]))


def context_from_leaves(model: RewardModel, leaves: Sequence[Any] | None) -> Any:
    """Return a context, or many, from its leaves: arrays, or lists after a round trip through JSON."""
    if leaves is None:
        return None
    examples, structure = jax.tree.flatten(model.context)
    arrays: list[Any] = [
        np.asarray(leaf, _DTYPES[np.asarray(e).dtype.kind]) for leaf, e in zip(leaves, examples, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def _rows_of_event(model: RewardModel, event: Event) -> Rows | None:
    body = event.body
    if event.kind == IMPORTED:
        rewards = {name: np.asarray(values, np.float64) for name, values in body["rewards"].items()}
        return Rows(np.asarray(body["arms"], np.int64), rewards, context_from_leaves(model, body["contexts"]))
    if not event.settles or event.kind not in (REWARDED, CORRECTED) or body.get("of") is not None:
        return None
    context = context_from_leaves(model, body["context"])
    contexts = None if context is None else jax.tree.map(lambda leaf: leaf[None], context)
    rewards = {name: np.array([body["reward"][name]], np.float64) for name in model.outcomes}
    return Rows(np.array([event.arm], np.int64), rewards, contexts)


def _concatenate(pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return Rows(*jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(tuple, pieces)))


def _refuse_overflow(rows: Rows) -> None:
    for name, values in rows.rewards.items():
        row = int(np.argmax(np.abs(values)))
        if abs(values[row]) > _MAX_REWARD:
            raise ValueError(
                f"{name}={values[row]:g} is so large that the posterior would overflow: nothing was learnt from it; correct "
                "the reward, or measure rewards in larger units"
            )
