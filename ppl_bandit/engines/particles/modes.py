"""Damped Newton ascent to a mode of a log density."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.log_density import LogDensity

__all__ = ["Mode", "find_mode"]


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
