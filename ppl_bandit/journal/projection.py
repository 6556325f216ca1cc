"""The projection of a stream: arms, posterior and history after the events up to a position, as pure functions.

An event brings rows of data, completes or edits rows that were learnt before, or none of these. New rows, and more outcomes of
a row, update the posterior. An edit
refits the posterior to the edited history from the prior, in one batch, so that a corrected reward leaves no trace.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.engines.proof.linear_step import Clock
from ppl_bandit.journal.events import CORRECTED, ERASED, IMPORTED, REWARDED, Event
from ppl_bandit.posterior.fallback import NotCertified, learn
from ppl_bandit.posterior.learning import Learner, start
from ppl_bandit.posterior.task import History, Rows, Task, is_known, why_not_in_part
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

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
        is_paused: whether new decisions are refused.
        look: body of the last look at a designed experiment; None before the first.
        num_late: number of rewards that came after their decisions had expired.
        digest: of the event at its position, if it is a published snapshot; decisions record it.
    """

    position: int
    task: Task
    prior: Learner
    learner: Learner
    history: History
    num_played: np.ndarray
    retired: frozenset[int] = frozenset()
    is_paused: bool = False
    look: Mapping[str, Any] | None = None
    num_late: int = 0
    digest: str = ""

    @property
    def allocation(self) -> Sequence[float] | None:
        """Probabilities of the arms that a design fixes until the next look; None lets the selector decide."""
        if self.task.design is None:
            return None
        return self.task.design.allocation if self.look is None else self.look["allocation"]


class LearningStep(NamedTuple):
    """The result of learning from events that are not recorded yet.

    Attributes:
        projection: after the events, but for its position and the new rows of its history.
        rows: the new rows, each with the index of its event.
        info: the engine's diagnostics; None if nothing was learnt.
        warnings: for the user.
    """

    projection: Projection
    rows: list[tuple[int, Rows]]
    info: Any
    warnings: list[str]


def initial_projection(task: Task, prior: Learner) -> Projection:
    """Return the state before the first event."""
    return Projection(0, task, prior, prior, History(task.model.outcomes), np.zeros(len(task.arms), np.int64))


def learn_events(projection: Projection, events: Sequence[Event], is_learning: bool = True) -> LearningStep:
    """Learn from the events of one call.

    Args:
        is_learning: whether to update the posterior, which is that of the history; if not, the history alone changes.

    Raises:
        ValueError: for a reward that the program cannot produce, or that is too large to learn from.
    """
    projection, changes = _with_changes(projection, events, is_learning)
    task, learner, history = projection.task, projection.learner, projection.history
    edited = history
    if changes.edits or changes.completed:
        edited = history.edited(changes.edits | changes.completed, len(changes.completed))
    if not is_learning:
        return LearningStep(projection._replace(history=edited), changes.rows, None, [])
    pieces = [*changes.completed.values(), *(piece for _, piece in changes.rows)]
    if changes.edits:
        pieces = pieces[len(changes.completed) :]
        after, info, warnings = refit(projection, edited, _concatenate(task, pieces) if pieces else None)
        return LearningStep(projection._replace(learner=after, history=edited), changes.rows, info, warnings)
    if not pieces:
        return LearningStep(projection, changes.rows, None, [])
    joined = pieces[0] if len(pieces) == 1 else _concatenate(task, pieces)
    try:
        after, info, warnings = learn(task, learner, history, joined)
    except NotCertified:
        _refuse_overflow(joined)
        raise
    if learner.engine.explanation.is_exact and not after.engine.explanation.is_exact:
        _refuse_overflow(joined)
    return LearningStep(projection._replace(learner=after, history=edited), changes.rows, info, warnings)


def forgotten(projection: Projection, rows: Sequence[int], is_learning: bool) -> Projection:
    """Return the projection without the rows of an erased unit.

    The posterior keeps what it has learnt from them, unless its engine stores rows, was chosen for one of them, or is at the
    time of one: then it learns the others again.
    """
    if not rows:
        return projection
    after = projection._replace(history=projection.history.edited(dict.fromkeys(rows)))
    if is_learning and (_stores_rows(projection.learner) or has_example(projection, rows) or _has_other_time(after)):
        after = after._replace(learner=refit(after, after.history)[0])
    return after


def _stores_rows(learner: Learner) -> bool:
    """Return whether a state holds rows: all of them, or a window of the latest."""
    parts = jax.tree.leaves(learner.state, is_leaf=lambda part: isinstance(part, Interaction))
    return learner.engine.capabilities.reserve is not None or any(isinstance(part, Interaction) for part in parts)


def _has_other_time(projection: Projection) -> bool:
    """Return whether the clock of a posterior stands at `context["time"]` of a row that left the history."""
    parts = jax.tree.leaves(projection.learner.state, is_leaf=lambda part: isinstance(part, Clock))
    times = [part.time for part in parts if isinstance(part, Clock)]
    if not (projection.task.model.has_clock and times):
        return False
    return not len(projection.history) or not np.isin(times, projection.history.rows()[2]["time"]).all()


