"""DataFrames, pandas or polars, with one row per play: columns are found by name, never by position.

A context that is a dictionary takes the columns with the names of its keys. A vector takes `context_0`, `context_1`, ..., or
the columns that the caller lists. This module imports neither library: a frame is any object with named columns.

Also here: columns of numbers, as CSV files, DataFrames and the journal's tables have them.

A context that is a vector has the columns `context_0`, `context_1`, ...; a dictionary has its keys: {"exposure": number} is
`exposure`, and {"user": vector} is `user_0`, `user_1`, ...
"""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.inputs.checks import check_contexts, count_rows
from ppl_bandit.inputs.late_entries import fill_late, late_numbers
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import InvalidContext


def key_names(path: Any) -> list[str]:
    """Return the keys of a path in a pytree as texts."""
    return [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]


def context_columns(model: RewardModel) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the columns of a program's context: {column: (number of the leaf, index in the leaf)}."""
    columns = {}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(model.context)[0]):
        stem = ".".join(key_names(path)) or "context"
        for index in np.ndindex(np.shape(leaf)):
            columns["_".join([stem, *map(str, index)])] = (number, index)
    return columns


def column_values(model: RewardModel, leaves: list[Any]) -> dict[str, np.ndarray]:
    """Return {column: (N,)} of contexts, given their leaves with a leading axis."""
    arrays: list[Any] = [np.asarray(leaf) for leaf in leaves]
    return {name: arrays[number][(slice(None), *index)] for name, (number, index) in context_columns(model).items()}


