"""Moves of one latent at a time, at scales that are drawn at random, alone or with all others stretched along.

Hamiltonian trajectories have one step size for all places. Where a scale goes to 0 the posterior narrows to a neck that such
steps cannot follow: the nearer the scale is to 0, the nearer other latents have to be to some point. Two moves can. One
latent alone finds its own width, whatever that is, because its step is drawn from several powers of two. And where latents
narrow together, by a factor exp(a) a unit of some coordinate, a step of that coordinate that multiplies the distances
of all others from the point by the same factor stays inside of the neck, however far it goes:

    x_j -> x_j + step,   x_i -> c_i + exp(a_i step) (x_i - c_i),   with the Jacobian exp(step sum_i a_i).

The point c is the mean of the densest particles, which lie farthest inside of a neck, and a_i is the slope of log |x_i - c_i|
on x_j over the cloud: about 1 where x_j is the log of a scale, 1/2 for a log variance, 0 for latents that do not narrow. A
cloud in which nothing narrows by much can be left as it is: trajectories serve it well.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.numerics.random_bits import uniform_and_normal
from ppl_bandit.types import Key

__all__ = ["FunnelShape", "EvaluatedParticles", "funnel_shape", "coordinate_moves"]

_NUM_MOVES = 4  # between two looks at where the densest particles are: they go farther into a neck by then
_WIDEST, _NARROWEST, _NARROWEST_STRETCH = 1.0, -7.0, -1.0  # steps, as powers of two of the cloud's standard deviation
_NEAREST = 1e-4  # distances from the centre that matter, of a standard deviation
_NUM_ERRORS = 4.0  # standard errors from which on a slope is believed
_MAX_STRETCH = 30.0  # in logarithms


class EvaluatedParticles(NamedTuple):
    """Particles after their moves, with the two parts of the log density there."""

    positions: Float[Array, "M k"]
    log_prior: Float[Array, " M"]
    log_likelihood: Float[Array, " M"]


class FunnelShape(NamedTuple):
    """How a cloud narrows.

    Attributes:
        centre: the mean of its densest particles.
        slopes: (j, i), of the log distance of x_i from the centre on x_j.
        shares: with which coordinate j leads a stretch, cumulated: in proportion to how far others narrow with it.
        narrowing: the farthest that any does, in logarithms, with a standard deviation of another.
    """

    centre: Float[Array, " k"]
    slopes: Float[Array, "k k"]
    shares: Float[Array, " k"]
    narrowing: Float[Array, ""]


def funnel_shape(
    positions: Float[Array, "M k"], log_density: Float[Array, " M"], sd: Float[Array, " k"]
) -> FunnelShape:
    """Return the mean of a cloud's densest particles, and how distances from it depend on each coordinate.

    Args:
        sd: of the cloud, roughly.
    """
    num, size = positions.shape
    highest = jnp.max(jnp.where(jnp.isnan(log_density), -jnp.inf, log_density))
    # Where no density is a number, all particles count alike.
    weights = jnp.nan_to_num(jnp.exp(0.5 * (log_density - highest))) + jnp.finfo(log_density.dtype).tiny
    centre = weights @ positions / jnp.sum(weights)
    gaps = (positions - centre) / sd
    logs = 0.5 * jnp.log(jnp.square(gaps) + _NEAREST**2)
    # All sums in one product: many small reductions take long to compile.
    both = jnp.concatenate([gaps, logs, jnp.ones((num, 1), gaps.dtype)], axis=1)
    moments = both.T @ both / num
    covariance = moments[:-1, :-1] - moments[:-1, -1:] * moments[-1, :-1]
    variances = jnp.diagonal(covariance)
    of_gaps, of_logs = variances[:size, None], variances[size:]
    cross = covariance[:size, size:] * (1.0 - jnp.eye(size, dtype=gaps.dtype))
    is_believed = jnp.square(cross) > _NUM_ERRORS**2 / num * of_gaps * of_logs
    slopes = jnp.where(is_believed, cross / of_gaps, 0.0)
    narrowing = jnp.max(jnp.abs(slopes), axis=1)
    shares = jnp.cumsum(narrowing + jnp.finfo(gaps.dtype).eps)
    return FunnelShape(centre, slopes / sd[:, None], shares / shares[-1], jnp.max(narrowing))


def coordinate_moves(
    key: Key,
    target: LogDensity,
    positions: Float[Array, "M k"],
    sd: Float[Array, " k"],
    length: Int[Array, ""] | int,
    min_narrowing: Float[Array, ""] | float = 0.0,
) -> tuple[EvaluatedParticles, Bool[Array, ""]]:
    """Make `length` times 4 moves of every particle, by turns of one latent alone and of all others with it.

    Every move leaves the target as it is, given the centre and the slopes, which the cloud as a whole decides.

    Args:
        sd: of the cloud, roughly: steps are made in proportion.
        min_narrowing: moves end as soon as nothing narrows by as much, in logarithms, with a standard deviation of another
            coordinate; in most clouds, before they begin.

    Returns:
        The particles, and whether all of these moves were made.
    """
    num, size = positions.shape
    dtype = positions.dtype

    def moves(carry: tuple[Array, FunnelShape, EvaluatedParticles]) -> tuple[Array, FunnelShape, EvaluatedParticles]:
        number, stretch, swept = carry

        def one(turn: Array, carry: EvaluatedParticles) -> EvaluatedParticles:
            x, log_prior, log_likelihood = carry
            is_first, is_together = turn < 0, turn % 2 == 1
            key_turn = jr.fold_in(key, number * (_NUM_MOVES + 1) + turn + 1)
            uniform, normal = uniform_and_normal(key_turn, 2 * num + 1, num, dtype)
            width, chance = jnp.split(uniform[1:], 2)
            leader, alone = jnp.sum(stretch.shares < uniform[0]), jnp.floor(size * uniform[0]).astype(int)
            j = jnp.minimum(jnp.where(is_together, leader, alone), size - 1)
            power = _WIDEST + (jnp.where(is_together, _NARROWEST_STRETCH, _NARROWEST) - _WIDEST) * width
            step = jnp.where(is_first, 0.0, sd[j] * jnp.exp2(power) * normal)
            slopes = jnp.where(is_together & ~is_first, stretch.slopes[j], 0.0)
            logs = jnp.clip(step[:, None] * slopes, -_MAX_STRETCH, _MAX_STRETCH)
            there = x + jnp.expm1(logs) * (x - stretch.centre) + step[:, None] * (jnp.arange(size) == j)
            new_prior, new_likelihood = jax.vmap(target.parts)(there)
            gain = new_prior - log_prior + new_likelihood - log_likelihood + jnp.sum(logs, axis=1)
            accepts = (jnp.log(chance) < gain) | is_first
            return EvaluatedParticles(
                jnp.where(accepts[:, None], there, x),
                jnp.where(accepts, new_prior, log_prior),
                jnp.where(accepts, new_likelihood, log_likelihood),
            )

        # Before the first look a single turn reads the density where the particles are: it is compiled once.
        is_before = number == 0
        swept = jax.lax.fori_loop(jnp.where(is_before, -1, 0), jnp.where(is_before, 0, _NUM_MOVES), one, swept)
        stretch = funnel_shape(swept.positions, swept.log_prior + swept.log_likelihood, sd)
        return number + 1, stretch, swept

    def goes_on(carry: tuple[Array, FunnelShape, EvaluatedParticles]) -> Bool[Array, ""]:
        number, stretch, _ = carry
        return (number == 0) | (number <= length) & (stretch.narrowing >= min_narrowing)

    unknown, zeros = jnp.zeros(num, dtype), jnp.zeros(size, dtype)
    nothing = FunnelShape(zeros, jnp.zeros((size, size), dtype), zeros, jnp.zeros((), dtype))
    begin = (jnp.zeros((), int), nothing, EvaluatedParticles(positions, unknown, unknown))
    number, _, swept = jax.lax.while_loop(goes_on, moves, begin)
    return swept, (length > 0) & (number > length)
