"""Tables of users, one row per play: which columns are the arm, the reward, its probability and the context."""

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.display.terminal import original_cell
from ppl_bandit.inputs.data_files import DataFileError, read_table

_OPERATORS: Mapping[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Mapping[str, Callable] = {"log": np.log, "exp": np.exp, "sqrt": np.sqrt, "abs": np.abs}
_ALLOWED = f"columns, numbers, + - * / **, comparisons (1 or 0), and {', '.join(_FUNCTIONS)}"
_MOST_CHARACTERS = 500  # nested as deeply as that, an expression is far from Python's limit of recursion
_QUOTED = re.compile("`([^`]+)`")


class ValueExpression(NamedTuple):
    """A parsed expression.

    Attributes:
        text: as it was given.
        columns: names of the columns in it, in the order of their first use.
        compute: {column: (N,)} -> (N,).
    """

    text: str
    columns: tuple[str, ...]
    compute: Callable[[Mapping[str, np.ndarray]], np.ndarray]


def parse_value(text: str) -> ValueExpression:
    """Parse an expression; a column whose name is no Python name stands in backquotes.

    Raises:
        ValueError: for anything but arithmetic on columns, with the part that is refused.
    """
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(f"--value has {len(text)} characters, expected at most {_MOST_CHARACTERS}")
    quoted: dict[str, str] = {}

    def placeholder(match: re.Match) -> str:
        name = f"_column_{len(quoted)}"
        quoted[name] = match[1]
        return name

    try:
        tree = ast.parse(_QUOTED.sub(placeholder, text).strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"--value {text!r} is not an expression: {getattr(error, 'msg', error)}") from None
    columns: dict[str, None] = {}

    def compile_part(node: ast.AST) -> Callable[[Mapping[str, np.ndarray]], Any]:
        match node:
            case ast.Constant(int() | float() as value) if not isinstance(value, bool):
                return lambda rows: float(value)
            case ast.Name(name):
                columns[quoted.get(name, name)] = None
                return lambda rows: rows[quoted.get(name, name)]
            case ast.BinOp(left, op, right) | ast.Compare(left, [op], [right]) if type(op) in _OPERATORS:
                function, parts = _OPERATORS[type(op)], [left, right]
            case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
                function, parts = _OPERATORS[type(op)], [operand]
            case ast.Call(ast.Name(name), [argument], []) if name in _FUNCTIONS:
                function, parts = _FUNCTIONS[name], [argument]
            case _:
                raise ValueError(f"--value {text!r} has {ast.unparse(node)!r}, but may have only {_ALLOWED}")
        compiled = [compile_part(part) for part in parts]
        return lambda rows: function(*(np.asarray(part(rows), float) for part in compiled))

    part = compile_part(tree)
    if not columns:
        raise ValueError(f"--value {text!r} names no column: it would be the same in every row")

    def compute(rows: Mapping[str, np.ndarray]) -> np.ndarray:
        num_rows = len(next(iter(rows.values())))
        with np.errstate(all="ignore"):  # what is not finite is refused with its row
            found = np.broadcast_to(np.asarray(part(rows), float), (num_rows,))
        wrong = np.flatnonzero(~np.isfinite(found))
        if wrong.size:
            raise ValueError(f"--value {text!r} is {found[wrong[0]]} in row {wrong[0] + 1}, expected finite numbers")
        return found

    return ValueExpression(text, tuple(columns), compute)


EQUAL = "equal"  # in place of a column: every arm had the same probability
NONE = "none"  # in place of a column: do not look for one
GROUPS = ":groups"  # after the name of a column: its numbers are codes
_KNOWN = {  # names of columns that are found without being named
    "--arm": ("arm", "variant", "treatment", "group", "action", "variation", "test group", "version"),
    "--reward": ("reward", "outcome", "converted", "conversion", "click", "clicked", "clicks", "y", "revenue"),
    "--propensity": ("propensity", "pscore"),  # a "probability" is often a prediction
}
_IDS = ("decision", "decision_id", "request_id")
_MOST_LEVELS = 20  # of a column of texts that is taken for groups
_EMPTY = ("", "na", "n/a", "#n/a", "nan", "null", "none", "-")  # cells that programs write where there is no value
_TRUTH = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0, "t": 1.0, "f": 0.0, "y": 1.0, "n": 0.0}


