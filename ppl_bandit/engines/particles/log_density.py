"""The log density that particles represent, what it costs, and its modes by Newton's method."""

import contextlib
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.runtime.jax_adapter import all_equations, inner_jaxprs

_TRANSCENDENTAL = frozenset(
    {"div", "erf", "exp", "expm1", "lgamma", "digamma", "log", "log1p", "logistic", "pow", "sqrt", "tanh"}
)
_TRANSCENDENTAL_COST = 10  # in additions of an element


class LogDensity(NamedTuple):
    """An unnormalised log density on k real numbers.

    Attributes:
        parts: (k,) -> log prior and log likelihood; their sum is the log density.
        log_prior: (k,) -> log prior.
        value_and_grad: (k,) -> log density and gradient.
        value_grad_hessian: (k,) -> log density, gradient and Hessian.
    """

    parts: Callable[[Float[Array, " k"]], tuple[Float[Array, ""], Float[Array, ""]]]
    log_prior: Callable[[Float[Array, " k"]], Float[Array, ""]]
    value_and_grad: Callable[[Float[Array, " k"]], tuple[Float[Array, ""], Float[Array, " k"]]]
    value_grad_hessian: Callable[[Float[Array, " k"]], tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]]


def whiten(target: LogDensity, centre: Float[Array, " k"], root: Float[Array, "k k"]) -> LogDensity:
    """Return the log density at centre + root @ x as a function of x, without the log determinant of root."""

    def value_and_grad(x: Array) -> Any:
        value, gradient = target.value_and_grad(centre + root @ x)
        return value, root.T @ gradient

    def value_grad_hessian(x: Array) -> Any:
        value, gradient, hessian = target.value_grad_hessian(centre + root @ x)
        return value, root.T @ gradient, root.T @ hessian @ root

    return LogDensity(
        lambda x: target.parts(centre + root @ x),
        lambda x: target.log_prior(centre + root @ x),
        value_and_grad,
        value_grad_hessian,
    )


def second_derivatives(
    function: Callable[[Float[Array, " k"]], Float[Array, ""]], x: Float[Array, " k"]
) -> tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]:
    """Return value, gradient and Hessian of a function that has at least a reverse-mode first derivative.

    The Hessian comes from forward mode over reverse mode, else from reverse over reverse, else from central differences:
    functions with a custom derivative, such as the solution of an ODE or a callback, may support reverse mode alone.
    """

    def gradient_with_value(x: Array) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(function)(x)
        return gradient, (value, gradient)

    def central_differences(x: Array) -> tuple[Array, tuple[Array, Array]]:
        # This step balances the truncation error, of order step^2, and the rounding of the gradient, of order eps / step.
        step = jnp.finfo(x.dtype).eps ** (1 / 3) * jnp.maximum(1.0, jnp.abs(x))
        differences = jax.lax.map(
            lambda way: gradient_with_value(x + way)[0] - gradient_with_value(x - way)[0], jnp.diag(step)
        )
        return differences / (2.0 * step[:, None]), gradient_with_value(x)[1]

    modes = (jax.jacfwd(gradient_with_value, has_aux=True), jax.jacrev(gradient_with_value, has_aux=True))
    for differentiate in (*modes, central_differences):
        with contextlib.suppress(TypeError, ValueError, NotImplementedError):
            hessian, (value, gradient) = differentiate(x)
            break
    return value, gradient, 0.5 * (hessian + hessian.T)


def num_operations(function: Callable[..., Any], *args: Any) -> int:
    """Count the numbers that a function computes, with ten for each value of a transcendental function.

    Loops count as one iteration. The count depends on the program alone, so that a budget in these units gives the same
    draws on every machine.
    """
    total = 0
    for eqn in all_equations(jax.make_jaxpr(function)(*args).jaxpr):
        if next(inner_jaxprs(eqn), None) is None:
            size = sum(math.prod(out.aval.shape) for out in eqn.outvars)
            total += size * (_TRANSCENDENTAL_COST if eqn.primitive.name in _TRANSCENDENTAL else 1)
    return total


