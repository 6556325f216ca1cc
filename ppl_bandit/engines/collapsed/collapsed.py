"""Exact where it can be, draws only where it must: integrate the conjugate sites out, and let particles hold the others.

With psi the outer sites and theta the rest, which is conjugate given psi, p(psi | y) has a closed form up to a constant, in the
few dimensions of psi. Particles follow it from row to row (`particles`); theta is drawn from its exact law given psi.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.flatten_util import ravel_pytree
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.buffer import Buffer, Data, append, empty_buffer, fits, read, reserve, row_mask
from ppl_bandit.engines.approximate.diagnostics import MAX_K_HAT, finite_weights, pareto_k_hat, resample, weight_ess
from ppl_bandit.engines.collapsed import report
from ppl_bandit.engines.collapsed.inspection import Split, certify_rows
from ppl_bandit.engines.collapsed.mixture import mixture_of, spread_out
from ppl_bandit.engines.collapsed.particles import Moved, follow, max_memory, squared_error
from ppl_bandit.engines.collapsed.split import find_split
from ppl_bandit.engines.collapsed.statistics import Statistics, add, log_normalizer, no_statistics, posterior_of
from ppl_bandit.engines.collapsed.stores import Store, read_prior, read_rows, separable_store, shared_store
from ppl_bandit.engines.exact.certificate import tolerance
from ppl_bandit.engines.exact.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.families import Coordinates, Posterior, coordinates_at, sample
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Interaction, Key

__all__ = ["CollapsedInfo", "CollapsedState", "collapsed"]

_MAX_AT_ONCE = 1 << 21  # particles times rows read at once
_ROWS_AT_ONCE = 256  # certified at once


class CollapsedState(NamedTuple):
    """Particles of the outer sites, and what is kept of the data.

    Attributes:
        buffer: the rows, where they must be read again; otherwise without room, and only the number of rows counts.
        kept: sums of statistics, or where rows are read again, each particle's own sum.
        centre: the point at which densities of the inner sites are read.
        particles: outer sites, unconstrained.
        log_targets: log density, inner sites integrated out, of which the particles are an equally weighted sample.
        log_weights: from there to the posterior.
        log_evidence: log p(data); with forgetting, the sum of log predictive densities.
        squared_error: of the log evidence, up to the last refresh.
        memory, acceptance: of the last refresh; see `particles`.
        num_refreshes: refreshes so far.
    """

    buffer: Buffer
    kept: Any
    centre: Coordinates
    particles: Float[Array, "M K"]
    log_targets: Float[Array, " M"]
    log_weights: Float[Array, " M"]
    log_evidence: Float[Array, ""]
    squared_error: Float[Array, ""]
    memory: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_refreshes: Int[Array, ""]

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Standard error of the log evidence, as if the particles of each refresh were independent and exact."""
        return jnp.sqrt(self.squared_error + squared_error(self.log_weights))


class CollapsedInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether every row is certified, the weights are even and the last refresh was sound.
        ess: effective sample size of the particles' weights.
        k_hat: Pareto k-hat of the weights.
        memory: how far particles still resembled where they started when the last refresh ended.
        acceptance: share of its proposals that were accepted.
        num_refreshes: refreshes so far.
        log_evidence, log_evidence_error: log p(data) so far, and its standard error.
        is_certified: whether each row's likelihood is proved analytic and found affine; if one is not, nothing is absorbed.
        residual: largest relative deviation from affine, per row.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    memory: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_refreshes: Int[Array, ""]
    log_evidence: Float[Array, ""]
    log_evidence_error: Float[Array, ""]
    is_certified: Bool[Array, " N"]
    residual: Float[Array, " N"]
    is_full: Bool[Array, ""]


