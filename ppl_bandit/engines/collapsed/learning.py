"""Take rows in: certify them, and add them to what is kept, as sums or as rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ppl_bandit.engines.approximate.buffer import append, read, row_mask
from ppl_bandit.engines.collapsed.conditional import CollapsedState, Conditional, Reading, reading_of
from ppl_bandit.engines.collapsed.inspection import certify_rows
from ppl_bandit.engines.collapsed.particles import Moved, where_wanted
from ppl_bandit.engines.collapsed.statistics import Statistics, change_of_one, changes_one, has_only_elements
from ppl_bandit.engines.collapsed.stores import WeightedRows, read_rows
from ppl_bandit.engines.exact.certificate.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.families.families import Coordinates, Posterior, coordinates_at, posterior_of
from ppl_bandit.engines.particles.diagnostics import finite_weights, weigh

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
    settle: Callable[[Moved, Array], CollapsedState]


def read_new(
    posterior: Conditional, state: CollapsedState, picked: Any, laws: Posterior, data: WeightedRows
) -> tuple[Any, Float[Array, " N"]]:
    """Certify rows at a few outer values, and return what the store keeps of them, and how close each row comes to failing.

    In chunks, so that memory is bounded; without a store, nothing is kept here.

    Args:
        laws: of the inner sites at these outer values, before these rows.
    """
    model, split, store, _ = posterior
    num_rows = data.weights.shape[0]
    chunks, is_row = split_chunks(data, num_rows, min(num_rows, _ROWS_AT_ONCE))
    chunks = chunks._replace(
        rows=chunks.rows._replace(mask=chunks.rows.mask & is_row), weights=jnp.where(is_row, chunks.weights, 0.0)
    )
    first = jax.tree.map(lambda leaf: leaf[0], picked)

    def read_chunk(chunk: WeightedRows) -> tuple[Any, Array]:
        residual = certify_rows(model, split, state.centre, picked, laws, chunk.rows)
        if store is None:
            return (), residual
        kept, distance = store.read(state.centre, first, chunk)
        return kept, jnp.maximum(residual, distance)

    kept, residuals = jax.lax.map(read_chunk, chunks)
    kept = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), kept)
    # Padding may hold anything where no row counts.
    kept = jax.tree.map(lambda leaf: jnp.where(jnp.any(row_mask(data.rows)), leaf, 0.0), kept)
    return kept, join_chunks(residuals, num_rows)


def learn_by_sums(
    posterior: Conditional, state: CollapsedState, new: WeightedRows, fresh: Any, keep: Float[Array, ""]
) -> Learnt:
    """Add rows to the sums of a store.

    Args:
        fresh: the sums of the new rows.
        keep: what older rows still count for.
    """
    store, centre = posterior.store, state.centre
    assert store is not None
    forgotten = state.kept if posterior.discount == 1.0 else jax.tree.map(lambda leaf: keep * leaf, state.kept)
    kept = jax.tree.map(jnp.add, forgotten, fresh)

    def path(data: Any, positions: Array, part: Array) -> Array:
        centre, before, after = data
        here = jax.tree.map(lambda old, new: old + part * (new - old), before, after)
        return posterior.log_targets(posterior.read(centre, positions), here)

    def settle(moved: Moved, has_moved: Array) -> CollapsedState:
        recentred = store.recentred
        there = centre
        if recentred is not None:
            there = where_wanted(mean_of, (centre, kept, moved.positions), centre, has_moved)
        after = state._replace(
            buffer=state.buffer._replace(num_rows=state.buffer.num_rows + jnp.sum(row_mask(new.rows))),
            kept=kept,
            particles=moved.positions,
            reading=_read_again(posterior, state, there, moved, has_moved),
            log_targets=moved.log_targets,
        )
        if recentred is None:
            return after
        shifted = recentred(kept, centre, there)
        return after._replace(
            kept=shifted,
            centre=there,
            log_targets=after.log_targets + store.common(kept) - store.common(shifted),
        )

    def mean_of(data: Any) -> Coordinates:
        """Return the means of the inner sites at the middle of the particles."""
        layout, (centre, kept, positions) = posterior.split.layout, data
        total = posterior.total(posterior.read(centre, jnp.mean(positions, axis=0)[None]), kept)
        natural = jax.tree.map(lambda leaf: leaf[..., 0], total.natural)
        there = coordinates_at(layout, posterior_of(layout, natural, centre))
        return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(a), a, b), there, centre)

    reading = reading_of(posterior, state)
    before = _mean_before(posterior, state, reading, forgotten)
    common = store.common(kept) - store.common(forgotten)
    if _adds_up(posterior, centre.real.dtype):
        fresh_natural, layout = fresh.natural, posterior.split.layout
        own = posterior.total(reading, forgotten).natural
        gained = jax.vmap(lambda each: change_of_one(layout, each, fresh_natural), in_axes=-1)(own)
        ends = where_wanted(
            lambda data: posterior.log_targets(*data),
            (reading, kept),
            state.log_targets + state.log_weights + gained,
            ~changes_one(fresh_natural),
        )
    else:
        ends = posterior.log_targets(reading, kept)
    return Learnt(ends, before, common, path, (centre, state.kept, kept), settle)


def _mean_before(posterior: Conditional, state: CollapsedState, reading: Reading, forgotten: Any) -> Float[Array, ""]:
    """Return the log of the particles' mean weight before new rows, older ones forgotten by the discount."""
    if posterior.discount == 1.0:
        return state.log_mean
    return weigh(finite_weights(posterior.log_targets(reading, forgotten) - state.log_targets)).log_mean


