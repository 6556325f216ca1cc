"""Ranges of quantities that given latents reach, with a proof that they are real-analytic functions of these.

A program may be conjugate given some latents, the outer ones. Certificates try some of their values. They hold for all values
if every coefficient of the form is a real-analytic function of the outer latents: one that vanishes at random points vanishes
everywhere. Arithmetic and analytic functions keep this where the range of their operands stays inside their domain: the
logarithm of a positive number, division by something that cannot be zero. A branch, an index, rounding, or a comparison that
the ranges do not decide, loses it.

Latents range over closed intervals inside their supports, wide enough for any number that a posterior can produce. So an
infinite bound means that arithmetic can overflow, and a strict inequality between bounds holds in floating point too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.program.jaxpr.primitives import AnalyticWhere, Kind, describe_primitive, index_operands

__all__ = [
    "EVERYTHING",
    "NotAnalytic",
    "Range",
    "hull",
    "lossy_conversion",
    "result_range",
    "softplus_range",
    "support_range",
    "values_range",
]

_HUGE = 1e20
_NUM_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}
_MODERATE = 700.0  # the exponential of a number below this neither underflows nor overflows


class Range(NamedTuple):
    """Bounds of all entries of an array; of a Cholesky factor, only its diagonal is known to be positive."""

    low: float
    high: float
    is_factor: bool = False


class NotAnalytic(Exception):
    """An operation at which analyticity is lost; carries the reason, "" for that of the table of primitives."""


EVERYTHING = Range(-math.inf, math.inf)


def support_range(low: float, high: float) -> Range:
    """Return the range of a latent: the interior of its support, without numbers that no posterior reaches."""
    above = 1.0 / _HUGE if low == 0 else float(np.nextafter(low, math.inf))
    below = -1.0 / _HUGE if high == 0 else float(np.nextafter(high, -math.inf))
    return Range(max(above, -_HUGE), min(below, _HUGE))


def values_range(values: Any) -> Range:
    """Return the range of known numbers."""
    array = np.asarray(values)
    if array.dtype.kind not in "biuf" or not array.size:
        return EVERYTHING
    return _range(float(array.min()), float(array.max()))


def hull(several: Sequence[Range]) -> Range:
    """Return the smallest range that contains several."""
    is_factor = any(x.is_factor for x in several)
    return Range(min(x.low for x in several), max(x.high for x in several), is_factor)


def result_range(eqn: Any, xs: Sequence[Range], constants: Sequence[Any], *, is_same: bool) -> tuple[Any, bool]:
    """Return the range of the results of an operation, or the truth value that it has; and whether it may flatten.

    A function flattens where floating point rounds it to a constant far out, although it is analytic there.

    Args:
        xs: ranges of the operands.
        constants: the operands whose numbers are known; None for others.
        is_same: whether the first two operands are the same array.

    Raises:
        NotAnalytic: if analyticity may be lost.
    """
    name, described = eqn.primitive.name, describe_primitive(eqn)
    if name in _RULES:
        return _RULES[name](eqn, xs, constants, is_same), False
    if described.kind is Kind.COMPARISON:
        return _compare(name, xs[0], xs[1], is_same), False
    if described.kind in (Kind.IDENTITY, Kind.MOVE, Kind.CHOICE) or name == "stop_gradient":
        fixed = index_operands(eqn)
        return hull([x for i, x in enumerate(xs) if i not in fixed]), False
    if described.analytic_where is None:
        raise NotAnalytic
    x, where, flattens = xs[0], described.analytic_where, False
    if where is AnalyticWhere.MODERATE:
        flattens = _flattens(x)
    elif where is not AnalyticWhere.EVERYWHERE and not x.is_factor:
        _require(x.low > (0.0 if where is AnalyticWhere.POSITIVE else -1.0))
    return (EVERYTHING if described.increasing is None else _increasing(described.increasing, x)), flattens


def softplus_range(x: Range) -> tuple[Range, bool]:
    """Return the range of softplus, whose formula has a kink that the function has not, and whether it may flatten."""
    return _increasing(lambda end: np.logaddexp(end, 0.0), x), _flattens(x)


def _flattens(x: Range) -> bool:
    return not (-_MODERATE < x.low and x.high < _MODERATE)


def _require(holds: bool, reason: str = "") -> None:
    if not holds:
        raise NotAnalytic(reason)


def _range(low: float, high: float) -> Range:
    """Return a range; bounds that are nan (infinity minus infinity, or infinity times 0) become infinite."""
    return EVERYTHING if math.isnan(low) or math.isnan(high) else Range(float(low), float(high))


def _increasing(function: Callable[[float], float], x: Range) -> Range:
    with np.errstate(all="ignore"):
        return _range(float(function(x.low)), float(function(x.high)))


def _sum_of(x: Range, y: Range) -> Range:
    return _range(x.low + y.low, x.high + y.high)


def _negative(x: Range) -> Range:
    return Range(-x.high, -x.low)


def _times(x: Range, y: Range) -> Range:
    ends = [a * b for a in x[:2] for b in y[:2]]
    return EVERYTHING if any(map(math.isnan, ends)) else Range(min(ends), max(ends))


def _is_nonzero(x: Range) -> bool:
    return x.low > 0 or x.high < 0


def _reciprocal(x: Range) -> Range:
    _require(_is_nonzero(x))
    return Range(1.0 / x.high, 1.0 / x.low)


def _reciprocal_root(x: Range) -> Range:
    _require(x.low > 0)
    return _reciprocal(_increasing(np.sqrt, x))


def _power(x: Range, exponent: int) -> Range:
    if exponent < 0:
        _require(_is_nonzero(x), "a negative power of a quantity that may be zero")
        return _reciprocal(_power(x, -exponent))
    with np.errstate(all="ignore"):
        a, b = (float(np.float64(end) ** exponent) for end in x[:2])
    _require(exponent <= 2 or (math.isfinite(a) and math.isfinite(b)), "a power that can overflow")
    if exponent % 2:
        return Range(a, b)
    return Range(min(a, b) if _is_nonzero(x) else 0.0, max(a, b))


def _real_power(x: Range, y: Range, exponent: Any) -> Range:
    """Raise a positive quantity to any power, or any quantity to a known nonnegative integer."""
    if x.low > 0:
        multiple = _times(_increasing(np.log, x), y)
        _require(-_MODERATE < multiple.low and multiple.high < _MODERATE)
        return _increasing(np.exp, multiple)
    numbers = np.asarray(-1 if exponent is None else exponent)
    _require(bool(np.all((numbers >= 0) & (numbers == np.floor(numbers)))))
    return Range(0.0 if np.all(numbers % 2 == 0) else -math.inf, math.inf)


def _compare(name: str, x: Range, y: Range, is_same: bool) -> bool:
    if is_same:  # a test for nan: a quantity between finite bounds is not nan
        _require(math.isfinite(x.low) and math.isfinite(x.high))
        return name in ("eq", "le", "ge")
    is_below, is_above = x.high < y.low, x.low > y.high
    _require(is_below or is_above)
    return name == "ne" or name in (("lt", "le") if is_below else ("gt", "ge"))


def _larger(x: Range, y: Range) -> Range:
    _require(x.low >= y.high or y.low >= x.high)
    return x if x.low >= y.high else y


def _smaller(x: Range, y: Range) -> Range:
    return _negative(_larger(_negative(x), _negative(y)))


def _is_finite(x: Range) -> bool:
    _require(math.isfinite(x.low) and math.isfinite(x.high))
    return True


def _absolute(x: Range) -> Range:
    _require(_is_nonzero(x))
    return x if x.low > 0 else _negative(x)


def _repeated(x: Range, most: int, least: int) -> Range:
    """Return the range of sums of `least` to `most` terms."""
    several = [_range(count * x.low, count * x.high) for count in (least, most)]
    return hull(several)


def _num_along(eqn: Any) -> int:
    shape = eqn.invars[0].aval.shape
    axes = eqn.params["axes"] if "axes" in eqn.params else (eqn.params["axis"],)
    return max(math.prod(shape[axis] for axis in axes), 1)


def _product_along(eqn: Any, x: Range) -> Range:
    count = _num_along(eqn)
    if x.low <= 0:
        return EVERYTHING
    with np.errstate(all="ignore"):
        powers = Range(float(np.float64(x.low) ** count), float(np.float64(x.high) ** count))
    return hull([powers, x]) if eqn.primitive.name == "cumprod" else powers


def _dot_general(eqn: Any, x: Range, y: Range) -> Range:
    shape, (sums, _) = eqn.invars[0].aval.shape, eqn.params["dimension_numbers"][0]
    count = max(math.prod(shape[axis] for axis in sums), 1)
    return _repeated(_times(x, y), count, count)


def _scatter_add(eqn: Any, x: Range, updates: Range) -> Range:
    added = _repeated(updates, math.prod(eqn.invars[2].aval.shape), 0)
    return _sum_of(x, added)


def _triangular_solve(eqn: Any, matrix: Range, constant: Any) -> Range:
    _require(matrix.is_factor or _is_nonzero(matrix) or constant is not None)
    return EVERYTHING


def lossy_conversion(eqn: Any) -> str:
    """Return why a conversion of real numbers to another dtype loses digits; "" if it loses none."""
    old, new = np.dtype(eqn.invars[0].aval.dtype), eqn.params["new_dtype"]
    if old.kind in "biu":
        return ""
    if not (np.issubdtype(new, np.floating) or np.dtype(new).name in _NUM_DIGITS):
        return f"conversion of a quantity that depends on latents to {np.dtype(new).name}"
    if _NUM_DIGITS.get(np.dtype(new).name, 0) < _NUM_DIGITS.get(old.name, 0):
        return f"rounding of a quantity that depends on latents from {old.name} to {np.dtype(new).name}"
    return ""


def _convert(eqn: Any, x: Range) -> Range:
    reason = lossy_conversion(eqn)
    _require(not reason, reason)
    return x


Rule = Callable[[Any, Sequence[Range], Sequence[Any], bool], Any]


def _of(function: Callable[..., Any]) -> Rule:
    return lambda eqn, xs, constants, is_same: function(*xs)


def _with_equation(function: Callable[..., Any]) -> Rule:
    return lambda eqn, xs, constants, is_same: function(eqn, *xs)


_RULES: dict[str, Rule] = {
    "add": _of(_sum_of),
    "add_any": _of(_sum_of),
    "sub": _of(lambda x, y: _sum_of(x, _negative(y))),
    "neg": _of(_negative),
    "mul": lambda eqn, xs, constants, is_same: _power(xs[0], 2) if is_same else _times(*xs),
    "div": _of(lambda x, y: _times(x, _reciprocal(y))),
    "square": _of(lambda x: _power(x, 2)),
    "integer_pow": lambda eqn, xs, constants, is_same: _power(xs[0], eqn.params["y"]),
    "pow": lambda eqn, xs, constants, is_same: _real_power(xs[0], xs[1], constants[1]),
    "rsqrt": _of(_reciprocal_root),
    "abs": _of(_absolute),
    "max": _of(_larger),
    "min": _of(_smaller),
    "clamp": _of(lambda low, x, high: _smaller(_larger(x, low), high)),
    "is_finite": _of(_is_finite),
    "reduce_sum": lambda eqn, xs, constants, is_same: _repeated(xs[0], _num_along(eqn), _num_along(eqn)),
    "cumsum": lambda eqn, xs, constants, is_same: _repeated(xs[0], _num_along(eqn), 1),
    "reduce_prod": _with_equation(_product_along),
    "cumprod": _with_equation(_product_along),
    "dot_general": _with_equation(_dot_general),
    "scatter-add": lambda eqn, xs, constants, is_same: _scatter_add(eqn, xs[0], xs[2]),
    "cholesky": lambda eqn, xs, constants, is_same: EVERYTHING._replace(is_factor=True),
    "triangular_solve": lambda eqn, xs, constants, is_same: _triangular_solve(eqn, xs[0], constants[0]),
    "convert_element_type": _with_equation(_convert),
}
