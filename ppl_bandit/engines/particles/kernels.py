"""Markov transitions of all particles at once: Hamiltonian Monte Carlo and NumPyro's NUTS.

Also Metropolis moves of one coordinate at a time, alone or with all other coordinates scaled along, at random step sizes:
Hamiltonian trajectories have one step size everywhere. In a funnel, where a scale goes to 0 and other latents concentrate with
it, no step size suits both ends. Two moves do. A move of one coordinate draws its step size from several powers of two, so that
some match its local width. A move along the funnel changes coordinate j and scales the distances of the other coordinates from
a centre c accordingly,

    x_j -> x_j + step,   x_i -> c_i + exp(a_i step) (x_i - c_i),   with log Jacobian step * sum_i a_i.

The centre c is the mean of the particles with the highest density, which lie farthest inside the funnel, and a_i is the slope
of log |x_i - c_i| on x_j over the particles: about 1 if x_j is the log of a scale, 1/2 for a log variance, 0 for latents that
do not narrow with x_j. Without such a dependence trajectories suffice.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer import NUTS

from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.numerics.random_bits import uniform_and_normal
from ppl_bandit.types import Key

_MAX_LEAPS = 64  # of one trajectory, for the same reason
_DIVERGENT_ENERGY = 1000.0  # energy error of a divergent trajectory, as in Stan
_MAX_TREE_DEPTH = 7  # all chains wait for the longest trajectory: of 127 steps here, of 1,023 with Stan's depth of 10


class Transition(NamedTuple):
    """The result of one transition of every particle.

    Attributes:
        positions: after the transition.
        energies: minus the log density there.
        accept_prob: acceptance probability of each proposal.
        is_divergent: whether the energy error of a trajectory exceeded 1,000.
        num_evaluations: of the density and its gradient at every particle.
    """

    positions: Float[Array, "M k"]
    energies: Float[Array, " M"]
    accept_prob: Float[Array, " M"]
    is_divergent: Bool[Array, " M"]
    num_evaluations: Int[Array, ""]


# (key, log density in whitened coordinates, positions there, step size) -> one transition of every particle
Kernel = Callable[[Key, LogDensity, Float[Array, "M k"], Float[Array, ""]], Transition]


def hamiltonian(
    key: Key, target: LogDensity, positions: Float[Array, "M k"], step_size: Float[Array, ""]
) -> Transition:
    """Move every particle by Hamiltonian Monte Carlo with a trajectory of about a quarter period.

    In whitened coordinates a quarter period makes the end of a Gaussian's trajectory independent of its start. The length
    varies by up to a half and the step size by a fifth, which prevents periodic trajectories. All particles make the same
    number of leapfrog steps.
    """
    num, dtype = positions.shape[0], positions.dtype
    uniform, normal = uniform_and_normal(key, 2 * num + 1, positions.size, dtype)
    momenta = normal.reshape(positions.shape)
    length = 0.5 * math.pi * (0.5 + uniform[-1])
    num_leaps = jnp.clip(jnp.ceil(length / step_size), 1, _MAX_LEAPS).astype(int)
    steps = step_size * (0.8 + 0.4 * uniform[:num, None])

    def leapfrog(number: Array, carry: Any) -> Any:
        x, p, gradient, first, _ = carry
        # Iteration 0 has step size 0 and evaluates the density at the start, so that the density is compiled once.
        step = jnp.where(number == 0, 0.0, steps)
        p = p + 0.5 * step * gradient
        x = x + step * p
        value, gradient = jax.vmap(target.value_and_grad)(x)
        return x, p + 0.5 * step * gradient, gradient, jnp.where(number == 0, value, first), value

    zeros = jnp.zeros(num, dtype)
    start = positions, momenta, jnp.zeros_like(positions), zeros, zeros
    x, p, _, log_start, log_end = jax.lax.fori_loop(0, num_leaps + 1, leapfrog, start)
    log_ratio = log_end - log_start + 0.5 * jnp.sum(jnp.square(momenta) - jnp.square(p), axis=1)
    log_ratio = jnp.where(jnp.isnan(log_ratio), -jnp.inf, log_ratio)
    accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
    is_accepted = uniform[num : 2 * num] < accept_prob
    energies = -jnp.where(is_accepted, log_end, log_start)
    is_divergent = log_ratio < -_DIVERGENT_ENERGY
    positions = jnp.where(is_accepted[:, None], x, positions)
    return Transition(positions, energies, accept_prob, is_divergent, num_leaps + 1)


def no_u_turn(key: Key, target: LogDensity, positions: Float[Array, "M k"], step_size: Float[Array, ""]) -> Transition:
    """Move every particle by one transition of NumPyro's NUTS."""

    # `LogDensity` sums over rows in a loop of unknown length, which has no reverse-mode derivative of its own.
    @jax.custom_vjp
    def potential(x: Array) -> Array:
        log_prior, log_likelihood = target.parts(x)
        return -log_prior - log_likelihood

    def forward(x: Array) -> tuple[Array, Array]:
        value, gradient = target.value_and_grad(x)
        return -value, -gradient

    potential.defvjp(forward, lambda gradient, outer: (outer * gradient,))
    kernel = NUTS(
        potential_fn=potential,
        step_size=step_size,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        max_tree_depth=_MAX_TREE_DEPTH,
    )
    # A state is built from positions alone: one from an earlier update would hold the potential energy of older data.
    states = kernel.init(jr.split(key, positions.shape[0]), 0, init_params=positions)
    adapt_state = states.adapt_state._replace(step_size=jnp.broadcast_to(step_size, positions.shape[:1]))
    states = kernel.sample(states._replace(adapt_state=adapt_state), (), {})
    accept_prob, num_leaps = jnp.nan_to_num(states.accept_prob), jnp.max(states.num_steps).astype(int)
    return Transition(states.z, states.potential_energy, accept_prob, states.diverging, num_leaps + 1)


