"""Replay a stream: make every decision again from its events and the program, and compare; stored posteriors likewise."""

import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ppl_bandit.journal.audit import Verification
from ppl_bandit.journal.checkpoints import announced_checkpoints, checkpoint_difference
from ppl_bandit.journal.events import DECIDED, ERASED, LOOKED, Event
from ppl_bandit.journal.experiment import BuildTask, Experiment
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.projection import Projection, context_from_leaves, initial_projection
from ppl_bandit.journal.repeats import choose_arms
from ppl_bandit.journal.stores.sql import SqlStore, read_batches
from ppl_bandit.journal.stores.store import DamagedEvent, ReadingEvent
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import Task
from ppl_bandit.types import Selection

_TOLERANCE = 1e-9  # of probabilities: rounding on another processor, far below the 1 / M between two values of p-hat


class ReplayResult(NamedTuple):
    """The result of a replay.

    Attributes:
        num_decisions: number of decisions in the stream.
        num_checked: number of decisions made again; those before the last change of the experiment cannot be.
        position: of the first decision, look or checkpoint that differs; None if all agree.
        difference: in words.
        num_erased: decisions that cannot be made again: a context that they depend on was erased with its unit.
        num_posteriors: number of stored posteriors that were learnt again, and agree.
    """

    num_decisions: int
    num_checked: int
    position: int | None = None
    difference: str = ""
    num_erased: int = 0
    num_posteriors: int = 0


def replay(
    store: SqlStore,
    name: str,
    after: int,
    task: Task,
    prior: Learner,
    build: BuildTask,
    advance: Callable[[int], None] | None = None,
    look_difference: Callable[[Projection, Event], str] = lambda projection, event: "",
    *,
    only_posteriors: bool = False,
) -> ReplayResult:
    """Make the decisions beyond a position again, in order, and stop at the first that differs.

    The looks, and the posteriors that are stored as checkpoints or published as snapshots, are compared too.

    A process may record a decision after another process recorded a reward that the first had not read yet. Such a late
    decision is made again from the projection before that reward, which is kept until then. The stream is read
    twice: to find the late decisions, and to fold it.

    Args:
        after: position of the last change of the experiment; the rewards before it are learnt in one batch.
        task: with the arms at that position.
        advance: called with numbers of events that were folded.
        look_difference: takes a recorded look again; returns the difference in words, empty if there is none.
        only_posteriors: whether to make no decision and no look again, and to stop at the last stored posterior.
    """
    experiment = Experiment(store, name, initial_projection(task, prior), build)
    late, num_decisions = ({}, 0) if only_posteriors else _find_late_decisions(store, name, after)
    num_uses = Counter(late.values())
    kept: dict[int, Projection] = {}
    found, has_erased_rows, has_context = ReplayResult(num_decisions, 0), False, task.model.context is not None
    stored = [one for one in announced_checkpoints(store, name) if not 0 < one.position <= after]  # none before is read
    for one in stored:
        if not 0 < one.position < one.announced:
            difference = (
                f"the stored posterior is said to be that of position {one.position}, announced at {one.announced}"
            )
            return found._replace(position=one.announced, difference=difference)
    for batch in read_batches(store, name, 0, whole=not only_posteriors):
        if only_posteriors and not stored:
            break
        first, kind = batch[0].position, batch[0].kind
        if batch[-1].position <= after:
            experiment.fold(batch, is_learning=False)
            continue
        if experiment.projection.position <= after:
            experiment.set_posterior()
        if first in num_uses:
            kept[first] = experiment.projection
        is_erased = any(ERASED in event.body for event in batch)
        # A late decision that depends on rewards before `after` cannot be made again.
        if not only_posteriors and kind == DECIDED and late.get(first, after + 1) > after:
            projection = kept[late[first]] if first in late else experiment.projection
            if has_context and (has_erased_rows or is_erased):
                found = found._replace(num_erased=found.num_erased + len(batch))
            else:
                found = found._replace(num_checked=found.num_checked + len(batch))
                with ReadingEvent(name, first):
                    different = _first_difference(projection, batch)
                if different is not None:
                    return found._replace(position=different[0], difference=different[1])
            if first in late:
                num_uses[late[first]] -= 1
                if not num_uses[late[first]]:
                    del kept[late[first]]
        if has_context and kind != DECIDED and is_erased:
            has_erased_rows, stored = True, []  # posteriors behind this position depend on contexts that are gone
        if kind == LOOKED and not (only_posteriors or has_erased_rows):
            with ReadingEvent(name, first):
                difference = look_difference(experiment.projection, batch[0])
            if difference:
                return found._replace(position=first, difference=difference)
        experiment.fold(batch)
        due = [one for one in stored if one.position <= batch[-1].position]
        stored = [one for one in stored if one.position > batch[-1].position]
        for one in due:
            differs = checkpoint_difference(experiment.projection, one)
            if differs:
                return found._replace(position=one.announced, difference=differs)
            found = found._replace(num_posteriors=found.num_posteriors + (differs is not None))
        if advance is not None:
            advance(len(batch))
    return found


