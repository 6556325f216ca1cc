"""Newton's method to a mode of a log density."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.log_density import LogDensity

__all__ = ["Mode", "find_mode"]


class Mode(NamedTuple):
    """Where Newton's method ended; the inverse of minus the Hessian is root @ root.T.

    Attributes:
        log_density: there.
        precisions: eigenvalues of minus the Hessian, as absolute values.
        axes: its eigenvectors, as columns.
        is_converged: whether the gradient vanishes and all curvature is downwards.
    """

    position: Float[Array, " k"]
    log_density: Float[Array, ""]
    precisions: Float[Array, " k"]
    axes: Float[Array, "k k"]
    is_converged: Bool[Array, ""]
    num_steps: Int[Array, ""]

    @property
    def root(self) -> Float[Array, "k k"]:
        """A root of the covariance of the Gaussian at the mode."""
        return self.axes / jnp.sqrt(self.precisions)


class _Climb(NamedTuple):
    here: Mode
    slope: Float[Array, " k"]
    tried: Float[Array, " k"]
    damping: Float[Array, ""]
    decrement: Float[Array, ""]


def find_mode(target: LogDensity, start: Float[Array, " k"], tolerance: float = 1e-5, max_steps: int = 60) -> Mode:
    """Climb a log density by Newton's method with the absolute values of the Hessian's eigenvalues.

    Their absolute values make every step go uphill if it is short enough, and steps that are not are tried again with the
    smaller eigenvalues raised (Levenberg and Marquardt), so that a start far from the mode, or where the density is flat or
    not concave, is no trap.

    Args:
        tolerance: of the Newton decrement; 1e-5 finds the mode to about 0.004 posterior standard deviations.
    """
    size = start.shape[0]

    def step(carry: _Climb) -> _Climb:
        value, gradient, hessian = target.value_grad_hessian(carry.tried)
        least, precisions, axes = _spectrum(-hessian)
        slope = axes.T @ gradient
        decrement = jnp.sum(jnp.square(slope) / precisions)
        is_finite = jnp.isfinite(value) & jnp.isfinite(decrement)
        # Rounding decides between points that are equally high.
        rounding = 10 * jnp.finfo(start.dtype).eps * jnp.abs(carry.here.log_density)
        is_better = is_finite & ((value >= carry.here.log_density - rounding) | (carry.here.num_steps == 0))
        is_there = (decrement <= tolerance) & (least > 0)
        num_steps = carry.here.num_steps + 1
        there = Mode(carry.tried, value, precisions, axes, is_there, num_steps)
        here = jax.tree.map(lambda new, old: jnp.where(is_better, new, old), there, carry.here)
        here = here._replace(num_steps=num_steps)
        slope = jnp.where(is_better, slope, carry.slope)
        decrement = jnp.where(is_better, decrement, carry.decrement)
        damping = jnp.where(is_better, carry.damping / 10.0, jnp.maximum(10.0 * carry.damping, 1e-3))
        damping = jnp.where(damping < 1e-4, 0.0, damping)
        raised = here.precisions + damping * jnp.max(here.precisions)
        tried = _off_zero(here.position + here.axes @ (slope / raised))
        return _Climb(here, slope, tried, damping, decrement)

    def is_moving(carry: _Climb) -> Array:
        return ~(carry.decrement <= tolerance) & (carry.here.num_steps < max_steps)

    zero, ones = jnp.zeros((), start.dtype), jnp.ones(size, start.dtype)
    none = Mode(start, zero - jnp.inf, ones, jnp.diag(ones), jnp.array(False), jnp.zeros((), int))
    begin = _Climb(none, ones, _off_zero(start), zero, zero + jnp.inf)
    return jax.lax.while_loop(is_moving, step, begin).here


def _off_zero(position: Float[Array, " k"]) -> Float[Array, " k"]:
    """Move coordinates off an exact zero, each by its own small amount.

    A logit of 0 is a kink of the stable formulas of Bernoulli log densities: its derivatives there are wrong, and the mode
    of a symmetric prior is just there.
    """
    size = position.shape[0]
    return jnp.where(position == 0, 1e-4 * (1.0 + jnp.arange(size) / size), position)


def _spectrum(precision: Float[Array, "k k"]) -> tuple[Float[Array, ""], Float[Array, " k"], Float[Array, "k k"]]:
    """Return the least eigenvalue, all of them as absolute values kept away from 0, and eigenvectors."""
    values, vectors = jnp.linalg.eigh(precision)
    least = values[0]
    values = jnp.abs(values)
    floor = jnp.maximum(jnp.max(values) * 10 * jnp.finfo(values.dtype).eps, jnp.finfo(values.dtype).tiny)
    return least, jnp.maximum(values, floor), vectors
