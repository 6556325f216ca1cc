"""The domain of weighted sums of a simplex's elements: it shows that 1 - p_1 - p_2 is positive.

Intervals for the single elements do not contain the fact that they add up to 1. So a quantity that is a weighted sum of the
elements of one row of a simplex latent carries its weights: 1 is the sum with weights (1, ..., 1), and 1 - p_1 the sum with
weights (0, 1, ..., 1). A weighted sum lies between its smallest and its largest weight. The ratio of two sums lies between the
smallest and the largest ratio of their weights, which shows that p_2 / (1 - p_1) is below 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.program.jaxpr.primitives import Kind, apply_per_column, describe_primitive, index_operands
from ppl_bandit.runtime.jax_adapter import apply_primitive

__all__ = ["SimplexSum", "ratio_bounds", "simplex_elements", "sum_bounds", "sums_of_results"]

_ANY_ROW = -1.0  # the row of a constant, which is a weighted sum over any row


class SimplexSum(NamedTuple):
    """A weighted sum of the elements of one row of a simplex, elementwise.

    Attributes:
        site: which simplex latent.
        row: which of its rows; -1 for a constant.
        weights: one for each element of the row; nan where the quantity is no such sum.
    """

    site: int
    row: Float[Array, "..."]
    weights: Float[Array, "... K"]


def simplex_elements(site: int, shape: tuple[int, ...]) -> SimplexSum:
    """Return the elements of a simplex latent as weighted sums of themselves."""
    size = shape[-1]
    rows = jnp.arange(jnp.zeros(shape[:-1]).size, dtype=float).reshape(*shape[:-1], 1)
    return SimplexSum(site, jnp.broadcast_to(rows, shape), jnp.broadcast_to(jnp.eye(size), (*shape, size)))


def sums_of_results(eqn: Any, values: Sequence[SimplexSum | Array | None]) -> list[SimplexSum] | None:
    """Return the results of an equation as weighted sums; None if they are not.

    Args:
        values: for each operand its weighted sum, an array if no latent reaches it, or None if it is neither.
    """
    name, kind = eqn.primitive.name, describe_primitive(eqn).kind
    own = [value for value in values if isinstance(value, SimplexSum)]
    if not own or any(value is None for value in values) or len({(s.site, s.weights.shape[-1]) for s in own}) > 1:
        return None
    fixed = index_operands(eqn)
    given: list[Any] = [value if i in fixed else _as_sum(value, own[0]) for i, value in enumerate(values)]
    if name in ("add", "add_any", "sub"):
        x, y = (_broadcast(value, eqn.outvars[0].aval.shape) for value in given)
        return [_combined(x, y, x.weights - y.weights if name == "sub" else x.weights + y.weights)]
    if name == "neg":
        return [given[0]._replace(weights=-given[0].weights)]
    if name in ("mul", "div") and len(own) == 1 and (name == "mul" or isinstance(values[0], SimplexSum)):
        factor = next(jnp.asarray(value, float) for value in values if not isinstance(value, SimplexSum))
        x = _broadcast(own[0], eqn.outvars[0].aval.shape)
        return [x._replace(weights=x.weights * factor[..., None] if name == "mul" else x.weights / factor[..., None])]
    if name in ("reduce_sum", "cumsum"):
        return [_summed(eqn, given[0])]
    if name == "convert_element_type" or kind is Kind.IDENTITY:
        return given
    if kind in (Kind.MOVE, Kind.CHOICE):
        rows = apply_primitive(eqn, [value if i in fixed else value.row for i, value in enumerate(given)])
        weights = apply_per_column(eqn, [v if i in fixed else v.weights for i, v in enumerate(given)])
        return [SimplexSum(own[0].site, *pair) for pair in zip(rows, weights, strict=True)]
    return None


def sum_bounds(x: SimplexSum, least: float) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return bounds of weighted sums of elements that are at least `least`; infinite where there are none."""
    low, high = x.weights.min(axis=-1), x.weights.max(axis=-1)
    inside = least * (high - low)  # the element with the other extreme weight is at least `least`
    return jnp.where(jnp.isnan(low), -jnp.inf, low + inside), jnp.where(jnp.isnan(high), jnp.inf, high - inside)


def ratio_bounds(x: SimplexSum, y: SimplexSum) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return bounds of the ratio of two weighted sums, the second without negative weights; infinite where there are none."""
    above, below = jnp.broadcast_arrays(_combined(x, y, x.weights + 0.0 * y.weights).weights, y.weights)
    is_weighted = below > 0
    ratio = jnp.where(
        is_weighted, above / jnp.where(is_weighted, below, 1.0), jnp.where(above == 0, jnp.nan, above * jnp.inf)
    )
    is_bounded = jnp.all(below >= 0, axis=-1) & jnp.any(is_weighted, axis=-1) & ~jnp.any(jnp.isnan(above), axis=-1)
    low, high = jnp.nanmin(ratio, axis=-1), jnp.nanmax(ratio, axis=-1)
    return jnp.where(is_bounded, low, -jnp.inf), jnp.where(is_bounded, high, jnp.inf)


def _as_sum(value: Any, like: SimplexSum) -> SimplexSum:
    if isinstance(value, SimplexSum):
        return value
    constant = jnp.asarray(value, float)
    weights = jnp.broadcast_to(constant[..., None], (*constant.shape, like.weights.shape[-1]))
    return SimplexSum(like.site, jnp.full(constant.shape, _ANY_ROW), weights)


def _broadcast(x: SimplexSum, shape: tuple[int, ...]) -> SimplexSum:
    weights = jnp.broadcast_to(x.weights, (*shape, x.weights.shape[-1]))
    return x._replace(row=jnp.broadcast_to(x.row, shape), weights=weights)


def _combined(x: SimplexSum, y: SimplexSum, weights: Array) -> SimplexSum:
    """Return a sum over the row that two sums share; its weights are nan where their rows differ."""
    is_one_row = (x.row == y.row) | (x.row == _ANY_ROW) | (y.row == _ANY_ROW)
    return SimplexSum(x.site, jnp.maximum(x.row, y.row), jnp.where(is_one_row[..., None], weights, jnp.nan))


def _summed(eqn: Any, x: SimplexSum) -> SimplexSum:
    """Sum along axes, where all terms belong to one row."""
    axes = eqn.params["axes"] if eqn.primitive.name == "reduce_sum" else (eqn.params["axis"],)
    (weights,) = apply_per_column(eqn, [x.weights])
    last = jnp.max(x.row, axis=axes, keepdims=True)
    is_one_row = jnp.all((x.row == last) | (x.row == _ANY_ROW), axis=axes, keepdims=True)
    row, is_one_row = (jnp.broadcast_to(array, x.row.shape) for array in (last, is_one_row))
    if eqn.primitive.name == "reduce_sum":
        row, is_one_row = jnp.max(row, axis=axes), jnp.all(is_one_row, axis=axes)
    return SimplexSum(x.site, row, jnp.where(is_one_row[..., None], weights, jnp.nan))