def has_example(projection: Projection, positions: Sequence[int]) -> bool:
    """Return whether the engine was chosen for a row with the context of one of those at some positions."""
    examples, history = projection.learner.examples, projection.history
    rows = history.rows()
    is_own = np.isin(rows.positions, positions)
    if examples is None or not is_own.any():  # they may have been removed before
        return False
    chosen = examples.context["context"] if projection.task.is_partial else examples.context
    pairs = zip(jax.tree.leaves(rows.contexts), jax.tree.leaves(chosen), strict=True)
    same = [np.all(own[is_own][:, None] == other, axis=tuple(range(2, own.ndim + 1))) for own, other in pairs]
    return bool(np.any(np.all(same, axis=0)))


def learning_in_part(projection: Projection) -> Projection:
    """Return the projection with an engine that takes rows of which some outcomes do not count, at its prior.

    Raises:
        ValueError: if rewards were learnt in part with another engine, and this one cannot.
    """
    if projection.task.is_partial:
        return projection
    why = why_not_in_part(projection.task, projection.prior.engine)
    if why:
        raise ValueError(
            f"some rewards were learnt before all of their outcomes were known, and now this is impossible: {why}"
        )
    task = projection.task._replace(is_partial=True)
    return projection._replace(task=task, prior=start(task, task.factory))


def refit(projection: Projection, history: History, more: Rows | None = None) -> tuple[Learner, Any, list[str]]:
    """Learn all rows of a history, and some more, from the prior."""
    pieces = ([history.rows()] if len(history) else []) + ([more] if more is not None else [])
    if not pieces:
        return projection.prior, None, []
    task = projection.task
    after, info, warnings = learn(task, projection.prior, History(task.model.outcomes), _concatenate(task, pieces))
    is_same = after.engine.explanation.engine == projection.learner.engine.explanation.engine
    return after, info, [] if is_same else warnings


class _Changes(NamedTuple):
    """How events change the rows that were learnt.

    Attributes:
        edits: {position of the row: what replaces it, or None to remove it}.
        completed: more outcomes of rows, {position: the row with what is learnt from it}.
        rows: the new rows, each with the index of its event.
    """

    edits: dict[int, Rows | None]
    completed: dict[int, Rows]
    rows: list[tuple[int, Rows]]


def _with_changes(projection: Projection, events: Sequence[Event], is_learning: bool) -> tuple[Projection, _Changes]:
    """Return how events change the rows, and the projection that can learn them."""
    changes, task = _Changes({}, {}, []), projection.task
    for index, event in enumerate(events):
        body, position = event.body, event.body.get("of")
        if "is_late" in body:
            projection = projection._replace(num_late=projection.num_late + 1)
        if "counted" in body and not projection.task.is_partial:
            projection = learning_in_part(projection)
            if is_learning:
                projection = projection._replace(learner=refit(projection, projection.history)[0])
        piece = rows_of_event(task.model, event)
        arms = [0] if piece is None else piece.arms.tolist()
        if min(arms) < 0 or max(arms) >= task.model.num_arms:
            raise ValueError(f"its arms are not all between 0 and {task.model.num_arms - 1}")
        if position is None:
            if piece is not None:
                changes.rows.append((index, piece))
        elif piece is not None and event.kind == REWARDED:
            changes.completed[position] = piece
        else:
            changes.edits[position] = piece
    return projection, changes


def context_from_leaves(model: RewardModel, leaves: Sequence[Any] | None) -> Any:
    """Return a context, or many, from its leaves: arrays, or lists after a round trip through JSON."""
    if leaves is None:
        return None
    examples, structure = jax.tree.flatten(model.context)
    arrays: list[Any] = [
        np.asarray(leaf, _DTYPES[np.asarray(e).dtype.kind]) for leaf, e in zip(leaves, examples, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def rows_of_event(model: RewardModel, event: Event) -> Rows | None:
    """Return the rows that an event brings to the posterior; None if there are none."""
    body = event.body
    if event.kind == IMPORTED:
        rewards = {name: np.asarray(values, np.float64) for name, values in body["rewards"].items()}
        return Rows(np.asarray(body["arms"], np.int64), rewards, context_from_leaves(model, body["contexts"]))
    if event.kind not in (REWARDED, CORRECTED) or not (event.settles or "counted" in body):
        return None
    if ERASED in body and model.context is not None:
        return None
    leaves = body.get("context")
    contexts = None if leaves is None else jax.tree.map(lambda leaf: leaf[None], context_from_leaves(model, leaves))
    known = body["reward"] if event.settles else {name: body["reward"][name] for name in body["known"]}
    rewards = {name: np.array([known.get(name, np.nan)], np.float64) for name in model.outcomes}
    counted = np.array([[name in body["counted"] for name in model.outcomes]]) if "counted" in body else None
    return Rows(np.array([event.arm], np.int64), rewards, contexts, counted)


def _concatenate(task: Task, pieces: Sequence[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    pieces = [piece._replace(positions=None) for piece in pieces]
    if any(piece.counted is not None for piece in pieces):
        outcomes = task.model.outcomes
        pieces = [p if p.counted is not None else p._replace(counted=is_known(p, outcomes)) for p in pieces]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)


def _refuse_overflow(rows: Rows) -> None:
    for name, values in rows.rewards.items():
        row = int(np.argmax(np.abs(values)))
        if abs(values[row]) > _MAX_REWARD:
            raise ValueError(
                f"{name}={values[row]:g} is so large that the posterior would overflow: nothing was learnt from it; correct "
                "the reward, or measure rewards in larger units"
            )
