"""Where a certificate looks: points near and far from where a log density was read, and points where the posterior is.

Reals are displaced along the Cholesky factor of their covariance, all of them jointly. In a tight hierarchy the marginal
standard deviations would move a child away from its parent by many of the child's own: the quadratic terms grow by ten orders
of magnitude, and a deviation of several nats hides in their rounding.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families.element_blocks import map_blocks
from ppl_bandit.engines.exact.families.families import (
    Coordinates,
    Layout,
    Posterior,
    blocks_of,
    by_block,
    coordinates_at,
    reals_of,
)
from ppl_bandit.numerics.arrow_matrices import Arrow, steps_along

__all__ = ["make_offsets", "offsets_at_home", "typical_point"]

_SEED = 20170903


def make_offsets(layout: Layout, num_points: int, posterior: Posterior | None = None) -> Coordinates:
    """Draw displacements from a centre, (P, ...) each, the same for every engine on every machine.

    Every second point moves one site alone; of every four in a row two are far; every other four have reals in units of 1.

    Args:
        posterior: the prior, or the posterior so far, whose covariance is the other unit of reals; None for 1 throughout.
    """
    rng = np.random.default_rng(_SEED)
    point = np.arange(num_points)
    is_far, is_single, is_unscaled = (point % 4 >= 2)[:, None], point % 2 == 1, (point // 4 % 2 == 1)[:, None]
    mover = (point // 2) % len(layout.sites)

    def spread(size: int, near: float, far: tuple[float, float]) -> Any:
        """Normal with standard deviation `near`, or of a size uniform in `far` with a random sign."""
        sign = rng.choice([-1.0, 1.0], size=(num_points, size))
        distant = sign * rng.uniform(*far, size=(num_points, size))
        return np.where(is_far, distant, near * rng.standard_normal((num_points, size)))

    # No further: 1 - z keeps 11 digits at logit 9, and at the far points a change of e^6 in a scale dwarfs its logarithm.
    unit = spread(layout.count("unit"), 2.0, (3.0, 9.0))
    positive = spread(layout.count("positive"), 1.2, (2.0, 6.0))
    simplex = [spread(site.size, 1.5, (2.0, 5.0)) for site in layout.of("simplex")]
    reach = 10.0 ** np.where(is_far, rng.uniform(0.0, 1.5, (num_points, 1)), rng.uniform(-1.5, 0.5, (num_points, 1)))
    real: Any = reach * rng.standard_normal((num_points, layout.count("real")))
    for position, site in enumerate(layout.sites):
        rests = is_single & (mover != position)
        block = {"unit": unit, "positive": positive, "real": real}.get(site.kind)
        if block is None:
            simplex[site.start][rests] = 0.0
        else:
            block[rests, site.start : site.start + site.size] = 0.0
    # With its type spelled out: jax may remember a NumPy constant across a change of its precision.
    dtype = jnp.zeros(()).dtype if posterior is None else posterior.mean.dtype
    real = real.astype(dtype)
    steps = real if posterior is None else _whitened(layout, posterior, real)
    return Coordinates(
        unit.astype(dtype),
        positive.astype(dtype),
        tuple(
            offset.reshape(num_points, -1, site.shape[-1]).astype(dtype)
            for offset, site in zip(simplex, layout.of("simplex"), strict=True)
        ),
        jnp.where(is_unscaled, real, steps) if real.size else real,
    )


def typical_point(layout: Layout, posterior: Posterior) -> Coordinates:
    """Return the middle of a posterior in all coordinates; `coordinates_at` is that of its reals and precisions alone."""
    at = coordinates_at(layout, posterior)
    logs = [jnp.log(rows) for rows in posterior.dirichlet]
    own = at._replace(
        unit=jnp.log(posterior.beta[:, 0] / posterior.beta[:, 1]) if at.unit.size else at.unit,
        simplex=tuple(rows - rows.mean(axis=-1, keepdims=True) for rows in logs),
    )
    return jax.tree.map(_where_finite, own, at)


def _where_finite(values: Array, otherwise: Array) -> Array:
    return jnp.where(jnp.isfinite(values), values, otherwise) if values.size else values


def offsets_at_home(layout: Layout, num_points: int, posterior: Posterior) -> Coordinates:
    """Draw displacements of a few of a posterior's own standard deviations, (P, ...) each."""
    rng = np.random.default_rng(_SEED + 1)
    reach = np.resize([1.0, 2.0, 0.5, 3.0], num_points)[:, None]

    def spread(size: int) -> Any:
        return reach * rng.standard_normal((num_points, size))

    def scaled(variance: Array, largest: float) -> Array:
        steps = spread(variance.size).reshape(num_points, *variance.shape).astype(variance.dtype)
        if not steps.size:
            return steps
        # Where counts are small, or not those of a proper posterior, the family is wider than it is Gaussian.
        sd = jnp.sqrt(variance)
        return jnp.where(jnp.isfinite(sd), jnp.minimum(sd, largest), largest) * steps

    return Coordinates(
        scaled(map_blocks(lambda counts: (1.0 / counts).sum(axis=-1), posterior.beta), 2.0),
        scaled(map_blocks(lambda shape: 1.0 / shape, posterior.shape), 1.2),
        tuple(scaled(1.0 / rows, 1.5) for rows in posterior.dirichlet),
        _whitened(layout, posterior, spread(layout.count("real")).astype(posterior.mean.dtype)),
    )


def _whitened(layout: Layout, posterior: Posterior, steps: Any) -> Float[Array, "P D"]:
    """Turn independent steps of size 1 into steps of the reals' joint law."""
    if not steps.size:
        return steps
    moved = _along(posterior.precision, blocks_of(layout, jnp.asarray(steps)))
    if np.any(layout.owner >= 0):
        moved = moved * by_block(layout, jnp.sqrt(posterior.rate / posterior.shape), 1.0)[:, None]
    return _where_finite(reals_of(layout, moved), steps)  # an improper prior is refused elsewhere, as such


def _along(precision: Any, steps: Float[Array, "P R S"]) -> Float[Array, "P R S"]:
    if isinstance(precision, Arrow):
        return jax.vmap(lambda own: steps_along(precision, own))(steps)
    if precision.shape[-1] == 1:
        return steps / jnp.sqrt(precision[..., 0])
    root, columns = jnp.linalg.cholesky(precision), jnp.moveaxis(steps, 0, -1)
    solved = jax.lax.linalg.triangular_solve(root, columns, left_side=True, lower=True, transpose_a=True)
    return jnp.moveaxis(solved, -1, 0)
