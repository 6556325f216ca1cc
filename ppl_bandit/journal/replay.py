"""Derive every decision of a stream again, from its events and the program alone."""

import bisect
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.journal.events import DECIDED, Event
from ppl_bandit.journal.experiment import Experiment, batches, in_lane
from ppl_bandit.journal.lessons import Standing, before_all
from ppl_bandit.journal.rows import context_from_json
from ppl_bandit.journal.stores.contract import Store
from ppl_bandit.posterior.deciding import Chosen, decide, decide_many
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import Task

__all__ = ["Replay", "replay"]

_TOLERANCE = 1e-9  # of probabilities: rounding on another processor, far below the 1 / M between two values of p-hat


class Replay(NamedTuple):
    """What came out of it.

    Attributes:
        num_decisions: in the stream.
        num_checked: derived again; those before the last change of the experiment cannot be.
        position: of the first decision that differs; None if all agree.
        difference: in words.
    """

    num_decisions: int
    num_checked: int
    position: int | None = None
    difference: str = ""


def replay(
    store: Store,
    name: str,
    after: int,
    task: Task,
    prior: Learner,
    grow: Callable[[list[Any]], tuple[Task, Learner]],
    report: Callable[[int], None] = lambda position: None,
) -> Replay:
    """Derive the decisions beyond a position again, and stop at the first that differs.

    Args:
        after: position of the last change of the experiment; what was learnt before it is learnt again there, in one batch.
        task: with the arms at that position.
        report: called with every position that was reached.
    """
    experiment = Experiment(store, name, before_all(task, prior), grow)
    due, num_decisions = _late(store, name, after)
    late = {position for positions in due.values() for position in positions}
    num_checked, is_settled = 0, False
    for batch in batches(store, name, 0, whole=True):
        if batch[-1].position <= after:
            experiment.remember(batch)
            continue
        if not is_settled:
            experiment.settle(None)
            is_settled = True
        ready = [batch] if batch[0].kind == DECIDED and batch[0].position not in late else []
        ready += [_batch_at(store, name, position) for position in due.get(batch[0].position, [])]
        for decisions in ready:
            num_checked += len(decisions)
            difference = _difference(experiment.standing, decisions)
            if difference is not None:
                return Replay(num_decisions, num_checked, *difference)
        experiment.absorb(batch)
        report(batch[-1].position)
    return Replay(num_decisions, num_checked)


def _late(store: Store, name: str, after: int) -> tuple[dict[int, list[int]], int]:
    """Find decisions that were recorded after something they had not absorbed: {what came between: their positions}."""
    taught: list[int] = []
    due: dict[int, list[int]] = defaultdict(list)
    num_decisions = 0
    for batch in batches(store, name, 0, whole=True):
        first = batch[0]
        if first.kind != DECIDED:
            taught.append(first.position)
            continue
        num_decisions += len(batch)
        place = bisect.bisect_right(taught, first.body["absorbed"])
        if first.position > after and place < len(taught):
            due[taught[place]].append(first.position)
    return due, num_decisions


def _batch_at(store: Store, name: str, position: int) -> list[Event]:
    return next(batches(store, name, position - 1, whole=True))


def _difference(standing: Standing, batch: Sequence[Event]) -> tuple[int, str] | None:
    """Return the position of the first decision of a call that comes out otherwise, and how; None if none does."""
    task, learner = in_lane(standing, batch[0].lane)
    allowed = batch[0].body["allowed"]
    mask = np.ones(len(task.arms), bool) if allowed is None else np.asarray(allowed)
    contexts = [context_from_json(task.model, event.body["context"]) for event in batch]
    numbers = np.array([event.number for event in batch])
    if "row" in batch[0].body:
        rows = None if contexts[0] is None else jax.tree.map(lambda *leaves: np.stack(leaves), *contexts)
        again = decide_many(task, learner, numbers, rows, mask)
    else:
        again = decide(task, learner, int(numbers[0]), contexts[0], mask)
    for row, event in enumerate(batch):
        words = _compared(task, event, again, row)
        if words:
            return event.position, words
    return None


def _compared(task: Task, event: Event, again: Chosen, row: int) -> str:
    body, arm, num_candidates = event.body, again.arms[row], again.num_candidates[row]
    if arm != event.arm:
        return f"it played {body['name']!r}, now it is {task.arms.names[arm]!r}"
    if num_candidates != body["num_candidates"]:
        return f"it drew {body['num_candidates']} candidates, now {num_candidates}"
    for name, values in (("best_arm_probs", again.best_arm_probs[row]), ("propensities", again.propensities[row])):
        gap = float(np.max(np.abs(values - np.asarray(body[name]))))
        if gap > _TOLERANCE:
            return f"its {name} differ by {gap:.2g}"
    return ""
