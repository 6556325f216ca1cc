"""Particles that follow a target as it changes: reweight, temper, resample, move.

Targets lie on a path, indexed by a part in [0, 1], from the one that the particles were last moved for to the new one. Where
the weights of the whole way are too uneven, the path is cut where half of the particles still count, and the particles are
resampled and moved there first (Del Moral, Doucet and Jasra 2006). Every particle is its own Markov chain: Metropolis steps
that propose, in turn, from a Student-t law at the cloud's mean and covariance, and a walk of the cloud's shape. In the few
dimensions of outer sites the first forgets where a particle came from at once, and the second serves where the cloud is bent.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.diagnostics import finite_weights, weight_ess
from ppl_bandit.types import Key

__all__ = ["Moved", "follow", "max_memory", "squared_error"]

_MIN_MOVES, _MAX_MOVES = 8, 60
_MAX_STAGES = 40
_HALF_DF = 3  # 6 degrees of freedom: a chi-squared of an even number is a sum of exponentials
_BISECTIONS = 16


class Moved(NamedTuple):
    """Particles after a path was followed.

    Attributes:
        positions, log_targets: the particles, and the log density of which they are an equally weighted sample.
        log_ratio: log ratio of the integrals of the last such density and of the first.
        squared_error: of that, as if the particles of each stage were independent and exact.
        memory: largest correlation of a coordinate, or of its squared deviation, before and after the last stage's moves.
        acceptance: share of proposals accepted in the last stage.
        num_stages: stages of this path, 0 where nothing had to be moved.
    """

    positions: Float[Array, "M K"]
    log_targets: Float[Array, " M"]
    log_ratio: Float[Array, ""]
    squared_error: Float[Array, ""]
    memory: Float[Array, ""]
    acceptance: Float[Array, ""]
    num_stages: Int[Array, ""]


class _Walk(NamedTuple):
    """A stage in progress; `phase` 0 looks at the end of the path, 1 weighs at the next part, later ones are moves.

    `pending` are the log weights of the particles at the present part.
    """

    number: Int[Array, ""]
    part: Float[Array, ""]
    next_part: Float[Array, ""]
    phase: Int[Array, ""]
    pending: Float[Array, " M"]
    starts: Float[Array, "M K"]
    num_accepted: Float[Array, ""]
    moved: Moved


def max_memory(num_particles: int) -> float:
    """Return the largest memory that moves may leave: a tenth, and what chance alone correlates."""
    return 0.1 + 2.0 / math.sqrt(num_particles)


def follow(
    key: Key,
    log_targets: Callable[[Float[Array, "M K"], Float[Array, ""]], Float[Array, " M"]],
    start: Moved,
    log_weights: Float[Array, " M"],
    is_wanted: Bool[Array, ""],
) -> Moved:
    """Take particles along a path of targets to its end; where that is not wanted, return them as they are.

    One loop with one evaluation of the target in its body, whatever it is needed for: what compiles is small.

    Args:
        log_targets: (positions, part) -> log densities, at a part of the path.
        start: the particles, with the density of which they are an equally weighted sample.
        log_weights: of the particles under the target at part 0.
    """
    num_particles, num_dims = start.positions.shape
    step = 1.7 / math.sqrt(num_dims)
    zero = jnp.zeros((), start.positions.dtype)

    def goes_on(walk: _Walk) -> Bool[Array, ""]:
        return is_wanted & (walk.part < 1.0) & (walk.moved.num_stages < _MAX_STAGES)

    def body(walk: _Walk) -> _Walk:
        moved = walk.moved
        # One block of uniform numbers for everything: a generator is a large part of what is compiled here.
        uniform = _uniform(jr.fold_in(key, walk.number), (num_particles + 1, num_dims + _HALF_DF + 1), zero.dtype)
        is_look, is_weighing = walk.phase == 0, walk.phase == 1
        is_move = walk.phase > 1
        mean, factor = _shape_of(moved.positions)
        proposed, log_odds = _propose(uniform[1:, 1:], moved.positions, mean, factor, step, walk.phase % 2 == 0)
        candidates = jnp.where(is_move, proposed, moved.positions)
        found = log_targets(candidates, jnp.where(is_look, 1.0, walk.next_part))
        found = jnp.where(jnp.isnan(found) | (found == jnp.inf), -jnp.inf, found)

        gained = finite_weights(found - moved.log_targets)
        next_part = jnp.where(is_look, _next_part(walk.part, walk.pending, gained), walk.next_part)

        index = jnp.where(is_weighing, _systematic(uniform[0, 0], gained), jnp.arange(num_particles))
        log_ratio = jnp.where(is_weighing, logsumexp(gained) - math.log(num_particles), 0.0)
        error = jnp.where(is_weighing, squared_error(gained), 0.0)

        accepts = is_move & (jnp.log(uniform[1:, 0]) < found - moved.log_targets + log_odds)
        positions = jnp.where(accepts[:, None], candidates, moved.positions[index])
        targets = jnp.where(accepts | is_weighing, found[index], moved.log_targets)
        num_accepted = jnp.where(is_move, walk.num_accepted + jnp.mean(accepts), 0.0)

        starts = jnp.where(is_weighing, positions, walk.starts)
        num_moves = walk.phase - 1
        memory = jnp.where(is_move, _memory(starts, positions), 1.0)
        is_done = (num_moves >= _MIN_MOVES) & (memory <= max_memory(num_particles)) | (num_moves >= _MAX_MOVES)
        is_done &= is_move
        return _Walk(
            walk.number + 1,
            jnp.where(is_done, walk.next_part, walk.part),
            next_part,
            jnp.where(is_done, 0, walk.phase + 1),
            jnp.where(is_weighing, 0.0, walk.pending),
            starts,
            num_accepted,
            Moved(
                positions,
                targets,
                moved.log_ratio + log_ratio,
                moved.squared_error + error,
                jnp.where(is_done, memory, moved.memory),
                jnp.where(is_done, num_accepted / num_moves, moved.acceptance),
                moved.num_stages + is_done,
            ),
        )

    first = _Walk(jnp.zeros((), int), zero, zero, jnp.zeros((), int), log_weights, start.positions, zero, start)
    return jax.lax.while_loop(goes_on, body, first).moved


def squared_error(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    """Return the relative variance of the mean of M independent weights: (M / ess - 1) / M."""
    return jnp.maximum(1.0 / jnp.maximum(weight_ess(log_weights), 1.0) - 1.0 / log_weights.shape[0], 0.0)


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


def _uniform(key: Key, shape: tuple[int, ...], dtype: Any) -> Array:
    return jr.uniform(
        key, shape, dtype, minval=jnp.finfo(dtype).eps
    )  # away from 0: its logarithm and quantile are finite


def _systematic(offset: Float[Array, ""], log_weights: Float[Array, " M"]) -> Int[Array, " M"]:
    """Resample: index m is drawn floor or ceil of M x weight times."""
    num_particles = log_weights.shape[0]
    cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
    points = (jnp.arange(num_particles) + offset) / num_particles * cumulative[-1]
    return jnp.clip(jnp.searchsorted(cumulative, points, side="right"), 0, num_particles - 1)


def _propose(
    uniform: Float[Array, "M U"],
    positions: Float[Array, "M K"],
    mean: Float[Array, " K"],
    factor: Float[Array, "K K"],
    step: float,
    is_anew: Bool[Array, ""],
) -> tuple[Float[Array, "M K"], Float[Array, " M"]]:
    """Propose from the Student-t law, or by a walk; return the proposals and the log odds of proposing the way back."""
    num_dims = positions.shape[1]
    df = 2.0 * _HALF_DF
    normal = math.sqrt(2.0) * jax.lax.erf_inv(2.0 * uniform[:, :num_dims] - 1.0)
    stretch = jnp.sqrt(df / (-2.0 * jnp.sum(jnp.log(uniform[:, num_dims:]), axis=1)))[:, None]
    anew = stretch * normal
    proposed = jnp.where(is_anew, mean + anew @ factor.T, positions + step * normal @ factor.T)
    back = jax.lax.linalg.triangular_solve(factor, (positions - mean).T, left_side=True, lower=True).T

    def log_density(z: Float[Array, "M K"]) -> Float[Array, " M"]:
        return -0.5 * (df + num_dims) * jnp.log1p(jnp.sum(z**2, axis=1) / df)

    return proposed, jnp.where(is_anew, log_density(back) - log_density(anew), 0.0)


def _memory(starts: Float[Array, "M K"], positions: Float[Array, "M K"]) -> Float[Array, ""]:
    """Return the largest correlation over coordinates, and over their squared deviations."""

    def unit(x: Array) -> Array:
        x = x - jnp.mean(x, axis=0)
        return x / jnp.sqrt(jnp.sum(x**2, axis=0))

    before, after = unit(starts), unit(positions)
    plain = jnp.sum(before * after, axis=0)
    squared = jnp.sum(unit(before**2) * unit(after**2), axis=0)
    memory = jnp.max(jnp.abs(jnp.concatenate([plain, squared])))
    return jnp.where(jnp.isnan(memory), 1.0, memory)