class Table(NamedTuple):
    """The rows of a table that have a reward.

    Attributes:
        arms: names, as given or sorted.
        arm: (N,), the name in each row.
        reward: (N,).
        propensity: (N,), probability of the arm that was played; None where the table has none.
        entries: {entry: (N,)} of the context; a column of groups has an entry of 0 and 1 for each group.
        others: further columns by name, such as ids and probabilities of all arms.
        words: what was read, in one line.
        has_fixed_amounts: whether the reward is an expression of columns that are 0 or 1, or the same in all rows of an arm.
    """

    arms: list[str]
    arm: list[str]
    reward: np.ndarray
    propensity: np.ndarray | None
    entries: dict[str, np.ndarray]
    others: dict[str, Any]
    words: str
    has_fixed_amounts: bool = False

    def frame(self) -> Any:
        """Return a DataFrame with the columns arm, reward, propensity, those of the context and the others."""
        import pandas

        columns = self.others | self.entries | {"arm": self.arm, "reward": self.reward}
        return pandas.DataFrame(columns if self.propensity is None else columns | {"propensity": self.propensity})


def read_plays(
    path: str | PathLike,
    *,
    arm: str | None = None,
    reward: str | None = None,
    value: str | None = None,
    propensity: str | None = None,
    context: Sequence[str] = (),
    arms: Sequence[str] | None = None,
) -> Table:
    """Read a CSV file with a header and one row per play; rows with an empty reward are left out.

    Args:
        arm, reward, propensity: names of columns; None finds a column by usual names. `propensity` may be "equal" or "none".
        value: what a row earned, arithmetic on columns, in place of `reward`.
        arms: names of all arms, in the order of a program; None sorts those that occur.
        context: columns known before the play: numbers, or at most 20 groups; "region:groups" takes numbers for groups.

    Raises:
        DataFileError: with the row (the first below the header is 1), the column, the fault and what to do.
        ValueError: for an expression that is not arithmetic on columns.
    """
    header, lines = read_table(path)
    if arm is None:
        arm = _find(header, "--arm", path)
    expression = None if value is None else parse_value(value)
    if expression is None:
        reward = _find(header, "--reward", path) if reward is None else reward
        needed: tuple[str, ...] = (reward,)
    else:
        needed = expression.columns
    if propensity is None:
        propensity = next((name for name in header if name.lower() in _KNOWN["--propensity"]), None)
    propensity = None if propensity == NONE else propensity
    given = [] if propensity in (None, EQUAL) else [propensity]
    known = {name: name not in header and name.endswith(GROUPS) for name in context}
    columns = {name.removesuffix(GROUPS) if is_code else name: is_code for name, is_code in known.items()}
    missing = [name for name in (arm, *needed, *given, *columns) if name not in header]
    if missing:
        raise DataFileError(f"{path} has no column {', '.join(map(repr, missing))}; its columns: {', '.join(header)}")
    index = {name: place for place, name in enumerate(header)}
    kept = [(number, line) for number, line in lines if all(line[index[name]].lower() not in _EMPTY for name in needed)]
    if not kept:
        raise DataFileError(
            f"{path}: every row has an empty cell in {', '.join(needed)}: there is nothing to learn from"
        )

    def cells(name: str) -> list[str]:
        return [line[index[name]] for _, line in kept]

    def check_filled(name: str, is_empty: list[bool]) -> None:
        rows = [str(number) for (number, _), is_one in zip(kept, is_empty, strict=True) if is_one]
        if rows:
            where = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows)} rows, such as {', '.join(rows[:3])}"
            remedy = ", or leave it out of --context" if name in columns else ""
            raise DataFileError(
                f"{path}: column {name!r} has an empty cell in {where}: fill in what is missing, or remove the rows{remedy}"
            )

    def numbers(name: str) -> np.ndarray:
        is_percent = all(cell.endswith("%") for cell in cells(name))
        given = [cell.removesuffix("%").strip() if is_percent else cell for cell in cells(name)]
        check_filled(name, [cell.lower() in _EMPTY for cell in given])
        found = [_number(cell, path, number, name) for (number, _), cell in zip(kept, given, strict=True)]
        return np.array(found) / (100.0 if is_percent else 1.0)

    played = [original_cell(cell) for cell in cells(arm)]
    check_filled(arm, [name == "" for name in played])
    names = _sorted(set(played)) if arms is None else list(arms)
    unknown = next((row for row, name in zip(kept, played, strict=True) if name not in names), None)
    if unknown is not None:
        other = unknown[1][index[arm]]
        raise DataFileError(
            f"{path}: row {unknown[0]} has the arm {other!r}, which --arms does not name: {', '.join(names)}"
        )
    earned = numbers(needed[0]) if expression is None else expression.compute({name: numbers(name) for name in needed})
    if propensity == EQUAL:
        probs: Any = np.full(len(kept), 1.0 / len(names))
    else:
        probs = None if propensity is None else numbers(propensity)
    entries, kinds = dict[str, np.ndarray](), list[str]()
    for name, is_code in columns.items():
        found = _entries(name, cells(name), numbers, path, is_code)
        is_number = list(found) == [name]
        is_whole = is_number and 2 < np.unique(found[name]).size <= _MOST_LEVELS and not (found[name] % 1).any()
        hint = f"; if it is a code, --context {name}{GROUPS}" if is_whole else ""
        kinds.append(f"{name} ({'a number' if is_number else f'{len(found)} groups'}{hint})")
        entries |= found
    of_arms = [name for name in header if name.startswith("propensity_")]
    others: dict[str, Any] = {name: cells(name) for name in header if name in _IDS}
    others |= {name: numbers(name) for name in of_arms}
    what = f"reward {value if expression is not None else needed[0]!r}"
    left_out = len(lines) - len(kept)
    words = (
        f"{len(kept):,} rows of {path}: arm {arm!r} ({len(names)} arm{'s' if len(names) > 1 else ''}), {what}"
        + (f", context {', '.join(kinds)}" if kinds else "")
        + ("" if propensity is None else f", probabilities {propensity!r}")
        + (f"; {left_out:,} row{'s' if left_out > 1 else ''} without a reward left out" if left_out else "")
    )
    place = np.array([names.index(name) for name in played])
    is_fixed = expression is not None and all(_is_fixed(numbers(name), place) for name in needed)
    return Table(names, played, earned, probs, entries, others, words, is_fixed)


