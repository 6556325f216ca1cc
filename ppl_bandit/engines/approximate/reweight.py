"""Reweight the draws with each new row, and renew them only when the weights say that they are stale.

Iterated batch importance sampling (Chopin 2002): a row multiplies the weight of every particle by its likelihood, which
costs one row's work and not that of all data. Latents that are proved independent of each other are weighed apart, and a row
touches one block of them. When a block's effective sample size falls below a half, or Pareto k-hat passes 0.7, its particles
are renewed: by importance where that has evidence, by moving every one of them elsewhere. Particles that were moved without
evidence are renewed as soon as rows that speak of them have changed their weights a little.

Weights say nothing of a place where no particle is. Some draws of the prior, the scouts, stay where they are: where rows make
one of them likely that had less than a particle's share when the particles were drawn, these are renewed as well, and modes are
looked for from there.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import Blocks, independent_blocks
from ppl_bandit.engines.approximate.explanation import explain
from ppl_bandit.engines.approximate.noncentred_refresh import renew as renew_cloud
from ppl_bandit.engines.approximate.unconstrained import Space, unconstrained_space
from ppl_bandit.engines.particles.conditional_execution import apply_where
from ppl_bandit.engines.particles.diagnostics import (
    MAX_K_HAT,
    finite_log_weights,
    normalize_weights,
    notable_k_hat,
    resample,
    variance_of_mean,
    weight_ess,
)
from ppl_bandit.engines.particles.importance import PriorProbes
from ppl_bandit.engines.particles.moves import MAX_MEMORY
from ppl_bandit.engines.particles.weighted_particles import (
    MIN_ESS_SHARE,
    WeightedParticles,
    is_trusted,
    prior_particles,
    sample_size,
)
from ppl_bandit.engines.row_buffer import (
    Buffer,
    append_row,
    as_rows,
    empty_buffer,
    has_room_for,
    reserve,
    row_mask,
    take_rows,
)
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["ReweightInfo", "ReweightState", "draw_prior_particles", "reweight", "draw_latents"]


_MIN_ESS_INSIDE = 0.2  # share of the particles, inside of a batch
_DOUBTED_ESS = 0.9  # share below which particles without evidence are renewed: until then it is the same posterior
_SCOUT_SHARE = 0.125  # scouts, of the particles
_MAX_HIDDEN = 0.005  # posterior mass that a scout may stand for where there may be no particle


class ReweightState(NamedTuple):
    """The data, and weighted draws of the posterior, block by block.

    Attributes:
        buffer: every row so far.
        clouds: the particles of all blocks, with a leading axis B.
        reference: some possible latents, for the blocks that are not looked at.
        scouts: draws of the prior of all blocks.
        log_shares: of the posterior, what each scout stands for, in particles: at most 1 when these were drawn.
    """

    buffer: Buffer
    clouds: WeightedParticles
    reference: Float[Array, " K"]
    scouts: Float[Array, "B S k"]
    log_shares: Float[Array, "B S"]

    @property
    def log_evidence(self) -> Float[Array, ""]:
        """The log of p(data): the sum of log predictive densities of the rows; with forgetting, a predictive score."""
        return jnp.sum(self.clouds.log_evidence)

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Standard error of the log evidence, as if the draws of each refresh were independent and exact."""
        return _evidence_error(self.clouds, jax.vmap(weight_ess)(self.clouds.log_weights))


