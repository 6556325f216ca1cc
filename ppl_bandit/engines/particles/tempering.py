"""A tempered sequential Monte Carlo sampler: reweight, resample and move particles along a path of target densities.

Targets lie on a path with a position `part` in [0, 1], from the target that the particles were last moved for to the new one.
If the weights for the whole path are too uneven, the path is cut where a quarter of the particles still count, and the
particles are resampled and moved there first (Del Moral, Doucet and Jasra 2006). Every particle is its own Markov chain of
Metropolis steps that propose, in turn, from a Student-t law with the mean and covariance of the particles, and by a random
walk of that covariance. In few dimensions the first needs few steps; the second serves curved targets.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.conditional_execution import ConditionalTask, run_where_needed
from ppl_bandit.engines.particles.covariance import (
    jittered_root,
    log_kernel,
    mean_and_covariance,
    standardize,
    student_t_draws,
)
from ppl_bandit.engines.particles.diagnostics import coordinate_autocorrelation
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    normalize_weights,
    resample,
    variance_of_mean,
    weight_ess,
)
from ppl_bandit.numerics import random_bits
from ppl_bandit.types import Key

__all__ = ["TemperingResult", "follow_path", "max_autocorrelation"]

_MIN_MOVES = 8
_MAX_MOVES = 240  # with 60, one in eight streams of `ridge_regression` had a refresh with a large autocorrelation
_MAX_STAGES = 200  # one outlier of 1e4 prior standard deviations takes 150
_MIN_ESS_SHARE = 0.25  # effective sample size at the end of a stage, as a share of the particles
_HALF_DEGREES = 3  # 6 degrees of freedom of the Student-t law
_BISECTIONS = 16
# Phases of a stage. Phases above `_RESAMPLE` are moves.
_LOOK_AHEAD, _RESAMPLE = 0, 1


class TemperingResult(NamedTuple):
    """Particles on a path of targets.

    Attributes:
        positions, log_targets: the particles, and the log density of which they are an equally weighted sample.
        log_weights: of the particles, from that density to the new target; 0 at the end of the path.
        log_ratio: log ratio of the integrals of that density and of the first target.
        squared_error: of the log ratio, as if the particles of each stage were independent and exact.
        autocorrelation: largest correlation of a coordinate, or of its squared deviation, over the moves of the last stage.
        acceptance: acceptance rate of the last stage.
        num_stages: stages so far; 0 if nothing was moved.
    """

    positions: Float[Array, "M K"]
    log_targets: Float[Array, " M"]
    log_weights: Float[Array, " M"]
    log_ratio: Float[Array, ""]
    squared_error: Float[Array, ""]
    autocorrelation: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_stages: Int[Array, ""]


class _Stage(NamedTuple):
    """A stage in progress.

    Attributes:
        number: iterations of the loop so far, over all stages.
        part, next_part: where on the path the stage starts and ends.
        phase: 0 evaluates the end of the path and decides how far to go, 1 resamples, and later ones are moves.
        starts: positions after resampling.
        sum_accepted: sum over moves of the share of accepted proposals.
    """

    number: Int[Array, ""]
    part: Float[Array, ""]
    next_part: Float[Array, ""]
    phase: Int[Array, ""]
    starts: Float[Array, "M K"]
    sum_accepted: Float[Array, ""]
    particles: TemperingResult


def max_autocorrelation(num_particles: float = math.inf) -> float:
    """Return the largest autocorrelation at which moves may end: 0.1, plus two standard errors of a zero correlation."""
    return 0.1 + 2.0 / math.sqrt(num_particles)


def follow_path(
    key: Key,
    log_targets: Callable[[Any, Float[Array, "M K"], Float[Array, ""]], Float[Array, " M"]],
    data: Any,
    start: TemperingResult,
    is_needed: Bool[Array, ""],
) -> TemperingResult:
    """Take particles along a path of targets to its end if that is needed, else return them unchanged.

    Under `vmap` only the sets of particles that need it are moved, a few sets at a time.

    Args:
        log_targets: (data, positions, part) -> log densities at a part of the path; it closes over no traced value.
        data: arrays that the targets read.
        start: the particles, with the density of which they are an equally weighted sample and their weights at part 0.
    """
    return run_where_needed(
        functools.partial(_follow_path, log_targets), ConditionalTask((jr.key_data(key), data), start, is_needed)
    )


def _follow_path(log_targets: Callable[[Any, Array, Array], Array], task: ConditionalTask) -> TemperingResult:
    """Run all phases of all stages in one loop, which evaluates the target once: it is large, and compiled once."""
    (key, data), start, is_needed = task
    num_particles, num_dims = start.positions.shape
    zero = jnp.zeros((), start.positions.dtype)

    def is_unfinished(stage: _Stage) -> Bool[Array, ""]:
        # After the last stage the weights to the end of the path are still evaluated once.
        is_exhausted = (stage.particles.num_stages >= _MAX_STAGES) & (stage.phase > _LOOK_AHEAD)
        return is_needed & (stage.part < 1.0) & ~is_exhausted

    def body(stage: _Stage) -> _Stage:
        particles = stage.particles
        shape = (num_particles + 1, num_dims + _HALF_DEGREES + 1)
        uniform = random_bits.uniform(jr.wrap_key_data(key), shape, zero.dtype, stage.number)
        proposed, log_odds = jax.lax.cond(
            stage.phase > _RESAMPLE,
            lambda: _propose(uniform[1:, 1:], particles.positions, stage.phase % 2 == 0),
            lambda: (particles.positions, jnp.zeros_like(start.log_weights)),
        )
        found = log_targets(data, proposed, jnp.where(stage.phase == _LOOK_AHEAD, 1.0, stage.next_part))
        found = jnp.where(jnp.isnan(found) | (found == jnp.inf), -jnp.inf, found)
        is_accepted = jnp.log(uniform[1:, 0]) < found - particles.log_targets + log_odds
        after = jax.lax.switch(
            jnp.minimum(stage.phase, 2),
            (
                lambda: _choose_next_part(stage, found),
                lambda: _resample(stage, found, uniform[0, 0]),
                lambda: _accept(stage, proposed, found, is_accepted),
            ),
        )
        return after._replace(number=stage.number + 1)

    first = _Stage(jnp.zeros((), int), zero, zero, jnp.zeros((), int), start.positions, zero, start)
    return jax.lax.while_loop(is_unfinished, body, first).particles


def _choose_next_part(stage: _Stage, log_end: Float[Array, " M"]) -> _Stage:
    """Choose where the stage ends, from the log densities at the end of the path."""
    particles = stage.particles
    log_weights = finite_log_weights(log_end - particles.log_targets)
    is_last = particles.num_stages >= _MAX_STAGES
    return stage._replace(
        next_part=_next_part(stage.part, particles.log_weights, log_weights),
        phase=stage.phase + 1,
        particles=particles._replace(log_weights=jnp.where(is_last, log_weights, particles.log_weights)),
    )


def _resample(stage: _Stage, log_targets: Float[Array, " M"], offset: Float[Array, ""]) -> _Stage:
    """Weight the particles to the end of the stage, and resample them."""
    particles = stage.particles
    log_weights = finite_log_weights(log_targets - particles.log_targets)
    _, ess, log_mean = normalize_weights(log_weights)
    index = resample(offset, log_weights, len(log_weights))
    positions = particles.positions[index]
    return stage._replace(
        phase=stage.phase + 1,
        starts=positions,
        sum_accepted=jnp.zeros_like(stage.sum_accepted),
        particles=particles._replace(
            positions=positions,
            log_targets=log_targets[index],
            log_weights=jnp.zeros_like(log_weights),
            log_ratio=particles.log_ratio + log_mean,
            squared_error=particles.squared_error + variance_of_mean(ess, len(log_weights)),
        ),
    )


def _accept(
    stage: _Stage, proposed: Float[Array, "M K"], log_targets: Float[Array, " M"], is_accepted: Bool[Array, " M"]
) -> _Stage:
    """Accept or reject proposals, and end the stage once the autocorrelation with its start is small."""
    particles = stage.particles
    positions = jnp.where(is_accepted[:, None], proposed, particles.positions)
    sum_accepted, num_moves = stage.sum_accepted + jnp.mean(is_accepted), stage.phase - _RESAMPLE
    autocorrelation = coordinate_autocorrelation(stage.starts, positions)
    is_mixed = (num_moves >= _MIN_MOVES) & (autocorrelation <= max_autocorrelation(len(log_targets)))
    is_done = is_mixed | (num_moves >= _MAX_MOVES)
    return stage._replace(
        part=jnp.where(is_done, stage.next_part, stage.part),
        phase=jnp.where(is_done, _LOOK_AHEAD, stage.phase + 1),
        sum_accepted=sum_accepted,
        particles=particles._replace(
            positions=positions,
            log_targets=jnp.where(is_accepted, log_targets, particles.log_targets),
            autocorrelation=jnp.where(is_done, autocorrelation, particles.autocorrelation),
            acceptance=jnp.where(is_done, sum_accepted / num_moves, particles.acceptance),
            num_stages=particles.num_stages + is_done,
        ),
    )


def _next_part(
    part: Float[Array, ""], log_weights: Float[Array, " M"], log_weights_at_end: Float[Array, " M"]
) -> Float[Array, ""]:
    """Return the farthest part at which the effective sample size is a quarter of the particles, at most the end.

    Log weights are interpolated linearly in between; the interpolation only decides where to stop.

    Args:
        log_weights: at the present part.
    """
    min_ess = _MIN_ESS_SHARE * log_weights.shape[0]

    def bisect(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        is_enough = weight_ess(log_weights + middle * (log_weights_at_end - log_weights)) >= min_ess
        return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle)

    zero, one = jnp.zeros((), log_weights.dtype), jnp.ones((), log_weights.dtype)
    share, _ = jax.lax.fori_loop(0, _BISECTIONS, bisect, (zero, one))
    inside = jnp.minimum(part + (1.0 - part) * jnp.maximum(share, 2.0**-_BISECTIONS), 1.0)
    return jnp.where(weight_ess(log_weights_at_end) >= min_ess, 1.0, inside)


def _propose(
    uniform: Float[Array, "M U"], positions: Float[Array, "M K"], is_independent: Bool[Array, ""]
) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """Propose from the Student-t law, or by a random walk.

    Returns:
        The proposals, and log q(position) - log q(proposal), which is 0 for the symmetric random walk.
    """
    num_dims = positions.shape[1]
    degrees = 2 * _HALF_DEGREES
    mean, covariance = mean_and_covariance(positions)
    root = jittered_root(covariance)
    normal = math.sqrt(2.0) * jax.lax.erf_inv(2.0 * uniform[:, :num_dims] - 1.0)
    noise = student_t_draws(uniform[:, num_dims:], normal)
    walk = 1.7 / math.sqrt(num_dims) * normal
    proposed = jnp.where(is_independent, mean + noise @ root.T, positions + walk @ root.T)
    old, new = (jnp.sum(jnp.square(z), axis=1) for z in (standardize(positions, mean, root), noise))
    log_odds = log_kernel(old, degrees, num_dims) - log_kernel(new, degrees, num_dims)
    return proposed, jnp.where(is_independent, log_odds, 0.0)