def _is_fixed(values: np.ndarray, arm: np.ndarray) -> bool:
    """Return whether a column is 0 or 1 in every row, or the same in all rows of an arm."""
    own = np.zeros(arm.max() + 1)
    own[arm] = values  # one row of each arm
    return bool(np.isin(values, (0.0, 1.0)).all() or (values == own[arm]).all())


def _find(header: list[str], option: str, path: str | PathLike) -> str:
    usual = _KNOWN[option]
    found = [name for known in usual for name in header if name.lower().replace("_", " ") == known]
    if not found:
        raise DataFileError(
            f"{path} has no column named {', '.join(usual[:-1])} or {usual[-1]}: say which one it is with {option} COLUMN; "
            f"its columns: {', '.join(header)}"
        )
    return found[0]


def _sorted(names: set[str]) -> list[str]:
    """Return numbers by their size, and texts with the numbers in them by their size: arm 2 before arm 10."""
    if all(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in names):
        return sorted(names, key=float)
    return sorted(names, key=lambda name: re.sub(r"\d+", lambda number: number[0].zfill(20), name))


def _number(cell: str, path: str | PathLike, row: int, column: str) -> float:
    try:
        found = _TRUTH.get(cell.lower())
        number = float(cell) if found is None else found
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        remedy = f"correct it (the words {', '.join(_TRUTH)} are read as 1 and 0), or remove the row"
        if re.search(r"\d", cell):
            remedy = "write the numbers of this column as 1200.5, without currency or marks of thousands, and % in all or none"
        raise DataFileError(f"{path}: row {row}, column {column!r}: {cell!r} is not a finite number; {remedy}")
    return number


def _entries(name: str, cells: list[str], numbers: Any, path: str | PathLike, is_code: bool) -> dict[str, np.ndarray]:
    """Return the context entries of a column: its numbers, or 0 and 1 for each group."""
    if not is_code and _is_numeric(cells):
        return {name: numbers(name)}
    levels = _sorted(set(cells))
    if len(levels) > _MOST_LEVELS:
        raise DataFileError(
            f"{path}: column {name!r} has {len(levels)} different {'codes' if is_code else 'texts'}, expected "
            f"{'' if is_code else 'numbers or '}at most {_MOST_LEVELS} groups: group its values, or leave it out of --context"
        )
    own = np.array(cells)
    return {f"{name}={level or 'empty'}": (own == level).astype(float) for level in levels}


def _is_numeric(cells: list[str]) -> bool:
    try:
        [float(cell.removesuffix("%")) for cell in cells if cell.lower() not in (*_TRUTH, *_EMPTY)]
    except ValueError:
        return False
    return any(cell.lower() not in _EMPTY for cell in cells)
