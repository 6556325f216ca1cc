"""Derive the natural parameters of a log density from its derivatives at one point."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.gaussian import blocks_of, by_block, take, zero_padding
from ppl_bandit.engines.exact.families.layout import POSITIVE, Layout
from ppl_bandit.engines.exact.families.posterior import Coordinates, Natural
from ppl_bandit.engines.exact.families.registry import family_of_group
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow


def derive(
    layout: Layout, log_density: Callable[[Coordinates], Array], point: Coordinates, *, as_arrow: bool = False
) -> Natural:
    """Derive the natural parameters and the constant of a log density, with real elements relative to `point`.

    If the log density is not affine in the sufficient statistics the result is meaningless; the certificate detects that. If it
    is, second derivatives between elements of different groups vanish, so one Hessian-vector product serves all groups, and one
    per column of a Gaussian block serves all blocks.

    Args:
        as_arrow: whether to return the quadratic coefficients as `Arrow`s.
    """

    def with_value(at: Coordinates) -> tuple[Array, Array]:
        value = log_density(at)
        return value, value

    gradient_of = jax.grad(with_value, has_aux=True)
    gradient, hessian_times, value = jax.linearize(gradient_of, point, has_aux=True)
    zeros = jax.tree.map(jnp.zeros_like, point)
    elements: dict[str, Any] = {}
    if point.elements:
        first = {group: _first_coordinates(group, own) for group, own in point.elements.items()}
        curvature = hessian_times(zeros._replace(elements=first)).elements
    for group, own in point.elements.items():

        def gradient_at(moved: Array, group: str = group) -> Array:
            return gradient_of(point._replace(elements={**point.elements, group: moved}))[0].elements[group]

        elements[group] = family_of_group(group).natural(own, gradient.elements[group], curvature[group], gradient_at)
    u = jnp.exp(point.elements[POSITIVE]) if layout.is_scaled else None
    linear, quadratic = _derive_blocks(layout, gradient.real, lambda v: hessian_times(zeros._replace(real=v)).real, u)
    # The terms of real elements vanish at `point`.
    terms = [jnp.sum(own * family_of_group(group).statistics(point.elements[group])) for group, own in elements.items()]
    constant = value - sum(terms, start=jnp.zeros_like(value))
    if as_arrow:
        return Natural(elements, linear, quadratic, constant)
    dense = arrow_matrices.as_matrix(quadratic) if layout.leaves[0] else quadratic.core
    return Natural(elements, linear, dense, constant)


def _first_coordinates(group: str, coordinates: Array) -> Array:
    """Return 1 at the first coordinate of each element, and 0 elsewhere."""
    if family_of_group(group).num_event_dims == 0:
        return jnp.ones_like(coordinates)
    return jnp.zeros_like(coordinates).at[..., 0].set(1.0)


def _derive_blocks(
    layout: Layout, gradient: Float[Array, " D"], hessian_times: Callable[[Array], Array], u: Float[Array, " G"] | None
) -> tuple[Array, Arrow]:
    """Return the linear and quadratic coefficients of the Gaussian blocks.

    The same column of all leaves goes into one Hessian-vector product: leaves have no second derivatives with each other.
    """
    (num_blocks, size), (num_leaves, leaf_size) = layout.members.shape, layout.leaves
    first_core = num_leaves * leaf_size
    shape = (num_blocks, num_leaves, leaf_size)
    if not gradient.size:
        leaves, cross, core = (*shape, leaf_size), (*shape, size - first_core), (num_blocks, 0, 0)
        empty = Arrow(*(jnp.zeros(each, gradient.dtype) for each in (leaves, cross, core)))
        return jnp.zeros((num_blocks, size), gradient.dtype), empty
    along = layout.along_columns
    by_column = along[:first_core].reshape(num_leaves, leaf_size, gradient.size).sum(axis=0)
    directions = jnp.asarray(np.concatenate([by_column, along[first_core:]]), gradient.dtype)
    products = jax.vmap(hessian_times)(directions)  # (s + c, D)
    linear = blocks_of(layout, gradient)
    found = -jnp.moveaxis(take(products, layout.members), 0, -1)  # (R, S, s + c)
    if u is not None:
        scale = by_block(layout, u, 1.0)
        linear, found = linear / scale[:, None], found / scale[:, None, None]
    of_leaves = found[:, :first_core].reshape(*shape, found.shape[-1])
    is_pair = arrow_matrices.as_arrow(layout.is_pair, num_leaves, leaf_size)
    parts = Arrow(of_leaves[..., :leaf_size], of_leaves[..., leaf_size:], found[:, first_core:, leaf_size:])
    return linear, jax.tree.map(zero_padding, is_pair, parts)
