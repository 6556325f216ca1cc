"""Certify that a log density is affine in the sufficient statistics: compare it with its affine part at random points.

The difference `log density(z) - <eta, T(z)>` must be the same number at every point. For functions that are proved analytic a
difference that varied could be constant on random points only by an accident of probability zero; what remains is the
resolution of floating point. So the difference is measured in nats, and what it may be is what the rounding of the terms that
were added up explains. Points lie near and far from where the density was read, on the scale of the posterior so far and on
the scale of 1; some move a single site. Others lie where the posterior is once the data are absorbed: a density may bend only
there. At those, rounding itself has a limit: where it could hide a deviation that matters, nothing is certified.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.certificate.affine import Region, affine_change, magnitude_of, recentre, region_around
from ppl_bandit.engines.exact.certificate.points import make_offsets, offsets_at_home, typical_point
from ppl_bandit.engines.exact.families.derivation import derive
from ppl_bandit.engines.exact.families.element_blocks import joined, map_blocks, nothing
from ppl_bandit.engines.exact.families.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    coordinates_at,
    latents_at,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import log_prob
from ppl_bandit.runtime.unrolled_reductions import argmax_of
from ppl_bandit.types import Interaction

__all__ = [
    "Evidence",
    "Places",
    "Residual",
    "excess_of",
    "is_affine",
    "log_likelihoods",
    "places_for",
    "read_row",
    "residual_of",
    "resolution",
    "worst_of",
]

_ROUNDINGS = 4.0  # roundings that a log density may add up, in units of the last place of the sum of its terms
_UNSEEN = 5e5  # and those inside the program, in units of the last place of 1: 1 - (1 - z) keeps 11 digits at logit -11


class Residual(NamedTuple):
    """How far a log density is from being affine, at the point that comes closest to failing.

    Attributes:
        nats: the deviation; infinite where the density is not finite.
        tolerance: what rounding explains there, in nats.
        rounding: what rounding could hide within a standard deviation of the posterior, in nats; `resolution` is the most
            that is certified.
    """

    nats: Float[Array, "..."]
    tolerance: Float[Array, "..."]
    rounding: Float[Array, "..."]


class Places(NamedTuple):
    """Where densities are compared: around the point where they are read, and where the posterior is."""

    near_and_far: Region
    at_home: Region


class Evidence(NamedTuple):
    """What an examination found.

    Attributes:
        prior, likelihood: how far they are from affine, at worst.
        num_rows: rows of data whose likelihood was certified.
        examples: rewards of those rows on arm 0, with the natural parameters that each adds.
        num_points: random points per certificate.
    """

    prior: Residual
    likelihood: Residual
    num_rows: int
    examples: tuple[tuple[dict[str, float], Natural], ...]
    num_points: int


def resolution(dtype: Any = None) -> float:
    """Return the most that rounding may hide from a certificate, in nats, in a precision, jax's current one by default."""
    return 1e-3 if jnp.dtype(jnp.result_type(float) if dtype is None else dtype) == jnp.float64 else 0.1


def is_affine(residual: Residual) -> Bool[Array, "..."]:
    """Tell whether rounding explains the deviation, and could hide none that matters where the posterior is."""
    return (residual.nats <= residual.tolerance) & (residual.rounding <= resolution(residual.rounding.dtype))


def excess_of(residual: Residual) -> Float[Array, "..."]:
    """Return how close a residual comes to failing, as one number: it `is_affine` where this is at most 1."""
    # In NumPy what is known: jax would compile every operation.
    numbers: Any = np if isinstance(residual.nats, np.ndarray | np.generic) else jnp
    hidden = residual.rounding / resolution(residual.rounding.dtype)
    return numbers.maximum(residual.nats / numbers.where(residual.tolerance > 0, residual.tolerance, 1.0), hidden)


def places_for(
    layout: Layout,
    before: Posterior,
    after: Posterior,
    num_points: int,
    num_at_home: int,
    stretch: Array | None = None,
    centre: Coordinates | None = None,
) -> Places:
    """Return where to compare densities that were read at the means of `before` and lead to `after`.

    Args:
        stretch: what the displacements from the first centre are multiplied by, if anything.
        centre: where the densities were read, if not at these means.
    """
    centre = coordinates_at(layout, before) if centre is None else centre
    home = typical_point(layout, after)
    offsets = make_offsets(layout, num_points, before)
    if stretch is not None:
        offsets = jax.tree.map(lambda leaf: stretch * leaf if leaf.size else leaf, offsets)
    return Places(_around(layout, centre, offsets), _around(layout, home, offsets_at_home(layout, num_at_home, after)))