_MOVES_PER_ROUND = 4  # moves between two estimates of the funnel's shape
# Step sizes as powers of two of the particles' standard deviation; those of moves along a funnel from half of it to twice.
_MAX_POWER, _MIN_POWER_ALONE = 1.0, -7.0
_MIN_DISTANCE = 1e-4  # smallest distance from the centre that counts, in standard deviations
_NUM_ERRORS = 4.0  # a slope counts as nonzero beyond this many standard errors


class EvaluatedParticles(NamedTuple):
    """Positions of particles, and the log prior and log likelihood there."""

    positions: Float[Array, "M k"]
    log_prior: Float[Array, " M"]
    log_likelihood: Float[Array, " M"]


class FunnelShape(NamedTuple):
    """How particles narrow along each coordinate.

    Attributes:
        centre: mean of the particles with the highest density.
        slopes: (j, i), slope of the log distance of x_i from the centre on x_j.
        cumulative_probs: of selecting coordinate j for a move along the funnel, proportional to the largest slope on x_j.
        narrowing: the largest slope, per standard deviation of x_j.
    """

    centre: Float[Array, " k"]
    slopes: Float[Array, "k k"]
    cumulative_probs: Float[Array, " k"]
    narrowing: Float[Array, ""]


def funnel_shape(
    positions: Float[Array, "M k"], log_density: Float[Array, " M"], sd: Float[Array, " k"]
) -> FunnelShape:
    """Estimate the centre of a funnel, and how distances from it depend on each coordinate.

    Args:
        sd: standard deviations of the particles, approximately.
    """
    num, size = positions.shape
    highest = jnp.max(jnp.where(jnp.isnan(log_density), -jnp.inf, log_density))
    # If no density is finite, all particles have equal weight.
    weights = jnp.nan_to_num(jnp.exp(0.5 * (log_density - highest))) + jnp.finfo(log_density.dtype).tiny
    centre = weights @ positions / jnp.sum(weights)
    gaps = (positions - centre) / sd
    log_gaps = 0.5 * jnp.log(jnp.square(gaps) + _MIN_DISTANCE**2)
    columns = jnp.concatenate([gaps, log_gaps], axis=1)
    centred = columns - jnp.mean(columns, axis=0)
    covariance = centred.T @ centred / num
    variances = jnp.diagonal(covariance)
    gap_variances, log_gap_variances = variances[:size, None], variances[size:]
    cross = covariance[:size, size:] * (1.0 - jnp.eye(size, dtype=gaps.dtype))
    is_significant = jnp.square(cross) > _NUM_ERRORS**2 / num * gap_variances * log_gap_variances
    slopes = jnp.where(is_significant, cross / gap_variances, 0.0)
    narrowing = jnp.max(jnp.abs(slopes), axis=1)
    cumulative = jnp.cumsum(narrowing + jnp.finfo(gaps.dtype).eps)
    return FunnelShape(centre, slopes / sd[:, None], cumulative / cumulative[-1], jnp.max(narrowing))


