"""Certify new rows of data and add them to the data of the collapsed engine: to sums of statistics, or to a buffer of rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ppl_bandit.engines.inner.data_sums import (
    WeightedRows,
    changes_one_element,
    has_only_elements,
    one_element_change,
    row_statistics,
)
from ppl_bandit.engines.inner.density import (
    Coordinates,
    Natural,
    Posterior,
    coordinates_at,
    posterior_of,
    where_finite,
)
from ppl_bandit.engines.particles.weights import finite_log_weights, normalize_weights
from ppl_bandit.engines.proof.inspection import certificate_excess
from ppl_bandit.engines.rows import append_rows, read_buffer, row_mask
from ppl_bandit.engines.state import Particles, State
from ppl_bandit.engines.updates.chunks import MAX_NUMBERS, MAX_ROWS_AT_ONCE, join_chunks, split_chunks
from ppl_bandit.engines.updates.collapsed_posterior import (
    CollapsedPosterior,
    CovarianceRoots,
    StatisticsAtOuterValues,
    add_rows,
    statistics_at_particles,
)
from ppl_bandit.runtime.jax_adapter import (
    ConditionalTask,
    apply_where,
    compute_where_needed,
    run_where_needed,
)


class DataUpdate(NamedTuple):
    """New rows added to the data, before particles are moved.

    Attributes:
        log_targets: of the particles, with the new rows.
        log_mean_before: log of the particles' mean weight without the new rows, after older rows were discounted.
        common_change: change of the constant that all log targets share and leave out.
        path: (data, positions, fraction) -> log targets between the old data, 0, and the new data, 1; it closes over no traced
            value.
        data: the first argument of `path`.
        state_after: (particles after the path, whether they moved) -> the new state.
    """

    log_targets: Float[Array, " M"]
    log_mean_before: Float[Array, ""]
    common_change: Float[Array, ""]
    path: Callable[[Any, Array, Array], Array]
    data: Any
    state_after: Callable[[Particles, Array], State]


def certify_and_summarize(
    posterior: CollapsedPosterior, state: State, picked: Any, laws: Posterior, data: WeightedRows
) -> tuple[Any, Float[Array, " N"]]:
    """Certify rows at a few outer values; return their summary, () without one, and how close each comes to failing.

    Args:
        picked: outer values, (V, ...) each.
        laws: of the inner sites at these outer values, before these rows.
    """
    model, split, summary, _ = posterior
    num_rows = data.weights.shape[0]
    chunks, is_row = split_chunks(data, num_rows, min(num_rows, MAX_ROWS_AT_ONCE))
    chunks = chunks._replace(
        rows=chunks.rows._replace(mask=chunks.rows.mask & is_row), weights=jnp.where(is_row, chunks.weights, 0.0)
    )
    first = jax.tree.map(lambda leaf: leaf[0], picked)

    def read_chunk(chunk: WeightedRows) -> tuple[Any, Array]:
        excess = certificate_excess(model, split, state.centre, picked, laws, chunk.rows)
        if summary is None:
            return (), excess
        kept, distance = summary.summarize(state.centre, first, chunk)
        return kept, jnp.maximum(excess, distance)

    kept, excess = jax.lax.map(read_chunk, chunks)
    kept = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), kept)
    # If all rows are masked, they may hold values without a derivative.
    kept = jax.tree.map(lambda leaf: jnp.where(jnp.any(row_mask(data.rows)), leaf, 0.0), kept)
    return kept, join_chunks(excess, num_rows)


def add_to_sums(
    posterior: CollapsedPosterior, state: State, new: WeightedRows, fresh: Any, keep: Float[Array, ""]
) -> DataUpdate:
    """Add rows to sums of statistics.

    Args:
        fresh: the sums of the new rows.
        keep: the weight that older rows keep.
    """
    summary, centre = posterior.summary, state.centre
    assert summary is not None
    discounted = (
        state.data_statistics
        if posterior.discount == 1.0
        else jax.tree.map(lambda leaf: keep * leaf, state.data_statistics)
    )
    kept = jax.tree.map(jnp.add, discounted, fresh)

    def path(data: Any, positions: Array, fraction: Array) -> Array:
        centre, before, after = data
        here = jax.tree.map(lambda old, new: old + fraction * (new - old), before, after)
        return posterior.log_targets(posterior.statistics_at(centre, positions), here)

    def state_after(moved: Particles, has_moved: Array) -> State:
        recentre = summary.recentre
        new_centre = centre
        if recentre is not None:
            new_centre = compute_where_needed(mean_of, (centre, kept, moved.positions), centre, has_moved)
        shifted = kept if recentre is None else recentre(kept, centre, new_centre)
        common_constant = summary.common_constant(kept) - summary.common_constant(shifted)
        outer, roots_after = _cached_after(posterior, state, roots, (new_centre, moved.positions, shifted), has_moved)
        return state._replace(
            buffer=state.buffer._replace(num_rows=state.buffer.num_rows + jnp.sum(row_mask(new.rows))),
            data_statistics=shifted,
            centre=new_centre,
            particles=moved._replace(log_targets=moved.log_targets + common_constant),
            outer_statistics=outer,
            roots=roots_after,
        )

    def mean_of(data: Any) -> Coordinates:
        """Return the means of the inner sites at the mean of the particles."""
        layout, (centre, kept, positions) = posterior.split.layout, data
        total = posterior.total(posterior.statistics_at(centre, jnp.mean(positions, axis=0)[None]), kept)
        natural = jax.tree.map(lambda leaf: leaf[..., 0], total)
        return where_finite(coordinates_at(layout, posterior_of(layout, natural, centre)), centre)

    outer_statistics = statistics_at_particles(posterior, state)
    before = _log_mean_before(posterior, state, outer_statistics, discounted)
    common = summary.common_constant(kept) - summary.common_constant(discounted)
    roots = None if state.roots is None else add_rows(state.roots, fresh)
    if _can_accumulate(posterior, centre.real.dtype):
        layout, own = posterior.split.layout, posterior.total(outer_statistics, discounted)
        gained = jax.vmap(lambda each: one_element_change(layout, each, fresh), in_axes=-1)(own)
        log_targets = compute_where_needed(
            lambda data: posterior.log_targets(*data),
            (outer_statistics, kept),
            state.particles.log_targets + state.particles.log_weights + gained,
            ~changes_one_element(fresh),
        )
    else:
        log_targets = posterior.log_targets(outer_statistics, kept, roots)
    return DataUpdate(log_targets, before, common, path, (centre, state.data_statistics, kept), state_after)


def _log_mean_before(
    posterior: CollapsedPosterior, state: State, statistics: StatisticsAtOuterValues, discounted: Any
) -> Float[Array, ""]:
    """Return the log of the particles' mean weight before new rows, with older rows discounted."""
    log_weights = state.particles.log_weights
    if posterior.discount < 1.0:
        log_weights = posterior.log_targets(statistics, discounted) - state.particles.log_targets
    return normalize_weights(finite_log_weights(log_weights)).log_mean


