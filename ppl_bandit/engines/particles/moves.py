"""Move particles as parallel Markov chains until their autocorrelation with the starting positions is small.

Every particle is a chain, and all make the same number of transitions. After a window of transitions the positions are
compared, over the particles, with those at its start: a window that left a large autocorrelation, or in which a mean
drifted, is followed by one of twice the length. Step size and mass matrix come from the particles. With a budget, the moves
end when it is spent, and the next moves continue with one window as long as the budget allows.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.checks import CHECKS, all_passed
from ppl_bandit.engines.particles.diagnostics import autocorrelation_and_drift
from ppl_bandit.engines.particles.kernels import EvaluatedParticles, Kernel, coordinate_moves, hamiltonian
from ppl_bandit.engines.particles.log_density import LogDensity, whiten
from ppl_bandit.engines.particles.weights import mean_and_root, standardize
from ppl_bandit.types import Key

MAX_AUTOCORRELATION = CHECKS["autocorrelation"].bound
_TARGET_ACCEPT = 0.8  # as in Stan
_ENOUGH_ESS = CHECKS[
    "weight_ess"
].bound  # effective sample size, as a share of the particles, that needs no further window
_MAX_WINDOWS = 5  # 4 + 8 + 16 + 32 + 64 transitions
_MIN_WINDOWS = 2  # windows before a decision that further windows are useless or unnecessary
_TRAPPED = 0.8  # autocorrelation that should have fallen in a window of twice the length
_MIN_DECAY = 0.5  # a window of twice the length should reduce the share of divergent transitions to at most this


class MoveEvidence(NamedTuple):
    """Measures of the last window of transitions.

    Attributes:
        checks: of the moves, by their names in `CHECKS`; the effective sample size is that of the starting positions.
        is_sound: whether the moved particles may be used as draws of the target.
        is_mixed: whether all checks passed, except those of divergences and of the budget.
        num_transitions: of all windows.
        num_evaluations: of the density at every particle, in all windows.
        num_unfinished: moves in a row that the budget ended before their checks passed, including the last ones.
    """

    checks: dict[str, Float[Array, "*B"]]
    is_sound: Bool[Array, "*B"]
    is_mixed: Bool[Array, "*B"]
    num_transitions: Int[Array, "*B"]
    num_evaluations: Int[Array, "*B"]
    num_unfinished: Int[Array, "*B"]

    @property
    def autocorrelation(self) -> Float[Array, "*B"]:
        """Largest correlation, beyond chance, of the particles with their positions at the start of the window."""
        return self.checks["autocorrelation"]

    @property
    def drift(self) -> Float[Array, "*B"]:
        """Largest shift of a mean, a mean square or the mean energy, in units of six standard errors."""
        return self.checks["drift"]

    def doubted_where(self, is_undefined: Bool[Array, "*B"]) -> "MoveEvidence":
        """Return the evidence with a failed check of finite densities where the density is undefined."""
        density = jnp.where(is_undefined, 0.0, self.checks["density"])
        return self._replace(checks={**self.checks, "density": density}, is_sound=self.is_sound & ~is_undefined)

    @property
    def is_unfinished(self) -> Bool[Array, "*B"]:
        """Whether the budget ended the moves before their checks passed."""
        return ~self.is_sound & (self.checks["budget"] < 1.0)

    @property
    def cost(self) -> Float[Array, "*B"]:
        """Evaluations of the density for each transition, with the coordinate moves that belong to it."""
        return self.num_evaluations / jnp.maximum(self.num_transitions, 1)


class MoveSettings(NamedTuple):
    """How particles move.

    Attributes:
        kernel: transitions of the particles.
        first_length: transitions of the first window.
        first_coordinate_moves: rounds of coordinate moves of the first window.
        min_narrowing: see `coordinate_moves`; 0 after a window with divergent transitions. Slopes were at least 0.78 for
            particles that had not reached the end of a funnel, and at most 0.34 in hierarchies without one.
        max_evaluations: budget of evaluations of the density at every particle; coordinate moves may exceed it.
    """

    kernel: Kernel = hamiltonian
    first_length: int = 4
    first_coordinate_moves: int = 8
    min_narrowing: Float[Array, ""] | float = 0.5
    max_evaluations: Float[Array, ""] | float = math.inf


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
        is_diverging: whether the share of divergent transitions failed its check and hardly fell.
    """

    number: Int[Array, ""]
    particles: EvaluatedParticles
    step_size: Float[Array, ""]
    ess: Float[Array, ""]
    previous_autocorrelation: Float[Array, ""]
    is_diverging: Bool[Array, ""]
    evidence: MoveEvidence


class _Transitions(NamedTuple):
    """The state inside a window, in whitened coordinates.

    Attributes:
        number: transitions so far.
        num_measured: those in the second half of the window, to which sum_acceptance and num_divergences belong.
    """

    number: Int[Array, ""]
    positions: Float[Array, "M k"]
    step_size: Float[Array, ""]
    first_energies: Float[Array, " M"]
    num_measured: Int[Array, ""]
    sum_acceptance: Float[Array, ""]
    num_divergences: Int[Array, ""]
    has_moved: Bool[Array, " M"]
    num_evaluations: Int[Array, ""]


