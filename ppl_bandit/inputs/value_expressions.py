"""Arithmetic on the columns of a table, such as `price * sold - cost`: parsed, never executed as code."""

import ast
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

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
