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

from ppl_bandit.program.jaxpr.primitives import MODERATE, Kind, describe_primitive

_HUGE = 1e20
_NUM_DIGITS = {"float64": 52, "float32": 23, "float16": 10, "bfloat16": 7}


class Range(NamedTuple):
    """Bounds of a number."""

    low: float
    high: float


class NoProof(Exception):
    """An operation at which the proof ends; carries the reason, "" for that of the table of primitives."""


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
    return Range(min(x.low for x in several), max(x.high for x in several))


def result_range(eqn: Any, xs: Sequence[Range], *, is_same: bool) -> tuple[Any, bool]:
    """Return the range of the result of an elementwise operation, or the truth value that it has; and whether it may flatten.

    A function flattens where floating point rounds it to a constant far out, although it is analytic there.

    Args:
        xs: ranges of the operands.
        is_same: whether the first two operands are the same number.

    Raises:
        NoProof: if analyticity may be lost.
    """
    name, described = eqn.primitive.name, describe_primitive(eqn)
    if name == "mul" and is_same:
        return _power(xs[0], 2), False
    if name in _RULES:
        return _RULES[name](*xs), False
    if name == "integer_pow":
        return _power(xs[0], eqn.params["y"]), False
    if name == "convert_element_type":
        reason = lossy_conversion(eqn)
        _require(not reason, reason)
        return xs[0], False
    if described.kind is Kind.COMPARISON:
        return _compare(name, xs[0], xs[1], is_same), False
    if name == "stop_gradient":
        return xs[0], False
    if described.analytic is None:
        raise NoProof
    x, (above, below) = xs[0], described.analytic
    flattens = below == MODERATE and _flattens(x)
    _require(flattens or above == -math.inf or x.low > above)
    return (EVERYTHING if described.increasing is None else _increasing(described.increasing, x)), flattens


def softplus_range(x: Range) -> tuple[Range, bool]:
    """Return the range of softplus, whose formula has a kink that the function has not, and whether it may flatten."""
    return _increasing(lambda end: np.logaddexp(end, 0.0), x), _flattens(x)


def _flattens(x: Range) -> bool:
    return not (-MODERATE < x.low and x.high < MODERATE)


def _require(holds: bool, reason: str = "") -> None:
    if not holds:
        raise NoProof(reason)


def _range(low: float, high: float) -> Range:
    """Return a range; bounds that are nan (infinity minus infinity, or infinity times 0) become infinite."""
    return EVERYTHING if math.isnan(low) or math.isnan(high) else Range(float(low), float(high))


def _increasing(function: Callable[[float], float], x: Range) -> Range:
    with np.errstate(all="ignore"):
        return _range(float(function(x.low)), float(function(x.high)))


def sum_range(x: Range, y: Range) -> Range:
    """Return the range of a sum."""
    return _range(x.low + y.low, x.high + y.high)


def negative_range(x: Range) -> Range:
    """Return the range of a number with the other sign."""
    return Range(-x.high, -x.low)


def product_range(x: Range, y: Range) -> Range:
    """Return the range of a product."""
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


def _real_power(x: Range, y: Range) -> Range:
    """Raise a positive quantity to any power, or any quantity to a known nonnegative integer."""
    if x.low > 0:
        multiple = product_range(_increasing(np.log, x), y)
        _require(-MODERATE < multiple.low and multiple.high < MODERATE)
        return _increasing(np.exp, multiple)
    _require(y.low == y.high >= 0 and y.low == math.floor(y.low))
    return Range(0.0 if y.low % 2 == 0 else -math.inf, math.inf)


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
    return negative_range(_larger(negative_range(x), negative_range(y)))


def _is_finite(x: Range) -> bool:
    _require(math.isfinite(x.low) and math.isfinite(x.high))
    return True


def _absolute(x: Range) -> Range:
    _require(_is_nonzero(x))
    return x if x.low > 0 else negative_range(x)


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


_RULES: dict[str, Callable[..., Any]] = {
    "add": sum_range,
    "add_any": sum_range,
    "sub": lambda x, y: sum_range(x, negative_range(y)),
    "neg": negative_range,
    "mul": product_range,
    "div": lambda x, y: product_range(x, _reciprocal(y)),
    "square": lambda x: _power(x, 2),
    "pow": _real_power,
    "rsqrt": _reciprocal_root,
    "abs": _absolute,
    "max": _larger,
    "min": _smaller,
    "clamp": lambda low, x, high: _smaller(_larger(x, low), high),
    "is_finite": _is_finite,
}