def coordinate_moves(
    key: Key,
    target: LogDensity,
    positions: Float[Array, "M k"],
    sd: Float[Array, " k"],
    num_rounds: Int[Array, ""] | int,
    min_narrowing: Float[Array, ""] | float = 0.0,
) -> tuple[EvaluatedParticles, Int[Array, ""], Bool[Array, ""]]:
    """Make `num_rounds` x 4 Metropolis moves of every particle: one coordinate alone and along the funnel, in turn.

    Given the centre and the slopes, which are estimated from all particles, every move leaves the target invariant.

    Args:
        sd: standard deviations of the particles, approximately; step sizes are proportional to them.
        min_narrowing: the moves end as soon as the largest slope, per standard deviation of the other coordinate, is smaller;
            for most posteriors before the first move.

    Returns:
        The particles, the number of evaluations of their density, and whether all of these moves were made.
    """
    num, size = positions.shape
    dtype = positions.dtype

    def one_round(
        carry: tuple[Array, FunnelShape, EvaluatedParticles],
    ) -> tuple[Array, FunnelShape, EvaluatedParticles]:
        number, funnel, particles = carry

        def one_move(turn: Array, now: EvaluatedParticles) -> EvaluatedParticles:
            is_evaluation, is_scaled = turn < 0, turn % 2 == 1
            key_move = jr.fold_in(key, number * (_MOVES_PER_ROUND + 1) + turn + 1)
            uniform, normal = uniform_and_normal(key_move, 2 * num + 1, num, dtype)
            for_power, for_acceptance = jnp.split(uniform[1:], 2)
            by_slope = jnp.sum(funnel.cumulative_probs < uniform[0])
            at_random = jnp.floor(size * uniform[0]).astype(int)
            j = jnp.minimum(jnp.where(is_scaled, by_slope, at_random), size - 1)
            min_power = jnp.where(is_scaled, -_MAX_POWER, _MIN_POWER_ALONE)
            step = sd[j] * jnp.exp2(_MAX_POWER + (min_power - _MAX_POWER) * for_power) * normal
            step = jnp.where(is_evaluation, 0.0, step)
            slopes = jnp.where(is_scaled & ~is_evaluation, funnel.slopes[j], 0.0)
            log_scaling = step[:, None] * slopes
            scaled = now.positions + jnp.expm1(log_scaling) * (now.positions - funnel.centre)
            proposed = scaled + step[:, None] * (jnp.arange(size) == j)
            log_prior, log_likelihood = jax.vmap(target.parts)(proposed)
            log_ratio = log_prior - now.log_prior + log_likelihood - now.log_likelihood + jnp.sum(log_scaling, axis=1)
            is_accepted = (jnp.log(for_acceptance) < log_ratio) | is_evaluation
            return EvaluatedParticles(
                jnp.where(is_accepted[:, None], proposed, now.positions),
                jnp.where(is_accepted, log_prior, now.log_prior),
                jnp.where(is_accepted, log_likelihood, now.log_likelihood),
            )

        # Round 0 is one step of size 0, which evaluates the density at the start: the density is compiled once.
        is_first = number == 0
        turns = jnp.where(is_first, -1, 0), jnp.where(is_first, 0, _MOVES_PER_ROUND)
        particles = jax.lax.fori_loop(*turns, one_move, particles)
        funnel = funnel_shape(particles.positions, particles.log_prior + particles.log_likelihood, sd)
        return number + 1, funnel, particles

    def needs_more(carry: tuple[Array, FunnelShape, EvaluatedParticles]) -> Bool[Array, ""]:
        number, funnel, _ = carry
        return (number == 0) | (number <= num_rounds) & (funnel.narrowing >= min_narrowing)

    unknown, zeros = jnp.zeros(num, dtype), jnp.zeros(size, dtype)
    no_funnel = FunnelShape(zeros, jnp.zeros((size, size), dtype), zeros, jnp.zeros((), dtype))
    first = (jnp.zeros((), int), no_funnel, EvaluatedParticles(positions, unknown, unknown))
    number, _, particles = jax.lax.while_loop(needs_more, one_round, first)
    return particles, 1 + _MOVES_PER_ROUND * (number - 1), (num_rounds > 0) & (number > num_rounds)
