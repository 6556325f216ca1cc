"""Moves of one latent at a time, at scales that are drawn at random, alone or with all others stretched along.

Hamiltonian trajectories have one step size for all places. Where a scale goes to 0 the posterior narrows to a neck that such
steps cannot follow: the nearer the scale is to 0, the nearer other latents have to be to some point. Two moves can. One
latent alone finds its own width, whatever that is, because its step is drawn from several powers of two. And where latents
narrow together, by a factor exp(a) a unit of some coordinate, a step of that coordinate that multiplies the distances
of all others from the point by the same factor stays inside of the neck, however far it goes:

    x_j -> x_j + step,   x_i -> c_i + exp(a_i step) (x_i - c_i),   with the Jacobian exp(step sum_i a_i).

The point c is the densest particle, which lies farthest inside of a neck, and a_i is the slope of log |x_i - c_i| on x_j over
the cloud: about 1 where x_j is the log of a scale, 1/2 for a log variance, 0 for latents that do not narrow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.approximate.target import Target
from ppl_bandit.types import Key

__all__ = ["Stretch", "stretches", "sweep"]

_NUM_MOVES = 16  # between two looks at where the densest particle is
_NUM_LEADERS = 8  # coordinates that others are stretched with: those with the most to stretch
_WIDEST, _NARROWEST, _NARROWEST_STRETCH = 1.0, -7.0, -3.0  # steps, as powers of two of a cloud's standard deviation
_NUM_ERRORS = 4.0  # standard errors from which on a slope is believed
_MAX_STRETCH = 30.0  # in logarithms


class Stretch(NamedTuple):
    """How a cloud narrows.

    Attributes:
        index: of the densest particle.
        centre: where it is.
        slopes: (j, i), of the log distance of x_i from the centre on x_j.
        leaders: coordinates j, those with the largest slopes first.
    """

    index: Int[Array, ""]
    centre: Float[Array, " k"]
    slopes: Float[Array, "k k"]
    leaders: Int[Array, " L"]


def stretches(positions: Float[Array, "M k"], log_density: Float[Array, " M"]) -> Stretch:
    """Return the densest particle of a cloud, and how distances from it depend on each coordinate."""
    num, size = positions.shape
    index = jnp.argmax(jnp.where(jnp.isnan(log_density), -jnp.inf, log_density))
    gaps = jnp.abs(positions - positions[index])
    # The densest particle and its repetitions have no distance.
    logs = jnp.log(jnp.maximum(gaps, jnp.finfo(gaps.dtype).tiny))
    is_apart = gaps > 0
    count = jnp.maximum(jnp.sum(is_apart, axis=0), 1)
    logs = jnp.where(is_apart, logs - jnp.sum(jnp.where(is_apart, logs, 0.0), axis=0) / count, 0.0)
    centred = positions - jnp.mean(positions, axis=0)
    covariance = centred.T @ logs / num
    slopes = covariance / jnp.mean(jnp.square(centred), axis=0)[:, None]
    correlation = covariance / jnp.std(positions, axis=0)[:, None] / jnp.sqrt(jnp.mean(jnp.square(logs), axis=0))
    is_believed = (jnp.abs(correlation) > _NUM_ERRORS * num**-0.5) & ~jnp.eye(size, dtype=bool)
    slopes = jnp.where(is_believed & jnp.isfinite(slopes), slopes, 0.0)
    narrowing = jnp.max(jnp.abs(slopes), axis=1) * jnp.std(positions, axis=0)
    _, leaders = jax.lax.top_k(narrowing, min(_NUM_LEADERS, size))
    return Stretch(index, positions[index], slopes, leaders)


def sweep(
    key: Key,
    target: Target,
    positions: Float[Array, "M k"],
    log_density: Float[Array, " M"],
    length: Int[Array, ""] | int,
) -> Float[Array, "M k"]:
    """Make `length` times 16 moves of every particle, by turns of one latent alone and of all others with it.

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
            key_noise, key_uniform = jr.split(jr.fold_in(key_moves, turn))
            uniform = jr.uniform(key_uniform, (2, num), dtype)
            is_together, place = turn % 2 == 1, turn // 2
            j = jnp.where(is_together, stretch.leaders[place % len(stretch.leaders)], (place + offset) % size)
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
            # The centre is no distance from itself: it would move along the middle of the neck, with the Jacobian of others.
            accepts &= ~is_together | (jnp.arange(num) != stretch.index)
            return jnp.where(accepts[:, None], there, x), jnp.where(accepts, value, here)

        return jax.lax.fori_loop(0, _NUM_MOVES, one, carry)

    return jax.lax.fori_loop(0, length, moves, (positions, log_density))[0]
