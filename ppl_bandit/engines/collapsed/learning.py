"""Take rows in: certify them, and add them to what is kept, as sums or as rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ppl_bandit.engines.collapsed.collapsed_posterior import (
    CollapsedPosterior,
    CollapsedState,
    StatisticsAtOuterValues,
    statistics_at_particles,
)
from ppl_bandit.engines.collapsed.data_summaries import WeightedRows, row_statistics
from ppl_bandit.engines.collapsed.inspection import certificate_excess
from ppl_bandit.engines.collapsed.statistics import (
    Statistics,
    changes_one_element,
    has_only_elements,
    one_element_change,
)
from ppl_bandit.engines.exact.certificate.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.families.posterior import Coordinates, Posterior, coordinates_at, posterior_of
from ppl_bandit.engines.particles.conditional_execution import compute_where_needed
from ppl_bandit.engines.particles.tempering import TemperingResult
from ppl_bandit.engines.particles.weights import finite_log_weights, normalize_weights
from ppl_bandit.engines.row_buffer import append_rows, read_buffer, row_mask

__all__ = ["Learnt", "learn_by_rows", "learn_by_sums", "read_new"]

_MAX_AT_ONCE = 1 << 21  # particles times rows read at once
_ROWS_AT_ONCE = 256  # certified at once


class Learnt(NamedTuple):
    """Rows taken in, before particles are moved.

    Attributes:
        ends: log targets of the particles with the new rows.
        before: log of their mean weight without them, older rows forgotten by the discount.
        common: what the new rows add to all log targets, and is left out of them.
        path: (data, positions, part) -> log targets, from the old data to the new; it closes over no traced value.
        data: what the path reads.
        settle: (moved, whether anything moved) -> the state.
    """

    ends: Float[Array, " M"]
    before: Float[Array, ""]
    common: Float[Array, ""]
    path: Callable[[Any, Array, Array], Array]
    data: Any
    settle: Callable[[TemperingResult, Array], CollapsedState]


def read_new(
    posterior: CollapsedPosterior, state: CollapsedState, picked: Any, laws: Posterior, data: WeightedRows
) -> tuple[Any, Float[Array, " N"]]:
    """Certify rows at a few outer values, and return what the summary keeps of them, and how close each row comes to failing.

    In chunks, so that memory is bounded; without a summary, nothing is kept here.

    Args:
        laws: of the inner sites at these outer values, before these rows.
    """
    model, split, summary, _ = posterior
    num_rows = data.weights.shape[0]
    chunks, is_row = split_chunks(data, num_rows, min(num_rows, _ROWS_AT_ONCE))
    chunks = chunks._replace(
        rows=chunks.rows._replace(mask=chunks.rows.mask & is_row), weights=jnp.where(is_row, chunks.weights, 0.0)
    )
    first = jax.tree.map(lambda leaf: leaf[0], picked)

    def read_chunk(chunk: WeightedRows) -> tuple[Any, Array]:
        residual = certificate_excess(model, split, state.centre, picked, laws, chunk.rows)
        if summary is None:
            return (), residual
        kept, distance = summary.summarize(state.centre, first, chunk)
        return kept, jnp.maximum(residual, distance)

    kept, residuals = jax.lax.map(read_chunk, chunks)
    kept = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), kept)
    # Padding may hold anything where no row counts.
    kept = jax.tree.map(lambda leaf: jnp.where(jnp.any(row_mask(data.rows)), leaf, 0.0), kept)
    return kept, join_chunks(residuals, num_rows)


def learn_by_sums(
    posterior: CollapsedPosterior, state: CollapsedState, new: WeightedRows, fresh: Any, keep: Float[Array, ""]
) -> Learnt:
    """Add rows to the sums of a summary.

    Args:
        fresh: the sums of the new rows.
        keep: what older rows still count for.
    """
    summary, centre = posterior.summary, state.centre
    assert summary is not None
    forgotten = (
        state.data_statistics
        if posterior.discount == 1.0
        else jax.tree.map(lambda leaf: keep * leaf, state.data_statistics)
    )
    kept = jax.tree.map(jnp.add, forgotten, fresh)

    def path(data: Any, positions: Array, part: Array) -> Array:
        centre, before, after = data
        here = jax.tree.map(lambda old, new: old + part * (new - old), before, after)
        return posterior.log_targets(posterior.statistics_at(centre, positions), here)

    def settle(moved: TemperingResult, has_moved: Array) -> CollapsedState:
        recentred = summary.recentre
        there = centre
        if recentred is not None:
            there = compute_where_needed(mean_of, (centre, kept, moved.positions), centre, has_moved)
        after = state._replace(
            buffer=state.buffer._replace(num_rows=state.buffer.num_rows + jnp.sum(row_mask(new.rows))),
            data_statistics=kept,
            particles=moved.positions,
            outer_statistics=_read_again(posterior, state, there, moved, has_moved),
            log_targets=moved.log_targets,
        )
        if recentred is None:
            return after
        shifted = recentred(kept, centre, there)
        return after._replace(
            data_statistics=shifted,
            centre=there,
            log_targets=after.log_targets + summary.common_constant(kept) - summary.common_constant(shifted),
        )

    def mean_of(data: Any) -> Coordinates:
        """Return the means of the inner sites at the middle of the particles."""
        layout, (centre, kept, positions) = posterior.split.layout, data
        total = posterior.total(posterior.statistics_at(centre, jnp.mean(positions, axis=0)[None]), kept)
        natural = jax.tree.map(lambda leaf: leaf[..., 0], total.natural)
        there = coordinates_at(layout, posterior_of(layout, natural, centre))
        return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(a), a, b), there, centre)

    reading = statistics_at_particles(posterior, state)
    before = _mean_before(posterior, state, reading, forgotten)
    common = summary.common_constant(kept) - summary.common_constant(forgotten)
    if _adds_up(posterior, centre.real.dtype):
        fresh_natural, layout = fresh.natural, posterior.split.layout
        own = posterior.total(reading, forgotten).natural
        gained = jax.vmap(lambda each: one_element_change(layout, each, fresh_natural), in_axes=-1)(own)
        ends = compute_where_needed(
            lambda data: posterior.log_targets(*data),
            (reading, kept),
            state.log_targets + state.log_weights + gained,
            ~changes_one_element(fresh_natural),
        )
    else:
        ends = posterior.log_targets(reading, kept)
    return Learnt(ends, before, common, path, (centre, state.data_statistics, kept), settle)


def _mean_before(
    posterior: CollapsedPosterior, state: CollapsedState, reading: StatisticsAtOuterValues, forgotten: Any
) -> Float[Array, ""]:
    """Return the log of the particles' mean weight before new rows, older ones forgotten by the discount."""
    if posterior.discount == 1.0:
        return state.log_mean
    return normalize_weights(finite_log_weights(posterior.log_targets(reading, forgotten) - state.log_targets)).log_mean


