"""The exponential families that the exact engine knows, and the coordinates in which it reads them.

A latent's support names its family: the unit interval a Beta, positive numbers a Gamma of a power of the latent, the simplex
a Dirichlet, the reals a Gaussian - one dense block of all real latents whose prior no positive latent scales, and one block
for each positive element that scales its reals (Normal-InverseGamma, Normal-Gamma). In each family the log density is affine
in sufficient statistics T(z):

    Beta          log w, log(1 - w)                 w = (z - low) / (high - low)
    Dirichlet     log z_k
    Gamma         log u, u                          u = (z - low)^power: power -1 is an InverseGamma, -2 a standard deviation
    Normal-Gamma  log u, u, u x, u x x'             x the real elements that u scales, u their precision
    Gaussian      x, x x'

so that natural parameters can be read off from first and second derivatives at one point. Real elements are read relative to
the current mean: sums of squares about a distant origin would lose all digits of a variance.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.blocks import map_blocks, nothing, pick, where_member
from ppl_bandit.numerics import sampling
from ppl_bandit.types import Draws, Key

__all__ = [
    "Coordinates",
    "Layout",
    "Natural",
    "Posterior",
    "SiteBlock",
    "absorb",
    "coordinates_at",
    "forget",
    "is_proper",
    "is_resolved",
    "latents_at",
    "posterior_of",
    "reals_of",
    "sample",
    "total_of",
]

UNIT, POSITIVE, SIMPLEX, REAL = "unit", "positive", "simplex", "real"
_UNIT_POINT = float(np.log(0.4 / 0.6))  # not 0: stabilised formulas have a kink at logit(1/2)


class SiteBlock(NamedTuple):
    """Where a latent site lives: `start` is its offset among the elements of its kind (for a simplex, its position)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    low: Any = 0.0
    high: Any = 1.0

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=int))


class Layout(NamedTuple):
    """How the latents of a program fall into families; all entries are known when the engine is built.

    Attributes:
        sites: one block per latent site.
        power: (G,), u = z^power for each of G positive elements.
        members: (G, S) indices of the real elements that each positive element scales, padded with 0.
        is_member: (G, S), false for padding.
        free: indices of the real elements that nothing scales.
    """

    sites: tuple[SiteBlock, ...]
    power: np.ndarray
    members: np.ndarray
    is_member: np.ndarray
    free: np.ndarray

    def of(self, kind: str) -> list[SiteBlock]:
        """Return the sites of a kind."""
        return [site for site in self.sites if site.kind == kind]

    def count(self, kind: str) -> int:
        """Return the number of elements of a kind."""
        return sum(site.size for site in self.of(kind))


class Coordinates(NamedTuple):
    """A point in latent space: logits of unit elements, logs of precisions u, logits per simplex row, real elements."""

    unit: Float[Array, " U"]
    positive: Float[Array, " G"]
    simplex: tuple[Float[Array, "rows K"], ...]
    real: Float[Array, " D"]


class Natural(NamedTuple):
    """Coefficients of the sufficient statistics, the reals' relative to a centre; quadratics are negated second derivatives.

    Attributes:
        unit: coefficients of log w and log(1 - w).
        simplex: coefficients of log z_k.
        log_scale, scale: coefficients of log u and u.
        scaled_linear, scaled_quadratic: of u (x - centre) and -u (x - centre)(x - centre)' / 2, per positive element.
        linear, quadratic: of x - centre and -(x - centre)(x - centre)' / 2 for the free reals.
    """

    unit: Float[Array, "U 2"]
    simplex: tuple[Float[Array, "rows K"], ...]
    log_scale: Float[Array, " G"]
    scale: Float[Array, " G"]
    scaled_linear: Float[Array, "G S"]
    scaled_quadratic: Float[Array, "G S S"]
    linear: Float[Array, " F"]
    quadratic: Float[Array, "F F"]


