"""The posterior density of one block of latents, given the rows of its arms.

The log likelihood is a sum over chunks of rows. Only chunks that hold data are evaluated, so that unused capacity costs
nothing. The number of chunks is a traced value, and such a loop has no reverse-mode derivative; each chunk has one, so the
derivatives are summed like the values.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.blocks import Blocks
from ppl_bandit.engines.approximate.unconstrained import Space
from ppl_bandit.engines.particles.log_density import LogDensity, second_derivatives
from ppl_bandit.engines.row_buffer import Buffer, BufferedRows, read_buffer, take_rows
from ppl_bandit.types import Draws

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
