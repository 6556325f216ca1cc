"""Moves of one latent at a time, at scales that are drawn at random, alone or with all others stretched along.

Hamiltonian trajectories have one step size for all places. Where a scale goes to 0 the posterior narrows to a neck that such
steps cannot follow: the nearer the scale is to 0, the nearer other latents have to be to some point. Two moves can. One
latent alone finds its own width, whatever that is, because its step is drawn from several powers of two. And where latents
narrow together, by a factor exp(a) a unit of some coordinate, a step of that coordinate that multiplies the distances
of all others from the point by the same factor stays inside of the neck, however far it goes:

    x_j -> x_j + step,   x_i -> c_i + exp(a_i step) (x_i - c_i),   with the Jacobian exp(step sum_i a_i).

The point c is the middle of the densest particles, which lie farthest inside of a neck, and a_i is the slope of log |x_i - c_i|
on x_j over the cloud: about 1 where x_j is the log of a scale, 1/2 for a log variance, 0 for latents that do not narrow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.target import Target
from ppl_bandit.types import Key

__all__ = ["Stretch", "stretches", "sweep"]

_NUM_MOVES = 4  # between two looks at where the densest particles are: they go farther into a neck by then
_NUM_DENSEST = 10
_WIDEST, _NARROWEST, _NARROWEST_STRETCH = 1.0, -7.0, -1.0  # steps, as powers of two of the cloud's standard deviation
_NUM_ERRORS = 4.0  # standard errors from which on a slope is believed
_MAX_STRETCH = 30.0  # in logarithms


class Stretch(NamedTuple):
    """How a cloud narrows.

    Attributes:
        centre: the median of its densest particles.
        slopes: (j, i), of the log distance of x_i from the centre on x_j.
        log_probs: with which coordinate j leads a stretch: in proportion to how far others narrow with it.
    """

    centre: Float[Array, " k"]
    slopes: Float[Array, "k k"]
    log_probs: Float[Array, " k"]


def stretches(positions: Float[Array, "M k"], log_density: Float[Array, " M"]) -> Stretch:
    """Return the middle of a cloud's densest particles, and how distances from it depend on each coordinate."""
    num, size = positions.shape
    _, densest = jax.lax.top_k(jnp.where(jnp.isnan(log_density), -jnp.inf, log_density), min(_NUM_DENSEST, num))
    centre = jnp.median(positions[densest], axis=0)
    gaps = jnp.abs(positions - centre)
    is_apart = gaps > 0
    logs = jnp.where(is_apart, jnp.log(jnp.where(is_apart, gaps, 1.0)), 0.0)
    logs = jnp.where(is_apart, logs - jnp.sum(logs, axis=0) / jnp.maximum(jnp.sum(is_apart, axis=0), 1), 0.0)
    centred = positions - jnp.mean(positions, axis=0)
    sd, log_sd = (jnp.sqrt(jnp.mean(jnp.square(values), axis=0)) for values in (centred, logs))
    correlations = (centred / sd).T @ (logs / log_sd) / num
    is_believed = (jnp.abs(correlations) > _NUM_ERRORS * num**-0.5) & ~jnp.eye(size, dtype=bool)
    slopes = jnp.where(is_believed, correlations * log_sd / sd[:, None], 0.0)
    slopes = jnp.where(jnp.isfinite(slopes), slopes, 0.0)
    return Stretch(centre, slopes, jnp.log(jnp.max(jnp.abs(slopes), axis=1) * sd + jnp.finfo(sd.dtype).tiny))


def sweep(
    key: Key,
    target: Target,
    positions: Float[Array, "M k"],
    log_density: Float[Array, " M"],
    length: Int[Array, ""] | int,
) -> Float[Array, "M k"]:
    """Make `length` times 4 moves of every particle, by turns of one latent alone and of all others with it.

    Every move leaves the target as it is, given the centre and the slopes, which the cloud as a whole decides.

    Args:
        log_density: of the target at the positions.
    """
    num, size = positions.shape
    dtype = positions.dtype

    def moves(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        key_offset, key_moves = jr.split(jr.fold_in(key, number))
        offset = jr.randint(key_offset, (), 0, size)
        stretch = stretches(*carry)
        sd = jnp.std(carry[0], axis=0)

        def one(turn: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            x, here = carry
            key_leader, key_noise, key_uniform = jr.split(jr.fold_in(key_moves, turn), 3)
            uniform = jr.uniform(key_uniform, (2, num), dtype)
            is_together = turn % 2 == 1
            alone = (offset + turn // 2) % size
            j = jnp.where(is_together, jr.categorical(key_leader, stretch.log_probs), alone)
            narrowest = jnp.where(is_together, _NARROWEST_STRETCH, _NARROWEST)
            width = sd[j] * jnp.exp2(_WIDEST + (narrowest - _WIDEST) * uniform[0])
            step = width * jr.normal(key_noise, (num,), dtype)
            slopes = jnp.where(is_together, stretch.slopes[j], 0.0)
            logs = jnp.clip(step[:, None] * slopes, -_MAX_STRETCH, _MAX_STRETCH)
            there = jnp.where(slopes == 0, x, stretch.centre + jnp.exp(logs) * (x - stretch.centre))
            there = there.at[:, j].add(step)
            log_prior, log_likelihood = jax.vmap(target.parts)(there)
            value = log_prior + log_likelihood
            accepts = jnp.log(uniform[1]) < value - here + jnp.sum(logs, axis=1)
            return jnp.where(accepts[:, None], there, x), jnp.where(accepts, value, here)

        return jax.lax.fori_loop(0, _NUM_MOVES, one, carry)

    return jax.lax.fori_loop(0, length, moves, (positions, log_density))[0]