class Posterior(NamedTuple):
    """Parameters of all families: the engine's state.

    Attributes:
        beta: (alpha, beta) of each unit element.
        dirichlet: concentrations, per simplex site.
        shape, rate: of u ~ Gamma(shape, rate).
        scaled_mean, scaled_precision: x | u ~ Normal(mean, inverse(u precision)); padding has mean 0, precision 1.
        mean, precision: of the free reals.
        num_rows: rows of data absorbed.
    """

    beta: Float[Array, "U 2"]
    dirichlet: tuple[Float[Array, "rows K"], ...]
    shape: Float[Array, " G"]
    rate: Float[Array, " G"]
    scaled_mean: Float[Array, "G S"]
    scaled_precision: Float[Array, "G S S"]
    mean: Float[Array, " F"]
    precision: Float[Array, "F F"]
    num_rows: Int[Array, ""]


def latents_at(layout: Layout, point: Coordinates) -> dict[str, Array]:
    """Return the program's latents at a point."""
    latents: dict[str, Array] = {}
    for site in layout.sites:
        span = slice(site.start, site.start + site.size)
        # With their type spelled out: jax may remember a NumPy constant across a change of its precision.
        low, high = (np.asarray(bound, point.unit.dtype) for bound in (site.low, site.high))
        if site.kind == UNIT:
            latents[site.name] = _within(low, high - low, jax.nn.sigmoid(point.unit[span].reshape(site.shape)))
        elif site.kind == POSITIVE:
            log_z = point.positive[span] / np.asarray(layout.power[span], point.positive.dtype)
            latents[site.name] = _within(low, np.ones_like(low), jnp.exp(log_z.reshape(site.shape)))
        elif site.kind == SIMPLEX:
            latents[site.name] = jax.nn.softmax(point.simplex[site.start], axis=-1).reshape(site.shape)
        else:
            latents[site.name] = point.real[span].reshape(site.shape)
    return latents


def _within(low: Any, width: Any, share: Array) -> Array:
    """Return low + width share, without what adds and multiplies nothing."""
    scaled = share if np.all(width == 1) else width * share
    return scaled if np.all(low == 0) else low + scaled


def coordinates_at(layout: Layout, posterior: Posterior) -> Coordinates:
    """Return the point at which likelihoods are differentiated: current means of reals and precisions, fixed elsewhere."""
    return Coordinates(
        jnp.full(posterior.beta.shape[:1], _UNIT_POINT, posterior.beta.dtype),
        jnp.log(posterior.shape / posterior.rate) if posterior.shape.size else posterior.shape,
        tuple(_uneven_logits(rows.shape) for rows in posterior.dirichlet),
        reals_of(layout, posterior.mean, posterior.scaled_mean),
    )


def _uneven_logits(shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.linspace(-0.3, 0.4, shape[-1]), shape)


def reals_of(
    layout: Layout, free: Float[Array, "*batch F"], scaled: Float[Array, "*batch G S"]
) -> Float[Array, "*batch D"]:
    """Put the real elements that nothing scales and those that are scaled into their places."""
    if not layout.members.size:
        return pick(free, np.argsort(layout.free))
    own = scaled.reshape(*scaled.shape[:-2], -1)
    given = np.concatenate([layout.free, layout.members[layout.is_member]])
    kept = np.concatenate([np.arange(layout.free.size), layout.free.size + np.flatnonzero(layout.is_member.ravel())])
    everything = jnp.concatenate([free, own], axis=-1) if layout.free.size else own
    return pick(everything, kept[np.argsort(given)])


def total_of(naturals: Natural) -> Natural:
    """Sum the natural parameters of rows along their leading axis; all have the same centre."""
    return map_blocks(lambda leaf: leaf.sum(0), naturals)


def forget(posterior: Posterior, prior: Posterior, keep: Float[Array, ""]) -> tuple[Posterior, Natural]:
    """Discount a posterior towards its prior: its natural parameters times `keep`, the prior's times 1 - keep.

    Returns:
        What is kept, and the prior's share as natural parameters read at the posterior's means, for `absorb` to add.
    """
    scaled_gap, gap = prior.scaled_mean - posterior.scaled_mean, prior.mean - posterior.mean
    scaled_pull = jnp.einsum("gst,gt->gs", prior.scaled_precision, scaled_gap)
    share = Natural(
        prior.beta,
        prior.dirichlet,
        prior.shape,
        -prior.rate - 0.5 * jnp.sum(scaled_gap * scaled_pull, axis=-1),
        scaled_pull,
        prior.scaled_precision,
        prior.precision @ gap,
        prior.precision,
    )
    kept = posterior._replace(
        beta=keep * posterior.beta,
        dirichlet=tuple(keep * rows for rows in posterior.dirichlet),
        shape=keep * posterior.shape,
        rate=keep * posterior.rate,
        scaled_precision=keep * posterior.scaled_precision,
        precision=keep * posterior.precision,
    )
    return kept, jax.tree.map(lambda leaf: (1.0 - keep) * leaf, share)


