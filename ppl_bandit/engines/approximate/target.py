"""The log density of one block of latents given the rows that speak of it, with its first and second derivatives.

Rows are read in chunks, and only chunks that hold data are read: a large capacity costs nothing while it is empty. A sum over
chunks whose number is not known to the compiler has no reverse-mode derivative, but each chunk has: derivatives are summed as
values are. Reverse mode is all that a program needs: where it has no forward mode, second derivatives do without.
"""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.blocks import Blocks
from ppl_bandit.engines.approximate.buffer import Buffer, Data, read, take_rows
from ppl_bandit.engines.approximate.unconstrained import Space

__all__ = ["Target", "block_target", "embed", "second_derivatives", "whiten"]

_CHUNK = 128  # rows
_SHORT_CHUNK = 32  # on a CPU: 29 rows take a quarter of the time, thousands a tenth more


class Target(NamedTuple):
    """An unnormalised log density on k real numbers.

    Attributes:
        parts: (k,) -> log prior and log likelihood, which add up to it.
        log_prior: (k,) -> the former.
        slope: (k,) -> value and gradient.
        curvature: (k,) -> value, gradient and Hessian.
    """

    parts: Callable[[Float[Array, " k"]], tuple[Float[Array, ""], Float[Array, ""]]]
    log_prior: Callable[[Float[Array, " k"]], Float[Array, ""]]
    slope: Callable[[Float[Array, " k"]], tuple[Float[Array, ""], Float[Array, " k"]]]
    curvature: Callable[[Float[Array, " k"]], tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]]


def embed(blocks: Blocks, number: Int[Array, ""] | int, own: Array, reference: Float[Array, " K"]) -> Array:
    """Return all K latents: those of one block, and a reference elsewhere."""
    coordinates = blocks.coordinates
    if len(coordinates) == 1:
        return own
    start = coordinates[:, 0]
    if np.array_equal(coordinates, start[:, None] + np.arange(coordinates.shape[1])) and blocks.is_latent.all():
        # A slice runs in a fraction of the time of a scatter.
        return jax.lax.dynamic_update_slice(reference, own, (jnp.asarray(start)[number],))
    return reference.at[jnp.asarray(coordinates)[number]].set(own, mode="drop")


def block_target(
    space: Space,
    blocks: Blocks,
    number: Int[Array, ""] | int,
    buffer: Buffer,
    reference: Float[Array, " K"],
    discount: float,
) -> Target:
    """Return the posterior density of a block; a place that no latent fills has a standard normal law.

    Args:
        reference: any possible values of the latents; those of other blocks change nothing.
        discount: weight of a row's log likelihood relative to the next row's.
    """
    is_alone = len(blocks.coordinates) == 1
    data = read(buffer, discount, None if is_alone else jnp.asarray(blocks.of_arm) == number)
    own_terms = jnp.asarray(blocks.terms)[number]
    is_filler = ~jnp.asarray(blocks.is_latent)[number]
    size = min(_SHORT_CHUNK if jax.default_backend() == "cpu" else _CHUNK, buffer.arm.shape[0])
    num_chunks = -(-data.num_rows // size)

    def log_prior(own: Array) -> Array:
        terms = space.log_prior(embed(blocks, number, own, reference))
        filler = -0.5 * (jnp.square(own) + jnp.log(2 * jnp.pi))
        return jnp.sum(jnp.where(own_terms, terms, 0.0)) + jnp.sum(jnp.where(is_filler, filler, 0.0))

    def log_likelihood(own: Array, chunk: Array) -> Array:
        rows, weights = _chunk(data, chunk, size)
        latents = space.constrain(embed(blocks, number, own, reference))
        return weights @ space.log_likelihood(latents, rows)

    def parts(own: Array) -> tuple[Array, Array]:
        prior = log_prior(own)
        return prior, _total(lambda chunk: log_likelihood(own, chunk), num_chunks, jnp.zeros_like(prior))

    def slope(own: Array) -> Any:
        start = jax.value_and_grad(log_prior)(own)
        return _total(lambda chunk: jax.value_and_grad(log_likelihood)(own, chunk), num_chunks, start)

    def curvature(own: Array) -> Any:
        start = second_derivatives(log_prior, own)
        return _total(lambda chunk: second_derivatives(lambda own: log_likelihood(own, chunk), own), num_chunks, start)

    return Target(parts, log_prior, slope, curvature)


def whiten(target: Target, centre: Float[Array, " k"], root: Float[Array, "k k"]) -> Target:
    """Return the density at centre + root @ x as a function of x; it is not divided by the volume of root."""

    def slope(x: Array) -> Any:
        value, gradient = target.slope(centre + root @ x)
        return value, root.T @ gradient

    def curvature(x: Array) -> Any:
        value, gradient, hessian = target.curvature(centre + root @ x)
        return value, root.T @ gradient, root.T @ hessian @ root

    return Target(
        lambda x: target.parts(centre + root @ x), lambda x: target.log_prior(centre + root @ x), slope, curvature
    )


def second_derivatives(
    function: Callable[[Float[Array, " k"]], Float[Array, ""]], own: Float[Array, " k"]
) -> tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]:
    """Return value, gradient and Hessian, by the modes of differentiation that the program has."""

    def first(own: Array) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(function)(own)
        return gradient, (value, gradient)

    def by_differences(own: Array) -> tuple[Array, tuple[Array, Array]]:
        # Central: wrong by the square of the step, and by the rounding of a gradient over it.
        step = jnp.finfo(own.dtype).eps ** (1 / 3) * jnp.maximum(1.0, jnp.abs(own))
        slopes = jax.lax.map(lambda way: first(own + way)[0] - first(own - way)[0], jnp.diag(step))
        return slopes / (2.0 * step[:, None]), first(own)[1]

    # Functions with a derivative of their own, such as an ODE's solution or a callback, may have it in reverse mode alone.
    for second in (jax.jacfwd(first, has_aux=True), jax.jacrev(first, has_aux=True), by_differences):
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            hessian, (value, gradient) = second(own)
            break
    return value, gradient, 0.5 * (hessian + hessian.T)


def _chunk(data: Data, chunk: Array, size: int) -> tuple[Any, Float[Array, " rows"]]:
    place = chunk * size + jnp.arange(size)
    index = data.places[jnp.minimum(place, data.places.shape[0] - 1)]
    is_data = place < data.num_rows
    # A place without data repeats the first row: a derivative must find nothing there that real data do not hold.
    index = jnp.where(is_data, index, data.places[0])
    return take_rows(data.rows, index)._replace(mask=is_data), jnp.where(is_data, data.weights[index], 0.0)


def _total(function: Callable[[Array], Any], num_chunks: Array, start: Any) -> Any:
    def add(chunk: Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, function(chunk))

    return jax.lax.fori_loop(0, num_chunks, add, start)
