"""A tempered sequential Monte Carlo sampler: reweight, resample and move particles along a path of target densities.

Targets lie on a path with a position `part` in [0, 1], from the target that the particles were last moved for to the new one.
If the weights for the whole path are too uneven, the path is cut where a quarter of the particles still count, and the
particles are resampled and moved there first (Del Moral, Doucet and Jasra 2006). Every particle is its own Markov chain of
Metropolis steps that propose, in turn, from a Student-t law with the mean and covariance of the particles, and by a random
walk of that covariance. In few dimensions the first needs few steps; the second serves curved targets. In many dimensions a
step changes a few random coordinates of the standardised particles: new values of all would hardly ever be accepted.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.checks import CHECKS
from ppl_bandit.engines.particles.diagnostics import coordinate_autocorrelation
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    jittered_root,
    log_kernel,
    mean_and_covariance,
    normalize_weights,
    resample,
    student_t_draws,
    variance_of_mean,
    weight_ess,
)
from ppl_bandit.engines.state import Particles
from ppl_bandit.numerics import random_bits
from ppl_bandit.runtime.jax_adapter import ConditionalTask, run_where_needed
from ppl_bandit.types import Key

_MIN_MOVES = 8  # before the autocorrelation with the start may end a stage
_MAX_MOVES = 240  # with 60, one in eight streams of `ridge_regression` had a refresh with a large autocorrelation
_MAX_STAGES = 200  # one outlier of 1e4 prior standard deviations takes 150
_MIN_ESS_SHARE = 0.25  # effective sample size at the end of a stage, as a share of the particles
MAX_DIMS_AT_ONCE = 12  # dimensions of which a move changes all
_NUM_MOVED = 4  # coordinates that a move changes if there are more
_HALF_DEGREES = 3  # 6 degrees of freedom of the Student-t law
_BISECTIONS = 16  # a part of the path to 2^-16


class PathEvidence(NamedTuple):
    """Measures of the moves along a path.

    Attributes:
        autocorrelation: largest correlation of a coordinate, or of its squared deviation, over the moves of the last stage.
        share_undefined: share of the proposals of the last stage whose density is nan or infinite. They are rejected, so that
            nothing else shows the posterior mass that may be there.
        num_stages: stages of the last path; 0 if nothing was moved.
    """

    autocorrelation: Float[Array, ""]
    share_undefined: Float[Array, ""]
    num_stages: Int[Array, ""]


class _Stage(NamedTuple):
    """A stage in progress.

    Attributes:
        number: iterations of the loop so far, over all stages.
        part, next_part: where on the path the stage starts and ends.
        phase: 0 evaluates the end of the path and decides how far to go, 1 resamples, and later ones are moves.
        starts: positions after resampling.
        sum_undefined: sum over moves of the share of proposals without a density.
    """

    number: Int[Array, ""]
    part: Float[Array, ""]
    next_part: Float[Array, ""]
    phase: Int[Array, ""]
    starts: Float[Array, "M K"]
    sum_undefined: Float[Array, ""]
    particles: Particles


def max_autocorrelation(num_particles: float = math.inf) -> float:
    """Return the largest autocorrelation at which moves may end: the bound, plus two standard errors of a zero correlation."""
    return CHECKS["path_autocorrelation"].bound + 2.0 / math.sqrt(num_particles)


def follow_path(
    key: Key,
    log_targets: Callable[[Any, Float[Array, "M K"], Float[Array, ""]], Float[Array, " M"]],
    data: Any,
    start: Particles,
    is_needed: Bool[Array, ""],
    max_evaluations: int | None = None,
) -> Particles:
    """Take particles along a path of targets to its end if that is needed, else return them unchanged.

    Under `vmap` only the sets of particles that need it are moved, a few sets at a time.

    Args:
        log_targets: (data, positions, part) -> log densities at a part of the path; it closes over no traced value.
        data: arrays that the targets read.
        start: the particles, with the density of which they are an equally weighted sample and their weights at part 0. The
            log ratio of the integrals at the end and the start is added to their log evidence.
        max_evaluations: of the targets, after which a stage ends with the fewest moves, however large the autocorrelation.
    """
    run = functools.partial(_follow_path, log_targets, max_evaluations)
    return run_where_needed(run, ConditionalTask((jr.key_data(key), data), start, is_needed))


def _follow_path(
    log_targets: Callable[[Any, Array, Array], Array], max_evaluations: int | None, task: ConditionalTask
) -> Particles:
    """Run all phases of all stages in one loop, which evaluates the target once: it is large, and compiled once."""
    (key, data), start, is_needed = task
    num_particles, num_dims = start.positions.shape
    zero = jnp.zeros((), start.positions.dtype)

    def is_unfinished(stage: _Stage) -> Bool[Array, ""]:
        # After the last stage the weights to the end of the path are still evaluated once.
        is_exhausted = (stage.particles.evidence.num_stages >= _MAX_STAGES) & (stage.phase > 0)
        return is_needed & (stage.part < 1.0) & ~is_exhausted

    def body(stage: _Stage) -> _Stage:
        particles = stage.particles
        shape = (num_particles + 1, num_dims + _HALF_DEGREES + 1)
        uniform = random_bits.uniform(jr.wrap_key_data(key), shape, zero.dtype, stage.number)
        proposed, log_odds = jax.lax.cond(
            stage.phase > 1,
            lambda: _propose(uniform[1:, 1:], uniform[0, 1 : num_dims + 1], particles.positions, stage.phase % 2 == 0),
            lambda: (particles.positions, jnp.zeros_like(start.log_weights)),
        )
        found = log_targets(data, proposed, jnp.where(stage.phase == 0, 1.0, stage.next_part))
        is_undefined = jnp.isnan(found) | (found == jnp.inf)
        found = jnp.where(is_undefined, -jnp.inf, found)
        is_spent = jnp.array(False) if max_evaluations is None else stage.number >= max_evaluations
        is_accepted = jnp.log(uniform[1:, 0]) < found - particles.log_targets + log_odds
        after = jax.lax.switch(
            jnp.minimum(stage.phase, 2),
            (
                lambda: _choose_next_part(stage, found),
                lambda: _resample(stage, found, uniform[0, 0]),
                lambda: _accept(stage, proposed, found, is_accepted, is_undefined, is_spent),
            ),
        )
        return after._replace(number=stage.number + 1)

    first = _Stage(jnp.zeros((), int), zero, zero, jnp.zeros((), int), start.positions, zero, start)
    return jax.lax.while_loop(is_unfinished, body, first).particles


def _choose_next_part(stage: _Stage, log_end: Float[Array, " M"]) -> _Stage:
    """Choose where the stage ends, from the log densities at the end of the path."""
    particles = stage.particles
    log_weights = finite_log_weights(log_end - particles.log_targets)
    is_last = particles.evidence.num_stages >= _MAX_STAGES
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
        sum_undefined=jnp.zeros_like(stage.sum_undefined),
        particles=particles._replace(
            positions=positions,
            log_targets=log_targets[index],
            log_weights=jnp.zeros_like(log_weights),
            log_evidence=particles.log_evidence + log_mean,
            squared_error=particles.squared_error + variance_of_mean(ess, len(log_weights)),
        ),
    )


def _accept(
    stage: _Stage,
    proposed: Float[Array, "M K"],
    log_targets: Float[Array, " M"],
    is_accepted: Bool[Array, " M"],
    is_undefined: Bool[Array, " M"],
    is_spent: Bool[Array, ""],
) -> _Stage:
    """Accept or reject proposals, and end the stage once the autocorrelation with its start is small or the budget spent."""
    particles = stage.particles
    positions = jnp.where(is_accepted[:, None], proposed, particles.positions)
    num_moves, sum_undefined = stage.phase - 1, stage.sum_undefined + jnp.mean(is_undefined)
    autocorrelation = coordinate_autocorrelation(stage.starts, positions)
    is_mixed = autocorrelation <= max_autocorrelation(len(log_targets))
    is_done = (num_moves >= _MIN_MOVES) & (is_mixed | is_spent) | (num_moves >= _MAX_MOVES)
    return stage._replace(
        part=jnp.where(is_done, stage.next_part, stage.part),
        phase=jnp.where(is_done, 0, stage.phase + 1),
        sum_undefined=sum_undefined,
        particles=particles._replace(
            positions=positions,
            log_targets=jnp.where(is_accepted, log_targets, particles.log_targets),
            evidence=PathEvidence(
                jnp.where(is_done, autocorrelation, particles.evidence.autocorrelation),
                jnp.where(is_done, sum_undefined / num_moves, particles.evidence.share_undefined),
                particles.evidence.num_stages + is_done,
            ),
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
    uniform: Float[Array, "M U"],
    order: Float[Array, " K"],
    positions: Float[Array, "M K"],
    is_independent: Bool[Array, ""],
) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """Propose new values of a few standardised coordinates, from the Student-t law or by a random walk.

    Args:
        order: random numbers; the coordinates with the smallest ones are moved.

    Returns:
        The proposals, and log q(position) - log q(proposal), which is 0 for the symmetric random walk.
    """
    num_dims = positions.shape[1]
    num_moved = num_dims if num_dims <= MAX_DIMS_AT_ONCE else _NUM_MOVED
    degrees = 2 * _HALF_DEGREES
    mean, covariance = mean_and_covariance(positions)
    root = jittered_root(covariance)
    # A triangular solve for 1,000 right-hand sides takes 8 ms on a CPU, the inverse and a product 0.04 ms (14 dimensions).
    inverse = jax.scipy.linalg.solve_triangular(root, jnp.eye(num_dims, dtype=root.dtype), lower=True)
    old = (positions - mean) @ inverse.T
    normal = math.sqrt(2.0) * jax.lax.erf_inv(2.0 * uniform[:, :num_dims] - 1.0)
    noise = student_t_draws(uniform[:, num_dims:], normal)
    is_moved = order <= jnp.sort(order)[num_moved - 1]
    walk = old + 1.7 / math.sqrt(num_moved) * normal
    new = jnp.where(is_moved, jnp.where(is_independent, noise, walk), old)
    squares = (jnp.sum(jnp.where(is_moved, jnp.square(z), 0.0), axis=1) for z in (old, new))
    before, after = (log_kernel(own, degrees, num_moved) for own in squares)
    return positions + (new - old) @ root.T, jnp.where(is_independent, before - after, 0.0)
