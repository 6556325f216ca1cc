"""CSV files with one row per play.

The columns are `arm`, one per outcome, by its name, and those of the context (see `columns`). Other columns are ignored.
"""

import csv
import re
from collections.abc import Sequence
from os import PathLike
from typing import Any

import jax
import numpy as np

from ppl_bandit.display.terminal import original_cell, safe_cell
from ppl_bandit.inputs.checks import as_interaction, impossible_rows
from ppl_bandit.inputs.data_frames import cell_number, column_values, context_columns, contexts_from_columns
from ppl_bandit.inputs.numbers import Arms
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import BanditError, Interaction


class DataFileError(BanditError):
    """A CSV file cannot be read; the message gives the row, the column, the fault and what to do."""


def read_data(path: str | PathLike, model: RewardModel, arms: Sequence[str] | None = None) -> Interaction:
    """Read rows from a CSV file with a header.

    Args:
        arms: the arms' names in the program's order, if the file has names; None if it has numbers from 0.

    Raises:
        DataFileError: with the row (the first below the header is 1, and blank rows count), the column and the fault.
    """
    try:
        names = Arms(model.num_arms, arms)
    except ValueError as error:
        raise DataFileError(str(error)) from None
    header, table = read_table(path)
    outcomes = {name: name for name in model.outcomes}
    if len(outcomes) == 1 and model.outcomes[0] not in header and "reward" in header:
        outcomes = {model.outcomes[0]: "reward"}
    needed = ["arm", *outcomes.values(), *context_columns(model)]
    missing = [column for column in needed if column not in header]
    if missing:
        raise DataFileError(
            f"{path}: the header has no column {', '.join(map(repr, missing))}; this program needs the columns "
            f"{', '.join(needed)}, and the file has {', '.join(header) or 'none'}: rename or add them"
        )
    index = {column: header.index(column) for column in needed}

    def where(row: int, column: str) -> str:
        return f"{path}: row {row}, column {column!r}"

    def numbers(column: str, kind: str) -> np.ndarray:
        return np.array([_parse(row[index[column]], kind, where(number, column)) for number, row in table])

    try:
        arm: Any = np.array([_arm(row[index["arm"]], names, where(number, "arm")) for number, row in table], np.int64)
        rewards = {name: numbers(column, "f") for name, column in outcomes.items()}
        context = contexts_from_columns(model, len(table), numbers)
    except ValueError as error:
        raise DataFileError(str(error)) from None
    rows = as_interaction(model, arm, rewards, context)
    with jax.enable_x64(True):
        impossible = impossible_rows(model, rows)
    for name, row in impossible.items():
        raise DataFileError(
            f"{where(table[row][0], outcomes[name])}: the program cannot produce {name} = {rewards[name][row]:g} on arm "
            f"{names.names[arm[row]]!r}; correct the value, or give the outcome a distribution that has it"
        )
    return rows


def write_data(path: str | PathLike, model: RewardModel, data: Interaction, arms: Sequence[Any]) -> None:
    """Write rows as a CSV file that `read_data` reads."""
    rewards = data.reward if isinstance(data.reward, dict) else {model.outcomes[0]: data.reward}
    columns: dict[str, Any] = {"arm": [arms[int(i)] for i in data.arm]}
    values = rewards | column_values(model, jax.tree.leaves(data.context))
    columns |= {name: np.asarray(column).tolist() for name, column in values.items()}
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(map(safe_cell, columns))
        writer.writerows(map(safe_cell, row) for row in zip(*columns.values(), strict=True))


def read_table(path: str | PathLike) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the header, and the rows that are not blank with their numbers; commas, semicolons or tabs separate cells.

    If commas do not separate cells, columns of numbers such as 1.200,50 are rewritten as 1200.50.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            first = file.readline()
            delimiter = max(",;\t", key=first.count)
            file.seek(0)
            lines = [[cell.strip() for cell in line] for line in csv.reader(file, delimiter=delimiter)]
        if lines:
            lines[0] = [original_cell(name) for name in lines[0]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataFileError(
            f"{path}: {error}; give a CSV file in UTF-8 ('CSV UTF-8' in Excel), with a header"
        ) from error
    header = lines[0] if lines else []
    table = [(number, line) for number, line in enumerate(lines[1:], 1) if any(line)]
    if not table:
        raise DataFileError(f"{path}: there are no rows; give a header and at least one row below it")
    repeated = next((name for name in header if name and header.count(name) > 1), None)
    if repeated is not None:
        raise DataFileError(f"{path}: the header has the column {repeated!r} twice; rename one of them")
    for number, line in table:
        if len(line) != len(header):
            raise DataFileError(
                f"{path}: row {number} has {len(line)} cells, the header has {len(header)}; quote cells that hold commas"
            )
    return header, table if delimiter == "," else _with_points(table)


# Numbers with a decimal comma, and dots between thousands.
_WITH_COMMA = re.compile(r"[-+]?(\d+|\d{1,3}(\.\d{3})+)(,\d+)?( ?%)?")


def _with_points(table: list[tuple[int, list[str]]]) -> list[tuple[int, list[str]]]:
    """Rewrite numbers with a decimal comma.

    A comma before other than three digits, or a dot before it, shows that it is decimal: 1,200 alone may be 1200. Where a
    column shows it, the dots of other columns are between thousands, if they can be.
    """
    columns = [set(cells) for cells in zip(*(line for _, line in table), strict=True)]
    columns = [{cell for cell in cells if re.search(r"\d", cell)} for cells in columns]
    fits = [bool(cells) and all(_WITH_COMMA.fullmatch(cell) for cell in cells) for cells in columns]
    shown = [
        is_fit and any("," in cell and ("." in cell or len(cell.rstrip(" %").partition(",")[2]) != 3) for cell in cells)
        for cells, is_fit in zip(columns, fits, strict=True)
    ]
    if not any(shown):
        return table
    return [
        (number, [_with_point(cell) if is_fit else cell for cell, is_fit in zip(line, fits, strict=True)])
        for number, line in table
    ]


def _with_point(cell: str) -> str:
    return cell.replace(".", "").replace(",", ".") if _WITH_COMMA.fullmatch(cell) else cell


def _arm(cell: str, arms: Arms, where: str) -> int:
    names = [str(name) for name in arms.names]
    for given in (cell, original_cell(cell)):
        if given in names:
            return names.index(given)
    given = "the cell is empty" if cell == "" else f"{cell!r} is not an arm"
    remedy = (
        f"number the arms from 0 to {len(arms) - 1}, or name them in the program's order with --arms"
        if isinstance(arms.names[0], int)
        else f"the arms are {', '.join(names)}; correct the cell or the names"
    )
    raise ValueError(f"{where}: {given}; {remedy}")


def _parse(cell: str, kind: str, where: str) -> float:
    value: Any = cell or None
    try:
        value = float({"true": "1", "false": "0"}.get(cell.lower(), cell))
    except ValueError:
        pass  # `cell_number` refuses text
    return cell_number(value, kind, where, shown=cell)
