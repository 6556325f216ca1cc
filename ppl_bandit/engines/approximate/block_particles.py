"""Weighted particles of all independent blocks of a program: draws of the prior, draws of all latents, checks."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.approximate.blocks import Blocks
from ppl_bandit.engines.approximate.unconstrained import Space
from ppl_bandit.engines.checks import worst_values
from ppl_bandit.engines.particles.weighted_particles import (
    WeightedParticles,
    particle_checks,
    prior_particles,
)
from ppl_bandit.engines.particles.weights import finite_log_weights, resample
from ppl_bandit.engines.row_buffer import row_mask
from ppl_bandit.types import Interaction, Key

__all__ = ["block_checks", "draw_latents", "draw_prior_particles", "join_blocks", "touched_blocks"]


def draw_prior_particles(
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


def draw_latents(
    key: Key, blocks: Blocks, particles: WeightedParticles, size: int, num_samples: int
) -> Float[Array, "M K"]:
    """Draw all K latents: those of each block in proportion to its weights, independently of the other blocks."""
    offsets = jr.uniform(key, (len(blocks.coordinates),), particles.positions.dtype)
    index = jax.vmap(lambda offset, weights: resample(offset, finite_log_weights(weights), num_samples))(
        offsets, particles.log_weights
    )
    return join_blocks(blocks, jnp.take_along_axis(particles.positions, index[..., None], axis=1), size)


def join_blocks(blocks: Blocks, positions: Float[Array, "B M k"], size: int) -> Float[Array, "M K"]:
    """Return draws of all K latents from draws of each block."""
    num_blocks, num, width = positions.shape
    column = np.argsort(blocks.coordinates.ravel(), kind="stable")[:size]
    joined = jnp.swapaxes(positions, 0, 1).reshape(num, num_blocks * width)
    is_ordered = np.array_equal(column, np.arange(num_blocks * width))
    return joined if is_ordered else joined[:, column]


def touched_blocks(blocks: Blocks, rows: Interaction) -> Bool[Array, " B"]:
    """Tell which blocks the rows inform that their mask selects."""
    num_blocks = len(blocks.coordinates)
    block = jnp.where(row_mask(rows), jnp.asarray(blocks.of_arm)[rows.arm], num_blocks)
    return jnp.zeros(num_blocks, bool).at[block].set(True, mode="drop")


def block_checks(particles: WeightedParticles, ess: Float[Array, " B"]) -> dict[str, Float[Array, ""]]:
    """Return the worst value over blocks of every check of particles, by name.

    Args:
        ess: effective sample sizes of the weights.
    """
    return worst_values(jax.vmap(particle_checks)(particles, ess))
