"""Sums of the elements of one simplex, followed along a jaxpr: how 1 - p_1 - p_2 is known to be positive.

An interval for each element does not know that they add up to 1. So a quantity that is a weighted sum of the elements of one
row carries its weights: 1 is the sum with weights (1, ..., 1), and 1 - p_1 the one with weights (0, 1, ..., 1). A weighted sum
lies between its smallest and its largest weight, and the ratio of two lies between the smallest and the largest ratio of their
weights, which puts p_2 / (1 - p_1) below 1.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.runtime.jax_adapter import apply_primitive

__all__ = ["Shares", "followed", "ratio_bounds", "shares_of_rows", "sum_bounds"]

_NOBODY = -1.0  # the row of a constant, which is a sum over any


class Shares(NamedTuple):
    """Weights of a quantity, elementwise.

    Attributes:
        site: which simplex.
        row: which of its rows; -1 for a constant.
        weights: of the row's elements; nan where the quantity is no sum of them.
    """

    site: int
    row: Float[Array, "..."]
    weights: Float[Array, "... K"]


def shares_of_rows(site: int, shape: tuple[int, ...]) -> Shares:
    """Return the weights of a simplex latent's own elements."""
    size = shape[-1]
    rows = jnp.arange(jnp.zeros(shape[:-1]).size, dtype=float).reshape(*shape[:-1], 1)
    return Shares(site, jnp.broadcast_to(rows, shape), jnp.broadcast_to(jnp.eye(size), (*shape, size)))


def followed(eqn: Any, values: Sequence[Shares | Array | None], fixed: tuple[int, ...]) -> list[Shares] | None:
    """Return the weights of an equation's outputs, or None where they are no sums.

    Args:
        values: for each input its weights; an array for what no latent reaches; None for what is neither.
        fixed: inputs that say where elements go.
    """
    name, own = eqn.primitive.name, [value for value in values if isinstance(value, Shares)]
    if not own or any(value is None for value in values) or len({(s.site, s.weights.shape[-1]) for s in own}) > 1:
        return None
    given: list[Any] = [value if i in fixed else _as_shares(value, own[0]) for i, value in enumerate(values)]
    if name in ("add", "add_any", "sub"):
        x, y = (_spread(value, eqn.outvars[0].aval.shape) for value in given)
        return [_joined(x, y, x.weights - y.weights if name == "sub" else x.weights + y.weights)]
    if name == "neg":
        return [given[0]._replace(weights=-given[0].weights)]
    if name in ("mul", "div") and len(own) == 1 and (name == "mul" or isinstance(values[0], Shares)):
        factor = next(jnp.asarray(value, float) for value in values if not isinstance(value, Shares))
        x = _spread(own[0], eqn.outvars[0].aval.shape)
        return [x._replace(weights=x.weights * factor[..., None] if name == "mul" else x.weights / factor[..., None])]
    if name in ("reduce_sum", "cumsum"):
        return [_summed(eqn, given[0])]
    if name == "convert_element_type":
        return [given[0]]
    if name in _MOVES:
        return _moved(eqn, given, fixed)
    return None


def sum_bounds(shares: Shares, least: float) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return bounds of weighted sums of elements that are at least `least`; infinite where there are none."""
    low, high = shares.weights.min(axis=-1), shares.weights.max(axis=-1)
    inside = least * (high - low)  # the other end has a share of at least this
    return jnp.where(jnp.isnan(low), -jnp.inf, low + inside), jnp.where(jnp.isnan(high), jnp.inf, high - inside)


def ratio_bounds(x: Shares, y: Shares) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return bounds of the ratio of two weighted sums, the second without negative weights; infinite where there are none."""
    above, below = jnp.broadcast_arrays(_joined(x, y, x.weights + 0.0 * y.weights).weights, y.weights)
    is_share = below > 0
    ratio = jnp.where(
        is_share, above / jnp.where(is_share, below, 1.0), jnp.where(above == 0, jnp.nan, above * jnp.inf)
    )
    is_known = jnp.all(below >= 0, axis=-1) & jnp.any(is_share, axis=-1) & ~jnp.any(jnp.isnan(above), axis=-1)
    low, high = jnp.nanmin(ratio, axis=-1), jnp.nanmax(ratio, axis=-1)
    return jnp.where(is_known, low, -jnp.inf), jnp.where(is_known, high, jnp.inf)


# What moves elements around.
_MOVES = frozenset(
    (
        "broadcast_in_dim concatenate copy dynamic_slice expand_dims gather pad reshape rev select_n slice split squeeze stack "
        "tile transpose unstack"
    ).split()
)


def _as_shares(value: Any, like: Shares) -> Shares:
    if isinstance(value, Shares):
        return value
    constant = jnp.asarray(value, float)
    weights = jnp.broadcast_to(constant[..., None], (*constant.shape, like.weights.shape[-1]))
    return Shares(like.site, jnp.full(constant.shape, _NOBODY), weights)


def _spread(shares: Shares, shape: tuple[int, ...]) -> Shares:
    weights = jnp.broadcast_to(shares.weights, (*shape, shares.weights.shape[-1]))
    return shares._replace(row=jnp.broadcast_to(shares.row, shape), weights=weights)


def _joined(x: Shares, y: Shares, weights: Array) -> Shares:
    """Return weights of what is made of two quantities, nan where they belong to different rows."""
    is_one = (x.row == y.row) | (x.row == _NOBODY) | (y.row == _NOBODY)
    return Shares(x.site, jnp.maximum(x.row, y.row), jnp.where(is_one[..., None], weights, jnp.nan))


def _by_weight(eqn: Any, arrays: Sequence[Any], fixed: tuple[int, ...]) -> list[Array]:
    """Apply an equation to the weights of each element of the simplex."""
    axes = tuple(None if i in fixed else -1 for i in range(len(arrays)))
    return jax.vmap(lambda *args: apply_primitive(eqn, args), in_axes=axes, out_axes=-1)(*arrays)


def _summed(eqn: Any, x: Shares) -> Shares:
    """Sum along axes, where all of it belongs to one row."""
    axes = eqn.params["axes"] if eqn.primitive.name == "reduce_sum" else (eqn.params["axis"],)
    (weights,) = _by_weight(eqn, [x.weights], ())
    most = jnp.max(x.row, axis=axes, keepdims=True)
    is_one = jnp.all((x.row == most) | (x.row == _NOBODY), axis=axes, keepdims=True)
    row, is_one = (jnp.broadcast_to(array, x.row.shape) for array in (most, is_one))
    if eqn.primitive.name == "reduce_sum":
        row, is_one = jnp.max(row, axis=axes), jnp.all(is_one, axis=axes)
    return Shares(x.site, row, jnp.where(is_one[..., None], weights, jnp.nan))


def _moved(eqn: Any, given: Sequence[Any], fixed: tuple[int, ...]) -> list[Shares]:
    rows = apply_primitive(eqn, [value if i in fixed else value.row for i, value in enumerate(given)])
    weights = _by_weight(eqn, [value if i in fixed else value.weights for i, value in enumerate(given)], fixed)
    return [
        Shares(next(v.site for v in given if isinstance(v, Shares)), *pair) for pair in zip(rows, weights, strict=True)
    ]