def _adds_up(posterior: CollapsedPosterior, dtype: Any) -> bool:
    """Tell whether log targets can be carried on from row to row by what each row changes, and digits last.

    A million rows add a million roundings of one element's integral, some thousands of nats: 1e-9 in double precision.
    """
    is_alone = posterior.split.has_shared_statistics and has_only_elements(posterior.split.layout)
    return is_alone and posterior.discount == 1.0 and dtype == jnp.float64


def learn_by_rows(
    posterior: CollapsedPosterior, state: CollapsedState, new: WeightedRows, fresh: Any, keep: Float[Array, ""]
) -> Learnt:
    """Append rows to the buffer, from which a refresh reads all again; in between each particle has a sum of its own."""
    del fresh
    model, split, centre, discount = posterior.model, posterior.split, state.centre, posterior.discount
    buffer = append_rows(model, state.buffer, new.rows, merges=discount == 1.0)
    old_weights, data = read_buffer(state.buffer, discount).weights, WeightedRows(*read_buffer(buffer, discount)[:2])
    forgotten = jax.tree.map(lambda leaf: keep * leaf, state.data_statistics)
    capacity = max(1, buffer.arm.shape[0])
    batch = max(1, min(state.particles.shape[0], _MAX_AT_ONCE // capacity))

    def over_particles(function: Callable[[Any], Any], positions: Array) -> Any:
        # As one vector each: what has no elements cannot be cut into batches.
        _, unravel = ravel_pytree(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, positions[0]))
        )
        flat = jax.lax.map(lambda x: ravel_pytree(function(x))[0], positions, batch_size=batch)
        return jax.vmap(unravel, out_axes=-1)(flat)

    def read_at(position: Array, rows: WeightedRows) -> Statistics:
        return row_statistics(model, split, centre, split.space.constrain(position)[0], rows)

    def path(given: Any, positions: Array, part: Array) -> Array:
        centre, old_weights, data = given
        here = data._replace(weights=old_weights + part * (data.weights - old_weights))

        def target(position: Array) -> Array:
            rows = row_statistics(model, split, centre, split.space.constrain(position)[0], here)
            own = jax.tree.map(lambda leaf: leaf[..., None], rows)
            return posterior.log_targets(posterior.statistics_at(centre, position[None]), own)[0]

        return over_particles(target, positions)

    read_new = over_particles(lambda x: read_at(x, new), state.particles)
    read_new = jax.tree.map(lambda leaf: jnp.where(jnp.any(row_mask(new.rows)), leaf, 0.0), read_new)
    kept = jax.tree.map(jnp.add, forgotten, read_new)

    def settle(moved: TemperingResult, has_moved: Array) -> CollapsedState:
        own = jax.lax.cond(
            has_moved,
            lambda positions: over_particles(lambda x: read_at(x, data), positions),
            lambda _: kept,
            moved.positions,
        )
        again = _read_again(posterior, state, centre, moved, has_moved)
        return state._replace(
            buffer=buffer,
            data_statistics=own,
            particles=moved.positions,
            outer_statistics=again,
            log_targets=moved.log_targets,
        )

    reading = statistics_at_particles(posterior, state)
    before = _mean_before(posterior, state, reading, forgotten)
    ends = posterior.log_targets(reading, kept)
    return Learnt(ends, before, jnp.zeros_like(state.log_evidence), path, (centre, old_weights, data), settle)


def _read_again(
    posterior: CollapsedPosterior, state: CollapsedState, centre: Coordinates, moved: TemperingResult, has_moved: Array
) -> StatisticsAtOuterValues | None:
    """Return what the particles say before any data, about a new centre, if they have moved."""
    if state.outer_statistics is None:
        return None
    return compute_where_needed(
        lambda data: posterior.statistics_at(*data), (centre, moved.positions), state.outer_statistics, has_moved
    )