class Mode(NamedTuple):
    """The end of Newton's method; the inverse of minus the Hessian is root @ root.T.

    Attributes:
        log_density: at the position.
        precisions: absolute eigenvalues of minus the Hessian.
        axes: its eigenvectors, as columns.
        is_converged: whether the gradient vanishes and minus the Hessian is positive definite.
    """

    position: Float[Array, " k"]
    log_density: Float[Array, ""]
    precisions: Float[Array, " k"]
    axes: Float[Array, "k k"]
    is_converged: Bool[Array, ""]
    num_steps: Int[Array, ""]

    @property
    def root(self) -> Float[Array, "k k"]:
        """A root of the covariance of the Gaussian approximation at the mode."""
        return self.axes / jnp.sqrt(self.precisions)


class _Ascent(NamedTuple):
    """The best point so far, its gradient along the axes, and the next point to evaluate."""

    here: Mode
    gradient: Float[Array, " k"]
    proposed: Float[Array, " k"]
    damping: Float[Array, ""]
    decrement: Float[Array, ""]


def find_mode(target: LogDensity, start: Float[Array, " k"], tolerance: float = 1e-5, max_steps: int = 60) -> Mode:
    """Maximise a log density by Newton's method with the absolute values of the Hessian's eigenvalues.

    With absolute values every short enough step is uphill. A step that is not uphill is tried again with damping
    (Levenberg and Marquardt), so that the start may be far from the mode or where the density is flat or not concave.

    Args:
        tolerance: largest Newton decrement; 1e-5 finds the mode to about 0.004 posterior standard deviations.
    """
    size = start.shape[0]

    def step(carry: _Ascent) -> _Ascent:
        value, gradient, hessian = target.value_grad_hessian(carry.proposed)
        least, precisions, axes = _spectrum(-hessian)
        slope = axes.T @ gradient
        decrement = jnp.sum(jnp.square(slope) / precisions)
        is_finite = jnp.isfinite(value) & jnp.isfinite(decrement)
        # Points that differ by rounding are equally good.
        rounding = 10 * jnp.finfo(start.dtype).eps * jnp.abs(carry.here.log_density)
        is_better = is_finite & ((value >= carry.here.log_density - rounding) | (carry.here.num_steps == 0))
        is_mode = (decrement <= tolerance) & (least > 0)
        num_steps = carry.here.num_steps + 1
        new = Mode(carry.proposed, value, precisions, axes, is_mode, num_steps)
        here = jax.tree.map(lambda a, b: jnp.where(is_better, a, b), new, carry.here)
        here = here._replace(num_steps=num_steps)
        slope = jnp.where(is_better, slope, carry.gradient)
        decrement = jnp.where(is_better, decrement, carry.decrement)
        damping = jnp.where(is_better, carry.damping / 10.0, jnp.maximum(10.0 * carry.damping, 1e-3))
        damping = jnp.where(damping < 1e-4, 0.0, damping)
        damped = here.precisions + damping * jnp.max(here.precisions)
        proposed = _off_zero(here.position + here.axes @ (slope / damped))
        return _Ascent(here, slope, proposed, damping, decrement)

    def is_unfinished(carry: _Ascent) -> Array:
        return ~(carry.decrement <= tolerance) & (carry.here.num_steps < max_steps)

    zero, ones = jnp.zeros((), start.dtype), jnp.ones(size, start.dtype)
    start_mode = Mode(start, zero - jnp.inf, ones, jnp.diag(ones), jnp.array(False), jnp.zeros((), int))
    first = _Ascent(start_mode, ones, _off_zero(start), zero, zero + jnp.inf)
    return jax.lax.while_loop(is_unfinished, step, first).here


def _off_zero(position: Float[Array, " k"]) -> Float[Array, " k"]:
    """Move coordinates off an exact zero, each by its own small amount.

    Stabilised Bernoulli log densities have wrong derivatives at a logit of 0, which is the mode of a symmetric prior.
    """
    size = position.shape[0]
    return jnp.where(position == 0, 1e-4 * (1.0 + jnp.arange(size) / size), position)


def _spectrum(precision: Float[Array, "k k"]) -> tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]:
    """Return the least eigenvalue, the absolute eigenvalues with a floor above 0, and the eigenvectors."""
    values, vectors = jnp.linalg.eigh(precision)
    least = values[0]
    values = jnp.abs(values)
    floor = jnp.maximum(jnp.max(values) * 10 * jnp.finfo(values.dtype).eps, jnp.finfo(values.dtype).tiny)
    return least, jnp.maximum(values, floor), vectors