def _around(layout: Layout, centre: Coordinates, offsets: Coordinates) -> Region:
    def moved(middle: Array, offset: Array) -> Array:
        if not middle.size:
            return nothing((len(offset) + 1, *middle.shape), middle.dtype)
        return jnp.concatenate([middle[None], middle + offset.astype(middle.dtype)])

    return region_around(layout, jax.tree.map(moved, centre, offsets))


def log_likelihoods(
    model: RewardModel, layout: Layout, row: Interaction, *, with_prior: bool = False
) -> Callable[[Coordinates], Array]:
    """Return point -> the log likelihood of one row, (1,) each, by group of outcomes that depend on each other.

    By group, since terms of one outcome would hide a deviation in another; and not by outcome, since in a chain - this many
    of all, and that many of the others - only the sum has a conjugate form.

    Args:
        with_prior: whether the log prior comes first.
    """

    def evaluate(point: Coordinates) -> Float[Array, " terms"]:
        trace = model.trace(latents_at(layout, point), row.arm, row.context, model.outcome_values(row.reward))
        by_outcome = {name: log_prob(trace[name], row.mask)[0] for name in model.outcomes}
        terms = [jnp.asarray(sum(by_outcome[name] for name in group)) for group in model.outcome_groups]
        return jnp.stack([model.log_prior_of(trace), *terms] if with_prior else terms)

    return evaluate


def read_row(model: RewardModel, layout: Layout, centre: Coordinates, row: Interaction) -> Natural:
    """Derive the natural parameters of one row's likelihood, (1,) each; with a leading axis over groups of outcomes."""
    evaluate, num_groups = log_likelihoods(model, layout, row), len(model.outcome_groups)
    if num_groups == 1:
        return map_blocks(lambda leaf: leaf[None], derive(layout, lambda point: evaluate(point)[0], centre))
    return jax.vmap(lambda one: derive(layout, lambda point: one @ evaluate(point), centre))(jnp.eye(num_groups))


def residual_of(
    layout: Layout,
    log_densities: Callable[[Coordinates], Float[Array, " terms"]],
    naturals: Natural,
    centre: Coordinates,
    places: Sequence[Region],
    num_rows: int = 1,
) -> Residual:
    """Return how far log densities are from being affine with the given coefficients, each of them.

    Args:
        num_rows: rows of data of which each density is a sum.
        naturals: with a leading axis over the densities, relative to `centre`.
        places: regions, the first of two around `centre` itself; the last is where the posterior is.
    """
    # All points go through one evaluation of the program, compiled once.
    points = jax.tree.map(joined, *(region.points for region in places))
    values = jax.vmap(log_densities)(points)
    home = places[-1]

    def one(natural: Natural, values: Float[Array, " P"]) -> Residual:
        own = recentre(layout, natural, centre, map_blocks(lambda leaf: leaf[0], home.points))
        found = [_compare(*own, home, values[values.size - home.points.real.shape[0] :], num_rows)]
        rounding = found[0][1][1]  # one standard deviation from the middle
        if len(places) == 2:
            size = magnitude_of(layout, natural, centre)
            found.append(_compare(natural, size, places[0], values[: places[0].points.real.shape[0]], num_rows))
        nats, tolerances = (joined(*parts) for parts in zip(*found, strict=True))
        # A point that tells nothing, because rounding there is large, is passed over unless it tells against the form.
        is_telling = (tolerances <= resolution(tolerances.dtype)) | ~(nats <= tolerances)
        worst = argmax_of(jnp.where(is_telling, nats / tolerances, -1.0))
        return Residual(nats[worst], tolerances[worst], rounding)

    return jax.vmap(one, in_axes=(0, 1))(naturals, values)


def worst_of(residuals: Residual) -> Residual:
    """Return the residual that comes closest to failing, along the leading axis, with the largest rounding of all."""
    worst = (residuals.nats / residuals.tolerance).argmax()
    return Residual(residuals.nats[worst], residuals.tolerance[worst], residuals.rounding.max())


def _compare(
    natural: Natural, size: Natural, region: Region, values: Float[Array, " P"], num_rows: int
) -> tuple[Float[Array, " P"], Float[Array, " P"]]:
    """Return the deviations from affine, relative to the first point, and what rounding explains of each."""
    changes, sizes = affine_change(natural, size, region)
    sizes = sizes + jnp.abs(values)
    tolerances = jnp.finfo(values.dtype).eps * (num_rows * _UNSEEN + _ROUNDINGS * (sizes + sizes[0]))
    nats = jnp.abs(values - values[0] - changes)
    is_finite = jnp.isfinite(nats) & jnp.isfinite(tolerances)
    return jnp.where(is_finite, nats, jnp.inf), jnp.where(is_finite, tolerances, 1.0)