def sound_evidence(dtype: Any) -> MoveEvidence:
    """Return the evidence of particles that were drawn without moves and need none."""
    none, yes = jnp.zeros((), int), jnp.array(True)
    best = {"autocorrelation": 0, "drift": 0, "divergences": 0, "acceptance": 1, "unmoved": 0, "ess": 1, "density": 1}
    checks = {name: jnp.asarray(value, dtype) for name, value in {**best, "budget": 1}.items()}
    return MoveEvidence(checks, yes, yes, none, none, none)


def move(
    key: Key,
    target: LogDensity,
    positions: Float[Array, "M k"],
    ess: Float[Array, ""],
    covariance: Float[Array, "k k"],
    step_size: Float[Array, ""],
    settings: MoveSettings,
    previous: MoveEvidence | None = None,
) -> MoveResult:
    """Move particles in windows of `first_length` transitions, then twice as many, until the checks pass.

    At the end of a window, `coordinate_moves` reach regions that no step size of the kernel suits.

    Args:
        positions: starting positions: draws of the target, repeated in proportion to their weights.
        ess: effective sample size of the starting positions.
        covariance: estimate of the target's covariance.
        previous: evidence of the last moves of these particles. If the budget ended them, the first window is as long as
            the budget allows, and counts as the one after theirs.
    """
    num, dtype = positions.shape[0], positions.dtype
    unmoved = sound_evidence(dtype)._replace(is_sound=jnp.array(False), is_mixed=jnp.array(False))
    unmoved = unmoved._replace(checks=jax.tree.map(jnp.ones_like, unmoved.checks))
    is_continued, first_window = jnp.array(False), jnp.asarray(settings.first_length)
    if previous is not None:
        is_continued = previous.is_unfinished
        affordable = settings.max_evaluations / jnp.maximum(previous.cost, 1.0)
        affordable = jnp.clip(affordable, settings.first_length, _longest_window(settings)).astype(int)
        first_window = jnp.where(is_continued, affordable, settings.first_length)
        unmoved = unmoved._replace(is_mixed=is_continued & previous.is_mixed, num_unfinished=previous.num_unfinished)
    plan = _Plan(target, settings, covariance, first_window, is_continued)

    unknown = jnp.zeros(num, dtype)
    start = EvaluatedParticles(positions, unknown, unknown)
    one, no = jnp.ones((), dtype), jnp.array(False)
    first = _Window(jnp.zeros((), int), start, step_size, ess.astype(dtype), one, no, unmoved)
    last = jax.lax.while_loop(
        lambda last: _needs_more(plan, last), lambda before: _next_window(key, plan, before), first
    )
    evidence = last.evidence
    num_unfinished = jnp.where(evidence.is_unfinished, evidence.num_unfinished + 1, 0)
    return MoveResult(*last.particles, last.step_size, evidence._replace(num_unfinished=num_unfinished))


class _Plan(NamedTuple):
    """What all windows have in common.

    Attributes:
        covariance: estimate of the target's covariance before the first window.
        first_window: transitions of the first window.
        is_continued: whether the windows continue moves that ended at their budget.
    """

    target: LogDensity
    settings: MoveSettings
    covariance: Float[Array, "k k"]
    first_window: Int[Array, ""]
    is_continued: Bool[Array, ""]


def _longest_window(settings: MoveSettings) -> int:
    return settings.first_length * 2 ** (_MAX_WINDOWS - 1)


def _next_length(plan: _Plan, last: _Window) -> Int[Array, ""]:
    """Return twice the length of the last window, or as many transitions as the rest of the budget allows."""
    left = plan.settings.max_evaluations - last.evidence.num_evaluations
    affordable = jnp.minimum(left / jnp.maximum(last.evidence.cost, 1.0), _longest_window(plan.settings)).astype(int)
    return jnp.minimum(plan.first_window * 2**last.number, affordable)


def _is_affordable(plan: _Plan, last: _Window) -> Bool[Array, ""]:
    return _next_length(plan, last) >= plan.settings.first_length


def _needs_more(plan: _Plan, last: _Window) -> Bool[Array, ""]:
    is_done = last.evidence.is_sound & (last.ess >= _ENOUGH_ESS * len(last.particles.positions))
    # Twice as many transitions with the same autocorrelation: no trajectory connects the modes.
    is_trapped = last.evidence.autocorrelation > jnp.maximum(0.9 * last.previous_autocorrelation, _TRAPPED)
    is_useless = (last.number > _MIN_WINDOWS) & (is_trapped | last.is_diverging)
    may_continue = (last.number < _MAX_WINDOWS) & _is_affordable(plan, last)
    return (last.number == 0) | (~is_done & ~is_useless & may_continue)