def _adds_up(posterior: Conditional, dtype: Any) -> bool:
    """Tell whether log targets can be carried on from row to row by what each row changes, and digits last.

    A million rows add a million roundings of one element's integral, some thousands of nats: 1e-9 in double precision.
    """
    is_alone = posterior.split.has_shared_statistics and has_only_elements(posterior.split.layout)
    return is_alone and posterior.discount == 1.0 and dtype == jnp.float64


def learn_by_rows(
    posterior: Conditional, state: CollapsedState, new: WeightedRows, fresh: Any, keep: Float[Array, ""]
) -> Learnt:
    """Append rows to the buffer, from which a refresh reads all again; in between each particle has a sum of its own."""
    del fresh
    model, split, centre, discount = posterior.model, posterior.split, state.centre, posterior.discount
    buffer = append(model, state.buffer, new.rows, merges=discount == 1.0)
    old_weights, data = read(state.buffer, discount).weights, WeightedRows(*read(buffer, discount)[:2])
    forgotten = jax.tree.map(lambda leaf: keep * leaf, state.kept)
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
        return read_rows(model, split, centre, split.space.constrain(position)[0], rows)

    def path(given: Any, positions: Array, part: Array) -> Array:
        centre, old_weights, data = given
        here = data._replace(weights=old_weights + part * (data.weights - old_weights))

        def target(position: Array) -> Array:
            rows = read_rows(model, split, centre, split.space.constrain(position)[0], here)
            own = jax.tree.map(lambda leaf: leaf[..., None], rows)
            return posterior.log_targets(posterior.read(centre, position[None]), own)[0]

        return over_particles(target, positions)

    read_new = over_particles(lambda x: read_at(x, new), state.particles)
    read_new = jax.tree.map(lambda leaf: jnp.where(jnp.any(row_mask(new.rows)), leaf, 0.0), read_new)
    kept = jax.tree.map(jnp.add, forgotten, read_new)

    def settle(moved: Moved, has_moved: Array) -> CollapsedState:
        own = jax.lax.cond(
            has_moved,
            lambda positions: over_particles(lambda x: read_at(x, data), positions),
            lambda _: kept,
            moved.positions,
        )
        again = _read_again(posterior, state, centre, moved, has_moved)
        return state._replace(
            buffer=buffer, kept=own, particles=moved.positions, reading=again, log_targets=moved.log_targets
        )

    reading = reading_of(posterior, state)
    before = _mean_before(posterior, state, reading, forgotten)
    ends = posterior.log_targets(reading, kept)
    return Learnt(ends, before, jnp.zeros_like(state.log_evidence), path, (centre, old_weights, data), settle)


def _read_again(
    posterior: Conditional, state: CollapsedState, centre: Coordinates, moved: Moved, has_moved: Array
) -> Reading | None:
    """Return what the particles say before any data, about a new centre, if they have moved."""
    if state.reading is None:
        return None
    return where_wanted(lambda data: posterior.read(*data), (centre, moved.positions), state.reading, has_moved)
