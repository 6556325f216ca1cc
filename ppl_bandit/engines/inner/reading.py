"""Read rows of data (derive their natural parameters) and certify them.

Every engine that needs a conjugate likelihood uses `certify`: when a program is examined, when the exact engine or a
filter absorbs data, and when the collapsed engine does so at fixed outer values. Between reading and certificate the rows are
absorbed, because they are also certified where the posterior is after them.

Rows are read one by one or, given weights, as one weighted sum. Only the sum of the log likelihoods enters a posterior, so it
suffices that the sum is affine, and its certificate costs a fraction of one per row. A deviation that cancels in the sum at
random points is not in the posterior either.
"""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.inner.density import (
    Coordinates,
    Natural,
    Posterior,
    absorb,
    constant_after,
    coordinates_at,
    discount_towards_prior,
    is_resolved,
    latents_at,
    natural_of,
    relative_to,
)
from ppl_bandit.engines.inner.gaussian import blocks_of, by_block, take, zero_padding
from ppl_bandit.engines.inner.layout import POSITIVE, Layout
from ppl_bandit.engines.inner.registry import family_of_group
from ppl_bandit.engines.proof.certificate import (
    NO_RESIDUAL,
    Residual,
    middle_of,
    regions_for,
    residual_of,
    worst_of,
)
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import log_prob
from ppl_bandit.runtime.compile_ahead import traced_once
from ppl_bandit.types import Interaction


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


class RowReadings(NamedTuple):
    """What was read from rows; with weights N is 1, the weighted sum.

    Attributes:
        naturals: natural parameters with leading axes (N, groups of outcomes); 0 for a row that is masked or not sound.
        is_possible: whether the program can produce the row.
        is_sound: whether it can, and the natural parameters are finite.
    """

    naturals: Natural
    is_possible: Bool[Array, " N"]
    is_sound: Bool[Array, " N"]


class ChunkEvidence(NamedTuple):
    """The evidence for a chunk of N rows.

    Attributes:
        residuals: of the rows; infinite for a row that the program cannot produce, 0 for a masked one.
        in_prior: how far the prior is from affine where the posterior is now; None if it is not compared.
        is_possible: whether the program can produce each row, or, of a sum, all rows that count.
        is_held: whether jax's precision holds the posterior.
    """

    residuals: Residual
    in_prior: Any  # a `Residual` or None
    is_possible: Bool[Array, "..."]
    is_held: Bool[Array, ""] | bool


def read_rows(
    model: RewardModel,
    layout: Layout,
    centre: Coordinates,
    rows: Interaction,
    *,
    weights: Float[Array, " N"] | None = None,
) -> RowReadings:
    """Derive the natural parameters of rows, and check that the program can produce them.

    Args:
        weights: weights of the rows' log likelihoods, to read their sum; None to read each row.
    """

    def read(rows: Interaction, weights: Float[Array, " n"]) -> RowReadings:
        log_likelihoods, num_groups = _log_likelihoods(model, layout, rows, weights), len(model.outcome_groups)

        def derive_group(one: Float[Array, " groups"]) -> Natural:
            return derive(layout, lambda point: one @ log_likelihoods(point), centre)

        naturals = jax.vmap(derive_group)(jnp.eye(num_groups))
        is_possible = jnp.all((rows.arm >= 0) & (rows.arm < model.num_arms))
        is_possible &= jnp.all(jnp.isfinite(log_likelihoods(centre)))
        for is_inside in model.in_support(latents_at(layout, centre), rows).values():
            is_possible &= jnp.all(is_inside)
        is_possible &= jnp.all(jnp.asarray(model.indexes_inside(rows.context)))
        is_sound = is_possible
        for leaf in jax.tree.leaves(naturals):
            if leaf.size:
                is_sound &= jnp.all(jnp.isfinite(leaf))
        # Padding and impossible rows may hold anything.
        is_counted = is_sound if weights is not None or rows.mask is None else is_sound & rows.mask[0]
        return RowReadings(jax.tree.map(lambda leaf: jnp.where(is_counted, leaf, 0.0), naturals), is_possible, is_sound)

    return jax.vmap(read)(*_batches(rows, weights, centre))


