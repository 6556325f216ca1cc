"""Engines whose posterior is weighted particles of each independent block of latents: their state, draws and refreshes.

`reweight` and `nuts` differ in when a block is refreshed, and in the settings of the refresh.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import Blocks, independent_blocks
from ppl_bandit.engines.approximate.noncentred_refresh import refresh_block
from ppl_bandit.engines.approximate.unconstrained import Space, unconstrained_space
from ppl_bandit.engines.checks import Info, checks_text, make_info, worst_values
from ppl_bandit.engines.particles.importance import PriorProbes
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.weighted_particles import (
    RefreshSettings,
    WeightedParticles,
    particle_checks,
    prior_particles,
    sample_size,
)
from ppl_bandit.engines.particles.weights import finite_log_weights, resample, variance_of_mean, weight_ess
from ppl_bandit.engines.row_buffer import Buffer, empty_buffer, row_mask
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Draws, Interaction, Key

_CHECKS = "ess weight_ess k_hat autocorrelation drift divergences acceptance unmoved density unseen_mass"
CHECKS_TEXT = checks_text(_CHECKS.split())


class BlockState(NamedTuple):
    """The data, and weighted draws of the posterior of every block.

    Attributes:
        buffer: all rows so far.
        particles: of all blocks, with a leading axis B.
        reference: possible latents, for the blocks that are not evaluated.
        num_rows, num_searched: rows that inform each block, now and at its last refresh, which searched for modes.
        probes: draws of the prior of all blocks, (B, S, k); None without a watch for unseen mass, as are the next two.
        log_probe_mass: log posterior mass of each probe in units of a particle's, (B, S); at most 0 at the last refresh.
        num_narrow: rows since then whose likelihood is too narrow for the particles to resolve, (B,).
        num_pending: updates since the last refresh; None if a refresh does not wait for a number of them.
    """

    buffer: Buffer
    particles: WeightedParticles
    reference: Float[Array, " K"]
    num_rows: Int[Array, " B"]
    num_searched: Int[Array, " B"]
    probes: Any = None
    log_probe_mass: Any = None
    num_narrow: Any = None
    num_pending: Any = None

    @property
    def log_evidence(self) -> Float[Array, ""]:
        """Log of p(data), the sum of the rows' log predictive densities; with a discount, a predictive score."""
        return jnp.sum(self.particles.log_evidence)

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Standard error of the log evidence, as if the draws of each refresh were independent and exact."""
        ess = jax.vmap(weight_ess)(self.particles.log_weights)
        num_particles = self.particles.log_weights.shape[-1]
        return jnp.sqrt(jnp.sum(self.particles.squared_error + variance_of_mean(ess, num_particles)))

    def of_block(self, block: Int[Array, ""]) -> WeightedParticles:
        """Return the particles of one block."""
        return jax.tree.map(lambda leaf: leaf[block], self.particles)


class BlockProgram(NamedTuple):
    """A program, its independent blocks of latents, and the number of particles of each.

    Attributes:
        discount: weight of a row's log likelihood relative to the next row's.
    """

    model: RewardModel
    space: Space
    blocks: Blocks
    num_particles: int
    discount: float

    def first_state(self, key: Key, capacity: int) -> BlockState:
        """Return a state with draws of the prior."""
        particles, reference = _draw_prior_particles(key, self.space, self.blocks, self.num_particles)
        none = jnp.zeros(len(self.blocks.coordinates), int)
        return BlockState(empty_buffer(self.model, capacity), particles, reference, none, none)

    def target(self, state: BlockState, block: Int[Array, ""]) -> LogDensity:
        """Return the posterior density of a block."""
        return block_posterior(self.space, self.blocks, block, state.buffer, state.reference, self.discount)

    def refresh(
        self,
        key: Key,
        state: BlockState,
        block: Int[Array, ""],
        settings: RefreshSettings,
        own: WeightedParticles,
        probes: PriorProbes | None = None,
    ) -> BlockState:
        """Refresh the particles of a block.

        Args:
            own: the particles of the block, weighted with all rows.
        """
        given = self.space, self.blocks, block, state.buffer, state.reference, self.discount
        own = refresh_block(key, self.target(state, block), own, settings, *given, probes=probes)
        return state._replace(
            particles=jax.tree.map(lambda all_, one: all_.at[block].set(one), state.particles, own),
            num_searched=state.num_searched.at[block].set(state.num_rows[block]),
        )

    def num_informing(self, rows: Interaction) -> Int[Array, " B"]:
        """Return how many of the rows that their mask selects inform each block."""
        num_blocks = len(self.blocks.coordinates)
        block = jnp.where(row_mask(rows), jnp.asarray(self.blocks.of_arm)[rows.arm], num_blocks)
        return jnp.zeros(num_blocks, int).at[block].add(1, mode="drop")

    def measure(self, state: BlockState, has_room: Bool[Array, ""], checks: Mapping[str, Any], **measures: Any) -> Info:
        """Return the measures of an update: of every check the worst value over blocks.

        Args:
            checks: further checks, by name.
            measures: further fields of `Info`.
        """
        particles = state.particles
        ess = jax.vmap(weight_ess)(particles.log_weights)
        return make_info(
            {**worst_values(jax.vmap(particle_checks)(particles, ess)), "capacity": has_room, **checks},
            permanent=["capacity"],
            is_sound=jnp.all(particles.evidence.is_sound),
            is_full=~has_room,
            num_refreshes=jnp.sum(particles.num_refreshes),
            ess=jnp.min(jax.vmap(sample_size)(particles, ess)),
            **measures,
        )

    def sample(self, key: Key, state: BlockState, num_samples: int) -> Draws:
        """Draw all latents: those of each block in proportion to its weights, independently of the other blocks."""
        particles = state.particles
        offsets = jr.uniform(key, (len(self.blocks.coordinates),), particles.positions.dtype)
        index = jax.vmap(lambda offset, weights: resample(offset, finite_log_weights(weights), num_samples))(
            offsets, particles.log_weights
        )
        return self.constrained(jnp.take_along_axis(particles.positions, index[..., None], axis=1))

    def constrained(self, positions: Float[Array, "B M k"]) -> Draws:
        """Return draws of all latents from draws of each block."""
        num_blocks, num, width = positions.shape
        column = np.argsort(self.blocks.coordinates.ravel(), kind="stable")[: self.space.size]
        joined = jnp.swapaxes(positions, 0, 1).reshape(num, num_blocks * width)
        is_ordered = np.array_equal(column, np.arange(num_blocks * width))
        return jax.vmap(self.space.constrain)(joined if is_ordered else joined[:, column])


def block_program(model: RewardModel, num_particles: int, discount: float) -> BlockProgram:
    """Return a program with its independent blocks of latents."""
    space = unconstrained_space(model)
    return BlockProgram(model, space, independent_blocks(model, space), num_particles, discount)


def _draw_prior_particles(
    key: Key, space: Space, blocks: Blocks, num: int
) -> tuple[WeightedParticles, Float[Array, " K"]]:
    """Draw particles of all blocks from the prior.

    Returns:
        The particles with a leading axis over blocks, and one draw of all latents.
    """
    key_prior, key_padding = jr.split(key)
    positions, log_factors = space.draw_prior(key_prior, num)
    log_terms = jax.vmap(space.log_prior)(positions)
    own_terms, is_latent = jnp.asarray(blocks.terms), jnp.asarray(blocks.is_latent)
    padding = jr.normal(key_padding, (len(blocks.coordinates), num, blocks.coordinates.shape[1]), positions.dtype)
    by_block = positions[:, jnp.minimum(jnp.asarray(blocks.coordinates), space.size - 1)].swapaxes(0, 1)
    by_block = jnp.where(is_latent[:, None], by_block, padding)
    log_padding = -0.5 * (jnp.square(padding) + jnp.log(2 * jnp.pi))
    log_padding = jnp.sum(jnp.where(is_latent[:, None], 0.0, log_padding), axis=-1)

    def sum_own(terms: Float[Array, "M terms"]) -> Float[Array, "B M"]:
        return jnp.sum(jnp.where(own_terms[:, None], terms, 0.0), axis=-1)

    has_data_starts = space.locations is not None

    def of_block(own: Array, log_weights: Array, log_prior: Array) -> WeightedParticles:
        return prior_particles(own, log_weights, log_prior, has_data_starts)

    particles = jax.vmap(of_block)(by_block, sum_own(log_factors), sum_own(log_terms) + log_padding)
    return particles, positions[0]