def absorb(layout: Layout, posterior: Posterior, natural: Natural, num_rows: Int[Array, ""] | int) -> Posterior:
    """Add natural parameters, read at the posterior's own means, to a posterior.

    For a Gaussian block: precision' = precision + quadratic and mean' = mean + inverse(precision') linear; completing the
    square moves linear' inverse(precision') linear / 2 from the rate of u, to which `-scale` was added.
    """
    counts = posterior.beta, posterior.dirichlet, posterior.shape, posterior.rate
    beta, dirichlet, shape, rate = map_blocks(
        lambda old, new: old + new, counts, (natural.unit, natural.simplex, natural.log_scale, -natural.scale)
    )
    scaled_mean, scaled_precision = posterior.scaled_mean, posterior.scaled_precision
    if layout.members.size:
        scaled_precision = scaled_precision + natural.scaled_quadratic
        shift = _solve(scaled_precision, natural.scaled_linear)
        scaled_mean = scaled_mean + shift
        rate = rate - 0.5 * jnp.sum(natural.scaled_linear * shift, axis=-1)
    mean, precision = posterior.mean, posterior.precision
    if layout.free.size:
        precision = precision + natural.quadratic
        mean = mean + _solve(precision, natural.linear)
    num_rows = posterior.num_rows + num_rows
    return Posterior(beta, dirichlet, shape, rate, scaled_mean, scaled_precision, mean, precision, num_rows)


def is_proper(posterior: Posterior) -> Bool[Array, ""]:
    """Tell whether all parameters are finite and inside their domains: a precision too ill-conditioned for its dtype is not."""
    reals = (posterior.scaled_mean, posterior.scaled_precision, posterior.mean, posterior.precision)
    positive = (posterior.beta, *posterior.dirichlet, posterior.shape, posterior.rate)
    # Finite, and not nan, is what lies strictly below infinity.
    is_fine = [posterior.num_rows >= 0, *(jnp.all(jnp.abs(leaf) < jnp.inf) for leaf in reals if leaf.size)]
    is_fine += [jnp.all((leaf > 0) & (leaf < jnp.inf)) for leaf in positive if leaf.size]
    return jnp.all(jnp.stack(is_fine))


def is_resolved(
    layout: Layout, before: Posterior, after: Posterior, natural: Natural, steps: Float[Array, "P D"]
) -> Bool[Array, ""]:
    """Tell whether a precision holds a posterior: all but a tenth of each count arrived, and no precision matrix cancels.

    A matrix cancels where its quadratic form, along typical steps, is a difference of terms whose rounding, once per row,
    could be a fifth of a nat or more: features that nearly repeat each other, as an intercept and a feature far from 0 do.

    Args:
        before, natural: a posterior, and what was added to it to make `after`.
        steps: displacements of the reals by a few standard deviations of `after`.
    """
    counts = [
        (before.beta, after.beta, natural.unit),
        (before.shape, after.shape, natural.log_scale),
        *zip(before.dirichlet, after.dirichlet, natural.simplex, strict=True),
    ]
    roundings = jnp.finfo(after.mean.dtype).eps * jnp.sqrt(1.0 + after.num_rows)
    is_held = [roundings < 1.0]
    is_held += [jnp.all(jnp.abs(new - old - add) - 0.1 * jnp.abs(add) <= 1e-6) for old, new, add in counts if old.size]
    if layout.members.size:
        x = jnp.abs(where_member(layout.is_member, pick(steps, layout.members)))
        span = after.shape / after.rate * jnp.einsum("pgs,gst,pgt->g", x, jnp.abs(after.scaled_precision), x)
        is_held.append(jnp.all(roundings * span <= 0.2 * len(steps) * (1.0 + layout.is_member.sum(axis=1))))
    if layout.free.size:
        y = jnp.abs(pick(steps, layout.free))
        span = jnp.sum(y @ jnp.abs(after.precision) * y)
        is_held.append(roundings * span <= 0.2 * len(steps) * (1.0 + layout.free.size))
    for old, new, add in (
        (before.precision, after.precision, natural.quadratic),
        (before.scaled_precision, after.scaled_precision, natural.scaled_quadratic),
    ):
        if old.size:
            gap, grown, typical = (
                jnp.diagonal(matrix, axis1=-2, axis2=-1)
                for matrix in (new - old - add, add, new / (1.0 + after.num_rows))
            )
            is_held.append(jnp.all(jnp.abs(gap) <= 0.1 * (jnp.abs(grown) + typical)))
    return jnp.all(jnp.stack(is_held))


