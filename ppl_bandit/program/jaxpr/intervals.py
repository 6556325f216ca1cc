"""Intervals that contain a quantity, elementwise, with a flag: is it proved a real-analytic function of the latents?

Latents range over closed boxes inside their supports, wide enough for any number that a posterior can produce. So a bound that
is infinite means that arithmetic can overflow, and a strict inequality between bounds holds in floating point too. Functions
that saturate are proved only where they cannot vanish or overflow: an analytic step or bump that floating point flattens to
zero would look like no step at all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ppl_bandit.program.jaxpr.simplex_sums import Shares, ratio_bounds, shares_of_rows, sum_bounds

__all__ = [
    "Flow",
    "absolute",
    "add",
    "anywhere",
    "as_flow",
    "compare",
    "finiteness",
    "hull",
    "increasing",
    "is_graded",
    "is_inside",
    "is_nonzero",
    "is_positive",
    "larger",
    "negative",
    "power",
    "product",
    "ratio_of_shares",
    "real_power",
    "reciprocal",
    "simplex_box",
    "smaller",
    "support_box",
    "truth",
    "unproved",
    "with_shares",
]


class Flow(NamedTuple):
    """Bounds of a quantity that latents reach, elementwise.

    Attributes:
        low, high: the quantity lies between them; for a truth value 0 and 1, equal where it is decided.
        is_analytic: whether it is proved to be a real-analytic function of the latents.
        shares: its weights, where it is a weighted sum of the elements of a simplex.
    """

    low: Float[Array, "..."]
    high: Float[Array, "..."]
    is_analytic: Bool[Array, "..."]
    shares: Shares | None = None


def support_box(low: Any, high: Any, shape: tuple[int, ...]) -> Flow:
    """Return a latent on the interior of its support, up to numbers so small or large that no posterior reaches them."""
    dtype = jnp.zeros(()).dtype
    huge = _huge()
    low, high = (jnp.broadcast_to(jnp.asarray(bound, dtype), shape) for bound in (low, high))
    above = jnp.where(low == 0, 1.0 / huge, jnp.nextafter(low, jnp.inf))
    below = jnp.where(high == 0, -1.0 / huge, jnp.nextafter(high, -jnp.inf))
    return Flow(jnp.maximum(above, -huge), jnp.minimum(below, huge), jnp.ones(shape, bool))


def _huge() -> float:
    return 1e20 if jnp.zeros(()).dtype == jnp.float64 else 1e9


def simplex_box(position: int, shape: tuple[int, ...]) -> Flow:
    """Return a latent on the simplex, one of several."""
    return support_box(0.0, 1.0, shape)._replace(shares=shares_of_rows(position, shape))


def with_shares(x: Flow, shares: Shares) -> Flow:
    """Return a quantity that is a weighted sum of the elements of a simplex, within the bounds that follow from that."""
    return _within(x, sum_bounds(shares, 1.0 / _huge()))._replace(shares=shares)


def ratio_of_shares(ratio: Flow, x: Shares, y: Shares) -> Flow:
    """Return the ratio of two such sums, within the bounds that follow from that."""
    return _within(ratio, ratio_bounds(x, y))


def _within(x: Flow, bounds: tuple[Array, Array]) -> Flow:
    return x._replace(low=jnp.maximum(x.low, bounds[0]), high=jnp.minimum(x.high, bounds[1]))


def as_flow(value: Any) -> Flow:
    """Return a quantity that no latent reaches as an interval of one point."""
    if isinstance(value, Flow):
        return value
    array = jnp.asarray(value).astype(float)
    return Flow(array, array, jnp.ones(array.shape, bool))


def anywhere(is_analytic: Array) -> Flow:
    """Return a quantity without bounds."""
    return Flow(jnp.full(is_analytic.shape, -jnp.inf), jnp.full(is_analytic.shape, jnp.inf), is_analytic)


def unproved(shape: tuple[int, ...]) -> Flow:
    """Return a quantity of which nothing is known."""
    return anywhere(jnp.zeros(shape, bool))


def is_positive(x: Flow) -> Array:
    """Tell where a quantity is positive for sure."""
    return x.low > 0


def is_nonzero(x: Flow) -> Array:
    """Tell where a quantity has a sign for sure."""
    return (x.low > 0) | (x.high < 0)


def is_graded(x: Flow) -> Array:
    """Tell where an exponential of a quantity neither vanishes nor overflows; single precision, which cannot, is let off."""
    limit = 700.0 if x.low.dtype == jnp.float64 else jnp.inf
    return (x.low > -limit) & (x.high < limit)


def is_inside(x: Flow, low: float, high: float) -> Bool[Array, "..."]:
    """Tell where a quantity provably lies in (low, high]."""
    return (x.low > low) & (x.high <= high)


def hull(flows: list[Flow]) -> Flow:
    """Return what contains all of several quantities."""
    out = flows[0]
    for x in flows[1:]:
        out = Flow(jnp.minimum(out.low, x.low), jnp.maximum(out.high, x.high), out.is_analytic & x.is_analytic)
    return out


def _bounded(low: Array, high: Array, is_analytic: Array) -> Flow:
    """Return a flow whose bounds may be nan, from infinity minus itself or times 0: then there are none."""
    unknown = jnp.isnan(low) | jnp.isnan(high)
    return Flow(jnp.where(unknown, -jnp.inf, low), jnp.where(unknown, jnp.inf, high), is_analytic)


def add(x: Flow, y: Flow) -> Flow:
    """Add."""
    return _bounded(x.low + y.low, x.high + y.high, x.is_analytic & y.is_analytic)


def negative(x: Flow) -> Flow:
    """Change the sign."""
    return Flow(-x.high, -x.low, x.is_analytic)


def product(x: Flow, y: Flow) -> Flow:
    """Multiply."""
    ends = jnp.stack([a * b for a in (x.low, x.high) for b in (y.low, y.high)])
    return _bounded(ends.min(0), ends.max(0), x.is_analytic & y.is_analytic)


def reciprocal(x: Flow) -> Flow:
    """Divide 1 by a quantity that cannot be zero."""
    safe = is_nonzero(x)
    low = jnp.where(safe, 1.0 / jnp.where(safe, x.high, 1.0), -jnp.inf)
    high = jnp.where(safe, 1.0 / jnp.where(safe, x.low, 1.0), jnp.inf)
    return Flow(low, high, x.is_analytic & safe)


def power(x: Flow, exponent: int) -> Flow:
    """Raise to a power that is a known integer."""
    if exponent < 0:
        return reciprocal(power(x, -exponent))
    if exponent == 0:
        return as_flow(jnp.ones(x.low.shape))
    a, b = x.low**exponent, x.high**exponent
    proved = x.is_analytic & (jnp.isfinite(a) & jnp.isfinite(b) | (exponent <= 2))
    if exponent % 2:
        return Flow(a, b, proved)
    return Flow(jnp.where(is_nonzero(x), jnp.minimum(a, b), 0.0), jnp.maximum(a, b), proved)


def real_power(base: Flow, exponent: Flow, is_fixed: bool) -> Flow:
    """Raise a positive quantity to any power, or any quantity to a fixed whole one."""
    positive = is_positive(base)
    logarithm = Flow(
        jnp.log(jnp.where(positive, base.low, 1.0)),
        jnp.log(jnp.where(positive, base.high, 1.0)),
        base.is_analytic & positive,
    )
    multiple = product(logarithm, exponent)
    out = increasing(jnp.exp, multiple, is_graded(multiple))
    if not is_fixed:
        return out
    whole = ~positive & (exponent.low >= 0) & (exponent.low == jnp.floor(exponent.low))
    at_least = jnp.where(exponent.low % 2 == 0, 0.0, -jnp.inf)
    return Flow(
        jnp.where(whole, at_least, out.low),
        jnp.where(whole, jnp.inf, out.high),
        jnp.where(whole, base.is_analytic, out.is_analytic),
    )


def increasing(function: Callable, x: Flow, is_in_domain: Array | None = None) -> Flow:
    """Apply an increasing analytic function."""
    inside = jnp.ones(x.low.shape, bool) if is_in_domain is None else is_in_domain
    low, high = (function(jnp.where(inside, end, 1.0)) for end in (x.low, x.high))
    return Flow(jnp.where(inside, low, -jnp.inf), jnp.where(inside, high, jnp.inf), x.is_analytic & inside)


def absolute(x: Flow) -> Flow:
    """Take the absolute value of a quantity that has a sign."""
    flipped, is_negative = negative(x), x.high < 0
    low, high = jnp.where(is_negative, flipped.low, x.low), jnp.where(is_negative, flipped.high, x.high)
    return Flow(low, high, x.is_analytic & is_nonzero(x))


def larger(x: Flow, y: Flow) -> Flow:
    """Take the larger of two quantities, where it is always the same one of them."""
    is_first, is_second = x.low >= y.high, y.low >= x.high
    low, high, proved = (jnp.where(is_first, a, b) for a, b in zip(x[:3], y[:3], strict=True))
    return Flow(low, high, proved & (is_first | is_second))


def smaller(x: Flow, y: Flow) -> Flow:
    """Take the smaller of two quantities, where it is always the same one of them."""
    return negative(larger(negative(x), negative(y)))


def truth(is_true: Array, is_false: Array, is_analytic: Array) -> Flow:
    """Return a truth value, a constant where it is decided."""
    low, high = is_true & is_analytic, ~(is_false & is_analytic)
    return Flow(low.astype(float), high.astype(float), low == high)


def compare(name: str, x: Flow, y: Flow) -> Flow:
    """Decide a comparison of two quantities that cannot meet."""
    below, above = x.high < y.low, x.low > y.high
    apart, never = below | above, jnp.zeros(jnp.shape(below), bool)
    is_true = {"lt": below, "le": below, "gt": above, "ge": above, "ne": apart, "eq": never}[name]
    is_false = {"lt": above, "le": above, "gt": below, "ge": below, "ne": never, "eq": apart}[name]
    return truth(is_true, is_false, x.is_analytic & y.is_analytic)


def finiteness(x: Flow) -> Flow:
    """Decide that a quantity is neither infinite nor nan."""
    bounded = jnp.isfinite(x.low) & jnp.isfinite(x.high)
    return truth(bounded, jnp.zeros(bounded.shape, bool), x.is_analytic)