def contexts_from_columns(model: RewardModel, num_rows: int, numbers: Callable[[str, str], np.ndarray]) -> Any:
    """Return contexts with a leading axis; None for a program without context.

    Args:
        numbers: (column, kind of number as in `dtype.kind`) -> (N,).
    """
    if model.context is None:
        return None
    leaves: list[Any] = [
        np.zeros((num_rows, *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in jax.tree.leaves(model.context)
    ]
    for name, (number, index) in context_columns(model).items():
        leaves[number][(slice(None), *index)] = numbers(name, leaves[number].dtype.kind)
    return jax.tree.unflatten(jax.tree.structure(model.context), leaves)


def cell_number(value: Any, kind: str, where: str, shown: Any = None) -> float:
    """Return the number in a cell; None is an empty cell.

    Args:
        kind: of the number that is expected, as in `dtype.kind`.
        where: file or frame, row and column, for messages.
        shown: the cell as the user wrote it, if it is not `value`.

    Raises:
        ValueError: for an empty cell, and for anything but a finite number of this kind.
    """
    text = repr(value if shown is None else shown)
    remedy = {"f": "give a number", "b": "give 0 or 1"}.get(kind, "give a whole number")
    if value is None:
        raise ValueError(f"{where}: the cell is empty; fill it in, or remove the row")
    if isinstance(value, str | bytes | complex | datetime.date) or not hasattr(value, "__float__"):
        raise ValueError(f"{where}: {text} is not a number; {remedy}")
    number = float(value)
    if not np.isfinite(number):
        raise ValueError(f"{where}: {text} is not finite; {remedy}, or remove the row")
    if kind == "b" and number not in (0.0, 1.0):
        raise ValueError(f"{where}: {text} is not 0 or 1; {remedy}")
    if kind in "iu" and number != int(number):
        raise ValueError(f"{where}: {text} is not a whole number; {remedy}")
    return number


FrameRows = tuple[list[Any], dict[str, np.ndarray], Any]  # arms, {outcome: rewards}, contexts


def is_frame(value: Any) -> bool:
    """Return whether a value is a DataFrame."""
    return hasattr(value, "columns") and hasattr(value, "__getitem__") and hasattr(value, "shape")


def rows_from(
    model: RewardModel, frame: Any, arm: str, reward: str | Mapping[str, str] | None, contexts: Any
) -> FrameRows:
    """Return arms, rewards and contexts of a frame's rows.

    Args:
        arm: the column of arms.
        reward: the column of the reward, or {outcome: column} for several outcomes; None uses the names of the outcomes.
        contexts: the columns of the context, see `contexts_from`.

    Raises:
        ValueError: with the column, and the row (the first is 0) of a wrong cell.
    """
    if isinstance(reward, str) and len(model.outcomes) > 1:
        raise ValueError(
            f"reward is one column, {reward!r}, but the program has the outcomes {list(model.outcomes)}: give a dict with a "
            "column for each"
        )
    given = {model.outcomes[0]: reward} if isinstance(reward, str) else dict(reward or {})
    unknown = set(given) - set(model.outcomes)
    if unknown:
        raise ValueError(f"reward has the outcomes {sorted(unknown)}, expected some of {list(model.outcomes)}")
    columns = {outcome: given.get(outcome, outcome) for outcome in model.outcomes}
    check_columns(frame, [arm, *columns.values()])
    arms = column_cells(frame, arm)
    missing = next((row for row, value in enumerate(arms) if value is None), None)
    if missing is not None:
        raise ValueError(f"frame: row {missing}, column {arm!r}: the cell is empty; fill it in, or remove the row")
    rewards = {outcome: _numbers(frame, column, "f") for outcome, column in columns.items()}
    return arms, rewards, contexts_from(model, frame, contexts)


def contexts_from(model: RewardModel, frame: Any, contexts: Any = None, late: Sequence[str] = ()) -> Any:
    """Return the contexts of a frame's rows, with a leading axis; None for a program without context.

    Args:
        contexts: None uses the columns with the context's own names; {name: column} renames some of them; for a context that is
            a vector, a list with the column of each entry.
        late: entries of a context that have their example values where the frame has no column for them.
    """
    if model.context is None:
        if contexts is not None:
            raise InvalidContext("contexts was given, but the program takes arm alone: leave it out")
        return None
    names = list(context_columns(model))
    columns = {name: name for name in names}
    if isinstance(contexts, Mapping):
        unknown = set(contexts) - set(names)
        if unknown:
            raise InvalidContext(f"contexts has the keys {sorted(map(str, unknown))}, expected some of {names}")
        columns |= contexts
    elif contexts is not None:
        columns = _listed_columns(model, names, contexts)
    examples = _late_examples(model, frame, columns, late)
    try:
        check_columns(frame, [column for name, column in columns.items() if name not in examples])
    except ValueError as error:
        raise InvalidContext(str(error)) from None

    def numbers(name: str, kind: str) -> np.ndarray:
        if name in examples:
            return np.full(len(frame), examples[name])
        try:
            return _numbers(frame, columns[name], kind)
        except ValueError as error:
            raise InvalidContext(str(error), name) from None

    return contexts_from_columns(model, len(frame), numbers)


def _late_examples(
    model: RewardModel, frame: Any, columns: Mapping[str, str], late: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return {name: example value} of the numbers in late entries that a frame has no column for."""
    leaves, absent = jax.tree.leaves(model.context), set(late_numbers(model, late).values())
    return {
        name: np.asarray(leaves[number])[index]
        for name, (number, index) in context_columns(model).items()
        if number in absent and columns[name] not in frame.columns
    }


def _listed_columns(model: RewardModel, names: list[str], contexts: Any) -> dict[str, str]:
    if isinstance(contexts, str) or not isinstance(contexts, Sequence):
        raise ValueError(f"contexts must be a list of columns or a dict, got {contexts!r}")
    given = list(contexts)
    if set(given) == set(names):
        return {name: name for name in names}  # the context's own names, in any order
    is_vector = len(jax.tree.leaves(model.context)) == 1 and np.ndim(jax.tree.leaves(model.context)[0]) <= 1
    if not is_vector:
        raise ValueError(
            f"contexts lists {given}, but the context has the columns {names}: list those, or give a dict {{name: column}}"
        )
    if len(given) != len(names):
        raise ValueError(f"contexts lists {len(given)} columns, {given}, expected one for each of {len(names)} entries")
    return dict(zip(names, given, strict=True))


def contexts_of_decisions(
    model: RewardModel, contexts: Any, num_decisions: int | None, late: Sequence[str] = ()
) -> tuple[Any, int]:
    """Return the contexts of many decisions, given as arrays or as a frame, and the number of decisions.

    Args:
        num_decisions: for a program without context.
        late: entries of a context that have their example values unless they are given.

    Raises:
        ValueError: if the number of decisions is unknown, or a context is wrong.
    """
    contexts = contexts_from(model, contexts, late=late) if is_frame(contexts) else contexts
    if model.context is None:
        if num_decisions is None:
            raise ValueError(
                "num_decisions is missing: it gives the number of decisions if the program takes no context"
            )
        num_rows = check_count(num_decisions, "num_decisions")
    else:
        contexts = fill_late(model, late, contexts, is_batch=True, num_rows=num_decisions)
        num_rows = count_rows(model, contexts)
        if num_rows == 0 or num_decisions not in (None, num_rows):
            raise InvalidContext("contexts must have a leading axis with one row per decision")
    return check_contexts(model, contexts, num_rows, "contexts"), num_rows


def check_columns(frame: Any, needed: Sequence[str], argument: str = "frame") -> None:
    """Refuse a frame without the needed columns, or with one of them twice.

    Raises:
        ValueError: with the column, and those that the frame has.
    """
    known = [str(column) for column in frame.columns]
    repeated = next((column for column in needed if known.count(column) > 1), None)
    if repeated is not None:
        raise ValueError(f"{argument} has the column {repeated!r} twice: rename one of them")
    missing = [column for column in needed if column not in known]
    if missing:
        raise ValueError(
            f"{argument} has no column {', '.join(map(repr, missing))}; it has {', '.join(map(repr, known)) or 'none'}: "
            "rename a column, or name the column to use"
        )


def column_cells(frame: Any, column: str) -> list[Any]:
    """Return the cells of a column as Python values; None where one is missing."""
    series = frame[column]
    return [_python_value(cell) for cell in (series.to_list() if hasattr(series, "to_list") else series)]


def _python_value(cell: Any) -> Any:
    is_nan = isinstance(cell, float) and np.isnan(cell)
    if cell is None or is_nan or type(cell).__name__ in ("NAType", "NaTType"):
        return None
    return cell.item() if isinstance(cell, np.generic) else cell


def column_numbers(frame: Any, column: Any) -> np.ndarray:
    """Return the numbers of one column.

    Raises:
        ValueError: if the frame has no such column, or a cell is not a number.
    """
    check_columns(frame, [column])
    return _numbers(frame, column, "f")


def _numbers(frame: Any, column: str, kind: str) -> np.ndarray:
    cells = enumerate(column_cells(frame, column))
    return np.array([cell_number(cell, kind, f"frame: row {row}, column {column!r}") for row, cell in cells])
