"""Take rows in: certify them, and add them to what is kept, as sums or as rows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from ppl_bandit.engines.approximate.buffer import append, read, row_mask
from ppl_bandit.engines.collapsed.conditional import CollapsedState, Conditional
from ppl_bandit.engines.collapsed.inspection import certify_rows
from ppl_bandit.engines.collapsed.particles import Moved
from ppl_bandit.engines.collapsed.statistics import Statistics
from ppl_bandit.engines.collapsed.stores import WeightedRows, read_rows
from ppl_bandit.engines.exact.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.families import Coordinates, Posterior, coordinates_at, posterior_of

__all__ = ["Learnt", "learn_by_rows", "learn_by_sums", "read_new"]

_MAX_AT_ONCE = 1 << 21  # particles times rows read at once
_ROWS_AT_ONCE = 256  # certified at once


class Learnt(NamedTuple):
    """Rows taken in, before particles are moved.

    Attributes:
        ends: log targets of the particles with the new rows.
        befores: without them, older rows forgotten by the discount.
        common: what the new rows add to all log targets, and is left out of them.
        path: (data, positions, part) -> log targets, from the old data to the new; it closes over no traced value.
        data: what the path reads.
        settle: (moved, whether anything moved) -> the state.
    """

    ends: Float[Array, " M"]
    befores: Float[Array, " M"]
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

    def targets(centre: Coordinates, positions: Array, sums: Any) -> Array:
        return jax.vmap(
            lambda x: posterior.log_target(centre, x, lambda values: store.statistics(sums, centre, values))
        )(positions)

    def path(data: Any, positions: Array, part: Array) -> Array:
        centre, before, after = data
        return targets(centre, positions, jax.tree.map(lambda old, new: old + part * (new - old), before, after))

    def settle(moved: Moved, has_moved: Array) -> CollapsedState:
        after = state._replace(
            buffer=state.buffer._replace(num_rows=state.buffer.num_rows + jnp.sum(row_mask(new.rows))),
            kept=kept,
            particles=moved.positions,
            log_targets=moved.log_targets,
        )
        if store.recentred is None:
            return after

        def mean_of(positions: Array) -> Coordinates:
            middle = posterior.split.space.constrain(jnp.mean(positions, axis=0))[0]
            total = posterior.total(centre, middle, kept)
            there = coordinates_at(posterior.split.layout, posterior_of(posterior.split.layout, total.natural, centre))
            return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(a), a, b), there, centre)

        there = jax.lax.cond(has_moved, mean_of, lambda _: centre, moved.positions)
        shifted = store.recentred(kept, centre, there)
        return after._replace(
            kept=shifted,
            centre=there,
            log_targets=after.log_targets + store.common(kept) - store.common(shifted),
        )

    befores = (
        state.log_targets + state.log_weights
        if posterior.discount == 1.0
        else targets(centre, state.particles, forgotten)
    )
    common = store.common(kept) - store.common(forgotten)
    ends = targets(centre, state.particles, kept)
    return Learnt(ends, befores, common, path, (centre, state.kept, kept), settle)


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
        return jax.vmap(unravel)(flat)

    def read_at(position: Array, rows: WeightedRows) -> Statistics:
        return read_rows(model, split, centre, split.space.constrain(position)[0], rows)

    def own_targets(sums: Statistics) -> Array:
        return jax.vmap(lambda x, own: posterior.log_target(centre, x, lambda _: own))(state.particles, sums)

    def path(given: Any, positions: Array, part: Array) -> Array:
        centre, old_weights, data = given
        here = data._replace(weights=old_weights + part * (data.weights - old_weights))
        return over_particles(
            lambda x: posterior.log_target(centre, x, lambda values: read_rows(model, split, centre, values, here)),
            positions,
        )

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
        return state._replace(buffer=buffer, kept=own, particles=moved.positions, log_targets=moved.log_targets)

    befores = state.log_targets + state.log_weights if discount == 1.0 else own_targets(forgotten)
    return Learnt(
        own_targets(kept), befores, jnp.zeros_like(state.log_evidence), path, (centre, old_weights, data), settle
    )