class ReweightInfo(NamedTuple):
    """Evidence of an update; of several blocks, the worst.

    Attributes:
        is_trusted: whether the weights are even, the particles were drawn with evidence and the rows were absorbed.
        ess: how many independent draws the weighted particles are worth.
        k_hat: Pareto k-hat of the weights; 0 where none stands out.
        memory: largest correlation of particles with where they started, at the last moves; 0 where none were needed.
        num_divergences: among the transitions of these moves.
        num_refreshes: how often the particles of some block were renewed so far.
        num_moves: how often by moves, because importance had no evidence.
        log_evidence: log p(data) so far.
        log_evidence_error: its standard error, as if the draws of each refresh were independent and exact.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    memory: Float[Array, ""]
    num_divergences: Int[Array, ""]
    num_refreshes: Int[Array, ""]
    num_moves: Int[Array, ""]
    log_evidence: Float[Array, ""]
    log_evidence_error: Float[Array, ""]
    is_full: Bool[Array, ""]


class _BatchProgress(NamedTuple):
    state: ReweightState
    row: Int[Array, ""]
    ess: Float[Array, " B"]
    k_hat: Float[Array, ""]
    was_stale: Bool[Array, ""]
    is_doubted: Bool[Array, " B"]


def reweight(model: RewardModel, *, num_particles: int = 1000, capacity: int = 64, discount: float = 1.0) -> Engine:
    """Return the engine that reweights its draws with each row and renews them when they are stale.

    A batch is absorbed row by row, so that no row can exhaust draws that a refresh would have kept fresh; rows between
    refreshes cost microseconds, and the number of refreshes grows as the logarithm of the number of rows.

    Args:
        num_particles: weighted draws held in the state, for each block of independent latents; `sample` takes M of them in
            proportion to their weight, each floor or ceil of M x weight times, so that draws repeat.
        capacity: rows of data that the first state has room for; equal rows are kept once, with a count.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing. Below 1, equal rows are of
            different age and are kept apart.
    """
    check_settings(discount, num_particles=num_particles, capacity=capacity)
    if num_particles < 4:
        raise ValueError(f"num_particles must be at least 4, got {num_particles}")
    space = unconstrained_space(model)
    blocks = independent_blocks(model, space)
    of_arm = jnp.asarray(blocks.of_arm)
    merges = discount == 1.0
    num_scouts = max(4, math.ceil(_SCOUT_SHARE * num_particles))
    max_log_share = math.log(max(2.0, _MAX_HIDDEN * num_particles))

    def init(key: Key) -> ReweightState:
        clouds, reference = draw_prior_particles(key, space, blocks, num_particles)
        scouts = clouds.positions[:, jnp.arange(num_scouts) % num_particles]
        log_shares = jnp.zeros(scouts.shape[:2], scouts.dtype)  # there is a particle at every scout
        return ReweightState(empty_buffer(model, capacity), clouds, reference, scouts, log_shares)

    def latents_of(state: ReweightState) -> Draws:
        """Return the latents of particles, and then of scouts, of all blocks together."""
        places = jnp.concatenate([state.clouds.positions, state.scouts], axis=1)
        return jax.vmap(space.constrain)(_together(blocks, places, space.size))

    def absorb(state: ReweightState, latents: Draws, row: Interaction) -> tuple[ReweightState, Bool[Array, " B"]]:
        """Multiply the weights of a row's block by its likelihood, if it counts, keep the row, and tell where a scout leads."""
        clouds, is_counted = state.clouds, row.mask
        assert is_counted is not None
        block = of_arm[row.arm]
        alone = jax.tree.map(lambda leaf: leaf[None], row)
        both = jax.vmap(lambda one: space.log_likelihood(one, alone)[0])(latents)
        gained, of_scouts = both[:num_particles], both[num_particles:]
        if discount < 1.0:
            forgotten = jnp.where(is_counted, (discount - 1.0) * clouds.log_likelihood, 0.0)
            clouds = clouds._replace(
                log_weights=clouds.log_weights + forgotten, log_likelihood=clouds.log_likelihood + forgotten
            )
        before = clouds.log_weights[block]
        predictive = jnp.where(is_counted, logsumexp(before + gained) - logsumexp(before), 0.0)
        clouds = clouds._replace(
            log_weights=clouds.log_weights.at[block].add(gained),
            log_likelihood=clouds.log_likelihood.at[block].add(gained),
            log_evidence=clouds.log_evidence.at[block].add(predictive),
        )
        log_shares = state.log_shares.at[block].add(jnp.where(is_counted, of_scouts - predictive, 0.0))
        # Where no particle is, there may be mass by now that matters: the weights tell nothing.
        is_ahead = jnp.max(log_shares, axis=1) > max_log_share
        buffer = append_row(state.buffer, row, is_counted, merges)
        return state._replace(buffer=buffer, clouds=clouds, log_shares=log_shares), is_ahead

    def stalest(clouds: WeightedParticles, ess: Array, is_doubted: Array) -> tuple[Array, Array, Array]:
        """Return the block whose weights are the least even, its k-hat, and whether it is stale: no other is staler."""
        block = jnp.argmin(jnp.where(is_doubted, 0.0, ess))
        log_weights = clouds.log_weights[block]
        k_hat = notable_k_hat(log_weights, normalize_weights(log_weights))
        return block, k_hat, (ess[block] < num_particles / 2) | (k_hat > MAX_K_HAT) | is_doubted[block]

    def info_of(state: ReweightState, ess: Array, k_hat: Array, has_room: Array) -> ReweightInfo:
        clouds = state.clouds
        return ReweightInfo(
            jnp.all(jax.vmap(is_trusted)(clouds, ess)) & (k_hat <= MAX_K_HAT) & has_room,
            jnp.min(jax.vmap(sample_size)(clouds, ess)),
            k_hat,
            jnp.max(clouds.evidence.memory),
            jnp.sum(clouds.evidence.num_divergences),
            jnp.sum(clouds.num_refreshes),
            jnp.sum(clouds.num_moves),
            state.log_evidence,
            _evidence_error(clouds, ess),
            ~has_room,
        )

    def renew(key: Key, state: ReweightState, block: Array) -> ReweightState:
        given = space, blocks, block, state.buffer, state.reference, discount
        target = block_posterior(*given)
        cloud = jax.tree.map(lambda leaf: leaf[block], state.clouds)
        places, is_ahead = state.scouts[block], jnp.max(state.log_shares[block]) > max_log_share
        scouts = PriorProbes(places, jax.vmap(lambda own: target.parts(own)[1])(places), is_ahead)
        cloud = renew_cloud(key, target, cloud, *given, keeps_evidence=merges, scouts=scouts)
        # Of the prior a scout stands for 1 / S; with forgetting the evidence is not known.
        posterior = scouts.log_likelihood - cloud.log_evidence + math.log(num_particles / num_scouts)
        return state._replace(
            clouds=jax.tree.map(lambda all_, one: all_.at[block].set(one), state.clouds, cloud),
            log_shares=state.log_shares.at[block].set(jnp.minimum(posterior, 0.0) if merges else 0.0),
        )

    def quick_update(
        key: Key, state: ReweightState, interaction: Interaction
    ) -> tuple[ReweightState, ReweightInfo, Bool[Array, ""]]:
        """Absorb one row as `update` does where it leaves no block stale: what stays the same stays the same array."""
        del key
        has_room = has_room_for(state.buffer, interaction)
        rows = as_rows(model, state.buffer, interaction)._replace(mask=row_mask(interaction) & has_room)
        row = take_rows(rows, jnp.zeros((), int))
        after, is_ahead = absorb(state, latents_of(state), row)
        ess = jax.vmap(weight_ess)(after.clouds.log_weights)
        is_spoken_of = jnp.zeros(ess.shape, bool).at[of_arm[rows.arm]].max(rows.mask)
        is_doubted = is_spoken_of & ~state.clouds.evidence.is_sound & (ess < _DOUBTED_ESS * num_particles)
        _, k_hat, is_stale = stalest(after.clouds, jnp.where(is_ahead, 0.0, ess), is_doubted)
        return after, info_of(after, ess, k_hat, has_room), ~is_stale

    def update(key: Key, state: ReweightState, interaction: Interaction) -> tuple[ReweightState, ReweightInfo]:
        has_room = has_room_for(state.buffer, interaction)
        rows = as_rows(model, state.buffer, interaction)._replace(mask=row_mask(interaction) & has_room)
        num_rows = rows.arm.shape[0]

        def absorb_until_stale(progress: _BatchProgress) -> _BatchProgress:
            latents = latents_of(progress.state)

            def step(progress: _BatchProgress) -> _BatchProgress:
                row = take_rows(rows, progress.row)
                state, is_ahead = absorb(progress.state, latents, row)
                log_weights, block = state.clouds.log_weights, of_arm[row.arm]
                if discount < 1.0:
                    ess = jax.vmap(weight_ess)(log_weights)
                else:
                    ess = progress.ess.at[block].set(weight_ess(log_weights[block]))
                return progress._replace(state=state, row=progress.row + 1, ess=jnp.where(is_ahead, 0.0, ess))

            def is_fresh(progress: _BatchProgress) -> Bool[Array, ""]:
                # Inside of a batch, which no decision sees, draws may be staler.
                return (progress.row < num_rows) & jnp.all(progress.ess >= _MIN_ESS_INSIDE * num_particles)

            return jax.lax.while_loop(is_fresh, step, progress)

        def stage(progress: _BatchProgress) -> _BatchProgress:
            progress = absorb_until_stale(progress)
            is_doubted = (
                progress.is_doubted & (progress.row >= num_rows) & (progress.ess < _DOUBTED_ESS * num_particles)
            )
            block, k_hat, is_stale = stalest(progress.state.clouds, progress.ess, is_doubted)
            key_block = jr.fold_in(jr.fold_in(key, progress.row), block)
            renewed = apply_where(is_stale, lambda state: renew(key_block, state, block), progress.state)
            ess = progress.ess.at[block].set(jnp.where(is_stale, num_particles, progress.ess[block]))
            left = progress.is_doubted.at[block].set(progress.is_doubted[block] & ~is_stale)
            return _BatchProgress(renewed, progress.row, ess, k_hat, is_stale, left)

        def is_wanting(progress: _BatchProgress) -> Bool[Array, ""]:
            return (progress.row < num_rows) | progress.was_stale

        ess = jax.vmap(weight_ess)(state.clouds.log_weights)
        is_spoken_of = jnp.zeros(ess.shape, bool).at[of_arm[rows.arm]].max(rows.mask)
        is_doubted = is_spoken_of & ~state.clouds.evidence.is_sound
        begin = _BatchProgress(state, jnp.zeros((), int), ess, jnp.zeros_like(ess[0]), jnp.array(False), is_doubted)
        end = jax.lax.while_loop(is_wanting, stage, begin)
        return end.state, info_of(end.state, jax.vmap(weight_ess)(end.state.clouds.log_weights), end.k_hat, has_room)

    def sample(key: Key, state: ReweightState, num_samples: int) -> Draws:
        return jax.vmap(space.constrain)(draw_latents(key, blocks, state.clouds, space.size, num_samples))

    num_blocks, size = blocks.coordinates.shape
    apart = f", held as {num_blocks} independent blocks of at most {size}" if num_blocks > 1 else ""
    explanation = explain(
        model,
        "reweight",
        "each row reweights the draws; when they are stale, importance sampling on all data replaces them, or Hamiltonian "
        "moves do where that has no evidence",
        f"{num_particles} weighted draws",
        discount,
        [
            f"approximated: the posterior by {num_particles} weighted draws of {space.size} latent numbers{apart}; nothing "
            "is assumed about its form",
            f"evidence: effective sample size, at least {MIN_ESS_SHARE:.0%} of the draws, and of the weights alone, at least "
            f"half; Pareto k-hat, at most {MAX_K_HAT}; after moves, the correlation of the draws with where they started, at "
            f"most {MAX_MEMORY}, drift, divergences and finite energies",
        ],
    )
    settings = {
        "num_particles": num_particles,
        "capacity": capacity,
        "discount": discount,
    }
    capabilities = Capabilities(reserve=reserve, quick_update=quick_update, is_traceable_without_program=True)
    return Engine(init, update, sample, explanation, settings, capabilities)


