"""Particles that follow a target as it changes: reweight, temper, resample, move.

Targets lie on a path, indexed by a part in [0, 1], from the one that the particles were last moved for to the new one. Where
the weights of the whole way are too uneven, the path is cut where half of the particles still count, and the particles are
resampled and moved there first (Del Moral, Doucet and Jasra 2006). Every particle is its own Markov chain: Metropolis steps
that propose, in turn, from a Student-t law at the cloud's mean and covariance, and a walk of the cloud's shape. In the few
dimensions of outer sites the first forgets where a particle came from at once, and the second serves where the cloud is bent.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.conditional_execution import Task, run_where_needed
from ppl_bandit.engines.particles.diagnostics import finite_log_weights, variance_of_mean, weight_ess
from ppl_bandit.numerics import random_bits
from ppl_bandit.types import Key

__all__ = ["TemperingResult", "follow", "max_memory"]

_MIN_MOVES = 8
_MAX_MOVES = 240  # with 60, one in eight streams of `ridge_regression` had a refresh that still remembered
_MAX_STAGES = 200  # of a path: one outlier of 1e4 prior standard deviations takes 150
_HALF_DF = 3  # 6 degrees of freedom: a chi-squared of an even number is a sum of exponentials
_BISECTIONS = 16


class TemperingResult(NamedTuple):
    """Particles after a path was followed.

    Attributes:
        positions, log_targets: the particles, and the log density of which they are an equally weighted sample.
        log_weights: from there to the target at the end of the path, of particles that have not moved to that at its start: 0
            where the end was reached.
        log_ratio: log ratio of the integrals of the last such density and of the first.
        squared_error: of that, as if the particles of each stage were independent and exact.
        memory: largest correlation of a coordinate, or of its squared deviation, before and after the last stage's moves.
        acceptance: share of proposals accepted in the last stage.
        num_stages: stages of this path, 0 where nothing had to be moved.
    """

    positions: Float[Array, "M K"]
    log_targets: Float[Array, " M"]
    log_weights: Float[Array, " M"]
    log_ratio: Float[Array, ""]
    squared_error: Float[Array, ""]
    memory: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_stages: Int[Array, ""]


class _Walk(NamedTuple):
    """A stage in progress; `phase` 0 looks at the end of the path, 1 weighs at the next part, later ones are moves."""

    number: Int[Array, ""]
    part: Float[Array, ""]
    next_part: Float[Array, ""]
    phase: Int[Array, ""]
    starts: Float[Array, "M K"]
    num_accepted: Float[Array, ""]
    moved: TemperingResult


def max_memory(num_particles: int) -> float:
    """Return the largest memory that moves may leave: a tenth, and what chance alone correlates."""
    return 0.1 + 2.0 / math.sqrt(num_particles)


def follow(
    key: Key,
    log_targets: Callable[[Any, Float[Array, "M K"], Float[Array, ""]], Float[Array, " M"]],
    data: Any,
    start: TemperingResult,
    is_wanted: Bool[Array, ""],
) -> TemperingResult:
    """Take particles along a path of targets to its end; where that is not wanted, return them as they are.

    Many clouds at once (`vmap`) are not moved in lockstep, all whenever one is to be moved: those that are wanted are gathered
    and moved a few at a time.

    Args:
        log_targets: (data, positions, part) -> log densities, at a part of the path; it closes over no traced value.
        data: arrays that the targets read.
        start: the particles, with the density of which they are an equally weighted sample and their weights at part 0.
    """
    return run_where_needed(functools.partial(_follow, log_targets), Task((jr.key_data(key), data), start, is_wanted))


def _follow(log_targets: Callable[[Any, Array, Array], Array], task: Task) -> TemperingResult:
    """Follow the path in one loop with one evaluation of the target, whatever it is needed for: what compiles is small."""
    (key, data), start, is_wanted = task
    num_particles, num_dims = start.positions.shape
    step = 1.7 / math.sqrt(num_dims)
    zero = jnp.zeros((), start.positions.dtype)

    def goes_on(walk: _Walk) -> Bool[Array, ""]:
        # After the last stage there is one more look: how uneven the weights still are is evidence.
        has_looked = (walk.moved.num_stages >= _MAX_STAGES) & (walk.phase > 0)
        return is_wanted & (walk.part < 1.0) & ~has_looked

    def body(walk: _Walk) -> _Walk:
        positions = walk.moved.positions
        # One block of uniform numbers for everything: a generator is a large part of what is compiled here.
        shape = (num_particles + 1, num_dims + _HALF_DF + 1)
        uniform = random_bits.uniform(jr.wrap_key_data(key), shape, zero.dtype, walk.number)
        candidates, log_odds = jax.lax.cond(
            walk.phase > 1,
            lambda: _propose(uniform[1:, 1:], positions, step, walk.phase % 2 == 0),
            lambda: (positions, jnp.zeros_like(start.log_weights)),
        )
        found = log_targets(data, candidates, jnp.where(walk.phase == 0, 1.0, walk.next_part))
        found = jnp.where(jnp.isnan(found) | (found == jnp.inf), -jnp.inf, found)
        after = jax.lax.switch(
            jnp.minimum(walk.phase, 2),
            (
                lambda: _look(walk, found),
                lambda: _weigh(walk, found, uniform[0, 0]),
                lambda: _step(
                    walk, candidates, found, jnp.log(uniform[1:, 0]) < found - walk.moved.log_targets + log_odds
                ),
            ),
        )
        return after._replace(number=walk.number + 1)

    first = _Walk(jnp.zeros((), int), zero, zero, jnp.zeros((), int), start.positions, zero, start)
    return jax.lax.while_loop(goes_on, body, first).moved


def _look(walk: _Walk, found: Float[Array, " M"]) -> _Walk:
    """Decide how far to go."""
    moved = walk.moved
    gained = finite_log_weights(found - moved.log_targets)
    is_last = moved.num_stages >= _MAX_STAGES
    return walk._replace(
        next_part=_next_part(walk.part, moved.log_weights, gained),
        phase=walk.phase + 1,
        moved=moved._replace(log_weights=jnp.where(is_last, gained, moved.log_weights)),
    )


def _weigh(walk: _Walk, found: Float[Array, " M"], offset: Float[Array, ""]) -> _Walk:
    """Weigh the particles where the stage ends, and resample them."""
    moved = walk.moved
    gained = finite_log_weights(found - moved.log_targets)
    index = _systematic(offset, gained)
    positions = moved.positions[index]
    return walk._replace(
        phase=walk.phase + 1,
        starts=positions,
        num_accepted=jnp.zeros_like(walk.num_accepted),
        moved=moved._replace(
            positions=positions,
            log_targets=found[index],
            log_weights=jnp.zeros_like(gained),
            log_ratio=moved.log_ratio + logsumexp(gained) - math.log(gained.shape[0]),
            squared_error=moved.squared_error + variance_of_mean(weight_ess(gained), len(gained)),
        ),
    )


def _step(walk: _Walk, candidates: Float[Array, "M K"], found: Float[Array, " M"], accepts: Bool[Array, " M"]) -> _Walk:
    """Accept or reject proposals, and end the stage once particles have forgotten where they started."""
    moved = walk.moved
    positions = jnp.where(accepts[:, None], candidates, moved.positions)
    num_accepted, num_moves = walk.num_accepted + jnp.mean(accepts), walk.phase - 1
    memory = _memory(walk.starts, positions)
    is_done = (num_moves >= _MIN_MOVES) & (memory <= max_memory(len(found))) | (num_moves >= _MAX_MOVES)
    return walk._replace(
        part=jnp.where(is_done, walk.next_part, walk.part),
        phase=jnp.where(is_done, 0, walk.phase + 1),
        num_accepted=num_accepted,
        moved=moved._replace(
            positions=positions,
            log_targets=jnp.where(accepts, found, moved.log_targets),
            memory=jnp.where(is_done, memory, moved.memory),
            acceptance=jnp.where(is_done, num_accepted / num_moves, moved.acceptance),
            num_stages=moved.num_stages + is_done,
        ),
    )


def _next_part(part: Float[Array, ""], pending: Float[Array, " M"], gained: Float[Array, " M"]) -> Float[Array, ""]:
    """Return how far to go: to the end if a quarter of the particles would count there, else where a quarter would.

    In between log weights are taken to be linear in the part; only where to stop depends on it.

    Args:
        pending, gained: log weights at the present part, and at the end.
    """
    enough = 0.25 * gained.shape[0]

    def halve(_: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        counts = weight_ess(pending + middle * (gained - pending)) >= enough
        return jnp.where(counts, middle, low), jnp.where(counts, high, middle)

    zero, one = jnp.zeros((), gained.dtype), jnp.ones((), gained.dtype)
    share, _ = jax.lax.fori_loop(0, _BISECTIONS, halve, (zero, one))
    share = jnp.where(weight_ess(gained) >= enough, 1.0, jnp.maximum(share, 2.0**-_BISECTIONS))
    return jnp.where(share == 1.0, 1.0, jnp.minimum(part + (1.0 - part) * share, 1.0))


def _shape_of(positions: Float[Array, "M K"]) -> tuple[Float[Array, " K"], Float[Array, "K K"]]:
    mean = jnp.mean(positions, axis=0)
    centred = positions - mean
    covariance = centred.T @ centred / positions.shape[0]
    # A share of its own diagonal keeps it invertible, in single precision too.
    return mean, jnp.linalg.cholesky(covariance + jnp.diag(1e-5 * jnp.diagonal(covariance) + 1e-12))


def _systematic(offset: Float[Array, ""], log_weights: Float[Array, " M"]) -> Int[Array, " M"]:
    """Resample: index m is drawn floor or ceil of M x weight times."""
    num_particles = log_weights.shape[0]
    cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (jnp.arange(num_particles) + offset) / num_particles * cumulative[-1]
    return jnp.clip(jnp.searchsorted(cumulative, points, side="right"), 0, num_particles - 1)


def _propose(
    uniform: Float[Array, "M U"], positions: Float[Array, "M K"], step: float, is_anew: Bool[Array, ""]
) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """Propose from the Student-t law, or by a walk; return the proposals and the log odds of proposing the way back."""
    num_dims = positions.shape[1]
    df = 2.0 * _HALF_DF
    mean, factor = _shape_of(positions)
    normal = math.sqrt(2.0) * jax.lax.erf_inv(2.0 * uniform[:, :num_dims] - 1.0)
    stretch = jnp.sqrt(df / (-2.0 * jnp.sum(jnp.log(uniform[:, num_dims:]), axis=1)))[:, None]
    anew = stretch * normal
    proposed = jnp.where(is_anew, mean + anew @ factor.T, positions + step * normal @ factor.T)
    # Invert the small matrix: to solve for a thousand right-hand sides takes a library call ten times as long.
    identity = jnp.eye(num_dims, dtype=positions.dtype)
    inverse = jax.lax.linalg.triangular_solve(factor, identity, left_side=True, lower=True)
    back = (positions - mean) @ inverse.T

    def log_density(z: Float[Array, "M K"]) -> Float[Array, " M"]:
        return -0.5 * (df + num_dims) * jnp.log1p(jnp.sum(z**2, axis=1) / df)

    return proposed, jnp.where(is_anew, log_density(back) - log_density(anew), 0.0)


def _memory(starts: Float[Array, "M K"], positions: Float[Array, "M K"]) -> Float[Array, ""]:
    """Return the largest correlation over coordinates, and over their squared deviations."""
    both = jnp.stack([starts, positions])
    deviations = both - jnp.mean(both, axis=1, keepdims=True)
    squares = deviations**2
    features = jnp.concatenate([deviations, squares - jnp.mean(squares, axis=1, keepdims=True)], axis=2)  # (2, M, 2 K)
    before, after = features
    norms = jnp.sqrt(jnp.sum(features**2, axis=1))
    memory = jnp.max(jnp.abs(jnp.sum(before * after, axis=0) / (norms[0] * norms[1])))
    return jnp.where(jnp.isnan(memory), 1.0, memory)
