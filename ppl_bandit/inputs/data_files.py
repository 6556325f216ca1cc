"""Rows of data from outside: checked arrays, and CSV files with one row per play.

Columns of a file: `arm`; one for each outcome, by its name; and those of the context. A context that is a vector is
`context_0`, `context_1`, ...; a dictionary gives its keys as names, so that {"exposure": number} is `exposure` and
{"user": vector} is `user_0`, `user_1`, ... Other columns are ignored.
"""

import csv
import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.inputs.checks import Arms, check_contexts, check_rewards
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction

__all__ = ["DataFileError", "check_data", "context_columns", "read_data", "write_data"]


class DataFileError(ValueError):
    """A file of data cannot be read; the message names the row, the column, what was wrong and what to do."""


def check_data(model: RewardModel, data: Interaction, arms: Arms) -> Interaction:
    """Return rows as arrays of the kinds that the program expects, with arms by number, given by number or by name.

    Raises:
        ValueError: for a row that has the wrong form or that the program cannot produce.
    """
    numbered = np.asarray(data.arm).dtype.kind in "iu"  # numbers count arms whether or not these have names
    indices: Any = (Arms(len(arms), None) if numbered else arms).indices(data.arm, "data.arm")
    if indices.size == 0:
        raise ValueError("data is empty: give at least one row")
    if data.mask is not None:
        raise ValueError("data.mask was given: leave out the rows that do not count")
    rewards = check_rewards(model, data.reward, indices.size, "data.reward")
    contexts = check_contexts(model, data.context, indices.size, "data.context")
    rows = Interaction(indices, rewards if len(model.outcomes) > 1 else rewards[model.outcomes[0]], contexts)
    for name, row in _impossible(model, rows).items():
        raise ValueError(
            f"data.reward is {rewards[name][row]:g} in row {row}, outside the support of the outcome '{name}' on arm "
            f"{arms.names[indices[row]]!r}: the program cannot produce it; correct the reward or the program"
        )
    return rows


def _impossible(model: RewardModel, rows: Interaction) -> dict[str, int]:
    """Return, for each outcome with a value that the program cannot produce, the first row that has one."""

    def read() -> dict[str, Any]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        return model.in_support(latents, jax.tree.map(jnp.asarray, rows))

    return {name: int(np.flatnonzero(~fits)[0]) for name, fits in run_once(read).items() if not fits.all()}


def context_columns(model: RewardModel) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Name the columns of a program's context: column -> (number of the leaf, index within it)."""
    columns = {}
    for number, (path, leaf) in enumerate(jax.tree_util.tree_flatten_with_path(model.context)[0]):
        keys = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        stem = ".".join(keys) or "context"
        for index in np.ndindex(np.shape(leaf)):
            columns["_".join([stem, *map(str, index)])] = (number, index)
    return columns


def read_data(path: str | PathLike, model: RewardModel, arms: Sequence[str] | None = None) -> Interaction:
    """Read rows from a CSV file with a header.

    Args:
        arms: the arms' names in the program's order, if the file names them; otherwise it numbers them from 0.

    Raises:
        DataFileError: with the row (the first below the header is 1, and blank ones count), the column, what was wrong and
            what to do.
    """
    names = Arms(model.num_arms if arms is None else None, arms)
    if len(names) != model.num_arms:
        raise DataFileError(f"arms names {len(names)} arms, but the program has {model.num_arms}; name each one")
    header, table = _read_table(path)
    outcomes = {name: name for name in model.outcomes}
    if len(outcomes) == 1 and model.outcomes[0] not in header and "reward" in header:
        outcomes = {model.outcomes[0]: "reward"}
    contexts = context_columns(model)
    needed = ["arm", *outcomes.values(), *contexts]
    missing = [column for column in needed if column not in header]
    if missing:
        raise DataFileError(
            f"{path}: the header has no column {', '.join(map(repr, missing))}; this program needs the columns "
            f"{', '.join(needed)}, and the file has {', '.join(header) or 'none'}: rename or add them"
        )
    place = {column: header.index(column) for column in needed}
    arm: Any = np.array([_arm(path, number, row[place["arm"]], names) for number, row in table], np.int64)

    def numbers(column: str, kind: str) -> np.ndarray:
        return np.array([_number(path, number, column, row[place[column]], kind) for number, row in table])

    rewards = {name: numbers(column, "f") for name, column in outcomes.items()}
    leaves: list[Any] = [
        np.zeros((len(table), *np.shape(leaf)), np.asarray(leaf).dtype) for leaf in jax.tree.leaves(model.context)
    ]
    for column, (number, index) in contexts.items():
        leaves[number][(slice(None), *index)] = numbers(column, leaves[number].dtype.kind)
    context = None if model.context is None else jax.tree.unflatten(jax.tree.structure(model.context), leaves)
    rows = Interaction(arm, rewards if len(outcomes) > 1 else rewards[model.outcomes[0]], context)
    with jax.enable_x64(True):
        wrong = _impossible(model, rows)
    for name, row in wrong.items():
        raise _fault(
            path,
            table[row][0],
            outcomes[name],
            f"the program cannot produce {name} = {rewards[name][row]:g} on arm {names.names[arm[row]]!r}",
            "correct the value, or give the outcome a distribution that has it",
        )
    return rows


