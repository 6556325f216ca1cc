"""Rewards on their way from the caller to the journal: checked, matched to decisions, overdue.

Also here: learn from many rewards, each for itself, in as few updates of the posterior as their order allows.

One update of many rows costs about as much as one of a single row. So first rewards are learnt together, as by
`Bandit.update_many`; if the call is refused, each half of it is tried, so that only wrong rows are refused in the end.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.inputs.checks import as_interaction, check_contexts, check_rewards, impossible_rows
from ppl_bandit.inputs.data_frames import column_numbers, is_frame, rows_from
from ppl_bandit.inputs.late_entries import check_late_values
from ppl_bandit.inputs.numbers import as_numbers, as_seconds
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.outcome_events import Import, LearnRequest, Report, Reported, Rewards
from ppl_bandit.journal.repeats import Repeat, check_unit
from ppl_bandit.live.decisions import Decision, Slate, decision_id, decision_ids, plain
from ppl_bandit.posterior.task import Rows, Task, Windows
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import check_flag


def one_update(
    task: Task,
    decision: Any = None,
    reward: Any = None,
    arm: Any = None,
    context: Any = None,
    correct: bool = False,
    shown: Any = None,
    propensity: Any = None,
    request_id: Any = None,
) -> tuple[Report, Repeat | None]:
    """Return what is reported by `Bandit.update`, and its request; the arguments are its arguments."""
    repeat = None
    if request_id is not None:
        given = decision, reward, arm, context, correct, shown, propensity
        repeat = Repeat(str(check_unit(request_id, "request_id")), plain(given))
    if correct is not False:
        correct = check_flag(correct, "correct")
    if reward is None:
        raise ValueError("reward is missing")
    if decision is not None:
        if arm is not None:
            raise ValueError("give a decision or arm=, not both: a decision has its arm")
        reported = reported_reward(task, decision, reward, context, shown, propensity)
        return Rewards(reported, correct), repeat
    if shown is not None or propensity is not None:
        raise ValueError(
            "shown= and propensity= need a decision: without one, give arm=, or update_many(arms=, propensity=)"
        )
    if arm is None:
        raise ValueError("give a decision, or arm= (and context= for a program that takes one)")
    if correct:
        raise ValueError("correct=True needs a decision: a play that another system decided cannot be found again")
    index = task.arms.index(arm)
    context = check_contexts(task.model, context, None, "context")
    rewards = check_rewards(task.model, reward, None, "reward")
    contexts = None if context is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], context)
    return Import(Rows(np.array([index]), rewards, contexts)), repeat


def reported_reward(
    task: Task, decision: Any, reward: Any, context: Any = None, shown: Any = None, propensity: Any = None
) -> dict[str, Reported]:
    """Return {decision: what is reported} of one decision or slate; the arguments are those of `Bandit.update`."""
    if context is None and shown is None and propensity is None and isinstance(decision, Decision | str):
        id = decision if isinstance(decision, str) else decision.id
        return {id: Reported(reward_values(task.model, reward, is_partial=True))}
    late, unchanged = check_late_values(task.model, task.late, context, None, "context")
    index, prob = _check_shown(task, decision, shown, propensity)
    given = _by_place(decision, reward) if isinstance(decision, Slate) else {decision_id(decision): reward}
    return {
        id: Reported(reward_values(task.model, own, is_partial=True), late, unchanged, index, prob)
        for id, own in given.items()
    }


def _check_shown(task: Task, decision: Any, shown: Any, propensity: Any) -> tuple[int | None, float | None]:
    """Return the index of the arm that was shown, and its probability; None for what was not given."""
    if shown is None:
        if propensity is not None:
            raise ValueError(
                "propensity was given without shown=: a decision has its propensity; give the arm that was shown"
            )
        return None, None
    if isinstance(decision, Slate):
        raise ValueError(
            "shown= was given with a slate: report the places one by one, as in update(slate.decisions[0], ...)"
        )
    prob = None if propensity is None else float(_check_propensity([propensity], 1)[0])
    return task.arms.index(shown), prob


def many_rewards(
    task: Task,
    frame: Any,
    arm: str,
    reward: str | Mapping[str, str] | None,
    decisions: Any,
    arms: Any,
    rewards: Any,
    contexts: Any,
    propensity: Any,
    correct: bool,
) -> Report:
    """Return what is reported by `Bandit.update_many`; the arguments are its arguments."""
    correct = check_flag(correct, "correct")
    if frame is not None:
        if not is_frame(frame) or any(value is not None for value in (decisions, arms, rewards)):
            raise ValueError(
                f"frame must be a DataFrame, without decisions=, arms= or rewards=, got {type(frame).__name__}; for arrays use "
                "arms=, rewards= and contexts="
            )
        arms, rewards, contexts = rows_from(task.model, frame, arm, reward, contexts)
        propensity = None if propensity is None else column_numbers(frame, propensity)
    elif rewards is None:
        raise ValueError("rewards is missing")
    if (decisions is None) == (arms is None):
        raise ValueError("give decisions= or arms=, and not both")
    if decisions is not None:
        if propensity is not None:
            raise ValueError("propensity was given with decisions=: a decision has its propensity")
        values = _by_decision(task.model, decisions, rewards)
        entries = check_late_values(task.model, task.late, contexts, len(values), "contexts")
        reported = {
            id: Reported(own, _row(entries[0], row), _row(entries[1], row))
            for row, (id, own) in enumerate(values.items())
        }
        return Rewards(reported, correct)
    if correct:
        raise ValueError("correct=True needs decisions=: plays that another system decided cannot be found again")
    indices = task.arms.indices(arms)
    if indices.size == 0:
        raise ValueError("arms is empty: give at least one row")
    checked = check_rewards(task.model, rewards, indices.size, "rewards")
    rows = Rows(indices, checked, check_contexts(task.model, contexts, indices.size, "contexts"))
    return Import(rows, None if propensity is None else _check_propensity(propensity, indices.size))


def reward_values(model: RewardModel, reward: Any, *, is_partial: bool = False) -> dict[str, float]:
    """Return {outcome: value} of one reward."""
    if type(reward) in (int, float) and len(model.outcomes) == 1 and abs(reward) <= 2**53:
        return {model.outcomes[0]: float(reward)}  # the common case, several times as fast
    checked = check_rewards(model, reward, None, "reward", is_partial=is_partial)
    return {name: float(values[0]) for name, values in checked.items()}


def _check_propensity(propensity: Any, num_rows: int) -> np.ndarray:
    """Return the probabilities of imported plays as an array."""
    if isinstance(propensity, str):
        raise ValueError(
            f"propensity={propensity!r} names a column, and no frame was given: give one probability for each row; with a "
            "frame, give the name of its column"
        )
    values = as_numbers(propensity, "propensity")
    if values.dtype == bool:
        raise ValueError("propensity must hold probabilities, got True and False: give the probability of each play")
    values = values.astype(float)
    if values.shape != (num_rows,):
        raise ValueError(
            f"propensity must hold one probability for each of {num_rows} rows, got {propensity!r}; with a frame, give the "
            "name of its column"
        )
    wrong = np.flatnonzero(~((values > 0) & (values <= 1)))
    if wrong.size:
        raise ValueError(
            f"propensity[{wrong[0]}]={values[wrong[0]]:g} must be in (0, 1], the probability with which the arm was played: "
            "import rows without a known probability in a call of their own"
        )
    return values


def _by_place(slate: Slate, rewards: Any) -> dict[str, Any]:
    """Return {decision: reward} of a slate, from {place: reward} or a list with None for places without a reward yet."""
    size = len(slate.decisions)
    if isinstance(rewards, Mapping):
        wrong = [place for place in rewards if isinstance(place, bool) or place not in range(size)]
        if wrong:
            raise ValueError(
                f"reward has the places {wrong}, expected places from 0 to {size - 1}: give {{place: reward}}"
            )
        by_place = dict(rewards)
    elif isinstance(rewards, str | bytes) or not hasattr(rewards, "__len__") or len(rewards) != size:
        raise ValueError(
            f"reward of a slate must be {{place: reward}} or a list with one entry for each of its {size} places, None where "
            f"there is none yet; got {rewards!r}"
        )
    else:
        by_place = {place: reward for place, reward in enumerate(rewards) if reward is not None}
    if not by_place:
        raise ValueError("reward has no place with a reward: report at least one, or discard the slate")
    return {slate.decisions[place].id: reward for place, reward in by_place.items()}


def _by_decision(model: RewardModel, decisions: Any, rewards: Any) -> dict[str, dict[str, float]]:
    """Return {decision: {outcome: value}}."""
    is_sequence = hasattr(decisions, "__len__")
    if isinstance(decisions, str | bytes | set | frozenset | Mapping | Decision) or not is_sequence:
        raise ValueError(f"decisions must be a sequence of decisions or ids, got {type(decisions).__name__}")
    ids = [decision_id(decision) for decision in decisions]
    if not ids:
        raise ValueError("decisions is empty: give at least one")
    if len(set(ids)) < len(ids):
        raise ValueError("decisions has one decision twice: give each once")
    checked = check_rewards(model, rewards, len(ids), "rewards", is_partial=True)
    return {id: {name: float(values[row]) for name, values in checked.items()} for row, id in enumerate(ids)}


def _row(entries: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {name: column[row] for name, column in entries.items()}


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


def check_windows(
    model: RewardModel, late: tuple[str, ...], unit_window: Any, reward_window: Any, default_reward: Any
) -> Windows:
    """Return the windows of a bandit; the arguments are its arguments.

    Raises:
        ValueError: for a window of zero, or a default reward that is never used or cannot be one.
    """
    default = None
    if default_reward is not None:
        if reward_window is None:
            raise ValueError(
                "default_reward was given without reward_window: give the time after which it is the reward"
            )
        if late:
            raise ValueError(
                f"default_reward was given, but late={list(late)} come with each reward: call expire(older_than, reward, "
                "context={...}) instead"
            )
        checked = check_rewards(model, default_reward, None, "default_reward")
        default = {name: float(values[0]) for name, values in checked.items()}
        if model.context is None:  # otherwise the support may depend on it
            arms = np.arange(model.num_arms)
            rewards = {name: np.full(arms.size, value) for name, value in default.items()}
            for name, arm in impossible_rows(model, as_interaction(model, arms, rewards, None)).items():
                raise ValueError(
                    f"default_reward={default[name]:g} is outside the support of the outcome '{name}' on arm {arm}: the "
                    "program cannot produce it; give a value that every arm can have, or None to discard overdue decisions"
                )
    return Windows(_window(unit_window, "unit_window"), _window(reward_window, "reward_window"), default)


def _window(span: Any, argument: str) -> float | None:
    seconds = None if span is None else as_seconds(span, argument)
    if seconds == 0:
        raise ValueError(f"{argument} is 0, expected a time of more than 0 seconds: leave it out for no limit")
    return seconds
