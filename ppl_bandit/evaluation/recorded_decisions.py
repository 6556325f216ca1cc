"""The decisions of an experiment, from its event store, in the order in which they were made."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.journal.decision_record import REWARDED_STATUS, fold_decision
from ppl_bandit.journal.events import IMPORTED, Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.program.model.reward_model import RewardModel

__all__ = ["decisions_from_experiment", "decisions_from_journal"]


def decisions_from_experiment(experiment: Experiment, outcome: str | None) -> LoggedDecisions:
    """Return the rewarded decisions of an open experiment; see `_from_events`.

    Raises:
        JournalError: if its journal was edited.
    """
    _check_unbroken(experiment.store, experiment.name)
    task = experiment.catch_up().task
    decisions = experiment.store.decisions(experiment.name)
    found = _from_events(decisions, task.arms.names, task.model.outcomes, outcome, task.model)
    return found._replace(num_without_propensity=max(len(experiment.history) - found.arm.size, 0))


def decisions_from_journal(
    journal: Journal, name: str, outcome: str | None, model: RewardModel | None
) -> LoggedDecisions:
    """Return the rewarded decisions of an experiment in a journal; see `_from_events`.

    Raises:
        JournalError: if there is no such experiment, or the journal was edited.
    """
    header = read_header(journal.store, name)
    if header is None:
        raise JournalError(
            f"{journal!r} has no experiment {name!r}; its experiments: {', '.join(journal.experiments())}"
        )
    _check_unbroken(journal.store, name)
    found = _from_events(journal.store.decisions(name), header.names, header.identity["outcomes"], outcome, model)
    imported = journal.store.read(name, kinds=(IMPORTED,))
    return found._replace(num_without_propensity=sum(len(event.body["arms"]) for event in imported))


def _from_events(
    decisions: Sequence[Sequence[Event]],
    names: Sequence[Any],
    outcomes: Sequence[str],
    outcome: str | None,
    model: RewardModel | None,
) -> LoggedDecisions:
    """Return the rewarded decisions of an experiment.

    A corrected reward counts with its last value, an expired one with the value that it was given. Pending and discarded
    decisions are unrewarded. Imported plays have no propensity and are left out. An arm that was added later has propensity
    0 before.

    Args:
        decisions: the events of every decision.
        names: the arms now.
        outcome: the outcome to evaluate; None takes the only one.
        model: whose context the recorded one is; None reads no contexts.
    """
    if outcome is None and len(outcomes) > 1:
        raise ValueError(f"the experiment has the outcomes {list(outcomes)}: name the one to evaluate with outcome=")
    chosen = outcomes[0] if outcome is None else outcome
    if chosen not in outcomes:
        raise ValueError(f"outcome is {chosen!r}, expected one of {list(outcomes)}")
    records = sorted(map(fold_decision, decisions), key=lambda record: record.decided.position)
    rewarded = [record for record in records if record.status == REWARDED_STATUS]
    arm = np.array([record.decided.arm for record in rewarded], np.int64)
    propensities = np.zeros((len(rewarded), len(names)))
    for row, record in enumerate(rewarded):
        values = record.decided.body["propensities"]
        propensities[row, : len(values)] = values
    values = {name: np.array([record.reward[name] for record in rewarded], float) for name in outcomes}
    contexts = None
    if model is not None and model.context is not None and rewarded:
        leaves = [np.stack([np.asarray(r.context[i]) for r in rewarded]) for i in range(len(rewarded[0].context))]
        contexts = jax.tree.unflatten(jax.tree.structure(model.context), leaves)
    return LoggedDecisions(
        tuple(names),
        arm,
        values[chosen],
        propensities[np.arange(arm.size), arm],
        propensities,
        contexts,
        values,
        len(records) - len(rewarded),
    )


def _check_unbroken(store: Any, name: str) -> None:
    """Refuse a stream whose digests do not follow from each other, before anything is estimated.

    Raises:
        JournalError: with the position of the first event that was edited, removed or inserted.
    """
    find = getattr(store, "first_broken", None)
    position = None if find is None else find(name)
    if position is not None:
        raise JournalError(
            f"the event at position {position} of the experiment {name!r} does not follow from those before it: the journal "
            "was edited or damaged, and nothing is estimated from it; restore it from a copy"
        )
