"""Move particles as parallel Markov chains until their autocorrelation with the starting positions is small.

Every particle is a chain, and all make the same number of transitions. After a window of transitions the positions are
compared, over the particles, with those at its start: a window that left a large autocorrelation, or in which a mean
drifted, is followed by one of twice the length. Step size and mass matrix come from the particles.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.checks import Check, passed_checks
from ppl_bandit.engines.particles.coordinate_moves import EvaluatedParticles, coordinate_moves
from ppl_bandit.engines.particles.covariance import mean_and_root, standardize
from ppl_bandit.engines.particles.diagnostics import autocorrelation_and_drift
from ppl_bandit.engines.particles.kernels import Kernel, hamiltonian
from ppl_bandit.engines.particles.log_density import LogDensity, whiten
from ppl_bandit.types import Key

__all__ = ["MAX_AUTOCORRELATION", "MOVE_CHECKS", "MoveEvidence", "MoveResult", "move", "sound_evidence"]

MAX_AUTOCORRELATION = 0.5
MOVE_CHECKS = (
    Check("the autocorrelation of the particles with their starting positions", MAX_AUTOCORRELATION),
    Check("the drift of a mean, in units of six standard errors,", 1.0),
    Check("the share of divergent transitions", 0.01),
    Check("the mean acceptance probability", 0.5, is_minimum=True),
    Check("the share of particles that never moved", 0.02),
    Check("the effective sample size of the starting positions, as a share of the particles,", 0.1, is_minimum=True),
    Check("energies", failure="the log density of a particle is not finite"),
)
_DIVERGENCE = 2  # index of the check of divergences
_TARGET_ACCEPT = 0.8
_ENOUGH_ESS = 0.5  # effective sample size, as a share of the particles, that needs no further window
_MAX_WINDOWS = 5
_MIN_WINDOWS = 2  # windows before a decision that further windows are useless or unnecessary
_TRAPPED = 0.8  # autocorrelation that should have fallen in a window of twice the length
_MIN_DECAY = 0.5  # a window of twice the length should reduce the share of divergent transitions to at most this


class MoveEvidence(NamedTuple):
    """Measures of the last window of transitions.

    Attributes:
        check_values: the values of `MOVE_CHECKS`.
        num_divergences: divergent transitions.
        is_sound: whether the moved particles may be used as draws of the target.
    """

    check_values: Float[Array, "*B checks"]
    num_divergences: Int[Array, "*B"]
    is_sound: Bool[Array, "*B"]

    @property
    def autocorrelation(self) -> Float[Array, "*B"]:
        """Largest correlation, beyond chance, of the particles with their positions at the start of the window."""
        return self.check_values[..., 0]

    @property
    def drift(self) -> Float[Array, "*B"]:
        """Largest shift of a mean, a mean square or the mean energy, in units of six standard errors."""
        return self.check_values[..., 1]


class MoveResult(NamedTuple):
    """Moved particles, their log densities, the step size for the next moves, and the evidence of these."""

    positions: Float[Array, "M k"]
    log_prior: Float[Array, " M"]
    log_likelihood: Float[Array, " M"]
    step_size: Float[Array, ""]
    evidence: MoveEvidence


class _Window(NamedTuple):
    """The state after a window of transitions.

    Attributes:
        ess: effective sample size of the particles.
        is_mixed: whether all checks passed, except that of divergences.
        is_diverging: whether the share of divergent transitions failed its check and hardly fell.
    """

    number: Int[Array, ""]
    particles: EvaluatedParticles
    step_size: Float[Array, ""]
    ess: Float[Array, ""]
    previous_autocorrelation: Float[Array, ""]
    is_mixed: Bool[Array, ""]
    is_diverging: Bool[Array, ""]
    evidence: MoveEvidence


class _Transitions(NamedTuple):
    """The state inside a window, in whitened coordinates; acceptance and divergences are of its second half."""

    positions: Float[Array, "M k"]
    step_size: Float[Array, ""]
    first_energies: Float[Array, " M"]
    acceptance: Float[Array, ""]
    num_divergences: Int[Array, ""]
    has_moved: Bool[Array, " M"]


def sound_evidence(dtype: Any) -> MoveEvidence:
    """Return the evidence of particles that were drawn without moves and need none."""
    return MoveEvidence(jnp.array([0, 0, 0, 1, 0, 1, 1], dtype), jnp.zeros((), int), jnp.array(True))


def move(
    key: Key,
    target: LogDensity,
    positions: Float[Array, "M k"],
    ess: Float[Array, ""],
    covariance: Float[Array, "k k"],
    step_size: Float[Array, ""],
    kernel: Kernel = hamiltonian,
    first_length: int = 4,
    first_coordinate_moves: int = 8,
    min_narrowing: Float[Array, ""] | float = 0.0,
) -> MoveResult:
    """Move particles in windows of `first_length` transitions, then twice as many, until the checks pass.

    At the end of a window, `coordinate_moves` reach regions that no step size of the kernel suits.

    Args:
        positions: starting positions: draws of the target, repeated in proportion to their weights.
        ess: effective sample size of the starting positions.
        covariance: estimate of the target's covariance.
        min_narrowing: see `coordinate_moves`; 0 after a window with divergent transitions.
    """
    num, dtype = positions.shape[0], positions.dtype

    def window(before: _Window) -> _Window:
        prior_covariance = jnp.where(before.number == 0, covariance, 0.0)
        centre, root = mean_and_root(before.particles.positions, prior_covariance, before.ess)
        key_coordinates, key_window = jr.split(jr.fold_in(key, before.number))
        start = standardize(before.particles.positions, centre, root)
        length = first_length * 2**before.number
        num_measured = length - length // 2
        run = _run_kernel(key_window, whiten(target, centre, root), kernel, start, before.step_size, length)

        divergent_share = (run.num_divergences / (num_measured * num)).astype(dtype)
        is_calm = divergent_share <= MOVE_CHECKS[_DIVERGENCE].bound
        moved = centre + run.positions @ root.T
        sd = jnp.sqrt(jnp.sum(jnp.square(root), axis=1))
        particles, has_coordinate_moves = coordinate_moves(
            key_coordinates,
            target,
            moved,
            sd,
            first_coordinate_moves * 2**before.number,
            jnp.where(is_calm, min_narrowing, 0.0),
        )
        energies = -particles.log_prior - particles.log_likelihood
        end = standardize(particles.positions, centre, root)
        autocorrelation, drift = autocorrelation_and_drift(start, end, run.first_energies, energies, before.ess)
        has_moved = run.has_moved | jnp.any(particles.positions != moved, axis=1)
        measures = (
            autocorrelation,
            drift,
            divergent_share,
            run.acceptance,
            1.0 - jnp.mean(has_moved.astype(dtype)),
            before.ess / num,
            jnp.all(jnp.isfinite(energies)),
        )
        values = jnp.stack([measure.astype(dtype) for measure in measures])
        is_mixed = jnp.all(passed_checks(MOVE_CHECKS, values).at[_DIVERGENCE].set(True))
        # Coordinate moves reach the regions where trajectories diverge: two windows in a row that mixed are enough.
        is_followed = has_coordinate_moves & before.is_mixed & (before.number >= _MIN_WINDOWS)
        is_sound = is_mixed & (is_calm | is_followed)
        before_share = before.evidence.check_values[_DIVERGENCE]
        is_diverging = is_mixed & ~is_sound & (divergent_share > _MIN_DECAY * before_share)
        return _Window(
            before.number + 1,
            particles,
            run.step_size,
            1.0 / (autocorrelation**2 / before.ess + (1.0 - autocorrelation**2) / num),
            before.evidence.autocorrelation,
            is_mixed,
            is_diverging,
            MoveEvidence(values, run.num_divergences, is_sound),
        )

    def needs_more(last: _Window) -> Bool[Array, ""]:
        is_done = last.evidence.is_sound & (last.ess >= _ENOUGH_ESS * num)
        # Twice as many transitions with the same autocorrelation: no trajectory connects the modes.
        is_trapped = last.evidence.autocorrelation > jnp.maximum(0.9 * last.previous_autocorrelation, _TRAPPED)
        is_useless = (last.number > _MIN_WINDOWS) & (is_trapped | last.is_diverging)
        return (last.number == 0) | (~is_done & ~is_useless & (last.number < _MAX_WINDOWS))

    unknown = jnp.zeros(num, dtype)
    start = EvaluatedParticles(positions, unknown, unknown)
    one, no = jnp.ones((), dtype), jnp.array(False)
    unmoved = MoveEvidence(jnp.ones(len(MOVE_CHECKS), dtype), jnp.zeros((), int), no)
    first = _Window(jnp.zeros((), int), start, step_size, ess.astype(dtype), one, no, no, unmoved)
    last = jax.lax.while_loop(needs_more, window, first)
    return MoveResult(*last.particles, last.step_size, last.evidence)


def _run_kernel(
    key: Key,
    target: LogDensity,
    kernel: Kernel,
    start: Float[Array, "M k"],
    step_size: Float[Array, ""],
    length: Int[Array, ""],
) -> _Transitions:
    """Make `length` transitions of every particle and adapt the step size to the mean acceptance probability."""
    num, dtype = start.shape[0], start.dtype
    num_measured = length - length // 2

    def transition(number: Array, run: _Transitions) -> _Transitions:
        after = kernel(jr.fold_in(key, number), target, run.positions, run.step_size)
        acceptance = jnp.mean(after.accept_prob)
        is_measured = number >= length // 2  # before, the step size still adapts to the new mass matrix
        return _Transitions(
            after.positions,
            run.step_size * jnp.exp(jnp.clip(2.0 * (acceptance - _TARGET_ACCEPT), -1.0, 0.25)),
            jnp.where(number == 0, after.energies, run.first_energies),
            run.acceptance + jnp.where(is_measured, acceptance / num_measured, 0.0),
            run.num_divergences + jnp.where(is_measured, jnp.sum(after.is_divergent), 0),
            run.has_moved | jnp.any(after.positions != run.positions, axis=1),
        )

    zeros, zero = jnp.zeros(num, dtype), jnp.zeros((), dtype)
    first = _Transitions(start, step_size, zeros, zero, jnp.zeros((), int), jnp.zeros(num, bool))
    return jax.lax.fori_loop(0, length, transition, first)
