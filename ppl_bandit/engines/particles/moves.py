"""Markov chains for a whole cloud: every particle is a chain, and all make the same number of transitions.

So no particle's share is lost or gained by chance, and how well the cloud forgot where it started can be measured: over the
particles, what they are after a window of transitions is compared with what they were before it. A window in which they did
not forget, or in which their mean drifted, is followed by one of twice the length. Step size and mass matrix come from the
cloud, whose mean acceptance is known to a percent after one transition.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int
from numpyro.infer import NUTS

from ppl_bandit.engines.particles.coordinate_moves import EvaluatedParticles, coordinate_moves
from ppl_bandit.engines.particles.diagnostics import memory_and_drift
from ppl_bandit.engines.particles.log_density import LogDensity, whiten
from ppl_bandit.numerics.random_bits import uniform_and_normal
from ppl_bandit.types import Key

__all__ = ["Kernel", "MoveEvidence", "MoveResult", "hamiltonian", "move", "no_u_turn", "mean_and_root"]

MAX_MEMORY = 0.5  # correlation with where a particle started, in any direction, square or energy
MAX_DIVERGENT_SHARE = 0.01  # of the transitions of the last window
MIN_ACCEPT = 0.5
MAX_STUCK_SHARE = 0.02  # of particles that made no transition in the last window
_ENOUGH = 0.5  # effective sample size, of the number of particles, at which no further window is worth its cost
_TARGET_ACCEPT = 0.8
_MIN_START_SHARE = 0.1  # effective sample size of particles whose forgetting says something
_MAX_WINDOWS = 5
_NUM_BEFORE = 2  # windows before one that may say that no more of them will help, or are needed
_TRAPPED = 0.8  # memory that twice as many transitions should have brought down
_FADING = 0.5  # of the share of divergent transitions that a longer window should have left
_MAX_LEAPS = 64
_LOST_ENERGY = 1000.0
_MAX_TREE_DEPTH = 7


class Steps(NamedTuple):
    """What one transition of every particle did.

    Attributes:
        positions: after it.
        energies: minus the log density there.
        accept_prob: with which each proposal was accepted.
        is_divergent: whether a trajectory lost its energy.
    """

    positions: Float[Array, "M k"]
    energies: Float[Array, " M"]
    accept_prob: Float[Array, " M"]
    is_divergent: Bool[Array, " M"]


# (key, target in whitened coordinates, positions there, step size) -> one transition of each
Kernel = Callable[[Key, LogDensity, Float[Array, "M k"], Float[Array, ""]], Steps]


class MoveEvidence(NamedTuple):
    """How the last window of transitions went.

    Attributes:
        memory: largest correlation, beyond chance, between what the particles are and what they were when it began.
        drift: largest shift of a mean, a mean square or the energy during it, relative to what chance allows.
        accept: mean probability of acceptance.
        num_divergences: transitions whose trajectories lost their energy.
        stuck_share: of particles, those that it did not move.
        is_sound: whether all of these are as they should be, and all energies finite.
    """

    memory: Float[Array, ""]
    drift: Float[Array, ""]
    accept: Float[Array, ""]
    num_divergences: Int[Array, ""]
    stuck_share: Float[Array, ""]
    is_sound: Bool[Array, ""]


class MoveResult(NamedTuple):
    """A cloud after its moves, its log densities, the step size for the next moves, and the evidence of these."""

    positions: Float[Array, "M k"]
    log_prior: Float[Array, " M"]
    log_likelihood: Float[Array, " M"]
    step_size: Float[Array, ""]
    evidence: MoveEvidence


def hamiltonian(key: Key, target: LogDensity, positions: Float[Array, "M k"], step_size: Float[Array, ""]) -> Steps:
    """Move every particle along a Hamiltonian trajectory of about a quarter of a turn, all with as many leaps.

    Where the cloud's covariance is the posterior's, a quarter of a turn makes a Gaussian forget; trajectories are longer or
    shorter by up to a half, and steps by a fifth, so that nothing is periodic.
    """
    num, dtype = positions.shape[0], positions.dtype
    uniform, normal = uniform_and_normal(key, 2 * num + 1, positions.size, dtype)
    momenta = normal.reshape(positions.shape)
    length = 0.5 * math.pi * (0.5 + uniform[-1])
    num_leaps = jnp.clip(jnp.ceil(length / step_size), 1, _MAX_LEAPS).astype(int)
    steps = step_size * (0.8 + 0.4 * uniform[:num, None])

    def leap(number: Array, carry: Any) -> Any:
        x, p, gradient, first, _ = carry
        # The turn before the first reads the density where the particles are: the kernel is compiled once.
        own = jnp.where(number == 0, 0.0, steps)
        p = p + 0.5 * own * gradient
        x = x + own * p
        value, gradient = jax.vmap(target.value_and_grad)(x)
        return x, p + 0.5 * own * gradient, gradient, jnp.where(number == 0, value, first), value

    none = jnp.zeros(num, dtype)
    x, p, _, begin, end = jax.lax.fori_loop(
        0, num_leaps + 1, leap, (positions, momenta, jnp.zeros_like(positions), none, none)
    )
    gain = end - begin + 0.5 * jnp.sum(jnp.square(momenta) - jnp.square(p), axis=1)
    gain = jnp.where(jnp.isnan(gain), -jnp.inf, gain)
    accept_prob = jnp.exp(jnp.minimum(gain, 0.0))
    is_accepted = uniform[num : 2 * num] < accept_prob
    energies = -jnp.where(is_accepted, end, begin)
    return Steps(jnp.where(is_accepted[:, None], x, positions), energies, accept_prob, gain < -_LOST_ENERGY)


def no_u_turn(key: Key, target: LogDensity, positions: Float[Array, "M k"], step_size: Float[Array, ""]) -> Steps:
    """Move every particle by one transition of NumPyro's NUTS."""

    @jax.custom_vjp
    def potential(x: Array) -> Array:
        log_prior, log_likelihood = target.parts(x)
        return -log_prior - log_likelihood

    def forward(x: Array) -> tuple[Array, Array]:
        value, gradient = target.value_and_grad(x)
        return -value, -gradient

    # The rows are read in a loop that reverse-mode derivatives cannot pass; the target knows its own.
    potential.defvjp(forward, lambda gradient, outer: (outer * gradient,))
    kernel = NUTS(
        potential_fn=potential,
        step_size=step_size,
        adapt_step_size=False,
        adapt_mass_matrix=False,
        max_tree_depth=_MAX_TREE_DEPTH,
    )
    # States are built from positions alone: the cached energy of a state from before would be that of older data.
    states = kernel.init(jr.split(key, positions.shape[0]), 0, init_params=positions)
    adapt_state = states.adapt_state._replace(step_size=jnp.broadcast_to(step_size, positions.shape[:1]))
    states = kernel.sample(states._replace(adapt_state=adapt_state), (), {})
    return Steps(states.z, states.potential_energy, jnp.nan_to_num(states.accept_prob), states.diverging)


