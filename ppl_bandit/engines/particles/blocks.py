"""Latents of a program as independent blocks, and the posterior of one block.

A posterior is a product over blocks of latents if every term of the prior, and the likelihood of every row given its arm,
depends on latents of one block only. The blocks come from element-level dependence analysis (`program.jaxpr.entry_reads`),
which holds for all contexts and rewards; they may be too large, never too small.

The log likelihood of a block is a sum over chunks of rows. Only chunks that hold data are evaluated, so that unused capacity
costs nothing. The number of chunks is a traced value, and such a loop has no reverse-mode derivative; each chunk has one, so
the derivatives are summed like the values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.particles.log_density import LogDensity, second_derivatives
from ppl_bandit.engines.particles.space import Space
from ppl_bandit.engines.rows import Buffer, BufferedRows, read_buffer, take_rows
from ppl_bandit.program.jaxpr.entry_reads import MAX_ENTRIES, connected_components, entries_read
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Draws, Interaction


class Blocks(NamedTuple):
    """A partition of the K unconstrained latents into B blocks that are independent given any data.

    Attributes:
        coordinates: (B, k), the latents of each block; k is the size of the largest block, and smaller ones are padded with K.
        is_latent: (B, k), false for padding.
        of_arm: (A,), the block that the likelihood of an arm's rows depends on.
        terms: (B, terms), the terms of the prior that belong to each block.
    """

    coordinates: np.ndarray
    is_latent: np.ndarray
    of_arm: np.ndarray
    terms: np.ndarray


def one_block(model: RewardModel, space: Space) -> Blocks:
    """Return all latents as one block."""
    num_terms = jax.eval_shape(space.log_prior, jnp.zeros(space.size)).shape[0]
    return Blocks(
        np.arange(space.size)[None],
        np.ones((1, space.size), bool),
        np.zeros(model.num_arms, int),
        np.ones((1, num_terms), bool),
    )


def independent_blocks(model: RewardModel, space: Space) -> Blocks:
    """Return the finest partition that is proved; latents that no likelihood depends on are one block together."""
    if space.size > MAX_ENTRIES:
        return one_block(model, space)
    terms = entries_read(space.log_prior, space.size, ())
    if space.partial_centring is not None:  # a term may be constant in the latents and not in non-centred coordinates
        half, log_prior = np.full(space.size, 0.5), space.partial_centring.log_prior
        terms = terms | entries_read(lambda flat: log_prior(flat, jnp.asarray(half, flat.dtype)), space.size, ())
    arms = np.arange(model.num_arms)

    def likelihood(flat: Array, reward: Any, context: Any) -> Array:
        return model.log_likelihood(space.constrain(flat), Interaction(jnp.asarray(arms), reward, context))

    def data() -> tuple[Any, Any]:
        reward = model.zero_outcomes(model.num_arms)
        return reward, model.context_rows(model.num_arms)

    rows = entries_read(likelihood, space.size, jax.eval_shape(data))
    label = connected_components(np.concatenate([terms, rows]))
    of_arm = np.array([label[np.argmax(row)] if row.any() else -1 for row in rows])
    is_read = np.isin(label, of_arm[of_arm >= 0])
    label = np.where(is_read, label, space.size)  # latents that no likelihood depends on stay together
    names = np.unique(label)
    members = [np.flatnonzero(label == name) for name in names]
    size = max(len(member) for member in members)
    coordinates = np.full((len(names), size), space.size)
    for row, member in zip(coordinates, members, strict=True):
        row[: len(member)] = member
    of_term = np.array([label[np.argmax(row)] if row.any() else names[0] for row in terms])
    return Blocks(
        coordinates,
        coordinates < space.size,
        np.array([int(np.flatnonzero(names == name)[0]) if name >= 0 else 0 for name in of_arm]),
        of_term == names[:, None],
    )


CHUNK_SIZE = 16  # rows: 64 take 4 times as long for the first rows, and no less for 2,000, which leave the CPU's cache


def embed(blocks: Blocks, block: Int[Array, ""] | int, own: Array, reference: Float[Array, " K"]) -> Array:
    """Return all K latents: those of one block, and reference values elsewhere."""
    if len(blocks.coordinates) == 1:
        return own
    return reference.at[jnp.asarray(blocks.coordinates)[block]].set(own, mode="drop")


def block_posterior(
    space: Space,
    blocks: Blocks,
    block: Int[Array, ""] | int,
    buffer: Buffer,
    reference: Float[Array, " K"],
    discount: float,
) -> LogDensity:
    """Return the posterior density of a block; coordinates that pad a small block have a standard normal density.

    Args:
        reference: any possible values of the latents; those of other blocks do not change the density.
        discount: weight of a row's log likelihood relative to the next row's.
    """
    has_one_block = len(blocks.coordinates) == 1
    data = read_buffer(buffer, discount, None if has_one_block else jnp.asarray(blocks.of_arm) == block)
    own_terms = jnp.asarray(blocks.terms)[block]
    is_padding = ~jnp.asarray(blocks.is_latent)[block]
    size = min(CHUNK_SIZE, buffer.arm.shape[0])
    num_chunks = -(-data.num_rows // size)

    def log_prior(own: Array) -> Array:
        terms = space.log_prior(embed(blocks, block, own, reference))
        log_normal = -0.5 * (jnp.square(own) + jnp.log(2 * jnp.pi))
        return jnp.sum(jnp.where(own_terms, terms, 0.0)) + jnp.sum(jnp.where(is_padding, log_normal, 0.0))

    def latents(own: Array) -> Draws:
        return space.constrain(embed(blocks, block, own, reference))

    def log_likelihood(latents: Draws, chunk: Array) -> Array:
        rows, weights = _chunk(data, chunk, size)
        return weights @ space.log_likelihood(latents, rows)

    def parts(own: Array) -> tuple[Array, Array]:
        prior, values = log_prior(own), latents(own)
        return prior, _sum_chunks(lambda chunk: log_likelihood(values, chunk), num_chunks, jnp.zeros_like(prior))

    def value_and_grad(own: Array) -> Any:
        (prior, gradient), (values, pull_back) = jax.value_and_grad(log_prior)(own), jax.vjp(latents, own)
        start = jnp.zeros_like(prior), jax.tree.map(jnp.zeros_like, values)
        likelihood, by_latents = _sum_chunks(
            lambda chunk: jax.value_and_grad(log_likelihood)(values, chunk), num_chunks, start
        )
        return prior + likelihood, gradient + pull_back(by_latents)[0]

    def value_grad_hessian(own: Array) -> Any:
        def of_chunk(chunk: Array) -> Any:
            return second_derivatives(lambda own: log_likelihood(latents(own), chunk), own)

        return _sum_chunks(of_chunk, num_chunks, second_derivatives(log_prior, own))

    return LogDensity(parts, log_prior, value_and_grad, value_grad_hessian)


def _chunk(data: BufferedRows, chunk: Array, size: int) -> tuple[Any, Float[Array, " rows"]]:
    """Return the rows of a chunk and their weights; padding repeats the first row, so that derivatives stay finite."""
    place = chunk * size + jnp.arange(size)
    index = data.places[jnp.minimum(place, data.places.shape[0] - 1)]
    is_data = place < data.num_rows
    index = jnp.where(is_data, index, data.places[0])
    return take_rows(data.rows, index)._replace(mask=is_data), jnp.where(is_data, data.weights[index], 0.0)


def _sum_chunks(function: Callable[[Array], Any], num_chunks: Array, start: Any) -> Any:
    def add_chunk(chunk: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, function(chunk))

    return jax.lax.fori_loop(0, num_chunks, add_chunk, start)