def _solve(precision: Array, rhs: Array) -> Array:
    if rhs.shape[-1] == 0:
        return rhs
    if rhs.shape[-1] == 1:
        return rhs / precision[..., 0]
    factor = jnp.linalg.cholesky(precision)
    return jax.scipy.linalg.cho_solve((factor, True), rhs[..., None])[..., 0]


def sample(layout: Layout, key: Key, posterior: Posterior, num_samples: int) -> Draws:
    """Draw from the posterior: {site: (M, ...)}, exact and independent."""
    keys = dict(zip(("beta", "scale", "free", "simplex"), jax.random.split(key, 4), strict=True))
    lead = (num_samples,)
    draws: Draws = {}
    unit = sampling.beta(keys["beta"], posterior.beta[:, 0], posterior.beta[:, 1], lead)
    real = jnp.zeros((num_samples, layout.count(REAL)), posterior.mean.dtype)
    if layout.free.size:
        factor = jnp.linalg.cholesky(posterior.precision)
        free = sampling.multivariate_normal_precision(keys["free"], posterior.mean, factor, lead)
        real = real.at[:, layout.free].set(free)
    if layout.members.size:
        factor = jnp.linalg.cholesky(posterior.scaled_precision)
        log_u, scaled = sampling.normal_inverse_gamma(
            keys["scale"], posterior.scaled_mean, factor, posterior.shape, posterior.rate, lead
        )
        real = real.at[:, layout.members[layout.is_member]].set(scaled[:, layout.is_member])
    else:
        log_u = sampling.log_gamma(keys["scale"], posterior.shape, lead) - jnp.log(posterior.rate)
    for site in layout.sites:
        span = slice(site.start, site.start + site.size)
        full = (num_samples, *site.shape)
        low, high = (jnp.asarray(bound, unit.dtype) for bound in (site.low, site.high))
        if site.kind == UNIT:
            draws[site.name] = low + (high - low) * unit[:, span].reshape(full)
        elif site.kind == POSITIVE:
            draws[site.name] = low + jnp.exp(log_u[:, span] / layout.power[span]).reshape(full)
        elif site.kind == SIMPLEX:
            rows = posterior.dirichlet[site.start]
            key_site = jax.random.fold_in(keys["simplex"], site.start)
            draws[site.name] = sampling.dirichlet(key_site, rows, lead).reshape(full)
        else:
            draws[site.name] = real[:, span].reshape(full)
    return draws


def posterior_of(layout: Layout, natural: Natural, centre: Coordinates) -> Posterior:
    """Return the law whose log density is <natural, T(theta)>, with reals relative to `centre`, as parameters."""
    dtype = centre.real.dtype
    identity = np.eye(layout.members.shape[1], dtype=dtype)
    empty = Posterior(
        nothing(natural.unit.shape, dtype) + 1.0,
        tuple(nothing(rows.shape, dtype) + 1.0 for rows in natural.simplex),
        # log p(z) has (shape - 1/power + members/2) log u where the Gamma density of u would have shape - 1.
        nothing(natural.scale.shape, dtype) + (1.0 / layout.power - 0.5 * layout.is_member.sum(axis=1)).astype(dtype),
        nothing(natural.scale.shape, dtype),
        where_member(layout.is_member, pick(centre.real, layout.members)),
        identity * ~layout.is_member[:, :, None],
        pick(centre.real, layout.free),
        nothing(natural.quadratic.shape, dtype),
        jnp.zeros((), int),
    )
    return absorb(layout, empty, natural, 0)
