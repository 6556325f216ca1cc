"""The decisions of an experiment, from its event store, in the order in which they were made."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.evaluation.logged_decisions import LoggedDecisions, check_repeated_rows, propensity_doubts
from ppl_bandit.inputs.late_entries import late_numbers
from ppl_bandit.journal.events import DECIDED, REWARDED_STATUS, DecisionRecord
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.program.model.reward_model import RewardModel


def decisions_from_experiment(experiment: Experiment) -> LoggedDecisions:
    """Return the rewarded decisions of an open experiment; see `_from_store`.

    Raises:
        JournalError: if its journal was edited.
    """
    experiment.store.check(experiment.name)
    task = experiment.catch_up().task
    recorded = experiment.store, experiment.name, task.model.context is not None or bool(task.model.moving_sites)
    return _from_store(*recorded, task.arms.names, task.model.outcomes, task.model, task.late)


def decisions_from_journal(journal: Journal, name: str, model: RewardModel | None) -> LoggedDecisions:
    """Return the rewarded decisions of an experiment in a journal; see `_from_store`.

    Raises:
        JournalError: if there is no such experiment, or the journal was edited.
    """
    header = read_header(journal.store, name)
    journal.store.check(name)
    recorded = journal.store, name, bool(header.context_columns) or header.is_moving
    outcomes, late = header.identity["outcomes"], header.identity.get("late", ())
    return _from_store(*recorded, header.names, outcomes, model, late)


def _from_store(
    store: SqlStore,
    name: str,
    is_varying: bool,
    names: Sequence[Any],
    outcomes: Sequence[str],
    model: RewardModel | None,
    late: Sequence[str] = (),
) -> LoggedDecisions:
    """Return the rewarded decisions of an experiment.

    A corrected reward counts with its last value, an expired one with the value that it was given. Pending and discarded
    decisions are unrewarded, also those of which some outcomes are known; an outcome that the program masks counts as 0.
    Imported plays count if their propensity was given; the propensities of all arms are then not known. If another system
    showed an arm in place of a decision's with a known propensity, those of the other arms are nan. An arm that was added later
    has propensity 0 before.

    Args:
        is_varying: whether decisions had a context, or latents move.
        names: the arms now.
        model: whose context the recorded one is; None reads no contexts.
        late: entries of the context that came with the reward: targets and expectations see what the decision had.
    """
    has_context = model is not None and model.context is not None
    plays, others = list[DecisionRecord](), list[DecisionRecord]()
    num_unrewarded = num_unknown = num_shown = num_erased = num_late = 0
    for record in store.imported(name):
        num_unknown += record.propensity is None
        others += [] if record.propensity is None else [record]
    for record in store.decisions(name):
        num_late += record.is_late
        if record.status != REWARDED_STATUS:
            num_unrewarded += 1
        elif record.propensity is None:  # shown by another system
            num_shown += 1
        elif has_context and record.is_erased and record.context is None:
            num_erased += 1
        else:
            plays.append(record)
    doubts = _check_imported(others, len(names)) if others else []
    plays = sorted([*plays, *others], key=lambda play: play.decided.position)  # the rows of one event keep their order
    arm = np.array([play.arm for play in plays], np.int64)
    propensities: np.ndarray | None = None
    if not others and (not plays or any(map(_knows_all, plays))):
        propensities = np.zeros((len(plays), len(names)))
        for row, play in enumerate(plays):
            if _knows_all(play):
                own = play.decided.body["propensities"]
                propensities[row, : len(own)] = own
            else:
                others_known = play.propensity == 1.0 or len(names) == 2
                propensities[row] = 1.0 - float(play.propensity or 0.0) if others_known else np.nan
                propensities[row, play.arm] = play.propensity
    values = {name: np.array([play.reward[name] for play in plays], float) for name in outcomes}
    contexts = learnt = None
    if model is not None and has_context and plays:
        leaves = jax.tree.leaves(model.context)
        examples = {number: np.asarray(leaves[number]) for number in late_numbers(model, late).values()}
        contexts = _stacked(model, [_decided_context(play, examples) for play in plays])
        learnt = _stacked(model, [play.context for play in plays]) if late else None
    return LoggedDecisions(
        tuple(names),
        arm,
        values[outcomes[0]],
        np.array([play.propensity for play in plays], float),
        propensities,
        contexts,
        values,
        num_unrewarded,
        learnt_contexts=learnt,
        doubts=tuple(doubts),
        num_without_propensity=num_shown + num_unknown,
        num_shown=num_shown,
        num_erased=num_erased,
        num_late=num_late,
        is_varying=is_varying or (None if others else False),  # another system may have used contexts of its own
    )


def _knows_all(play: DecisionRecord) -> bool:
    """Return whether the propensities of all arms are known; otherwise that of the arm that was shown is."""
    return not play.shown or play.is_shown_as_decided


def _decided_context(play: DecisionRecord, examples: Mapping[int, Any]) -> Any:
    """Return the leaves of the context at the decision: an imported play has the example values of its late entries."""
    if play.decided.kind == DECIDED:
        return play.decided.body.get("context")
    return [examples.get(number, leaf) for number, leaf in enumerate(play.context)]


def _check_imported(plays: list[DecisionRecord], num_arms: int) -> list[str]:
    """Refuse plays that were imported more than once; return why their propensities cannot be true."""
    arm, propensity = np.array([play.arm for play in plays]), np.array([play.propensity for play in plays])
    columns: dict[str, Any] = {"arm": arm, "propensity": propensity}
    columns |= {f"outcome {name}": np.array([play.reward[name] for play in plays]) for name in plays[0].reward}
    for number in range(len(plays[0].context or ())):
        columns[f"context {number}"] = np.stack([np.asarray(play.context[number]) for play in plays])
    check_repeated_rows(columns, "imported plays")
    return propensity_doubts(propensity, arm, num_arms)


def _stacked(model: RewardModel, contexts: Sequence[Sequence[Any]]) -> Any:
    leaves = [np.stack([np.asarray(context[i]) for context in contexts]) for i in range(len(contexts[0]))]
    return jax.tree.unflatten(jax.tree.structure(model.context), leaves)