def draw_prior_particles(
    key: Key, space: Space, blocks: Blocks, num: int
) -> tuple[WeightedParticles, Float[Array, " K"]]:
    """Draw the clouds of all blocks from the prior, and latents that are possible."""
    key_prior, key_filler = jr.split(key)
    positions, excess = space.draw_prior(key_prior, num)
    terms = jax.vmap(space.log_prior)(positions)
    own = jnp.asarray(blocks.terms)
    is_latent = jnp.asarray(blocks.is_latent)
    filler = jr.normal(key_filler, (len(blocks.coordinates), num, blocks.coordinates.shape[1]), positions.dtype)
    apart = positions[:, jnp.minimum(jnp.asarray(blocks.coordinates), space.size - 1)].swapaxes(0, 1)
    apart = jnp.where(is_latent[:, None], apart, filler)
    log_filler = -0.5 * (jnp.square(filler) + jnp.log(2 * jnp.pi))
    log_filler = jnp.sum(jnp.where(is_latent[:, None], 0.0, log_filler), axis=-1)

    def of_blocks(values: Array) -> Array:
        return jnp.sum(jnp.where(own[:, None], values, 0.0), axis=-1)

    clouds = jax.vmap(prior_particles)(apart, of_blocks(excess), of_blocks(terms) + log_filler)
    return clouds, positions[0]


