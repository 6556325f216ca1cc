"""Tables of what a live bandit has recorded: one row per reward, or per decision with a pending reward."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.inputs.data_frames import column_values
from ppl_bandit.journal.events import DecisionRecord, fold_decision
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.posterior.task import why_not_in_part
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.outcomes import separable_outcomes

if TYPE_CHECKING:
    import pandas


def history_table(experiment: Experiment) -> "pandas.DataFrame":
    """Return one row per learnt reward, in the order of learning; imported plays have no decision."""
    import pandas

    with experiment.fold_lock:
        task = experiment.projection.task
        arms, rewards, contexts = experiment.history.rows()
        positions = experiment.history.positions()
    ids, propensity = np.full(arms.size, None, object), np.full(arms.size, np.nan)
    decided, rewarded = propensity.copy(), propensity.copy()
    for record in experiment.store.decisions(experiment.name):
        row = np.searchsorted(positions, record.row or 0)
        if row < arms.size and positions[row] == record.row:
            ids[row], decided[row] = shown_name(record.decided.decision), record.decided.time
            rewarded[row], propensity[row] = record.settled, record.propensity
    for event in experiment.store.imported(experiment.name):
        propensity[positions == event.position] = event.body["propensity"]
    columns: dict[str, Any] = {
        "decision": ids,
        "decided": _times(decided),
        "rewarded": _times(rewarded),
        "arm": [shown_name(task.arms.names[i]) for i in arms],
        "propensity": propensity,
    }
    return pandas.DataFrame(columns | rewards | _context_values(task.model, jax.tree.leaves(contexts)))


def pending_table(experiment: Experiment, until: float | None) -> "pandas.DataFrame":
    """Return one row per decision with a pending reward, oldest first."""
    import pandas

    model = experiment.projection.task.model
    pending = experiment.store.pending(experiment.name, until)
    found = experiment.store.find(experiment.name, [str(event.decision) for event in pending])
    records = [fold_decision(found[str(event.decision)]) for event in pending]
    columns: dict[str, Any] = {
        "decision": [shown_name(event.decision) for event in pending],
        "decided": _times([event.time for event in pending]),
        "arm": [shown_name(event.body["name"]) for event in pending],
        "propensity": [record.propensity for record in records],
    }
    if len(model.outcomes) > 1:
        columns |= {name: [record.reward.get(name, np.nan) for record in records] for name in model.outcomes}
        columns["learnt"] = [", ".join(o for o in model.outcomes if o in record.counted) for record in records]
    needed = (*model.outcomes, *experiment.projection.task.late)
    if len(needed) > 1:
        unknown = [[one for one in needed if one not in r.reward and one not in r.late] for r in records]
        columns["waiting_for"] = [", ".join(names) for names in unknown]
    note = _why_waiting(experiment, records)
    num_leaves = len(jax.tree.leaves(model.context)) if pending else 0
    leaves = [np.asarray([record.context[i] for record in records]) for i in range(num_leaves)]
    table = pandas.DataFrame(columns | _context_values(model, leaves))
    table.attrs |= {"note": note} if note else {}
    return table


def _why_waiting(experiment: Experiment, records: list[DecisionRecord]) -> str:
    """Return why outcomes that are known are not learnt before the others, in words; empty if that does not happen."""
    projection = experiment.projection
    task = projection.task
    known = [separable_outcomes(task.model, frozenset(r.reward)) for r in records if r.reward and r.row is None]
    why = why_not_in_part(task, projection.prior.engine) if any(known) else ""
    return f"outcomes wait until all are known: {why}" if why else ""


def _times(values: Any) -> Any:
    import pandas

    return pandas.to_datetime(pandas.Series(values, dtype=float), unit="s", utc=True)


def _context_values(model: RewardModel, leaves: list[Any]) -> dict[str, Any]:
    """Return the columns of contexts; empty columns if there are no leaves, because there are no rows."""
    if not leaves:
        leaves = [np.zeros((0, *np.shape(leaf))) for leaf in jax.tree.leaves(model.context)]
    return column_values(model, leaves)
