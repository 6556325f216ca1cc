"""What events teach: pure functions from what is known and some events to what is known after them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.journal.events import Event
from ppl_bandit.journal.rows import joined_rows, rows_of
from ppl_bandit.posterior.fallback import NotCertified, learn
from ppl_bandit.posterior.history import History
from ppl_bandit.posterior.learning import Learner, Rows
from ppl_bandit.posterior.task import Task

__all__ = ["Learnt", "Standing", "before_all", "learnt", "lessons", "relearnt"]

_HUGE = 1e75  # squares of what is larger overflow, or lose every digit of what was learnt before


class Standing(NamedTuple):
    """What is known at a position in the stream.

    Attributes:
        prior: the learner before any reward, from which what was learnt is learnt again after a correction.
        history: all rows that were learnt.
        num_played: decisions that each arm got.
        retired: indices of arms that are played no more.
    """

    position: int
    task: Task
    prior: Learner
    learner: Learner
    history: History
    num_played: np.ndarray
    retired: frozenset[int] = frozenset()


def before_all(task: Task, prior: Learner) -> Standing:
    """Return what is known before the first event."""
    return Standing(0, task, prior, prior, History(task.model.outcomes), np.zeros(len(task.arms), np.int64))


class Learnt(NamedTuple):
    """What some events teach: the learner after them, the history they leave as it was, their rows, evidence and notes."""

    learner: Learner
    history: History
    rows: list[tuple[int, Rows]]  # with the index of the event that brought them
    info: Any
    notes: list[str]


def learnt(standing: Standing, events: Sequence[Event]) -> Learnt:
    """Return what events teach on top of what is known; nothing is changed.

    A correction is learnt by learning all rows again, in one batch, as if the first reward had never been.

    Raises:
        ValueError: for a reward that the program cannot produce, or that is too large to learn from.
    """
    task, learner, history = standing.task, standing.learner, standing.history
    edits, rows = lessons(task, events)
    if edits:
        edited = history.edited(edits)
        more = joined_rows([piece for _, piece in rows]) if rows else None
        learner, info, notes = relearnt(standing, edited, more)
        return Learnt(learner, edited, rows, info, notes)
    if not rows:
        return Learnt(learner, history, rows, None, [])
    joined = joined_rows([piece for _, piece in rows])
    try:
        after, info, notes = learn(task, learner, history, joined)
    except NotCertified:
        _refuse_huge(joined)
        raise
    if learner.engine.explanation.is_exact and not after.engine.explanation.is_exact:
        _refuse_huge(joined)
    return Learnt(after, history, rows, info, notes)


def relearnt(standing: Standing, history: History, more: Rows | None = None) -> tuple[Learner, Any, list[str]]:
    """Learn all rows of a history, and some more, from the prior on."""
    empty = History(standing.task.model.outcomes)
    pieces = ([Rows(*history.rows())] if len(history) else []) + ([more] if more is not None else [])
    if not pieces:
        return standing.prior, None, []
    after, info, notes = learn(standing.task, standing.prior, empty, joined_rows(pieces))
    is_same = after.engine.explanation.engine == standing.learner.engine.explanation.engine
    return after, info, [] if is_same else notes


def lessons(task: Task, events: Sequence[Event]) -> tuple[dict[int, Any], list[tuple[int, Rows]]]:
    """Return the rows that events change, by position, and the rows that they add."""
    edits: dict[int, Any] = {}
    rows = []
    for index, event in enumerate(events):
        if event.body.get("of") is not None:
            edits[event.body["of"]] = event.body.get("reward")
        piece = rows_of(task.model, event)
        if piece is not None:
            rows.append((index, piece))
    return edits, rows


def _refuse_huge(rows: Rows) -> None:
    for name, values in rows.rewards.items():
        row = int(np.argmax(np.abs(values)))
        if abs(values[row]) > _HUGE:
            raise ValueError(
                f"{name}={values[row]:g} is so large that the posterior would overflow: nothing was learnt from it; correct "
                "the reward, or measure rewards in larger units"
            )
