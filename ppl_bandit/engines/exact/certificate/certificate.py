"""Certify that a log density is affine in the sufficient statistics: compare it with its affine form at random points.

The difference `log density(z) - <eta, T(z)>` must be the same number at every point. A difference of analytic functions that
varies is constant on random points with probability zero, so what remains is floating point. The difference is measured in
nats, and the tolerance is what the rounding of the terms explains. At points where the posterior has its mass, rounding itself
has a limit: where it could hide a deviation that matters, nothing is certified.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.certificate.affine import (
    Region,
    affine_change,
    rounding_sizes_after_move,
    rounding_sizes_of,
)
from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.engines.exact.families.posterior import Coordinates, Natural, relative_to

__all__ = ["Evidence", "Residual", "excess_of", "is_affine", "residual_of", "resolution", "worst_of"]

_NUM_ROUNDINGS = 4.0  # of a log density, in units of the last place of the sum of its terms
_NUM_HIDDEN_ROUNDINGS = (
    5e5  # inside the program, in units of the last place of 1: 1 - (1 - z) keeps 11 digits at logit -11
)


class Residual(NamedTuple):
    """How far a log density is from affine, at the point that comes closest to failing.

    Attributes:
        nats: the deviation; infinite where the density is not finite.
        tolerance: what rounding explains there, in nats.
        rounding: what rounding could hide within a standard deviation of the posterior, in nats; at most `resolution` is
            certified.
    """

    nats: Float[Array, "..."]
    tolerance: Float[Array, "..."]
    rounding: Float[Array, "..."]


class Evidence(NamedTuple):
    """The certificates of a program.

    Attributes:
        prior, likelihood: the largest residuals.
        num_rows: rows of data whose likelihood was certified.
        examples: rewards of those rows on arm 0, with the natural parameters of each.
        num_points: random points per certificate.
        num_summed: rows whose weighted sum each certificate is of.
    """

    prior: Residual
    likelihood: Residual
    num_rows: int
    examples: tuple[tuple[dict[str, float], Natural], ...]
    num_points: int
    num_summed: int = 1


def resolution(dtype: Any = None) -> float:
    """Return the most that rounding may hide from a certificate, in nats, for a dtype; by default jax's current float."""
    return 1e-3 if jnp.dtype(jnp.result_type(float) if dtype is None else dtype) == jnp.float64 else 0.1


def is_affine(residual: Residual) -> Bool[Array, "..."]:
    """Return whether rounding explains the deviation and could hide none that matters where the posterior is."""
    return (residual.nats <= residual.tolerance) & (residual.rounding <= resolution(residual.rounding.dtype))


def excess_of(residual: Residual) -> Float[Array, "..."]:
    """Return how close a residual comes to failing: `is_affine` holds where this is at most 1."""
    # NumPy for NumPy arrays: jax would compile every operation.
    numbers: Any = np if isinstance(residual.nats, np.ndarray | np.generic) else jnp
    hidden = residual.rounding / resolution(residual.rounding.dtype)
    return numbers.maximum(residual.nats / numbers.where(residual.tolerance > 0, residual.tolerance, 1.0), hidden)


def worst_of(residuals: Residual) -> Residual:
    """Return the residual that comes closest to failing, along the leading axis, with the largest rounding of all."""
    worst = (residuals.nats / residuals.tolerance).argmax()
    return Residual(residuals.nats[worst], residuals.tolerance[worst], residuals.rounding.max())


def residual_of(
    layout: Layout,
    log_densities: Callable[[Coordinates], Float[Array, " terms"]],
    naturals: Natural,
    centre: Coordinates,
    regions: Sequence[Region],
    num_rows: int = 1,
    num_roundings: Float[Array, " R"] | None = None,
) -> Residual:
    """Return how far each of several log densities is from the affine form with the given coefficients.

    Args:
        naturals: with a leading axis over the densities, relative to `centre`.
        regions: the region around `centre`, which may be left out, and the one where the posterior is.
        num_rows: rows of data of which each density is a sum.
        num_roundings: of the quadratic form of each block, beyond those of its terms; see `inverse_roundings`.
    """
    # All points go through one evaluation of the program, compiled once.
    points = jax.tree.map(lambda *parts: jnp.concatenate(parts), *(region.points for region in regions))
    values = jax.vmap(log_densities)(points)
    *around_centre, in_posterior = regions
    num_in_posterior = in_posterior.steps.shape[0]
    middle = jax.tree.map(lambda leaf: leaf[0], in_posterior.points)

    def residual(natural: Natural, values: Float[Array, " P"]) -> Residual:
        moved = relative_to(layout, natural, centre, middle)
        size = rounding_sizes_after_move(layout, natural, centre, middle)
        found = [_compare(moved, size, in_posterior, values[values.size - num_in_posterior :], num_rows, num_roundings)]
        rounding = found[0][1][1]  # one standard deviation from the middle
        for region in around_centre:
            size = rounding_sizes_of(layout, natural, centre)
            found.append(
                _compare(natural, size, region, values[: values.size - num_in_posterior], num_rows, num_roundings)
            )
        nats, tolerances = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
        # A point where rounding is large counts only if it contradicts the affine form.
        is_informative = (tolerances <= resolution(tolerances.dtype)) | ~(nats <= tolerances)
        worst = jnp.argmax(jnp.where(is_informative, nats / tolerances, -1.0))
        return Residual(nats[worst], tolerances[worst], rounding)

    return jax.vmap(residual, in_axes=(0, 1))(naturals, values)


def _compare(
    natural: Natural,
    size: Natural,
    region: Region,
    values: Float[Array, " P"],
    num_rows: int,
    num_roundings: Float[Array, " R"] | None,
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return the deviations from affine, relative to the first point, and what rounding explains of each."""
    changes, sizes = affine_change(natural, size, region, num_roundings)
    sizes = sizes + jnp.abs(values)
    eps = jnp.finfo(values.dtype).eps
    tolerances = eps * (num_rows * _NUM_HIDDEN_ROUNDINGS + _NUM_ROUNDINGS * (sizes + sizes[0]))
    nats = jnp.abs(values - values[0] - changes)
    is_finite = jnp.isfinite(nats) & jnp.isfinite(tolerances)
    return jnp.where(is_finite, nats, jnp.inf), jnp.where(is_finite, tolerances, 1.0)
