"""Learn from many rewards, each for itself, in as few updates of the posterior as their order allows.

One update of many rows costs about as much as one of a single row. So first rewards are learnt together, as by
`Bandit.update_many`; if the call is refused, each half of it is tried, so that only wrong rows are refused in the end.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.outcome_events import LearnRequest, Reported, Rewards
from ppl_bandit.live.decisions import decision_ids
from ppl_bandit.live.reported_rewards import one_update, reported_reward
from ppl_bandit.posterior.task import Task

_TOGETHER = {"decision", "reward", "context", "shown", "propensity"}  # a row with other arguments is a call of its own


class _Part(NamedTuple):
    """Rows that are learnt in one call: {index of the row: what is reported}, or one row and its request."""

    rows: Mapping[int, Mapping[str, Reported]]
    request: LearnRequest


def learn_rows(experiment: Experiment, rows: Sequence[Mapping[str, Any]]) -> list[bool | Exception]:
    """Return for each row whether something was recorded, or the error that refused it.

    Args:
        rows: the arguments of `Bandit.update`, by name.
    """
    found: list[bool | Exception] = [False] * len(rows)
    remaining: Sequence[int] = range(len(rows))
    while remaining:
        parts, remaining = _parts(experiment.projection.task, rows, remaining, found)
        while parts:
            results = experiment.learn_each([part.request for part in parts])
            refused = []
            for part, result in zip(parts, results, strict=True):
                if isinstance(result, Exception) and len(part.rows) > 1:
                    refused += _halves(part)
                    continue
                recorded = set() if isinstance(result, Exception) else {event.decision for event in result}
                for index, own in part.rows.items():
                    is_new = bool(recorded & own.keys() if own else recorded)
                    found[index] = result if isinstance(result, Exception) else is_new
            parts = refused
    return found


def _parts(
    task: Task,
    rows: Sequence[Mapping[str, Any]],
    indices: Sequence[int],
    found: list[bool | Exception],
) -> tuple[list[_Part], list[int]]:
    """Return the calls of some rows, and the rows that must wait for an earlier one of the same decision."""
    together: dict[int, Mapping[str, Reported]] = {}
    parts, later, seen = list[_Part](), list[int](), set[str]()
    for index in indices:
        row = rows[index]
        try:
            decision = row.get("decision")
            ids = [] if decision is None else decision_ids(decision)
            if not seen.isdisjoint(ids):
                later.append(index)
                continue
            if row.get("reward") is not None and row.keys() <= _TOGETHER and len(ids) == 1:
                together[index] = reported_reward(task, **row)
            else:
                parts.append(_Part({index: {}}, LearnRequest(*one_update(task, **row))))
            seen.update(ids)
        except (ValueError, TypeError) as error:
            found[index] = error
    return ([_together(together)] if together else []) + parts, later


def _together(rows: Mapping[int, Mapping[str, Reported]]) -> _Part:
    reported = {id: one for own in rows.values() for id, one in own.items()}
    return _Part(rows, LearnRequest(Rewards(reported)))


def _halves(part: _Part) -> list[_Part]:
    items = list(part.rows.items())
    middle = len(items) // 2
    return [_together(dict(half)) for half in (items[:middle], items[middle:])]
