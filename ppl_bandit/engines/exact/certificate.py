"""Certify that a log density is affine in the sufficient statistics: compare it with its affine part at random points.

The difference `log density(z) - <eta, T(z)>` must be the same number at every point. For functions that are proved analytic a
difference that varied could be constant on random points only by an accident of probability zero; what remains is the
resolution of floating point. So points lie near and far, on the scale of the prior and on the scale of 1; some move a single
site, lest a deviation in one be lost among the large terms of another; and each deviation is measured relative to how far the
terms have moved, not to their size: a large constant hides nothing but its own rounding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ppl_bandit.engines.exact.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    affine_change,
    derive,
    latents_at,
    total_of,
)
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.program.tracing import log_prob
from ppl_bandit.types import Interaction

__all__ = ["Evidence", "certify", "certify_row", "make_offsets", "residual_of", "tolerance"]

_SEED = 20170903
_ROUNDINGS = 64.0  # roundings that a log density may add up, in units of the last place


class Evidence(NamedTuple):
    """What an examination found.

    Attributes:
        prior_residual, likelihood_residual: largest relative deviations from affine.
        num_rows: rows of data whose likelihood was certified.
        examples: rewards of those rows on arm 0, with the natural parameters that each adds.
        num_points: random points per certificate.
    """

    prior_residual: float
    likelihood_residual: float
    num_rows: int
    examples: tuple[tuple[dict[str, float], Natural], ...]
    num_points: int


def tolerance(dtype: Any = None) -> float:
    """Return the largest relative residual that rounding explains in a precision, jax's current one by default."""
    return 1e-10 if jnp.dtype(jnp.zeros(()).dtype if dtype is None else dtype) == jnp.float64 else 3e-3