def draw_latents(
    key: Key, blocks: Blocks, clouds: WeightedParticles, size: int, num_samples: int
) -> Float[Array, "M K"]:
    """Draw all latents: each block's in proportion to its weights, blocks independently of each other."""
    offsets = jr.uniform(key, (len(blocks.coordinates),), clouds.positions.dtype)
    index = jax.vmap(lambda offset, weights: resample(offset, finite_log_weights(weights), num_samples))(
        offsets, clouds.log_weights
    )
    return _together(blocks, jnp.take_along_axis(clouds.positions, index[..., None], axis=1), size)


def _evidence_error(clouds: WeightedParticles, ess: Float[Array, " B"]) -> Float[Array, ""]:
    """Return the standard error of the log evidence, by the effective sample sizes of the weights."""
    return jnp.sqrt(jnp.sum(clouds.squared_error + variance_of_mean(ess, clouds.log_weights.shape[-1])))


def _together(blocks: Blocks, positions: Float[Array, "B M k"], size: int) -> Float[Array, "M K"]:
    """Return draws of all latents from draws of each block."""
    num_blocks, num, width = positions.shape
    if num_blocks == 1:
        return positions[0]
    place = np.argsort(blocks.coordinates.ravel(), kind="stable")[:size]
    flat = jnp.swapaxes(positions, 0, 1).reshape(num, num_blocks * width)
    return flat if np.array_equal(place, np.arange(num_blocks * width)) else flat[:, place]