class _Window(NamedTuple):
    number: Int[Array, ""]
    swept: EvaluatedParticles
    step_size: Float[Array, ""]
    ess: Float[Array, ""]
    memory_before: Float[Array, ""]
    divergent_share: Float[Array, ""]
    is_mixed: Bool[Array, ""]
    is_diverging: Bool[Array, ""]
    evidence: MoveEvidence


def move(
    key: Key,
    target: LogDensity,
    positions: Float[Array, "M k"],
    ess: Float[Array, ""],
    covariance: Float[Array, "k k"],
    step_size: Float[Array, ""],
    kernel: Kernel = hamiltonian,
    first_length: int = 4,
    first_sweep: int = 8,
    min_narrowing: Float[Array, ""] | float = 0.0,
) -> MoveResult:
    """Move a cloud in windows of `first_length` transitions, then twice as many, until it forgot where a window began.

    After its transitions a window sweeps over the latents, which goes where no step size leads (see `sweeps`).

    Args:
        positions: where the particles start: draws of the target, with as many repetitions as their weights demand.
        ess: effective sample size of these.
        min_narrowing: of a cloud that is swept (`sweeps.sweep`); one whose trajectories diverge always is.
        covariance: of the target, as far as it is known.
    """
    num, size = positions.shape

    def window(before: _Window) -> _Window:
        centre, root = mean_and_root(before.swept.positions, jnp.where(before.number == 0, covariance, 0.0), before.ess)
        inside = whiten(target, centre, root)
        key_sweep, key_window = jr.split(jr.fold_in(key, before.number))

        def inside_of(positions: Array) -> Array:
            return jax.scipy.linalg.solve_triangular(root, (positions - centre).T, lower=True).T

        start = inside_of(before.swept.positions)
        length = first_length * 2**before.number
        num_settled = length - length // 2

        def transition(number: Array, carry: Any) -> Any:
            x, step_size, first_energies, accept, divergent, has_moved = carry
            steps = kernel(jr.fold_in(key_window, number), inside, x, step_size)
            mean_accept = jnp.mean(steps.accept_prob)
            is_settled = number >= length // 2  # until then the step size is still looking for the new mass matrix
            step_size = step_size * jnp.exp(jnp.clip(2.0 * (mean_accept - _TARGET_ACCEPT), -1.0, 0.25))
            has_moved |= jnp.any(steps.positions != x, axis=1)
            first_energies = jnp.where(number == 0, steps.energies, first_energies)
            return (
                steps.positions,
                step_size,
                first_energies,
                accept + jnp.where(is_settled, mean_accept / num_settled, 0.0),
                divergent + jnp.where(is_settled, jnp.sum(steps.is_divergent), 0),
                has_moved,
            )

        zero = jnp.zeros((), positions.dtype)
        carry = (
            start,
            before.step_size,
            jnp.zeros(num, positions.dtype),
            zero,
            jnp.zeros((), int),
            jnp.zeros(num, bool),
        )
        x, step_size, first_energies, accept, divergent, has_moved = jax.lax.fori_loop(0, length, transition, carry)
        moved = centre + x @ root.T
        sd = jnp.sqrt(jnp.sum(jnp.square(root), axis=1))
        divergent_share = (divergent / (num_settled * num)).astype(positions.dtype)
        is_calm = divergent_share <= MAX_DIVERGENT_SHARE
        least = jnp.where(is_calm, min_narrowing, 0.0)
        swept, is_swept = coordinate_moves(key_sweep, target, moved, sd, first_sweep * 2**before.number, least)
        has_moved |= jnp.any(swept.positions != moved, axis=1)
        energies = -swept.log_prior - swept.log_likelihood
        memory, drift = memory_and_drift(start, inside_of(swept.positions), first_energies, energies, before.ess)
        stuck = 1.0 - jnp.mean(has_moved.astype(positions.dtype))
        # Particles that all start at a few points have nothing to forget: the window after it can tell.
        is_judged = before.ess >= _MIN_START_SHARE * num
        is_mixed = (
            is_judged
            & (memory <= MAX_MEMORY)
            & (drift <= 1.0)
            & (accept >= MIN_ACCEPT)
            & (stuck <= MAX_STUCK_SHARE)
            & jnp.all(jnp.isfinite(energies))
        )
        # Sweeps go where trajectories diverge: of particles that they led to forget twice in a row, no more is asked.
        is_followed = is_swept & before.is_mixed & (before.number >= _NUM_BEFORE)
        is_sound = is_mixed & (is_calm | is_followed)
        # They forgot, and as many trajectories diverge as in half as many transitions: at a place that no step size suits.
        is_diverging = is_mixed & ~is_sound & (divergent_share > _FADING * before.divergent_share)
        evidence = MoveEvidence(memory, drift, accept, divergent, stuck, is_sound)
        after_ess = 1.0 / (memory**2 / before.ess + (1.0 - memory**2) / num)
        number, memory_before = before.number + 1, before.evidence.memory
        flags = is_mixed, is_diverging
        return _Window(number, swept, step_size, after_ess, memory_before, divergent_share, *flags, evidence)

    def needs_more(last: _Window) -> Bool[Array, ""]:
        is_done = last.evidence.is_sound & (last.ess >= _ENOUGH * num)
        # Twice as many transitions, and they remember as much: modes that no trajectory connects.
        is_trapped = (last.number > _NUM_BEFORE) & (
            last.evidence.memory > jnp.maximum(0.9 * last.memory_before, _TRAPPED)
        )
        is_hopeless = is_trapped | ((last.number > _NUM_BEFORE) & last.is_diverging)
        return (last.number == 0) | (~is_done & ~is_hopeless & (last.number < _MAX_WINDOWS))

    one = jnp.ones((), positions.dtype)
    none = MoveEvidence(one, one, 0 * one, jnp.zeros((), int), one, jnp.array(False))
    unknown = jnp.zeros(num, positions.dtype)
    starts = EvaluatedParticles(positions, unknown, unknown)
    no = jnp.array(False)
    begin = _Window(jnp.zeros((), int), starts, step_size, ess.astype(positions.dtype), one, one, no, no, none)
    end = jax.lax.while_loop(needs_more, window, begin)
    return MoveResult(*end.swept, end.step_size, end.evidence)


