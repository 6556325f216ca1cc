"""What was decided and learnt, as tables: one row per reward, one per decision that waits."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ppl_bandit.inputs.data_files import context_columns
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.records import record_of
from ppl_bandit.program.model.reward_model import RewardModel

if TYPE_CHECKING:
    import pandas

__all__ = ["history_table", "pending_table"]


def history_table(experiment: Experiment) -> "pandas.DataFrame":
    """Return one row per reward that was learnt, in the order of learning; plays decided elsewhere have no decision."""
    import pandas

    with experiment.learning:
        task = experiment.standing.task
        arms, rewards, contexts = experiment.history.rows()
        positions = experiment.history.positions()
    records = [record_of(events) for events in experiment.store.decisions(experiment.name)]
    by_row = {record.row: record for record in records if record.row is not None}
    rows = [by_row.get(int(position)) for position in positions]
    columns: dict[str, Any] = {
        "decision": [None if r is None else r.decided.decision for r in rows],
        "decided": _times([None if r is None else r.decided.time for r in rows]),
        "rewarded": _times([None if r is None else r.settled for r in rows]),
        "arm": [task.arms.names[i] for i in arms],
        "propensity": [np.nan if r is None else _propensity(r.decided) for r in rows],
    }
    columns |= rewards
    leaves = jax.tree.leaves(contexts)
    columns |= _contexts(task.model, leaves, len(rows))
    return pandas.DataFrame(columns)


def pending_table(experiment: Experiment, until: float | None) -> "pandas.DataFrame":
    """Return one row per decision that waits for a reward, oldest first."""
    import pandas

    task = experiment.standing.task
    waiting = experiment.store.pending(experiment.name, until)
    found = experiment.store.find(experiment.name, [str(event.decision) for event in waiting])
    known = [record_of(found[str(event.decision)]).reward for event in waiting]
    columns: dict[str, Any] = {
        "decision": [event.decision for event in waiting],
        "decided": _times([event.time for event in waiting]),
        "arm": [event.body["name"] for event in waiting],
        "propensity": [_propensity(event) for event in waiting],
    }
    if len(task.model.outcomes) > 1:
        columns |= {name: [values.get(name, np.nan) for values in known] for name in task.model.outcomes}
    num_leaves = len(jax.tree.leaves(task.model.context))
    leaves = [np.asarray([event.body["context"][i] for event in waiting]) for i in range(num_leaves)]
    columns |= _contexts(task.model, leaves, len(waiting))
    return pandas.DataFrame(columns)


def _propensity(event: Event) -> float:
    kept = event.body.get("propensity")
    return event.body["propensities"][event.arm] if kept is None else kept


def _times(values: list[float | None]) -> Any:
    import pandas

    return pandas.to_datetime(pandas.Series(values, dtype=float), unit="s", utc=True)


def _contexts(model: RewardModel, leaves: list[Any], num_rows: int) -> dict[str, Any]:
    if model.context is None or not num_rows:
        return {name: [] for name in context_columns(model)} if model.context is not None else {}
    columns = {}
    for name, (number, index) in context_columns(model).items():
        leaf: Any = np.asarray(leaves[number])
        columns[name] = leaf[(slice(None), *index)]
    return columns
