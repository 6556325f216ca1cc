"""Rows of data from a DataFrame, pandas or polars: columns are found by name, never by position.

A context that is a dictionary takes the columns named as its keys; one that is a vector takes `context_0`, `context_1`, ..., or
the columns that the caller names in the order of its entries. Nothing here imports either library: a frame is what has named
columns.
"""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.inputs.data_files import context_columns
from ppl_bandit.program.model.reward_model import RewardModel

__all__ = ["FrameRows", "contexts_from", "is_frame", "rows_from"]

FrameRows = tuple[list[Any], dict[str, np.ndarray], Any]  # arms, {outcome: rewards}, contexts


def is_frame(value: Any) -> bool:
    """Tell whether a value is a DataFrame."""
    return hasattr(value, "columns") and hasattr(value, "__getitem__") and hasattr(value, "shape")


def rows_from(
    model: RewardModel, frame: Any, arm: str, reward: str | Mapping[str, str] | None, contexts: Any
) -> FrameRows:
    """Return arms, rewards and contexts of a frame's rows.

    Args:
        arm: the column of arms.
        reward: the column of the reward, {outcome: column} for several outcomes; None takes columns named as the outcomes.
        contexts: the columns of the context, see `contexts_from`.

    Raises:
        ValueError: naming the column, and the row (the first is 0) where one is to blame.
    """
    if isinstance(reward, str) and len(model.outcomes) > 1:
        raise ValueError(
            f"reward names one column, {reward!r}, but the program has the outcomes {list(model.outcomes)}: give a dict with a "
            "column for each"
        )
    wanted = {model.outcomes[0]: reward} if isinstance(reward, str) else dict(reward or {})
    unknown = set(wanted) - set(model.outcomes)
    if unknown:
        raise ValueError(f"reward has the outcomes {sorted(unknown)}, expected some of {list(model.outcomes)}")
    columns = {outcome: wanted.get(outcome, outcome) for outcome in model.outcomes}
    _check_columns(frame, [arm, *columns.values()], "frame")
    arms = [_plain(value) for value in _values(frame, arm)]
    missing = next((row for row, value in enumerate(arms) if value is None), None)
    if missing is not None:
        raise ValueError(f"frame: row {missing}, column {arm!r} is empty: leave out the row, or fill in its arm")
    rewards = {outcome: _numbers(frame, column, "f") for outcome, column in columns.items()}
    return arms, rewards, contexts_from(model, frame, contexts)


def contexts_from(model: RewardModel, frame: Any, contexts: Any = None) -> Any:
    """Return the contexts of a frame's rows, with a leading axis; None for a program without context.

    Args:
        contexts: None takes the columns that the context itself names; {name: column} where the frame calls them otherwise;
            for a context that is a vector, a list with the column of each entry.
    """
    if model.context is None:
        if contexts is not None:
            raise ValueError("contexts was given, but the program takes arm alone: leave it out")
        return None
    places = context_columns(model)
    columns = {name: name for name in places}
    if isinstance(contexts, Mapping):
        unknown = set(contexts) - set(places)
        if unknown:
            raise ValueError(f"contexts has the keys {sorted(map(str, unknown))}, expected some of {list(places)}")
        columns |= contexts
    elif contexts is not None:
        columns = _listed(model, list(places), contexts)
    _check_columns(frame, list(columns.values()), "frame")
    leaves: list[Any] = [
        np.zeros((len(frame), *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in jax.tree.leaves(model.context)
    ]
    for name, (number, index) in places.items():
        leaves[number][(slice(None), *index)] = _numbers(frame, columns[name], leaves[number].dtype.kind)
    return jax.tree.unflatten(jax.tree.structure(model.context), leaves)


def _listed(model: RewardModel, names: list[str], contexts: Any) -> dict[str, str]:
    if isinstance(contexts, str) or not isinstance(contexts, Sequence):
        raise ValueError(f"contexts must be a list of columns or a dict, got {contexts!r}")
    given = list(contexts)
    if set(given) == set(names):
        return {name: name for name in names}  # a dictionary's keys, in whatever order they were listed
    is_vector = len(jax.tree.leaves(model.context)) == 1 and np.ndim(jax.tree.leaves(model.context)[0]) <= 1
    if not is_vector:
        raise ValueError(
            f"contexts lists {given}, but the context is made of {names}: name those, or give a dict {{name: column}}"
        )
    if len(given) != len(names):
        raise ValueError(f"contexts lists {len(given)} columns, {given}, expected one for each of {len(names)} entries")
    return dict(zip(names, given, strict=True))


def _check_columns(frame: Any, needed: Sequence[str], argument: str) -> None:
    known = [str(column) for column in frame.columns]
    twice = next((column for column in needed if known.count(column) > 1), None)
    if twice is not None:
        raise ValueError(f"{argument} has the column {twice!r} twice: rename one of them")
    missing = [column for column in needed if column not in known]
    if missing:
        raise ValueError(
            f"{argument} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, known)) or 'none'}: rename "
            "it, or say which column to take"
        )


def _values(frame: Any, column: str) -> list[Any]:
    series = frame[column]
    return series.to_list() if hasattr(series, "to_list") else list(series)


def _plain(value: Any) -> Any:
    """Return a cell as a Python value; None where it is missing, whatever the library calls that."""
    if value is None or (isinstance(value, float) and np.isnan(value)) or type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value.item() if isinstance(value, np.generic) else value


def _numbers(frame: Any, column: str, kind: str) -> np.ndarray:
    found = []
    for row, cell in enumerate(_values(frame, column)):
        value = _plain(cell)
        where = f"frame: row {row}, column {column!r}"
        if value is None:
            raise ValueError(f"{where} is empty: fill it in, or leave out the row")
        if isinstance(value, str | bytes | complex | datetime.date) or not hasattr(value, "__float__"):
            raise ValueError(f"{where} is {value!r}, expected a number: convert the column first")
        number = float(value)
        if not np.isfinite(number):
            raise ValueError(f"{where} is {value!r}, expected a finite number")
        if kind in "iub" and number != int(number):
            raise ValueError(f"{where} is {value!r}, expected a whole number as in the example context")
        found.append(number)
    return np.array(found)
