"""Newton's method to a mode of a log density."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.target import Target

__all__ = ["Mode", "find_mode"]

_DAMPING = (0.0, 0.01, 1.0)  # least eigenvalue of a step relative to the largest


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


def find_mode(target: Target, start: Float[Array, " k"], tolerance: float = 1e-5, max_steps: int = 50) -> Mode:
    """Climb a log density by Newton's method with the absolute values of the Hessian's eigenvalues.

    Their absolute values make every step go uphill, and among 1, 1/4, 1/16, ... of a step, with and without the smallest of
    them raised, the highest point is taken, so that a start far from the mode, or where the density is flat or not concave,
    is no trap.

    Args:
        tolerance: of the Newton decrement; 1e-5 finds the mode to about 0.004 posterior standard deviations. The curvature
            is that before the last step.
    """
    damping = jnp.array(_DAMPING)

    def step(carry: tuple[Mode, Array]) -> tuple[Mode, Array]:
        before, _ = carry
        value, gradient, hessian = target.curvature(before.position)
        least, precisions, axes = _spectrum(-hessian)
        slope = axes.T @ gradient
        directions = (slope / jnp.maximum(precisions, damping[:, None] * jnp.max(precisions))) @ axes.T
        tried = (before.position + lengths[:, None, None] * directions).reshape(-1, before.position.shape[0])
        heights = jnp.append(jax.vmap(target.value)(tried), value)
        heights = jnp.where(jnp.isfinite(heights), heights, -jnp.inf)
        best = jnp.argmax(heights)
        position = _off_zero(jnp.append(tried, before.position[None], axis=0)[best])
        decrement = jnp.sum(jnp.square(slope) / precisions)
        is_converged = (decrement <= tolerance) & (least > 0) & jnp.all(jnp.isfinite(position))
        return Mode(position, heights[best], precisions, axes, is_converged, before.num_steps + 1), decrement

    def is_moving(carry: tuple[Mode, Array]) -> Array:
        mode, decrement = carry
        return ~(decrement <= tolerance) & (mode.num_steps < max_steps)

    size, zero = start.shape[0], jnp.zeros((), start.dtype)
    lengths = 4.0 ** -jnp.arange(6, dtype=start.dtype)
    no_steps = jnp.zeros((), int)
    begin = Mode(
        _off_zero(start), zero, jnp.ones(size, start.dtype), jnp.eye(size, dtype=start.dtype), jnp.array(False), no_steps
    )
    return jax.lax.while_loop(is_moving, step, (begin, zero + jnp.inf))[0]


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