def write_data(path: str | PathLike, model: RewardModel, data: Interaction, arms: Sequence[Any]) -> None:
    """Write rows as a CSV file that `read_data` reads."""
    rewards = data.reward if isinstance(data.reward, dict) else {model.outcomes[0]: data.reward}
    leaves = jax.tree.leaves(data.context)
    columns: dict[str, Any] = {"arm": [arms[int(i)] for i in data.arm]}
    columns |= {name: np.asarray(values).tolist() for name, values in rewards.items()}
    for column, (number, index) in context_columns(model).items():
        leaf: Any = np.asarray(leaves[number])
        columns[column] = leaf[(slice(None), *index)].tolist()
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


def _read_table(path: str | PathLike) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and the rows that are not blank, with their numbers."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            lines = [[cell.strip() for cell in line] for line in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFileError(f"{path}: {error}; give a CSV file in UTF-8, with a header") from error
    header = lines[0] if lines else []
    table = [(number, line) for number, line in enumerate(lines[1:], 1) if any(line)]
    if not table:
        raise DataFileError(f"{path}: there are no rows; give a header and at least one row below it")
    twice = next((name for name in header if name and header.count(name) > 1), None)
    if twice is not None:
        raise DataFileError(f"{path}: the column {twice!r} stands twice in the header; rename one of them")
    for number, line in table:
        if len(line) != len(header):
            raise DataFileError(
                f"{path}: row {number} has {len(line)} cells, the header has {len(header)}; quote cells that hold commas"
            )
    return header, table


def _arm(path: Any, row: int, cell: str, arms: Arms) -> int:
    named = [str(name) for name in arms.names]
    if cell in named:
        return named.index(cell)
    given = "empty" if cell == "" else f"{cell!r} is not an arm"
    is_numbered = isinstance(arms.names[0], int)
    remedy = (
        f"number the arms from 0 to {len(arms) - 1}, or name them in the program's order with --arms"
        if is_numbered
        else f"the arms are {', '.join(named)}; correct the cell or the names"
    )
    raise _fault(path, row, "arm", given, remedy)


def _number(path: Any, row: int, column: str, cell: str, kind: str) -> float:
    remedies = {"f": "write a number with a point for decimals", "i": "write a whole number", "b": "write 0 or 1"}
    remedy = remedies[kind if kind in remedies else "i"]
    if cell == "":
        raise _fault(path, row, column, "the cell is empty", "write a number; leave out plays whose reward is unknown")
    try:
        value = float({"true": "1", "false": "0"}.get(cell.lower(), cell))
    except ValueError:
        raise _fault(path, row, column, f"{cell!r} is not a number", remedy) from None
    if not math.isfinite(value):
        raise _fault(path, row, column, f"{cell!r} is not finite", "write a number, or leave out the row")
    if (kind in "iu" and value != int(value)) or (kind == "b" and value not in (0.0, 1.0)):
        raise _fault(path, row, column, f"{cell!r} is not {'0 or 1' if kind == 'b' else 'a whole number'}", remedy)
    return value


def _fault(path: Any, row: int, column: str, wrong: str, remedy: str) -> DataFileError:
    return DataFileError(f"{path}: row {row}, column {column!r}: {wrong}; {remedy}")