def collapsed(
    model: RewardModel,
    outer: Sequence[str] | None = None,
    *,
    num_particles: int = 1000,
    capacity: int = 64,
    discount: float = 1.0,
) -> Engine:
    """Return the engine that is exact given a few outer sites, and holds particles of those; or refuse.

    Args:
        outer: the outer sites; None finds the smallest set that leaves the rest conjugate, of at most three sites.
        num_particles: weighted draws of the outer sites held in the state.
        capacity: rows of data that the first state has room for, where they must be read again.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.

    Raises:
        NotConjugate: if no split leaves the rest conjugate, or not provably so; its message lists what was tried.
        ValueError: if `outer` names what is no latent site, or every one.
    """
    check_settings(discount, num_particles=num_particles, capacity=capacity)
    if num_particles < 20:
        raise ValueError(f"num_particles must be at least 20, got {num_particles}; weights of fewer say nothing")
    with jax.enable_x64(True):
        split = find_split(model, outer)
        store = shared_store(model, split) if split.has_shared_statistics else separable_store(model, split)
    posterior = _Conditional(model, split, store, discount)

    def init(key: Key) -> CollapsedState:
        return _init(posterior, key, num_particles, capacity)

    def update(key: Key, state: CollapsedState, rows: Interaction) -> tuple[CollapsedState, CollapsedInfo]:
        return _update(posterior, key, state, rows)

    def draw(key: Key, state: CollapsedState, num_samples: int) -> Draws:
        return _sample(posterior, key, state, num_samples)

    def laws(state: CollapsedState) -> tuple[Any, Posterior]:
        picks = spread_out(state.particles, finite_weights(state.log_weights))
        return jax.vmap(lambda which: _law(posterior, state, which))(picks)

    example = {name: value[0] for name, value in split.values.items()}
    return Engine(
        init,
        update,
        draw,
        report.accepted(model, split, None if store is None else store.words, num_particles, discount),
        reserve=reserve if store is None else None,
        marginals=mixture_of(model, split.layout, example, laws),
    )


class _Conditional(NamedTuple):
    """A split program and how its data are kept; no store means rows, which are read again."""

    model: RewardModel
    split: Split
    store: Store | None
    discount: float

    def log_target(self, centre: Coordinates, position: Array, read: Callable[[Any], Statistics]) -> Float[Array, ""]:
        """Return the log density of an unconstrained outer value, inner sites integrated out.

        Args:
            read: outer values -> the statistics of the data.
        """
        values, log_jacobian = self.split.space.constrain(position)
        total = self.total(centre, values, read(values))
        return log_normalizer(self.split.layout, total.natural) + total.constant + log_jacobian

    def total(self, centre: Coordinates, values: Any, data: Statistics) -> Statistics:
        """Return the statistics of prior and data."""
        return add(read_prior(self.model, self.split, centre, values), data)


def _init(posterior: _Conditional, key: Key, num_particles: int, capacity: int) -> CollapsedState:
    model, split = posterior.model, posterior.split
    centre = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), split.centre)
    prior = model.sample_prior(key, num_particles)
    particles = jax.vmap(split.space.unconstrain)({name: prior[name] for name in split.space.names})
    nothing = no_statistics(split.layout, centre)
    targets = jax.vmap(lambda x: posterior.log_target(centre, x, lambda _: nothing))(particles)
    generated = targets
    extra = _terms_beside_the_draws(model)
    if extra:  # particles come from the program without its factors and observed constants: weigh with those
        view = copy.copy(model)
        view.outcomes = (*model.outcomes, *extra)
        without = posterior._replace(model=view)
        generated = jax.vmap(lambda x: without.log_target(centre, x, lambda _: nothing))(particles)
    zero = jnp.zeros((), particles.dtype)
    if posterior.store is None:
        kept = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (num_particles, *leaf.shape)), nothing)
    else:
        kept = posterior.store.empty(centre)
    return CollapsedState(
        empty_buffer(model, capacity if posterior.store is None else 0),
        kept,
        centre,
        particles,
        generated,
        targets - generated,
        zero,
        zero,
        zero,
        zero + 1.0,
        jnp.zeros((), int),
    )


def _terms_beside_the_draws(model: RewardModel) -> tuple[str, ...]:
    """Return the names of factors and observed constants, which are part of the prior density and not of its draws."""
    names: list[str] = []

    def look() -> None:
        trace = model.trace({}, jnp.zeros(1, int), model.context_rows(1))
        known = {*model.latent_shapes, *model.outcomes}
        names.extend(name for name, site in trace.items() if site["type"] == "sample" and name not in known)

    jax.eval_shape(look)
    return tuple(names)


