"""A linear Gaussian step, x_2 = F x_1 + b + noise with covariance Q, derived from the density of the program's step."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.gaussian import blocks_of, padding
from ppl_bandit.engines.exact.families.layout import REAL, Layout
from ppl_bandit.engines.exact.families.posterior import Coordinates, Posterior, latents_at
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once

__all__ = ["LinearStep", "derive_step", "invert_blocks", "predict", "shortest_step"]

_TIMES = 10.0 ** np.arange(-15, 16)  # candidates for the shortest step, in any unit of time
_NEGLIGIBLE = 1e-8  # of the prior's variances; certificates of shorter steps are lost in rounding


class LinearStep(NamedTuple):
    """A step of the Gaussian blocks of a layout; a static element has a row of the identity, no offset and no noise.

    Attributes:
        matrix: F.
        offset: b.
        noise: Q.
    """

    matrix: Float[Array, "R S S"]
    offset: Float[Array, "R S"]
    noise: Float[Array, "R S S"]


def derive_step(
    model: RewardModel,
    layout: Layout,
    elapsed: Array | float | None = None,
    fixed: Mapping[str, Array] = MappingProxyType({}),
) -> LinearStep:
    """Derive the step of a program whose step is linear Gaussian; what it returns for another program is meaningless.

    With H the second derivatives of log p(x_2 | x_1), the covariance is -inverse(H_22), and F = -inverse(H_22) H_21.

    Args:
        fixed: values of the static latents that are not in the layout.
    """
    num_real = layout.count(REAL)
    is_moving = np.zeros(num_real, bool)
    for site in layout.of(REAL):
        is_moving[site.span] = site.name in model.moving_sites
    (moving,) = np.nonzero(is_moving)

    def log_density(both: Float[Array, "2 D"]) -> Array:
        before, after = ({**fixed, **latents_at(layout, Coordinates({}, real))} for real in both)
        return model.log_transition(after, before, elapsed)

    origin = jnp.zeros((2, num_real))
    slope = jax.grad(log_density)(origin)[1, moving]
    curvature = jax.hessian(log_density)(origin)[1, moving]  # (moving, 2, D)
    noise = -jnp.linalg.inv(curvature[:, 1, moving])
    noise = 0.5 * (noise + noise.T)
    eye = jnp.eye(num_real)
    matrix = eye.at[moving].set(noise @ curvature[:, 0])
    offset = jnp.zeros(num_real).at[moving].set(noise @ slope)
    spread = jnp.zeros((num_real, num_real)).at[np.ix_(moving, moving)].set(noise)
    blank = padding(layout, spread.dtype)
    return LinearStep(_matrices(layout, matrix) + blank, blocks_of(layout, offset), _matrices(layout, spread))


def shortest_step(
    model: RewardModel, layout: Layout, prior: Posterior, fixed: Mapping[str, Array] = MappingProxyType({})
) -> float:
    """Return a time so short that the step changes nothing, up to rounding: the longest such power of ten, or 0.

    The density of such a step is nearly singular, or not finite. Rows that are no further apart are learnt at one time.

    Args:
        prior: the law at the first step, whose standard deviations are the unit of a change.
        fixed: as in `derive_step`.
    """

    def changes() -> Array:
        sd = jnp.sqrt(jnp.diagonal(invert_blocks(jnp.asarray(prior.precision)), axis1=-2, axis2=-1))

        def largest(elapsed: Array) -> Array:
            step = derive_step(model, layout, elapsed, fixed)
            moved = (step.matrix - jnp.eye(sd.shape[-1])) * sd[:, None, :] / sd[:, :, None]
            spread = step.noise / (sd[:, None, :] * sd[:, :, None])
            return jnp.max(jnp.stack([jnp.max(jnp.abs(own)) for own in (moved, step.offset / sd, spread)]))

        return jax.vmap(largest)(jnp.asarray(_TIMES))

    found = np.asarray(run_once(changes))
    is_short = ~np.isfinite(found) | (found < _NEGLIGIBLE)
    num_short = len(found) if is_short.all() else int(np.argmin(is_short))
    (short,) = np.nonzero(np.isfinite(found[:num_short]))
    return float(_TIMES[short[-1]]) if short.size else 0.0


def predict(step: LinearStep, posterior: Posterior) -> Posterior:
    """Return the law of the latents one step later."""
    matrix, offset, noise = (jnp.asarray(leaf, posterior.mean.dtype) for leaf in step)
    covariance = invert_blocks(posterior.precision)
    if matrix.shape[-1] == 1:
        later = matrix * covariance * matrix + noise
        return posterior._replace(mean=matrix[..., 0] * posterior.mean + offset, precision=1.0 / later)
    later = matrix @ covariance @ jnp.swapaxes(matrix, -1, -2) + noise
    mean = jnp.einsum("rst,rt->rs", matrix, posterior.mean) + offset
    return posterior._replace(mean=mean, precision=invert_blocks(0.5 * (later + jnp.swapaxes(later, -1, -2))))


def invert_blocks(matrices: Float[Array, "R S S"]) -> Float[Array, "R S S"]:
    """Return the inverse of each positive definite block."""
    if matrices.shape[-1] == 1:
        return 1.0 / matrices
    found = jnp.linalg.inv(matrices)
    return 0.5 * (found + jnp.swapaxes(found, -1, -2))


def _matrices(layout: Layout, dense: Float[Array, "D D"]) -> Any:
    """Return the blocks of a matrix over all reals, with 0 as padding."""
    found = dense[layout.members[:, :, None], layout.members[:, None, :]]
    return jnp.where(layout.is_pair, found, 0.0)