def make_offsets(layout: Layout, num_points: int, posterior: Posterior | None = None) -> Coordinates:
    """Draw displacements from a centre, (P, ...) each, the same for every engine on every machine.

    Every second point moves one site alone; of every four in a row two are far; every other four have reals in units of 1.

    Args:
        posterior: the prior, whose standard deviations are the other unit of reals; None for 1 throughout.
    """
    rng = np.random.default_rng(_SEED)
    point = np.arange(num_points)
    is_far, is_single, is_unscaled = (point % 4 >= 2)[:, None], point % 2 == 1, (point // 4 % 2 == 1)[:, None]
    mover = (point // 2) % len(layout.sites)

    def spread(size: int, near: float, far: tuple[float, float]) -> np.ndarray:
        """Normal with standard deviation `near`, or of a size uniform in `far` with a random sign."""
        sign = rng.choice([-1.0, 1.0], size=(num_points, size))
        distant = sign * rng.uniform(*far, size=(num_points, size))
        return np.where(is_far, distant, near * rng.standard_normal((num_points, size)))

    # No further: 1 - z keeps 11 digits at logit 9, and at the far points a change of e^6 in a scale dwarfs its logarithm.
    unit = spread(layout.count("unit"), 2.0, (3.0, 9.0))
    positive = spread(layout.count("positive"), 1.2, (2.0, 6.0))
    simplex = [spread(site.size, 1.5, (2.0, 5.0)) for site in layout.of("simplex")]
    reach = 10.0 ** np.where(is_far, rng.uniform(0.0, 1.5, (num_points, 1)), rng.uniform(-1.5, 0.5, (num_points, 1)))
    real = reach * rng.standard_normal((num_points, layout.count("real")))
    for position, site in enumerate(layout.sites):
        rests = is_single & (mover != position)
        block = {"unit": unit, "positive": positive, "real": real}.get(site.kind)
        if block is None:
            simplex[site.start][rests] = 0.0
        else:
            block[rests, site.start : site.start + site.size] = 0.0
    return Coordinates(
        jnp.asarray(unit),
        jnp.asarray(positive),
        tuple(
            jnp.asarray(offset.reshape(num_points, -1, site.shape[-1]))
            for offset, site in zip(simplex, layout.of("simplex"), strict=True)
        ),
        jnp.where(is_unscaled, 1.0, _standard_deviations(layout, posterior)) * jnp.asarray(real),
    )


def _standard_deviations(layout: Layout, posterior: Posterior | None) -> Float[Array, " D"]:
    scale = jnp.ones(layout.count("real"))
    if posterior is None:
        return scale
    scale = scale.at[layout.free].set(jnp.sqrt(_variances(posterior.precision)))
    if layout.members.size:
        spread = jnp.sqrt(_variances(posterior.scaled_precision) * (posterior.rate / posterior.shape)[:, None])
        scale = scale.at[layout.members[layout.is_member]].set(spread[layout.is_member])
    return jnp.where(jnp.isfinite(scale), scale, 1.0)  # an improper prior is refused elsewhere, as such


def _variances(precision: Array) -> Array:
    # By Cholesky: the general inverse takes seconds to compile.
    identity = jnp.broadcast_to(jnp.eye(precision.shape[-1]), precision.shape)
    root = jax.lax.linalg.triangular_solve(jnp.linalg.cholesky(precision), identity, left_side=True, lower=True)
    return jnp.sum(root**2, axis=-2)


def certify(
    layout: Layout, log_density: Callable[[Coordinates], Array], centre: Coordinates, offsets: Coordinates
) -> tuple[Natural, Float[Array, ""]]:
    """Derive the natural parameters of a log density at `centre` and return them with the largest relative residual."""
    natural = derive(layout, log_density, centre)
    return natural, residual_of(layout, log_density, natural, centre, offsets)


def certify_row(
    model: RewardModel, layout: Layout, centre: Coordinates, offsets: Coordinates, row: Interaction
) -> tuple[Natural, Float[Array, ""]]:
    """Derive the natural parameters of one row's likelihood, (1,) each, and return them with the largest residual.

    Each outcome is certified by itself: the large terms of one would hide a deviation in another.
    """

    def log_likelihoods(point: Coordinates) -> Float[Array, " outcomes"]:
        trace = model.trace(latents_at(layout, point), row.arm, row.context, model.outcome_values(row.reward))
        return jnp.stack([log_prob(trace[name], row.mask)[0] for name in model.outcomes])

    if len(model.outcomes) == 1:
        return certify(layout, lambda point: log_likelihoods(point)[0], centre, offsets)
    naturals, residuals = jax.vmap(
        lambda one: certify(layout, lambda point: one @ log_likelihoods(point), centre, offsets)
    )(jnp.eye(len(model.outcomes)))
    return total_of(naturals), residuals.max()


def residual_of(
    layout: Layout,
    log_density: Callable[[Coordinates], Array],
    natural: Natural,
    centre: Coordinates,
    offsets: Coordinates,
) -> Float[Array, ""]:
    """Return how far a log density is from being affine with the given coefficients, relative to how far its terms move.

    The residual is infinite where the log density is not finite at a point; 0 for a density that is constant.
    """
    # The centre itself comes first: all points go through one evaluation of the program, compiled once.
    points = jax.tree.map(
        lambda middle, offset: middle + jnp.concatenate([jnp.zeros_like(offset[:1]), offset]).astype(middle.dtype),
        centre,
        offsets,
    )
    values = jax.vmap(log_density)(points)
    changes, moves, sizes = jax.vmap(lambda point: affine_change(layout, natural, centre, point))(points)
    sizes += jnp.abs(values)
    rounding = _ROUNDINGS * jnp.finfo(values.dtype).eps / tolerance(values.dtype)
    scale = moves + rounding * (sizes + sizes[0])
    residual = jnp.abs(values - values[0] - changes) / jnp.where(scale == 0, 1.0, scale)
    return jnp.max(jnp.where(jnp.isfinite(residual), residual, jnp.inf))