def _update(
    posterior: _Conditional, key: Key, state: CollapsedState, interaction: Interaction
) -> tuple[CollapsedState, CollapsedInfo]:
    model, split, store, discount = posterior
    num_particles = state.particles.shape[0]
    has_room = fits(state.buffer, interaction) if store is None else jnp.array(True)
    mask = row_mask(interaction) & has_room
    rows = _sound_rows(interaction._replace(reward=model.outcome_values(interaction.reward), mask=mask))

    # By the proof one outer value speaks for all; where the likelihood depends on it, two are asked.
    picks = (state.buffer.num_rows + jnp.arange(1 if split.has_shared_statistics else 2)) % num_particles
    picked = jax.vmap(lambda x: split.space.constrain(x)[0])(state.particles[picks])

    num_new = jnp.sum(mask)
    age = jnp.where(mask, num_new - jnp.cumsum(mask), 0)
    weights = jnp.where(mask, jnp.asarray(discount, state.particles.dtype) ** age, 0.0)
    keep = jnp.asarray(discount, state.particles.dtype) ** num_new
    learn = _learn_by_rows if store is None else _learn_by_sums
    fresh, residual = _read(posterior, state, picked, Data(rows, weights))
    is_certified = residual <= tolerance()
    learnt = learn(posterior, state, Data(rows, weights), fresh, keep)

    log_weights = finite_weights(learnt.ends - state.log_targets)
    ess, k_hat = weight_ess(log_weights), pareto_k_hat(log_weights)
    is_stale = (ess < num_particles / 2) | (k_hat > MAX_K_HAT)
    start = Moved(
        state.particles,
        state.log_targets,
        jnp.zeros_like(state.log_evidence),
        state.squared_error,
        state.memory,
        state.acceptance,
        jnp.zeros_like(state.num_refreshes),
    )
    is_sound = jnp.all(is_certified)
    moved = follow(key, learnt.path, start, state.log_weights, is_sound & is_stale)
    has_moved = moved.num_stages > 0
    log_weights = jnp.where(has_moved, 0.0, log_weights)
    predictive = moved.log_ratio + _log_mean(log_weights) - _log_mean(learnt.befores - state.log_targets)
    after = learnt.settle(moved, has_moved)._replace(
        log_weights=log_weights,
        log_evidence=state.log_evidence + predictive + learnt.common,
        squared_error=moved.squared_error,
        memory=moved.memory,
        acceptance=moved.acceptance,
        num_refreshes=state.num_refreshes + has_moved,
    )
    after = jax.tree.map(lambda new, old: jnp.where(is_sound, new, old), after, state)
    is_inside = jnp.all(jax.vmap(lambda x: split.contains(split.space.constrain(x)[0]))(after.particles))
    is_forgotten = (after.num_refreshes == 0) | (after.memory <= max_memory(num_particles))
    is_fresh = has_moved | ~is_stale
    is_finite = jnp.isfinite(after.log_evidence)
    return after, CollapsedInfo(
        is_sound & has_room & is_fresh & is_forgotten & is_inside & is_finite,
        jnp.where(has_moved, jnp.asarray(num_particles, ess.dtype), ess),
        jnp.where(has_moved, 0.0, k_hat),
        after.memory,
        after.acceptance,
        after.num_refreshes,
        after.log_evidence,
        after.log_evidence_error,
        is_certified,
        residual,
        ~has_room,
    )


def _read(posterior: _Conditional, state: CollapsedState, picked: Any, data: Data) -> tuple[Any, Float[Array, " N"]]:
    """Certify rows at a few outer values, and return what the store keeps of them with each row's residual.

    In chunks, so that memory is bounded; without a store, nothing is kept here.
    """
    model, split, store, _ = posterior
    num_rows = data.weights.shape[0]
    chunks, is_row = split_chunks(data, num_rows, min(num_rows, _ROWS_AT_ONCE))
    chunks = chunks._replace(
        rows=chunks.rows._replace(mask=chunks.rows.mask & is_row), weights=jnp.where(is_row, chunks.weights, 0.0)
    )
    first = jax.tree.map(lambda leaf: leaf[0], picked)

    def read_chunk(chunk: Data) -> tuple[Any, Array]:
        _, residual = certify_rows(model, split, state.centre, picked, chunk.rows)
        if store is None:
            return (), residual
        kept, distance = store.read(state.centre, first, chunk)
        return kept, jnp.maximum(residual, distance)

    kept, residuals = jax.lax.map(read_chunk, chunks)
    kept = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), kept)
    # Padding may hold anything where no row counts.
    kept = jax.tree.map(lambda leaf: jnp.where(jnp.any(data.rows.mask), leaf, 0.0), kept)
    return kept, join_chunks(residuals, num_rows)


class _Learnt(NamedTuple):
    """Rows taken in, before particles are moved.

    Attributes:
        ends: log targets of the particles with the new rows.
        befores: without them, older rows forgotten by the discount.
        common: what the new rows add to all log targets, and is left out of them.
        path: (positions, part) -> log targets, from the old data to the new.
        settle: (moved, whether anything moved) -> the state.
    """

    ends: Float[Array, " M"]
    befores: Float[Array, " M"]
    common: Float[Array, ""]
    path: Callable[[Array, Array], Array]
    settle: Callable[[Moved, Array], CollapsedState]


