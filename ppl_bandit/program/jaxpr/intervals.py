"""Interval arithmetic, elementwise, with a flag: is the quantity proved to be a real-analytic function of the latents?

Latents range over closed boxes inside their supports, wide enough for any number that a posterior can produce. So an infinite
bound means that arithmetic can overflow, and a strict inequality between bounds holds in floating point too. Functions that
saturate are proved only where they cannot underflow or overflow: an analytic step that floating point rounds to a constant
could not be told from a constant.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ppl_bandit.program.jaxpr.simplex_sums import SimplexSum, simplex_elements, sum_bounds

__all__ = [
    "Interval",
    "absolute",
    "add",
    "unbounded",
    "as_interval",
    "decide_comparison",
    "finiteness",
    "hull",
    "increasing",
    "is_moderate",
    "is_inside",
    "is_nonzero",
    "is_positive",
    "larger",
    "negative",
    "power",
    "product",
    "real_power",
    "reciprocal",
    "simplex_box",
    "smaller",
    "support_box",
    "truth",
    "with_bounds",
    "with_sum",
    "within",
]


class Interval(NamedTuple):
    """Bounds of a quantity that depends on latents, elementwise.

    Attributes:
        low, high: the quantity lies between them; a truth value lies between 0 and 1, and has equal bounds where it is decided.
        is_analytic: whether it is proved to be a real-analytic function of the latents.
        simplex_sum: the quantity as a weighted sum of the elements of a simplex, if it is one.
        degree: of the quantity as a polynomial of the real latents; see `polynomial_degree`.
        power: the highest power of a sum of other latents in it; -1 if it does not depend on them.
        may_flatten: whether floating point may round to a constant what outer sites add to it, far out in their supports.
    """

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    is_analytic: Bool[Array, "..."]
    simplex_sum: SimplexSum | None = None
    degree: Any = 0
    power: int = -1
    may_flatten: Any = False


def support_box(low: Any, high: Any, shape: tuple[int, ...]) -> Interval:
    """Return the interval of a latent: the interior of its support, without numbers that no posterior reaches."""
    dtype = jnp.zeros(()).dtype
    huge = _huge()
    low, high = (jnp.broadcast_to(jnp.asarray(bound, dtype), shape) for bound in (low, high))
    above = jnp.where(low == 0, 1.0 / huge, jnp.nextafter(low, jnp.inf))
    below = jnp.where(high == 0, -1.0 / huge, jnp.nextafter(high, -jnp.inf))
    return Interval(jnp.maximum(above, -huge), jnp.minimum(below, huge), jnp.ones(shape, bool))


def _huge() -> float:
    return 1e20 if jnp.zeros(()).dtype == jnp.float64 else 1e9


def simplex_box(position: int, shape: tuple[int, ...]) -> Interval:
    """Return the interval of a simplex latent.

    Args:
        position: a number that identifies the latent.
    """
    return support_box(0.0, 1.0, shape)._replace(simplex_sum=simplex_elements(position, shape))


def within(x: Interval, low: Array, high: Array) -> Interval:
    """Narrow an interval by other bounds of the same quantity."""
    return x._replace(low=jnp.maximum(x.low, low), high=jnp.minimum(x.high, high))


def with_sum(x: Interval, simplex_sum: SimplexSum) -> Interval:
    """Narrow an interval by the bounds of the weighted sum that it is."""
    return within(x, *sum_bounds(simplex_sum, 1.0 / _huge()))._replace(simplex_sum=simplex_sum)


def as_interval(value: Any) -> Interval:
    """Return a value as an interval; a known array has equal bounds."""
    if isinstance(value, Interval):
        return value
    array = jnp.asarray(value).astype(float)
    return Interval(array, array, jnp.ones(array.shape, bool))


def unbounded(is_analytic: Array) -> Interval:
    """Return the interval of all real numbers."""
    return Interval(jnp.full(is_analytic.shape, -jnp.inf), jnp.full(is_analytic.shape, jnp.inf), is_analytic)


def is_positive(x: Interval) -> Array:
    """Return where a quantity is proved to be positive."""
    return x.low > 0


def is_nonzero(x: Interval) -> Array:
    """Return where a quantity is proved not to be zero."""
    return (x.low > 0) | (x.high < 0)


def is_moderate(x: Interval) -> Array:
    """Return where the exponential of a quantity neither underflows nor overflows; not checked in single precision."""
    limit = 700.0 if x.low.dtype == jnp.float64 else jnp.inf
    return (x.low > -limit) & (x.high < limit)


def is_inside(x: Interval, low: float, high: float) -> Bool[Array, "..."]:
    """Return where a quantity is proved to lie in (low, high]."""
    return (x.low > low) & (x.high <= high)


def hull(several: list[Interval]) -> Interval:
    """Return the smallest interval that contains several."""
    out = several[0]
    for x in several[1:]:
        out = Interval(jnp.minimum(out.low, x.low), jnp.maximum(out.high, x.high), out.is_analytic & x.is_analytic)
    return out


def with_bounds(low: Array, high: Array, is_analytic: Array) -> Interval:
    """Return an interval; bounds that are nan (infinity minus infinity, or infinity times 0) become infinite."""
    unknown = jnp.isnan(low) | jnp.isnan(high)
    return Interval(jnp.where(unknown, -jnp.inf, low), jnp.where(unknown, jnp.inf, high), is_analytic)


def add(x: Interval, y: Interval) -> Interval:
    """Add."""
    return with_bounds(x.low + y.low, x.high + y.high, x.is_analytic & y.is_analytic)


def negative(x: Interval) -> Interval:
    """Change the sign."""
    return Interval(-x.high, -x.low, x.is_analytic)


def product(x: Interval, y: Interval) -> Interval:
    """Multiply."""
    ends = jnp.stack([a * b for a in (x.low, x.high) for b in (y.low, y.high)])
    return with_bounds(ends.min(0), ends.max(0), x.is_analytic & y.is_analytic)


def reciprocal(x: Interval) -> Interval:
    """Divide 1 by a quantity that cannot be zero."""
    safe = is_nonzero(x)
    low = jnp.where(safe, 1.0 / jnp.where(safe, x.high, 1.0), -jnp.inf)
    high = jnp.where(safe, 1.0 / jnp.where(safe, x.low, 1.0), jnp.inf)
    return Interval(low, high, x.is_analytic & safe)


def power(x: Interval, exponent: int) -> Interval:
    """Raise to a power that is a known integer."""
    if exponent < 0:
        return reciprocal(power(x, -exponent))
    if exponent == 0:
        return as_interval(jnp.ones(x.low.shape))
    a, b = x.low**exponent, x.high**exponent
    proved = x.is_analytic & (jnp.isfinite(a) & jnp.isfinite(b) | (exponent <= 2))
    if exponent % 2:
        return Interval(a, b, proved)
    return Interval(jnp.where(is_nonzero(x), jnp.minimum(a, b), 0.0), jnp.maximum(a, b), proved)


def real_power(base: Interval, exponent: Interval, is_fixed: bool) -> Interval:
    """Raise a positive quantity to any power, or any quantity to a known nonnegative integer.

    Args:
        is_fixed: whether the exponent is known.
    """
    positive = is_positive(base)
    logarithm = Interval(
        jnp.log(jnp.where(positive, base.low, 1.0)),
        jnp.log(jnp.where(positive, base.high, 1.0)),
        base.is_analytic & positive,
    )
    multiple = product(logarithm, exponent)
    out = increasing(jnp.exp, multiple, is_moderate(multiple))
    if not is_fixed:
        return out
    whole = ~positive & (exponent.low >= 0) & (exponent.low == jnp.floor(exponent.low))
    at_least = jnp.where(exponent.low % 2 == 0, 0.0, -jnp.inf)
    return Interval(
        jnp.where(whole, at_least, out.low),
        jnp.where(whole, jnp.inf, out.high),
        jnp.where(whole, base.is_analytic, out.is_analytic),
    )


def increasing(function: Callable, x: Interval, is_in_domain: Array | None = None) -> Interval:
    """Apply an increasing analytic function."""
    inside = jnp.ones(x.low.shape, bool) if is_in_domain is None else is_in_domain
    low, high = (function(jnp.where(inside, end, 1.0)) for end in (x.low, x.high))
    return Interval(jnp.where(inside, low, -jnp.inf), jnp.where(inside, high, jnp.inf), x.is_analytic & inside)


def absolute(x: Interval) -> Interval:
    """Take the absolute value of a quantity that cannot be zero."""
    flipped, is_negative = negative(x), x.high < 0
    low, high = jnp.where(is_negative, flipped.low, x.low), jnp.where(is_negative, flipped.high, x.high)
    return Interval(low, high, x.is_analytic & is_nonzero(x))


def larger(x: Interval, y: Interval) -> Interval:
    """Take the maximum of two quantities, where it is always the same one of them."""
    is_first, is_second = x.low >= y.high, y.low >= x.high
    low, high, proved = (jnp.where(is_first, a, b) for a, b in zip(x[:3], y[:3], strict=True))
    return Interval(low, high, proved & (is_first | is_second))


def smaller(x: Interval, y: Interval) -> Interval:
    """Take the minimum of two quantities, where it is always the same one of them."""
    return negative(larger(negative(x), negative(y)))


def truth(is_true: Array, is_false: Array, is_analytic: Array) -> Interval:
    """Return a truth value; it is a constant where it is decided."""
    low, high = is_true & is_analytic, ~(is_false & is_analytic)
    return Interval(low.astype(float), high.astype(float), low == high)


def decide_comparison(name: str, x: Interval, y: Interval) -> Interval:
    """Compare two quantities; decided where their intervals do not overlap."""
    below, above = x.high < y.low, x.low > y.high
    apart, never = below | above, jnp.zeros(jnp.shape(below), bool)
    is_true = {"lt": below, "le": below, "gt": above, "ge": above, "ne": apart, "eq": never}[name]
    is_false = {"lt": above, "le": above, "gt": below, "ge": below, "ne": never, "eq": apart}[name]
    return truth(is_true, is_false, x.is_analytic & y.is_analytic)


def finiteness(x: Interval) -> Interval:
    """Test that a quantity is finite; decided where its bounds are."""
    bounded = jnp.isfinite(x.low) & jnp.isfinite(x.high)
    return truth(bounded, jnp.zeros(bounded.shape, bool), x.is_analytic)