def mean_and_root(
    positions: Float[Array, "M k"],
    before: Float[Array, "k k"],
    ess: Float[Array, ""],
    weights: Float[Array, " M"] | None = None,
) -> tuple[Float[Array, " k"], Float[Array, "k k"]]:
    """Return the mean of weighted draws, and a lower-triangular root of their covariance.

    It is drawn towards the covariance of before with the weight of k + 1 draws, never towards a diagonal: latents of a tight
    hierarchy differ by a millionth of what they have in common, and only a full covariance says so.
    """
    num, size = positions.shape
    if weights is None:
        weights = jnp.full(num, 1.0 / num, positions.dtype)
    mean = weights @ positions
    centred = positions - mean
    covariance = (weights[:, None] * centred).T @ centred
    share = ess / (ess + size + 1.0)
    blended = share * covariance + (1.0 - share) * before
    scale = jnp.sqrt(jnp.diagonal(blended))
    scale = jnp.where(scale > 0, scale, 1.0)
    correlation = blended / scale / scale[:, None]
    root = jnp.linalg.cholesky(correlation) * scale[:, None]
    # Rounding can leave a singular matrix; a draw's own noise is then the least that a root may be.
    jitter = 100 * jnp.finfo(positions.dtype).eps
    safe = jnp.linalg.cholesky(correlation + jitter * jnp.eye(size, dtype=positions.dtype)) * scale[:, None]
    root = jnp.where(jnp.all(jnp.isfinite(root)), root, safe)
    return mean, jnp.where(jnp.all(jnp.isfinite(root)), root, jnp.diag(scale))