def certify(
    model: RewardModel,
    layout: Layout,
    before: Posterior,
    rows: Interaction,
    num_points: tuple[int, int],
    *,
    weights: Float[Array, " N"] | None = None,
    as_sum: bool = False,
    centre: Coordinates | None = None,
    prior: Posterior | None = None,
    keep: Float[Array, ""] | None = None,
    variant: Int[Array, ""] | int = 0,
    after: Posterior | None = None,
) -> tuple[Posterior, ChunkEvidence]:
    """Read rows, absorb and certify them; return the posterior with them, and the evidence.

    All rows are read at the same point, so that their parameters add up. They are certified around that point, and where the
    posterior is with them; each group of outcomes is compared with its affine form by itself. With precisions as arrows the
    constant stays that of `absorb`, and `is_held` is not found.

    Args:
        num_points: random points around the point of reading, and where the posterior is.
        weights: of the rows' log likelihoods; None for 1.
        as_sum: whether the weighted sum is read and certified, and not every row.
        centre: where the rows are read, if not at the means of `before`.
        prior: is certified too, and what the posterior is discounted towards; None for neither.
        keep: the weight that the posterior keeps against the prior; None for 1.
        variant: of the points around the point of reading; see `regions_for`.
        after: the posterior with them, if known; or where they are certified, if they are not absorbed.
    """
    read_at = coordinates_at(layout, before) if centre is None else centre
    each = jnp.ones(rows.arm.shape[0], before.mean.dtype) if weights is None else weights
    of_sum = each if as_sum else None
    readings = read_rows(model, layout, read_at, rows, weights=of_sum)
    naturals = jax.tree.map(lambda leaf: leaf.sum(axis=1), readings.naturals)  # over the groups of outcomes
    total = jax.tree.map(lambda leaf: leaf[0] if as_sum else jnp.tensordot(each, leaf, axes=1), naturals)
    is_dense = not isinstance(before.precision, Arrow)
    if centre is not None:
        total = relative_to(layout, total, centre, coordinates_at(layout, before))
    if not is_dense:
        total = total._replace(quadratic=arrow_matrices.as_arrow(total.quadratic, *layout.leaves))
    start = before_rows = before
    if keep is not None and prior is not None:
        start, prior_share = discount_towards_prior(layout, before, prior, keep)
        total = jax.tree.map(jnp.add, total, prior_share)
        before_rows = absorb(layout, start, prior_share, 0)
    if after is None:
        after = absorb(layout, start, total, rows.arm.shape[0] if rows.mask is None else jnp.sum(rows.mask))

    regions = regions_for(layout, before, after, *num_points, variant=variant, centre=centre)
    here: Any = None
    if prior is not None:
        here = relative_to(layout, natural_of(layout, prior), coordinates_at(layout, prior), read_at)

    def compare(rows: Interaction, weights: Float[Array, " n"], own: Natural) -> tuple[Residual, Array]:
        if prior is not None:
            own = jax.tree.map(lambda first, rest: jnp.concatenate([first[None], rest]), here, own)
        densities = _log_likelihoods(model, layout, rows, weights, with_prior=prior is not None)
        return residual_of(layout, densities, own, read_at, regions, rows.arm.shape[0])

    found, values = jax.vmap(compare)(*_batches(rows, of_sum, read_at), readings.naturals)
    in_prior = None
    if prior is not None:
        in_prior, found = (jax.tree.map(operator.itemgetter(own), found) for own in ((0, 0), np.s_[:, 1:]))
        values = values[:, 1:]
    residuals = _where(readings.is_sound, jax.vmap(worst_of)(found), Residual(jnp.inf, 0.0, jnp.inf))
    if rows.mask is not None:
        residuals = _where(rows.mask, residuals, NO_RESIDUAL)
    real, densities = regions[1].points.real, jnp.sum(values, axis=1)
    is_held = is_resolved(layout, start, after, total, real[1:] - real[0]) if is_dense else True
    if layout.members.size and is_dense:  # else nothing large cancels in the constant
        density = densities[0] if as_sum else jnp.sum(each * densities)
        after = after._replace(constant=constant_after(layout, before_rows, after, middle_of(layout, after), density))
    return after, ChunkEvidence(residuals, in_prior, readings.is_possible, is_held)


def _where(condition: Bool[Array, " N"], chosen: Any, otherwise: Any) -> Any:
    return jax.tree.map(lambda own, other: jnp.where(condition, own, other), chosen, otherwise)


def _log_likelihoods(
    model: RewardModel, layout: Layout, rows: Interaction, weights: Float[Array, " n"], *, with_prior: bool = False
) -> Callable[[Coordinates], Float[Array, " terms"]]:
    """Return point -> weighted log likelihood of rows, by group of outcomes that depend on each other.

    By group, since the terms of one outcome could hide a deviation in another; not by outcome, since for dependent outcomes
    (such as a count, and how many of the rest) only the sum has a conjugate form.
    """

    @traced_once
    def evaluate(point: Coordinates) -> Float[Array, " terms"]:
        trace = model.trace(latents_at(layout, point), rows.arm, rows.context, model.outcome_values(rows.reward))
        by_outcome = {name: weights @ log_prob(trace[name], rows.mask) for name in model.outcomes}
        terms = [jnp.asarray(sum(by_outcome[name] for name in group)) for group in model.outcome_groups]
        return jnp.stack([model.log_prior_of(trace), *terms] if with_prior else terms)

    return evaluate


def _batches(rows: Interaction, weights: Float[Array, " N"] | None, centre: Coordinates) -> tuple[Any, Array]:
    """Return rows as N batches of one row each, or with weights as one batch, (B, n, ...), and weights (B, n)."""
    if weights is None:
        ones = jnp.ones((rows.arm.shape[0], 1), centre.real.dtype)
        return jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], rows), ones
    assert rows.mask is not None
    # Masked rows may hold values without a derivative: replace them by a copy of a row that counts.
    source = jnp.where(rows.mask, jnp.arange(rows.arm.shape[0]), jnp.argmax(rows.mask))
    filled = jax.tree.map(lambda leaf: jnp.asarray(leaf)[source], rows._replace(mask=None))
    return jax.tree.map(lambda leaf: leaf[None], filled), weights[None]
