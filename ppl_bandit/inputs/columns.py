"""Columns of numbers, as CSV files, DataFrames and the journal's tables have them.

A context that is a vector has the columns `context_0`, `context_1`, ...; a dictionary has its keys: {"exposure": number} is
`exposure`, and {"user": vector} is `user_0`, `user_1`, ...
"""

import datetime
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ppl_bandit.program.model.reward_model import RewardModel


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