def _next_window(key: Key, plan: _Plan, before: _Window) -> _Window:
    """Make the transitions and the coordinate moves of a window, and compare the particles with those at its start."""
    settings = plan.settings
    num, dtype = before.particles.positions.shape[0], before.particles.positions.dtype
    prior_covariance = jnp.where(before.number == 0, plan.covariance, 0.0)
    centre, root = mean_and_root(before.particles.positions, prior_covariance, before.ess)
    key_coordinates, key_window = jr.split(jr.fold_in(key, before.number))
    start = standardize(before.particles.positions, centre, root)
    length = jnp.where(before.number == 0, plan.first_window, _next_length(plan, before))
    left = settings.max_evaluations - before.evidence.num_evaluations
    white = whiten(plan.target, centre, root)
    run = _run_kernel(key_window, white, settings.kernel, start, before.step_size, length, left)

    divergent_share = (run.num_divergences / (run.num_measured * num)).astype(dtype)
    is_calm = divergent_share <= CHECKS["divergences"].bound
    moved = centre + run.positions @ root.T
    particles, num_coordinate_moves, has_coordinate_moves = coordinate_moves(
        key_coordinates,
        plan.target,
        moved,
        jnp.sqrt(jnp.sum(jnp.square(root), axis=1)),
        settings.first_coordinate_moves * run.number // settings.first_length,
        jnp.where(is_calm, settings.min_narrowing, 0.0),
    )
    energies = -particles.log_prior - particles.log_likelihood
    end = standardize(particles.positions, centre, root)
    autocorrelation, drift = autocorrelation_and_drift(start, end, run.first_energies, energies, before.ess)
    has_moved = run.has_moved | jnp.any(particles.positions != moved, axis=1)
    measures = {
        "autocorrelation": autocorrelation,
        "drift": drift,
        "divergences": divergent_share,
        "acceptance": run.sum_acceptance / run.num_measured,
        "unmoved": 1.0 - jnp.mean(has_moved.astype(dtype)),
        "ess": before.ess / num,
        "density": jnp.all(jnp.isfinite(energies)),
        "budget": jnp.ones((), dtype),
    }
    checks = {name: measure.astype(dtype) for name, measure in measures.items()}
    is_mixed = all_passed({name: value for name, value in checks.items() if name != "divergences"})
    # Coordinate moves reach the regions where trajectories diverge: two windows in a row that mixed are enough.
    is_late = (before.number >= _MIN_WINDOWS) | plan.is_continued
    is_sound = is_mixed & (is_calm | (has_coordinate_moves & before.evidence.is_mixed & is_late))
    before_share = before.evidence.checks["divergences"]
    evidence = MoveEvidence(
        checks,
        is_sound,
        is_mixed,
        before.evidence.num_transitions + run.number,
        before.evidence.num_evaluations + run.num_evaluations + num_coordinate_moves,
        before.evidence.num_unfinished,
    )
    after = _Window(
        before.number + 1,
        particles,
        run.step_size,
        1.0 / (autocorrelation**2 / before.ess + (1.0 - autocorrelation**2) / num),
        before.evidence.autocorrelation,
        is_mixed & ~is_sound & (divergent_share > _MIN_DECAY * before_share),
        evidence,
    )
    budget = jnp.where(_is_affordable(plan, after), 1.0, 0.0).astype(dtype)
    return after._replace(evidence=evidence._replace(checks={**checks, "budget": budget}))


def _run_kernel(
    key: Key,
    target: LogDensity,
    kernel: Kernel,
    start: Float[Array, "M k"],
    step_size: Float[Array, ""],
    length: Int[Array, ""],
    max_evaluations: Float[Array, ""] | float,
) -> _Transitions:
    """Make `length` transitions of every particle and adapt the step size to the mean acceptance probability.

    The transitions end early if the density has been evaluated `max_evaluations` times. If none is measured until then, the
    acceptance is nan and fails its check.
    """
    num, dtype = start.shape[0], start.dtype

    def transition(run: _Transitions) -> _Transitions:
        after = kernel(jr.fold_in(key, run.number), target, run.positions, run.step_size)
        acceptance = jnp.mean(after.accept_prob)
        is_measured = run.number >= length // 2  # before, the step size still adapts to the new mass matrix
        return _Transitions(
            run.number + 1,
            after.positions,
            run.step_size * jnp.exp(jnp.clip(2.0 * (acceptance - _TARGET_ACCEPT), -1.0, 0.25)),
            jnp.where(run.number == 0, after.energies, run.first_energies),
            run.num_measured + is_measured,
            run.sum_acceptance + jnp.where(is_measured, acceptance, 0.0),
            run.num_divergences + jnp.where(is_measured, jnp.sum(after.is_divergent), 0),
            run.has_moved | jnp.any(after.positions != run.positions, axis=1),
            run.num_evaluations + after.num_evaluations,
        )

    zeros, zero, none = jnp.zeros(num, dtype), jnp.zeros((), dtype), jnp.zeros((), int)
    first = _Transitions(none, start, step_size, zeros, none, zero, none, jnp.zeros(num, bool), none)
    return jax.lax.while_loop(
        lambda run: (run.number < length) & (run.num_evaluations < max_evaluations), transition, first
    )
