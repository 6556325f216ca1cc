"""Moves keep the law of particles, and moves that do not mix fail their checks; modes are found by their derivatives."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from programs import slow

from ppl_bandit.engines.checks import describe_failures
from ppl_bandit.engines.particles.kernels import Transition, coordinate_moves, funnel_shape, hamiltonian
from ppl_bandit.engines.particles.log_density import LogDensity, find_mode, num_operations, second_derivatives
from ppl_bandit.engines.particles.moves import MAX_AUTOCORRELATION, MoveSettings, move, sound_evidence
from ppl_bandit.numerics.random_bits import uniform_and_normal


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


def frozen(key, target, positions, step_size):
    steps = hamiltonian(key, target, positions, step_size)
    return steps._replace(positions=positions, accept_prob=jnp.ones_like(steps.accept_prob))


def slow_kernel(size):
    return lambda key, target, positions, step_size: hamiltonian(key, target, positions, jnp.array(size))


@pytest.mark.parametrize(
    ("target", "kernel", "bound"),
    [
        (GAUSSIAN, frozen, 0.9),
        slow(GAUSSIAN, slow_kernel(1e-3), MAX_AUTOCORRELATION),  # 64 leaps go a fifteenth of a standard deviation
        slow(TWO_MODES, hamiltonian, MAX_AUTOCORRELATION),  # none leaves its mode
    ],
    ids=["never", "hardly", "within a mode"],
)
def test_particles_that_do_not_move_fail_a_check(target, kernel, bound):
    starts = jr.normal(jr.key(0), (1000, 3))
    if target is TWO_MODES:
        starts += jnp.where(jnp.arange(1000) < 300, 1.0, -1.0)[:, None] * jnp.array([4.0, 3.0, -3.0])
    evidence = moved(target, starts, kernel).evidence
    assert not bool(evidence.is_sound) and float(evidence.autocorrelation) > bound


@pytest.mark.slow
def test_particles_far_from_the_target_fail_a_check():
    # All start at one point 30 standard deviations away, and their means drift.
    starts = 30.0 + 1e-3 * jr.normal(jr.key(0), (1000, 3))
    assert not bool(moved(GAUSSIAN, starts, slow_kernel(2e-3)).evidence.is_sound)


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
    def correlated(key, target, positions, step_size):
        noise = jr.normal(key, positions.shape)
        ones = jnp.ones(len(positions))
        after = 0.93 * positions + np.sqrt(1.0 - 0.93**2) * noise
        energies = 0.5 * jnp.sum(after**2, axis=1)
        return Transition(after, energies, 0.8 * ones, ones < 0, jnp.ones((), int))

    starts = jr.normal(jr.key(0), (1000, 3))
    settings = MoveSettings(correlated, first_coordinate_moves=0)

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


# Coordinate moves keep the law of particles and reach the end of a funnel
#
# Of n rewards, 0 each, of n arms with Laplace noise of one scale: with u the log of the scale and g = level /
# scale, the density of (u, g) is exp(u) exp(-exp(2 u) / 2) prod exp(-|g|) but for the prior of the levels, which is flat here:
# u and g are independent, and the scale is half-normal.


NUM_PARTICLES, SIZE = 4000, 3


def log_funnel(x):
    log_scale, levels = x[0], x[1:]
    return (1 - SIZE) * log_scale - 0.5 * jnp.exp(2 * log_scale) - jnp.sum(jnp.abs(levels)) * jnp.exp(-log_scale)


FUNNEL = LogDensity(lambda x: (log_funnel(x), jnp.zeros(())), log_funnel, None, None)


def exact_draws(seed):
    rng = np.random.default_rng(seed)
    scale = np.abs(rng.standard_normal(NUM_PARTICLES))[:, None]
    return jnp.asarray(np.concatenate([np.log(scale), scale * rng.laplace(size=(NUM_PARTICLES, SIZE))], axis=1))


@jax.jit
def after_moves(key, positions):
    return coordinate_moves(key, FUNNEL, positions, jnp.std(positions, axis=0), 16)[0]


def shares(positions):
    """Of particles whose scale is below a tenth, a third and 1."""
    return np.mean(np.asarray(positions)[:, :1] < np.log([0.1, 1 / 3, 1.0]), axis=0)


EXACT = np.array([0.0797, 0.2611, 0.6827])  # 2 Phi(s) - 1
# Four errors of a share of 4,000 independent draws.
ALLOWED = 4 * np.sqrt(EXACT * (1 - EXACT) / NUM_PARTICLES)


@pytest.mark.slow
def test_coordinate_moves_keep_the_law_of_particles():
    end = after_moves(jr.key(0), exact_draws(0))
    assert np.all(np.abs(shares(end.positions) - EXACT) < ALLOWED)
    gaps = np.asarray(end.positions[:, 1:] * np.exp(-end.positions[:, :1]))
    # Of a Laplace law, whose mean absolute value is 1 with a standard deviation of 1.
    np.testing.assert_allclose(np.abs(gaps).mean(axis=0), 1.0, atol=4 / np.sqrt(NUM_PARTICLES))
    np.testing.assert_allclose(end.log_prior, jax.vmap(log_funnel)(end.positions), rtol=1e-4, atol=1e-4)
    assert np.mean(np.any(end.positions != exact_draws(0), axis=1)) > 0.99


@pytest.mark.parametrize("seed", [1, slow(2)])
def test_coordinate_moves_reach_the_end_of_a_funnel(seed):
    positions = exact_draws(seed)
    # As chains leave them: nothing below a scale of 0.15, where 12% of the mass is.
    wide = positions[positions[:, 0] > np.log(0.15)]
    found = shares(after_moves(jr.key(seed), jnp.resize(wide, positions.shape)).positions)
    # Particles repeat, and 64 moves leave some autocorrelation: half as much again.
    assert np.all(np.abs(found - EXACT) < 1.5 * ALLOWED)


@pytest.mark.slow
def test_slopes_show_which_coordinates_narrow_together():
    positions = exact_draws(3)
    still = jr.normal(jr.key(3), (NUM_PARTICLES, 1))  # a latent that is independent of the others
    positions = jnp.concatenate([positions, still], axis=1)
    found = funnel_shape(positions, jax.vmap(log_funnel)(positions[:, :-1]), jnp.std(positions, axis=0))
    np.testing.assert_allclose(found.slopes[0, 1:-1], 1.0, atol=0.1)
    np.testing.assert_array_equal(found.slopes[-1], 0.0)
    assert float(found.slopes[0, -1]) == 0.0 and float(found.cumulative_probs[0]) > 0.4


@pytest.mark.slow
def test_a_density_without_finite_values_or_equal_particles_give_finite_results():
    nowhere = FUNNEL._replace(parts=lambda x: (jnp.nan * x[0], x[0]))
    start = jnp.ones((20, 2))
    end = jax.jit(lambda: coordinate_moves(jr.key(0), nowhere, start, jnp.ones(2), 2)[0])()
    np.testing.assert_array_equal(end.positions, start)
    found = funnel_shape(start, jnp.full(20, -jnp.inf), jnp.ones(2))
    np.testing.assert_array_equal(found.slopes, 0.0)
    assert np.all(np.isfinite(found.cumulative_probs))


def test_a_particle_with_a_nan_density_does_not_affect_the_others():
    start = exact_draws(4).at[0].set(0.5)
    parts = FUNNEL._replace(parts=lambda x: (jnp.where(x[1] == 0.5, jnp.nan, log_funnel(x)), jnp.zeros(())))
    end = jax.jit(lambda: coordinate_moves(jr.key(0), parts, start, jnp.ones(SIZE + 1), 4)[0])()
    assert np.mean(np.any(end.positions != start, axis=1)) > 0.9


def test_particles_without_a_funnel_are_not_moved():
    start = jr.normal(jr.key(0), (1000, 3))
    gaussian = FUNNEL._replace(parts=lambda x: (-0.5 * jnp.sum(x**2), jnp.ones(())))
    end, _, has_moves = jax.jit(
        lambda: coordinate_moves(jr.key(0), gaussian, start, jnp.ones(3), 8, min_narrowing=0.5)
    )()
    assert not bool(has_moves)
    np.testing.assert_array_equal(end.positions, start)
    np.testing.assert_allclose(end.log_prior, -0.5 * jnp.sum(start**2, axis=1), rtol=1e-5)
    np.testing.assert_array_equal(end.log_likelihood, 1.0)


# Newton's method and second derivatives


def test_newton_finds_a_far_mode_through_a_region_that_is_not_concave():
    # The log density of a Student-t with 3 degrees of freedom, scale 0.1, at 50: flat and convex from afar.
    target = density_of(lambda z: -2.0 * jnp.sum(jnp.log1p(jnp.square((z - 50.0) / 0.1) / 3.0)))
    mode = jax.jit(lambda start: find_mode(target, start))(jnp.zeros(2))
    assert bool(mode.is_converged)
    np.testing.assert_allclose(mode.position, 50.0, atol=1e-3)
    # The second derivative of 2 log(1 + u^2 / 3) at 0 is 4 / 3, in units of the scale.
    np.testing.assert_allclose(mode.root @ mode.root.T, np.eye(2) * 0.01 * 3 / 4, rtol=1e-3, atol=1e-6)


def test_newton_converges_from_a_flat_start_whose_full_step_overflows():
    # A weight about 1 with an unknown log variance: at (0, 0) the Hessian is singular, and a Newton step goes for ever.
    target = density_of(lambda z: -1.5 * z[0] - (1.0 + 0.5 * jnp.square(z[1] - 1.0)) * jnp.exp(-z[0]))
    mode = jax.jit(lambda start: find_mode(target, start))(jnp.zeros(2))
    assert bool(mode.is_converged)
    np.testing.assert_allclose(mode.position, [-np.log(1.5), 1.0], atol=1e-2)


def test_newton_reports_that_there_is_no_mode():
    assert not bool(find_mode(density_of(lambda z: -jnp.sum(z)), jnp.zeros(2)).is_converged)


@jax.custom_vjp
def cubed(x):
    return x**3


# A slope that is made of the function itself, as a callback's is, has no forward mode.
cubed.defvjp(lambda x: (cubed(x), (x, cubed(x))), lambda kept, outer: (3.0 * outer * kept[1] / kept[0],))


@jax.custom_vjp
def slope_of_cube(x):
    return jax.pure_callback(lambda x: np.asarray(3.0 * np.square(x), np.float32), x, x, vmap_method="broadcast_all")


def no_second(*_):
    raise ValueError("no second derivative")


slope_of_cube.defvjp(no_second, no_second)


@jax.custom_vjp
def cubed_outside(x):
    return x**3


cubed_outside.defvjp(lambda x: (x**3, x), lambda x, outer: (outer * slope_of_cube(x),))


@pytest.mark.parametrize(("cube", "error"), [(lambda x: x**3, 1e-5), (cubed, 1e-5), (cubed_outside, 3e-2)])
def test_second_derivatives_use_the_available_modes_of_differentiation(cube, error):
    # Differences of gradients in float32: a step of 0.005, and gradients rounded to 1e-6 of some 10.
    at = jnp.array([1.0, -2.0, 0.5])
    value, gradient, hessian = second_derivatives(lambda x: jnp.sum(cube(x)) + x[0] * x[1], at)
    np.testing.assert_allclose(value, np.sum(np.asarray(at) ** 3) - 2.0, rtol=1e-5)
    np.testing.assert_allclose(gradient, 3 * np.asarray(at) ** 2 + np.array([-2.0, 1.0, 0.0]), rtol=1e-5)
    expected = np.diag(6 * np.asarray(at)) + np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(hessian, expected, atol=error)


def test_operations_are_counted_by_the_numbers_they_compute_and_loops_by_one_iteration():
    def steps(x):
        return jax.lax.scan(lambda carry, _: (jnp.exp(carry), None), x, length=100)[0]

    assert num_operations(lambda x: x + x, jnp.ones(5)) == 5
    assert num_operations(steps, jnp.ones(5)) == 10 * 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_numbers_are_uniform_and_normal_and_all_finite(dtype):
    with jax.enable_x64(dtype == np.float64):
        uniform, normal = uniform_and_normal(jr.key(0), 100_000, 100_000, dtype)
        assert uniform.dtype == normal.dtype == dtype
        assert float(uniform.min()) > 0.0 and float(uniform.max()) < 1.0
        np.testing.assert_allclose(uniform.mean(), 0.5, atol=4 * np.sqrt(1 / 12 / 100_000))
        np.testing.assert_allclose([normal.mean(), normal.std()], [0.0, 1.0], atol=4 * np.sqrt(1 / 100_000))
        assert np.all(np.isfinite(normal))
