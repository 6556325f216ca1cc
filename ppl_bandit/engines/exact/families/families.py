"""The exponential families that the exact engine knows, and the coordinates in which it reads them.

A latent's support names its family: the unit interval a Beta, positive numbers a Gamma of a power of the latent, the simplex
a Dirichlet, the reals a Gaussian - in blocks of those that the prior or a datum may tie to each other (`ties`), each scaled by
one positive element or by none (Normal-InverseGamma, Normal-Gamma). In each family the log density is affine in sufficient
statistics T(z):

    Beta          log w, log(1 - w)                 w = (z - low) / (high - low)
    Dirichlet     log z_k
    Gamma         log u, u                          u = (z - low)^power: power -1 is an InverseGamma, -2 a standard deviation
    Normal-Gamma  log u, u, u x, u x x'             x a block of reals that u scales, u their precision
    Gaussian      x, x x'                           the same, with u = 1

so that natural parameters can be read off from first and second derivatives at one point. Real elements are read relative to
the current mean: sums of squares about a distant origin would lose all digits of a variance.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.families.element_blocks import map_blocks, nothing, pick, where_member
from ppl_bandit.numerics import arrow_matrices
from ppl_bandit.numerics.arrow_matrices import Arrow
from ppl_bandit.runtime.unrolled_reductions import is_all

__all__ = [
    "Coordinates",
    "Layout",
    "Natural",
    "Posterior",
    "SiteBlock",
    "absorb",
    "blocks_of",
    "by_block",
    "by_owner",
    "coordinates_at",
    "forget",
    "is_proper",
    "is_resolved",
    "latents_at",
    "posterior_of",
    "reals_of",
    "standard_law",
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
        members: (R, S) indices of the real elements of each of R Gaussian blocks, padded with 0.
        is_member: (R, S), false for padding.
        owner: (R,), the positive element that scales a block, -1 where none does.
        leaves: (L, s) where the first L s places of a block are L groups that only the others of the block, the core, may tie.
    """

    sites: tuple[SiteBlock, ...]
    power: np.ndarray
    members: np.ndarray
    is_member: np.ndarray
    owner: np.ndarray
    leaves: tuple[int, int] = (0, 0)

    @property
    def is_pair(self) -> np.ndarray:
        """(R, S, S), whether both places of a block are filled by members."""
        return self.is_member[:, :, None] & self.is_member[:, None, :]

    @property
    def along_places(self) -> np.ndarray:
        """(S, D), steps of the reals, each along one place of every block."""
        steps = np.zeros((self.members.shape[1], self.count(REAL)))
        for step, members, is_member in zip(steps, self.members.T, self.is_member.T, strict=True):
            step[members[is_member]] = 1.0
        return steps

    @property
    def num_scaled(self) -> np.ndarray:
        """How many reals each positive element scales, (G,)."""
        counts = self.is_member.sum(axis=1)
        return np.array([counts[self.owner == element].sum() for element in range(self.power.size)], int)

    @property
    def owner_of_real(self) -> np.ndarray:
        """The positive element that scales each real, -1 where none does, (D,)."""
        return self._by_real(self.owner)

    @property
    def block_of_real(self) -> np.ndarray:
        """The block that each real is in, (D,)."""
        return self._by_real(np.arange(self.owner.size))

    def _by_real(self, values: np.ndarray) -> np.ndarray:
        found = np.full(self.count(REAL), -1)
        found[self.members[self.is_member]] = np.broadcast_to(values[:, None], self.members.shape)[self.is_member]
        return found

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
        linear, quadratic: of u (x - centre) and -u (x - centre)(x - centre)' / 2, per block; u = 1 where nothing scales it. The
            latter as matrices, or as the entries that a layout with leaves leaves them.
    """

    unit: Float[Array, "U 2"]
    simplex: tuple[Float[Array, "rows K"], ...]
    log_scale: Float[Array, " G"]
    scale: Float[Array, " G"]
    linear: Float[Array, "R S"]
    quadratic: Any  # Float[Array, "R S S"] | Arrow


class Posterior(NamedTuple):
    """Parameters of all families: the engine's state.

    Attributes:
        beta: (alpha, beta) of each unit element.
        dirichlet: concentrations, per simplex site.
        shape, rate: of u ~ Gamma(shape, rate).
        mean, precision: x | u ~ Normal(mean, inverse(u precision)), per block; padding has mean 0, precision 1.
        num_rows: rows of data absorbed.
    """

    beta: Float[Array, "U 2"]
    dirichlet: tuple[Float[Array, "rows K"], ...]
    shape: Float[Array, " G"]
    rate: Float[Array, " G"]
    mean: Float[Array, "R S"]
    precision: Any  # Float[Array, "R S S"] | Arrow
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
        reals_of(layout, posterior.mean),
    )


def _uneven_logits(shape: tuple[int, ...]) -> Array:
    return jnp.broadcast_to(jnp.linspace(-0.3, 0.4, shape[-1]), shape)


def reals_of(layout: Layout, blocks: Float[Array, "*batch R S"]) -> Float[Array, "*batch D"]:
    """Put the elements of blocks into their places among all reals."""
    flat = blocks.reshape(*blocks.shape[:-2], layout.members.size)
    places = np.flatnonzero(layout.is_member.ravel())
    return pick(flat, places[np.argsort(layout.members[layout.is_member])])


def blocks_of(layout: Layout, real: Float[Array, "*batch D"]) -> Float[Array, "*batch R S"]:
    """Undo `reals_of`; places that are filled up hold 0."""
    return where_member(layout.is_member, pick(real, layout.members))


def by_block(layout: Layout, values: Float[Array, "*batch G"], otherwise: float) -> Any:
    """Return the value of the positive element that scales each block, (*batch, R), or another where none does."""
    if np.all(layout.owner < 0):
        return np.full((*values.shape[:-1], layout.owner.size), otherwise, values.dtype)
    if np.all(layout.owner >= 0):
        return pick(values, layout.owner)
    more = jnp.concatenate([values, jnp.full((*values.shape[:-1], 1), otherwise, values.dtype)], axis=-1)
    return pick(more, np.where(layout.owner < 0, layout.power.size, layout.owner))


def by_owner(layout: Layout, values: Float[Array, "R ..."]) -> Any:
    """Return the sum over the blocks that each positive element scales, (G, ...); 0 where it scales none."""
    if np.array_equal(layout.owner, np.arange(layout.power.size)):
        return values
    is_own = layout.owner == np.arange(layout.power.size)[:, None]
    if not is_own.any():
        return nothing((layout.power.size, *values.shape[1:]), values.dtype)
    return np.asarray(is_own, values.dtype) @ values


def total_of(naturals: Natural) -> Natural:
    """Sum the natural parameters of rows along their leading axis; all have the same centre."""
    return map_blocks(lambda leaf: leaf.sum(0), naturals)


def forget(layout: Layout, posterior: Posterior, prior: Posterior, keep: Float[Array, ""]) -> tuple[Posterior, Natural]:
    """Discount a posterior towards its prior: its natural parameters times `keep`, the prior's times 1 - keep.

    Returns:
        What is kept, and the prior's share as natural parameters read at the posterior's means, for `absorb` to add.
    """
    gap = prior.mean - posterior.mean
    pull = jnp.einsum("rst,rt->rs", prior.precision, gap)
    share = Natural(
        prior.beta,
        prior.dirichlet,
        prior.shape,
        -prior.rate - 0.5 * by_owner(layout, jnp.sum(gap * pull, axis=-1)),
        pull,
        _without_padding(layout, prior.precision),
    )
    kept = posterior._replace(
        beta=keep * posterior.beta,
        dirichlet=tuple(keep * rows for rows in posterior.dirichlet),
        shape=keep * posterior.shape,
        rate=keep * posterior.rate,
        precision=keep * _without_padding(layout, posterior.precision) + _padding(layout, posterior.precision.dtype),
    )
    return kept, jax.tree.map(lambda leaf: (1.0 - keep) * leaf, share)


def absorb(
    layout: Layout,
    posterior: Posterior,
    natural: Natural,
    num_rows: Int[Array, ""] | int,
    shift: Float[Array, "R S"] | None = None,
) -> Posterior:
    """Add natural parameters, read at the posterior's own means, to a posterior.

    For a Gaussian block: precision' = precision + quadratic and mean' = mean + inverse(precision') linear; completing the
    square moves linear' inverse(precision') linear / 2 from the rate of u, to which `-scale` was added.

    Args:
        shift: inverse(precision') linear, where it is known already.
    """
    counts = posterior.beta, posterior.dirichlet, posterior.shape, posterior.rate
    beta, dirichlet, shape, rate = map_blocks(
        lambda old, new: old + new, counts, (natural.unit, natural.simplex, natural.log_scale, -natural.scale)
    )
    mean, precision = posterior.mean, posterior.precision
    if layout.members.size:
        precision = jax.tree.map(lambda old, new: old + new, precision, natural.quadratic)
        shift = _solve(precision, natural.linear) if shift is None else shift
        mean = mean + shift
        rate = rate - 0.5 * by_owner(layout, jnp.sum(natural.linear * shift, axis=-1)) if rate.size else rate
    return Posterior(beta, dirichlet, shape, rate, mean, precision, posterior.num_rows + num_rows)


def is_proper(posterior: Posterior) -> Bool[Array, ""]:
    """Tell whether all parameters are finite and inside their domains: a precision too ill-conditioned for its dtype is not."""
    reals = jax.tree.leaves((posterior.mean, posterior.precision))
    positive = (posterior.beta, *posterior.dirichlet, posterior.shape, posterior.rate)
    # Finite, and not nan, is what lies strictly below infinity.
    is_fine = [posterior.num_rows >= 0, *(is_all(jnp.abs(leaf) < jnp.inf) for leaf in reals if leaf.size)]
    is_fine += [is_all((leaf > 0) & (leaf < jnp.inf)) for leaf in positive if leaf.size]
    return is_all(jnp.stack(is_fine))


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
    is_held += [is_all(jnp.abs(new - old - add) - 0.1 * jnp.abs(add) <= 1e-6) for old, new, add in counts if old.size]
    if layout.members.size:
        x = jnp.abs(blocks_of(layout, steps))
        span = jnp.einsum("prs,rst,prt->r", x, jnp.abs(after.precision), x)
        span = span * by_block(layout, after.shape / after.rate, 1.0) if after.shape.size else span
        is_held.append(is_all(roundings * span <= 0.2 * len(steps) * (1.0 + layout.is_member.sum(axis=1))))
        gap, grown, typical = (
            jnp.diagonal(matrix, axis1=-2, axis2=-1)
            for matrix in (
                after.precision - before.precision - natural.quadratic,
                natural.quadratic,
                after.precision / (1.0 + after.num_rows),
            )
        )
        is_held.append(is_all(jnp.abs(gap) <= 0.1 * (jnp.abs(grown) + typical)))
    return is_all(jnp.stack(is_held))


def _padding(layout: Layout, dtype: Any) -> Any:
    """Return what the precision of blocks has where they are filled up, and 0 elsewhere."""
    return np.eye(layout.members.shape[1], dtype=dtype) * ~layout.is_member[:, :, None]


def _without_padding(layout: Layout, precision: Float[Array, "R S S"]) -> Float[Array, "R S S"]:
    return where_member(layout.is_pair, precision)


def _solve(precision: Any, rhs: Array) -> Array:
    if isinstance(precision, Arrow):
        return arrow_matrices.solve(precision, rhs)
    if rhs.shape[-1] == 0:
        return rhs
    if rhs.shape[-1] == 1:
        return rhs / precision[..., 0]
    factor = jnp.linalg.cholesky(precision)
    return jax.scipy.linalg.cho_solve((factor, True), rhs[..., None])[..., 0]


def posterior_of(
    layout: Layout, natural: Natural, centre: Coordinates, shift: Float[Array, "R S"] | None = None
) -> Posterior:
    """Return the law whose log density is <natural, T(theta)>, with reals relative to `centre`, as parameters.

    Args:
        shift: of the means from the centre, where it is known already.
    """
    dtype = centre.real.dtype
    padding = _padding(layout, dtype)
    empty = Posterior(
        nothing(natural.unit.shape, dtype) + 1.0,
        tuple(nothing(rows.shape, dtype) + 1.0 for rows in natural.simplex),
        # log p(z) has (shape - 1/power + members/2) log u where the Gamma density of u would have shape - 1.
        nothing(natural.scale.shape, dtype) + (1.0 / layout.power - 0.5 * layout.num_scaled).astype(dtype),
        nothing(natural.scale.shape, dtype),
        blocks_of(layout, centre.real),
        arrow_matrices.as_arrow(padding, *layout.leaves) if isinstance(natural.quadratic, Arrow) else padding,
        jnp.zeros((), int),
    )
    return absorb(layout, empty, natural, 0, shift)


def standard_law(layout: Layout) -> Posterior:
    """Return a law of all families with parameters 1, and means 0: for a shape, or a point inside of every support."""
    num_blocks, size = layout.members.shape
    return Posterior(
        jnp.ones((layout.count(UNIT), 2)),
        tuple(jnp.ones((site.size // site.shape[-1], site.shape[-1])) for site in layout.of(SIMPLEX)),
        jnp.ones(layout.power.size),
        jnp.ones(layout.power.size),
        jnp.zeros((num_blocks, size)),
        jnp.broadcast_to(jnp.eye(size), (num_blocks, size, size)),
        jnp.zeros((), int),
    )
