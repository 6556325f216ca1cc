"""Unnormalised log densities with first and second derivatives: all that moves and proposals need to know of a posterior."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

__all__ = ["LogDensity", "second_derivatives", "whiten"]


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
