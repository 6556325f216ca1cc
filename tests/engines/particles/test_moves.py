"""Moves keep the law of particles, and moves that do not mix fail their checks."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from ppl_bandit.engines.checks import describe_failures
from ppl_bandit.engines.particles.kernels import Transition, hamiltonian
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.moves import MAX_AUTOCORRELATION, MoveSettings, move, sound_evidence


def density_of(log_density):
    """A target from its log density; all of it counts as prior."""

    def curvature(x):
        return log_density(x), jax.grad(log_density)(x), jax.hessian(log_density)(x)

    return LogDensity(
        lambda x: (log_density(x), jnp.zeros(())), log_density, jax.value_and_grad(log_density), curvature
    )


GAUSSIAN = density_of(lambda x: -0.5 * jnp.sum(x**2))


# Two modes, 12 standard deviations apart, along a direction that is no coordinate.
TWO_MODES = density_of(
    lambda x: jnp.logaddexp(*(-0.5 * jnp.sum((x - s * jnp.array([4.0, 3.0, -3.0])) ** 2) for s in (1, -1)))
)


def compiled_moves(target, starts, kernel=hamiltonian, step_size=0.5):
    """Move by the kernel alone, given a key: coordinate moves would compensate for a kernel that does not move."""
    ess, unit = jnp.asarray(1.0 * len(starts)), jnp.eye(starts.shape[1])
    settings = MoveSettings(kernel, first_coordinate_moves=0)
    return jax.jit(lambda key: move(key, target, starts, ess, unit, jnp.array(step_size), settings))


def moved(*arguments, **options):
    return compiled_moves(*arguments, **options)(jr.key(1))


@pytest.mark.slow
def test_moved_particles_keep_their_law_and_have_a_small_autocorrelation():
    end = moved(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), step_size=30.0)  # far too large at first
    assert bool(end.evidence.is_sound) and 0.05 < float(end.step_size) < 2.0
    assert float(end.evidence.autocorrelation) < 0.25
    # Four errors of a mean, 1 / sqrt(1,000), and of a standard deviation, 1 / sqrt(2,000).
    np.testing.assert_allclose(end.positions.mean(axis=0), 0.0, atol=0.13)
    np.testing.assert_allclose(end.positions.std(axis=0), 1.0, atol=0.09)
    np.testing.assert_allclose(end.log_prior, -0.5 * jnp.sum(end.positions**2, axis=1), rtol=1e-4, atol=1e-5)


def test_particles_that_never_move_fail_a_check():
    def frozen(key, target, positions, step_size):
        steps = hamiltonian(key, target, positions, step_size)
        return steps._replace(positions=positions, accept_prob=jnp.ones_like(steps.accept_prob))

    evidence = moved(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), frozen).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > 0.9


@pytest.mark.slow
def test_particles_that_hardly_move_fail_a_check():
    def slow(key, target, positions, step_size):
        return hamiltonian(key, target, positions, jnp.array(1e-3))  # 64 leaps go a fifteenth of a standard deviation

    evidence = moved(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), slow).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > MAX_AUTOCORRELATION


@pytest.mark.slow
def test_particles_that_cannot_leave_their_mode_fail_a_check():
    signs = jnp.where(jnp.arange(1000) < 300, 1.0, -1.0)[:, None]
    starts = signs * jnp.array([4.0, 3.0, -3.0]) + jr.normal(jr.key(0), (1000, 3))
    evidence = moved(TWO_MODES, starts).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > MAX_AUTOCORRELATION


@pytest.mark.slow
def test_particles_far_from_the_target_fail_a_check():
    # All start at one point 30 standard deviations away, and their means drift.
    def slow(key, target, positions, step_size):
        return hamiltonian(key, target, positions, jnp.array(2e-3))

    assert not bool(moved(GAUSSIAN, 30.0 + 1e-3 * jr.normal(jr.key(0), (1000, 3)), slow).evidence.is_sound)


def test_moves_that_keep_diverging_end_early_and_are_flagged():
    """A twentieth of the particles diverges in every transition, although all of them mix.

    A window whose checks fail by chance is no reason to end, so with some random numbers all windows are run.
    """
    transitions = []

    def diverging(key, target, positions, step_size):
        jax.debug.callback(lambda: transitions.append(None))
        after = hamiltonian(key, target, positions, step_size)
        return after._replace(is_divergent=jnp.arange(len(positions)) % 20 == 0)

    moves, numbers = compiled_moves(GAUSSIAN, jr.normal(jr.key(0), (1000, 3)), diverging), []
    for seed in range(8):
        transitions.clear()
        end = moves(jr.key(seed))
        jax.effects_barrier()
        assert not bool(end.evidence.is_sound) and float(end.evidence.autocorrelation) < MAX_AUTOCORRELATION
        numbers.append(len(transitions))
    all_windows = 4 + 8 + 16 + 32 + 64
    assert max(numbers) <= all_windows
    assert np.median(numbers) < all_windows, numbers


def test_moves_that_end_at_their_budget_are_flagged_and_continue_with_one_long_window():
    # A correlation of 0.93 for each transition, less 0.11 by chance: 5 transitions leave 0.59, 8 leave 0.45, 9 leave 0.41.
    def slow(key, target, positions, step_size):
        noise = jr.normal(key, positions.shape)
        ones = jnp.ones(len(positions))
        after = 0.93 * positions + np.sqrt(1.0 - 0.93**2) * noise
        energies = 0.5 * jnp.sum(after**2, axis=1)
        return Transition(after, energies, 0.8 * ones, ones < 0, jnp.ones((), int))

    starts = jr.normal(jr.key(0), (1000, 3))
    settings = MoveSettings(slow, first_coordinate_moves=0)

    @jax.jit
    def run(key, positions, budget, previous):
        given = jnp.asarray(1000.0), jnp.eye(3), jnp.array(0.5), settings._replace(max_evaluations=budget)
        return move(key, GAUSSIAN, positions, *given, previous)

    none = sound_evidence(starts.dtype)
    free = run(jr.key(1), starts, jnp.inf, none).evidence
    assert bool(free.is_sound) and int(free.num_evaluations) > 12
    # A window evaluates the density once more at its end, so windows of 4 and 5 transitions fit into 12 evaluations.
    first = run(jr.key(1), starts, 12.0, none)
    assert bool(first.evidence.is_unfinished) and int(first.evidence.num_transitions) == 4 + 5
    failures = describe_failures(first.evidence.checks)
    assert len(failures) == 2 and "autocorrelation" in failures[0] and "budget" in failures[1]
    then = run(jr.key(2), first.positions, 12.0, first.evidence).evidence
    assert bool(then.is_sound) and not bool(then.is_unfinished)
    assert int(then.num_transitions) == 9