def _learn_by_sums(
    posterior: _Conditional, state: CollapsedState, new: Data, fresh: Any, keep: Float[Array, ""]
) -> _Learnt:
    store, centre = posterior.store, state.centre
    assert store is not None
    forgotten = state.kept if posterior.discount == 1.0 else jax.tree.map(lambda leaf: keep * leaf, state.kept)
    kept = jax.tree.map(jnp.add, forgotten, fresh)

    def targets(positions: Array, sums: Any) -> Array:
        return jax.vmap(
            lambda x: posterior.log_target(centre, x, lambda values: store.statistics(sums, centre, values))
        )(positions)

    def path(positions: Array, part: Array) -> Array:
        return targets(positions, jax.tree.map(lambda old, whole: old + part * (whole - old), state.kept, kept))

    def settle(moved: Moved, has_moved: Array) -> CollapsedState:
        after = state._replace(
            buffer=state.buffer._replace(num_rows=state.buffer.num_rows + jnp.sum(new.rows.mask)),
            kept=kept,
            particles=moved.positions,
            log_targets=moved.log_targets,
        )
        if store.recentred is None:
            return after
        middle = posterior.split.space.constrain(jnp.mean(moved.positions, axis=0))[0]
        total = posterior.total(centre, middle, kept)
        there = coordinates_at(posterior.split.layout, posterior_of(posterior.split.layout, total.natural, centre))
        there = jax.tree.map(lambda a, b: jnp.where(has_moved & jnp.isfinite(a), a, b), there, centre)
        shifted = store.recentred(kept, centre, there)
        return after._replace(
            kept=shifted,
            centre=there,
            log_targets=after.log_targets + store.common(kept) - store.common(shifted),
        )

    befores = (
        state.log_targets + state.log_weights if posterior.discount == 1.0 else targets(state.particles, forgotten)
    )
    common = store.common(kept) - store.common(forgotten)
    return _Learnt(targets(state.particles, kept), befores, common, path, settle)


def _learn_by_rows(
    posterior: _Conditional, state: CollapsedState, new: Data, fresh: Any, keep: Float[Array, ""]
) -> _Learnt:
    del fresh
    model, split, centre, discount = posterior.model, posterior.split, state.centre, posterior.discount
    buffer = append(model, state.buffer, new.rows)
    old_weights, data = read(state.buffer, discount).weights, read(buffer, discount)
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

    def read_at(position: Array, rows: Data) -> Statistics:
        return read_rows(model, split, centre, split.space.constrain(position)[0], rows)

    def own_targets(sums: Statistics) -> Array:
        return jax.vmap(lambda x, own: posterior.log_target(centre, x, lambda _: own))(state.particles, sums)

    def path(positions: Array, part: Array) -> Array:
        here = data._replace(weights=old_weights + part * (data.weights - old_weights))
        return over_particles(
            lambda x: posterior.log_target(centre, x, lambda values: read_rows(model, split, centre, values, here)),
            positions,
        )

    read_new = over_particles(lambda x: read_at(x, new), state.particles)
    read_new = jax.tree.map(lambda leaf: jnp.where(jnp.any(new.rows.mask), leaf, 0.0), read_new)
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
    return _Learnt(own_targets(kept), befores, jnp.zeros_like(state.log_evidence), path, settle)


def _sound_rows(rows: Interaction) -> Interaction:
    """Return rows whose padding is a copy of one that counts: derivatives flow through masked rows too."""
    assert rows.mask is not None
    source = jnp.where(rows.mask, jnp.arange(rows.mask.shape[0]), jnp.argmax(rows.mask))
    filled = jax.tree.map(lambda leaf: jnp.asarray(leaf)[source], rows._replace(mask=None))
    return filled._replace(mask=rows.mask)


def _log_mean(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    return logsumexp(finite_weights(log_weights)) - jnp.log(float(log_weights.shape[0]))


def _sample(posterior: _Conditional, key: Key, state: CollapsedState, num_samples: int) -> Draws:
    """Draw outer sites from the particles, and inner sites from their exact law given those."""
    key_outer, key_inner = jr.split(key)
    index = resample(key_outer, finite_weights(state.log_weights), num_samples)

    def draw(key: Key, which: Array) -> Draws:
        values, law = _law(posterior, state, which)
        inner = sample(posterior.split.layout, key, law, 1)
        return {**values, **{name: value[0] for name, value in inner.items()}}

    drawn = jax.vmap(draw)(jr.split(key_inner, num_samples), index)
    return {name: drawn[name] for name in posterior.model.latent_shapes}


def _law(posterior: _Conditional, state: CollapsedState, which: Int[Array, ""]) -> tuple[dict[str, Array], Posterior]:
    """Return the outer values of a particle and the law of the inner sites given them."""
    split, store = posterior.split, posterior.store
    values, _ = split.space.constrain(state.particles[which])
    if store is None:
        data = jax.tree.map(lambda leaf: leaf[which], state.kept)
    else:
        data = store.statistics(state.kept, state.centre, values)
    total = posterior.total(state.centre, values, data)
    return values, posterior_of(split.layout, total.natural, state.centre)