def _can_accumulate(posterior: CollapsedPosterior, dtype: Any) -> bool:
    """Return whether each row's change can be added to the log targets without losing precision.

    After a million rows, the roundings of integrals of some thousands of nats add up to 1e-9 nats in double precision.
    """
    is_separate = posterior.split.has_shared_statistics and has_only_elements(posterior.split.layout)
    return is_separate and posterior.discount == 1.0 and dtype == jnp.float64


def add_to_buffer(
    posterior: CollapsedPosterior, state: State, new: WeightedRows, fresh: Any, keep: Float[Array, ""]
) -> DataUpdate:
    """Append rows to the buffer, and their statistics to each particle's own sum; a refresh computes that from all rows."""
    del fresh
    model, split, centre, discount = posterior.model, posterior.split, state.centre, posterior.discount
    buffer = append_rows(model, state.buffer, new.rows, merges=discount == 1.0)
    old_weights, data = read_buffer(state.buffer, discount).weights, WeightedRows(*read_buffer(buffer, discount)[:2])
    discounted = jax.tree.map(lambda leaf: keep * leaf, state.data_statistics)
    capacity = max(1, buffer.arm.shape[0])
    batch = max(1, min(state.particles.positions.shape[0], MAX_NUMBERS // capacity))

    def over_particles(function: Callable[[Any], Any], positions: Array) -> Any:
        # As one vector each: `lax.map` cannot batch arrays without elements.
        _, unravel = ravel_pytree(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, positions[0]))
        )
        flat = jax.lax.map(lambda x: ravel_pytree(function(x))[0], positions, batch_size=batch)
        return jax.vmap(unravel, out_axes=-1)(flat)

    def statistics_at(position: Array, rows: WeightedRows) -> Natural:
        return row_statistics(model, split, centre, split.space.constrain(position)[0], rows)

    def path(given: Any, positions: Array, fraction: Array) -> Array:
        centre, old_weights, data = given
        here = data._replace(weights=old_weights + fraction * (data.weights - old_weights))

        def target(position: Array) -> Array:
            rows = row_statistics(model, split, centre, split.space.constrain(position)[0], here)
            own = jax.tree.map(lambda leaf: leaf[..., None], rows)
            return posterior.log_targets(posterior.statistics_at(centre, position[None]), own)[0]

        return over_particles(target, positions)

    added = over_particles(lambda x: statistics_at(x, new), state.particles.positions)
    added = jax.tree.map(lambda leaf: jnp.where(jnp.any(row_mask(new.rows)), leaf, 0.0), added)
    kept = jax.tree.map(jnp.add, discounted, added)

    def state_after(moved: Particles, has_moved: Array) -> State:
        own = jax.lax.cond(
            has_moved,
            lambda positions: over_particles(lambda x: statistics_at(x, data), positions),
            lambda _: kept,
            moved.positions,
        )
        outer, _ = _cached_after(posterior, state, None, (centre, moved.positions, own), has_moved)
        return state._replace(
            buffer=buffer,
            data_statistics=own,
            particles=moved,
            outer_statistics=outer,
        )

    outer_statistics = statistics_at_particles(posterior, state)
    before = _log_mean_before(posterior, state, outer_statistics, discounted)
    log_targets = posterior.log_targets(outer_statistics, kept)
    return DataUpdate(log_targets, before, jnp.zeros_like(before), path, (centre, old_weights, data), state_after)


def _cached_after(
    posterior: CollapsedPosterior, state: State, roots: CovarianceRoots | None, moved: Any, has_moved: Array
) -> tuple[StatisticsAtOuterValues | None, CovarianceRoots | None]:
    """Return what the state caches for its particles.

    Args:
        roots: if no particle has moved.
        moved: centre, positions and data if particles have moved.
    """
    if state.outer_statistics is None:
        return None, None

    def compute(data: tuple[Coordinates, Array, Any]) -> Any:
        centre, positions, summary = data
        return posterior.cached(posterior.statistics_at(centre, positions), summary)

    def run(task: ConditionalTask) -> Any:
        # `lax.cond` would copy the roots where they stay.
        return apply_where(task.is_needed, lambda _: compute(task.data), task.otherwise)

    return run_where_needed(run, ConditionalTask(moved, (state.outer_statistics, roots), has_moved))
