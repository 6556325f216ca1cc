"""Newton's method and second derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ppl_bandit.engines.particles.log_density import LogDensity, find_mode, num_operations, second_derivatives


def density_of(log_density):
    """A target from its log density; all of it counts as prior."""

    def curvature(x):
        return log_density(x), jax.grad(log_density)(x), jax.hessian(log_density)(x)

    return LogDensity(
        lambda x: (log_density(x), jnp.zeros(())), log_density, jax.value_and_grad(log_density), curvature
    )


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