def recompute_posteriors(
    store: SqlStore, found: Verification, build: BuildTask, advance: Callable[[int], None] | None = None
) -> Verification:
    """Learn the stored posteriors of a verified stream again from its events, and compare.

    Args:
        build: of the program that the experiment was recorded with.
        advance: as in `replay`.

    Raises:
        DamagedEvent: with the position of the event that announces the first that differs.
    """
    header = read_header(store, found.name)
    # With the initial arms: later ones are added at the events that added them.
    task, prior = build(list(header.identity["arms"]))
    result = replay(store, found.name, header.last_change, task, prior, build, advance, only_posteriors=True)
    if result.position is not None:
        raise DamagedEvent(
            f"the posterior that the event at position {result.position} of the experiment {found.name!r} announces does not "
            f"follow from the events before it: {result.difference}; it was forged or damaged: restore the journal from a copy"
        )
    return found._replace(num_recomputed=result.num_posteriors)


def _find_late_decisions(store: SqlStore, name: str, after: int) -> tuple[dict[int, int], int]:
    """Return {position of a late decision: position of the first event that it had not read}, and the number of decisions."""
    not_decisions: list[int] = []
    late: dict[int, int] = {}
    num_decisions = 0
    for batch in read_batches(store, name, 0, whole=True):
        first = batch[0]
        if first.kind != DECIDED:
            not_decisions.append(first.position)
            continue
        num_decisions += len(batch)
        with ReadingEvent(name, first.position):
            index = bisect.bisect_right(not_decisions, first.body["absorbed"])
        if first.position > after and index < len(not_decisions):
            late[first.position] = not_decisions[index]
    return late, num_decisions


def _first_difference(projection: Projection, batch: Sequence[Event]) -> tuple[int, str] | None:
    """Make the decisions of one call again; return the position and the difference of the first that differs."""
    model, names, body = projection.task.model, projection.task.arms.names, batch[0].body
    if len(batch) > 1 and "place" in body:  # a slate: each place is a decision of its own
        found = (_first_difference(projection, [event]) for event in batch)
        return next((difference for difference in found if difference is not None), None)
    allowed = body.get("allowed")
    mask = np.ones(len(names), bool) if allowed is None else np.asarray(allowed)
    contexts = [context_from_leaves(model, event.body.get("context")) for event in batch]
    numbers, is_batch, context = [int(event.number or 0) for event in batch], "row" in body, contexts[0]
    if is_batch and context is not None:
        context = jax.tree.map(lambda *leaves: np.stack(leaves), *contexts)
    chosen = choose_arms(projection, batch[0].stream, numbers, context, mask, is_batch=is_batch)
    for event, selection in zip(batch, chosen, strict=True):
        difference = _difference(names, event, selection)
        if difference:
            return event.position, difference
    return None


def _difference(names: Sequence[object], event: Event, selection: Selection) -> str:
    body, arm, num_candidates = event.body, int(selection.arm), selection.num_candidates
    if arm != event.arm:
        return f"the recorded arm is {body['name']!r}, the replayed arm is {names[arm]!r}"
    if num_candidates != body["num_candidates"]:
        return f"the recorded number of candidates is {body['num_candidates']}, the replayed one is {num_candidates}"
    for name in ("best_arm_probs", "propensities"):
        gap = float(np.max(np.abs(getattr(selection, name) - np.asarray(body[name]))))
        if gap > _TOLERANCE:
            return f"recorded and replayed {name} differ by {gap:.2g}"
    return ""
