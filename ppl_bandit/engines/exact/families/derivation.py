"""Read the natural parameters of a log density off its derivatives at one point."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.element_blocks import nothing, pick, where_member
from ppl_bandit.engines.exact.families.families import Coordinates, Layout, Natural, blocks_of, by_block
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow

__all__ = ["derive"]


def derive(
    layout: Layout, log_density: Callable[[Coordinates], Array], point: Coordinates, *, as_arrow: bool = False
) -> Natural:
    """Read the natural parameters of a log density off its derivatives at a point, which is the centre of its reals.

    Where the log density is not affine in the sufficient statistics the result is meaningless: the certificate tells.
    Second derivatives between families vanish if it is, so one product with the Hessian serves all of the elementwise
    families, and one per place in a block serves all of the Gaussian blocks.

    Args:
        as_arrow: whether to return the quadratics as what the layout's leaves and core may have. No more is read of them in any
            case, with one product for all leaves at once.
    """
    gradient_of = jax.grad(log_density)
    gradient, pull = jax.linearize(gradient_of, point)
    zeros = jax.tree.map(jnp.zeros_like, point)
    unit, simplex = nothing((0, 2), point.unit.dtype), list[Array]()
    log_scale = scale = u = nothing((0,), point.positive.dtype)
    if point.unit.size or point.positive.size or point.simplex:
        first = tuple(jnp.zeros_like(rows).at[..., 0].set(1.0) for rows in point.simplex)
        ones = zeros._replace(unit=jnp.ones_like(point.unit), positive=jnp.ones_like(point.positive), simplex=first)
        curve = pull(ones)
    if point.unit.size:
        w = jax.nn.sigmoid(point.unit)
        both = -curve.unit / (w * (1.0 - w))
        success = gradient.unit + w * both
        unit = _as_counts(jnp.stack([success, both - success], axis=-1))
    for logits, slope, bend in zip(
        point.simplex, gradient.simplex, curve.simplex if point.simplex else (), strict=True
    ):
        p = jax.nn.softmax(logits, axis=-1)
        total = -bend[..., 0] / (p[..., 0] * (1.0 - p[..., 0]))
        simplex.append(_as_counts(slope + total[..., None] * p))
    if point.positive.size:
        # Along log u the density is a log u + b u: where b u is large the slope a + b u has lost the digits of a, so a is read
        # where b u is at most 1.
        shift = jnp.log1p(jnp.abs(curve.positive))
        slope_there = gradient_of(point._replace(positive=point.positive - shift)).positive
        log_scale = _as_counts(slope_there - curve.positive * jnp.exp(-shift))
        u = jnp.exp(point.positive)
        scale = curve.positive / u
    read = _derive_arrows if as_arrow or layout.leaves[0] else _derive_reals
    linear, quadratic = read(layout, gradient.real, pull, zeros, u)
    if isinstance(quadratic, Arrow) and not as_arrow:
        quadratic = arrow_matrices.as_matrix(quadratic)
    return Natural(unit, tuple(simplex), log_scale, scale, linear, quadratic)


def _as_counts(coefficients: Array) -> Array:
    """Round to halves what differs from one by rounding alone: counts stay whole however many rewards are added up."""
    halves = jnp.round(2.0 * coefficients) / 2.0
    tolerance = 8.0 * jnp.finfo(coefficients.dtype).eps * jnp.maximum(1.0, jnp.abs(coefficients))
    return jnp.where(jnp.abs(coefficients - halves) <= tolerance, halves, coefficients)


def _derive_reals(
    layout: Layout, gradient: Float[Array, " D"], pull: Callable, zeros: Coordinates, u: Float[Array, " G"]
) -> tuple[Array, Array]:
    """Read the linear and quadratic coefficients of the Gaussian blocks."""
    num_blocks, size = layout.members.shape
    if not gradient.size:
        return nothing((num_blocks, size), gradient.dtype), nothing((num_blocks, size, size), gradient.dtype)
    directions = jnp.asarray(layout.along_places, gradient.dtype)
    bends = jax.vmap(lambda v: pull(zeros._replace(real=v)).real)(directions)  # (S, D)
    linear = blocks_of(layout, gradient)
    quadratic = -where_member(layout.is_pair, jnp.moveaxis(pick(bends, layout.members), 0, 1))  # (R, S, S)
    if np.all(layout.owner < 0):
        return linear, quadratic
    unit = by_block(layout, u, 1.0)
    return linear / unit[:, None], quadratic / unit[:, None, None]


def _derive_arrows(
    layout: Layout, gradient: Float[Array, " D"], pull: Callable, zeros: Coordinates, u: Float[Array, " G"]
) -> tuple[Array, Arrow]:
    """Read the coefficients of Gaussian blocks whose leaves are tied by the core alone: leaves do not disturb each other."""
    (num_blocks, size), (num_leaves, leaf_size) = layout.members.shape, layout.leaves
    first_core = num_leaves * leaf_size
    shape = (num_blocks, num_leaves, leaf_size)
    if not gradient.size:
        leaves, cross, core = (*shape, leaf_size), (*shape, size - first_core), (num_blocks, 0, 0)
        empty = Arrow(*(nothing(each, gradient.dtype) for each in (leaves, cross, core)))
        return nothing((num_blocks, size), gradient.dtype), empty
    along = layout.along_places
    by_place = along[:first_core].reshape(num_leaves, leaf_size, gradient.size).sum(axis=0)
    directions = jnp.asarray(np.concatenate([by_place, along[first_core:]]), gradient.dtype)
    bends = jax.vmap(lambda v: pull(zeros._replace(real=v)).real)(directions)  # (s + c, D)
    linear = blocks_of(layout, gradient)
    found = -jnp.moveaxis(pick(bends, layout.members), 0, -1)  # (R, S, s + c)
    if np.any(layout.owner >= 0):
        unit = by_block(layout, u, 1.0)
        linear, found = linear / unit[:, None], found / unit[:, None, None]
    of_leaves = found[:, :first_core].reshape(*shape, found.shape[-1])
    is_pair = arrow_matrices.as_arrow(layout.is_pair, num_leaves, leaf_size)
    parts = Arrow(of_leaves[..., :leaf_size], of_leaves[..., leaf_size:], found[:, first_core:, leaf_size:])
    return linear, jax.tree.map(where_member, is_pair, parts)
