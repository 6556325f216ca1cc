"""The state of the collapsed engine, and the marginal density of the outer sites with the inner sites integrated out.

The state may hold square roots of the covariances of Gaussian blocks at every particle, which a row changes without a
factorization. A row adds h h' to a precision matrix P and c h to the linear coefficients b. With a root R of the covariance, R
R' = inverse(P), v = R'h and s = 1 + v'v, Potter's square-root filter is

    R <- R (I - v v' / (s + sqrt(s))),    log|P| <- log|P| + log s,    m <- m + R v (c - h'm) / s,    m = inverse(P) b,

O(S^2) operations instead of O(S^3). R R' stays positive definite, and rounding changes it relatively, not by what cancels. The
arrays of a particle are adjacent in memory: with 50 rows, those of 1,000 particles are 20 MB, and every pass over them counts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.inner.data_sums import (
    DataSummary,
    log_normalizer,
    no_rows,
    precision_of,
    prior_statistics,
)
from ppl_bandit.engines.inner.density import Coordinates, Natural, Posterior, posterior_of
from ppl_bandit.engines.inner.gaussian import padding
from ppl_bandit.engines.particles.tempering import PathEvidence
from ppl_bandit.engines.proof.inspection import Split
from ppl_bandit.engines.proof.outer import without
from ppl_bandit.engines.rows import empty_buffer
from ppl_bandit.engines.state import Particles, State
from ppl_bandit.numerics.arrow_matrices import (
    MAX_BATCH_OPERATIONS,
    MIN_PIVOT,
    Arrow,
    as_arrow,
    as_matrix,
    solve_and_step,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.jax_adapter import apply_where
from ppl_bandit.types import Key

_ROUNDINGS = 1e4  # relative to the largest entry: smaller ones are rounding


class CovarianceRoots(NamedTuple):
    """Roots of the covariances of R Gaussian blocks of S rows, for M particles.

    Attributes:
        root: root root' = inverse(precision).
        shift: inverse(precision) linear, the means less the centre.
        log_det: of the precisions; nan where a pivot is not positive, or consists of rounding.
    """

    root: Float[Array, "M R S S"]
    shift: Float[Array, "M R S"]
    log_det: Float[Array, "M R"]


def factorize(precision: Arrow, linear: Float[Array, "R S M"]) -> CovarianceRoots:
    """Return the roots of precisions without leaves."""

    def one(precision: Float[Array, "S S"], linear: Float[Array, " S"]) -> CovarianceRoots:
        half, log_det = _divide_by_root(precision, jnp.eye(len(linear), dtype=linear.dtype))
        return CovarianceRoots(half.T, half.T @ (half @ linear), log_det)

    given = jnp.moveaxis(precision.core, -1, 0), jnp.moveaxis(linear, -1, 0)
    return jax.lax.map(lambda own: jax.vmap(one)(*own), given, batch_size=_batch_size(linear))


def add_rows(roots: CovarianceRoots, fresh: Natural) -> CovarianceRoots:
    """Add rows whose natural parameters all particles share; a factorization is needed if they add more than one term.

    Args:
        fresh: with precisions without leaves.
    """
    linear, quadratic = fresh.linear, fresh.quadratic.core
    every, pivot = jnp.arange(len(linear)), jnp.argmax(jnp.diagonal(quadratic, axis1=1, axis2=2), axis=1)
    largest = quadratic[every, pivot, pivot]
    # The term that explains the row of the largest diagonal entry; 0 for a block that the rows do not read.
    scale = jnp.where(largest > 0.0, jax.lax.rsqrt(jnp.where(largest > 0.0, largest, 1.0)), 0.0)
    h, c = quadratic[every, :, pivot] * scale[:, None], linear[every, pivot] * scale
    linear, quadratic = linear - c[:, None] * h, quadratic - h[:, :, None] * h[:, None]
    tolerance = _ROUNDINGS * jnp.finfo(linear.dtype).eps
    is_left = jnp.any(jnp.max(jnp.abs(quadratic), axis=(1, 2)) > tolerance * largest)
    is_left |= jnp.any(jnp.max(jnp.abs(linear), axis=1) > tolerance * (1.0 + jnp.abs(c)) * jnp.sqrt(largest))

    def one(roots: CovarianceRoots, linear: Float[Array, " S"], quadratic: Float[Array, "S S"]) -> CovarianceRoots:
        root, shift, log_det = roots
        matrix = jnp.eye(len(shift), dtype=root.dtype) + root.T @ quadratic @ root
        half, more = _divide_by_root(matrix, root.T)
        shift = shift + half.T @ (half @ (linear - quadratic @ shift))
        return CovarianceRoots(half.T, shift, log_det + more)

    def add_rest(roots: CovarianceRoots) -> CovarianceRoots:
        return jax.lax.map(lambda own: jax.vmap(one)(own, linear, quadratic), roots, batch_size=_batch_size(linear))

    return apply_where(is_left, add_rest, _add_term(roots, h, c))


def _add_term(roots: CovarianceRoots, h: Float[Array, "R S"], c: Float[Array, " R"]) -> CovarianceRoots:
    root, shift, log_det = roots
    # A row of one arm reads one element: a row of each root in place of a pass over all of them.
    every, largest = jnp.arange(len(h)), jnp.argmax(jnp.abs(h), axis=1)
    v = jax.lax.cond(
        jnp.all(jnp.sum(h != 0.0, axis=1) <= 1),
        lambda: root[:, every, largest] * h[every, largest, None],
        lambda: jnp.sum(root * h[:, :, None], axis=2),
    )
    s = 1.0 + jnp.sum(v * v, axis=2)
    covariance = jnp.sum(root * v[:, :, None], axis=3)  # of every element with h'x
    gain = (c - jnp.sum(h * shift, axis=2)) / s
    return CovarianceRoots(
        root - covariance[..., None] * (v / (s + jnp.sqrt(s))[..., None])[:, :, None],
        shift + covariance * gain[..., None],
        log_det + jnp.log(s),
    )


def _batch_size(linear: Float[Array, "R S ..."]) -> int:
    num_blocks, size = linear.shape[:2]
    return max(1, MAX_BATCH_OPERATIONS // (num_blocks * size**3))


def _divide_by_root(
    matrix: Float[Array, "S S"], columns: Float[Array, "S n"]
) -> tuple[Float[Array, "S n"], Float[Array, ""]]:
    """Return inverse(L) columns for the Cholesky factor L of a matrix, and its log determinant."""
    lower = jnp.linalg.cholesky(matrix)
    pivots = jnp.square(jnp.diagonal(lower))
    is_known = pivots > MIN_PIVOT * jnp.finfo(pivots.dtype).eps * jnp.diagonal(matrix)
    log_det = jnp.sum(jnp.log(jnp.where(is_known, pivots, jnp.nan)))
    return jax.scipy.linalg.solve_triangular(lower, columns, lower=True), log_det


def gaussian_integral(
    roots: CovarianceRoots, linear: Float[Array, "R S M"]
) -> tuple[Float[Array, "R M"], Float[Array, "R M"]]:
    """Return linear' inverse(precision) linear / 2 and the log determinants, as `arrow_matrices.gaussian_integral` does."""
    return 0.5 * jnp.sum(linear * jnp.moveaxis(roots.shift, 0, -1), axis=1), roots.log_det.T


def precisions_of(roots: CovarianceRoots) -> Float[Array, "M R S S"]:
    """Return the precisions of a few particles."""
    inverse = jax.lax.map(jnp.linalg.inv, roots.root)
    return jnp.sum(inverse[..., :, None] * inverse[..., None, :], axis=-3)


_MAX_CACHED = (
    1 << 22
)  # numbers in `outer_statistics` that a state, and every checkpoint, holds: 34 MB; more are computed again


class StatisticsAtOuterValues(NamedTuple):
    """Statistics of the prior, and of what rows need, at C outer values; C is the last axis of every array.

    Attributes:
        prior: natural parameters of the prior of the inner sites.
        at: what the statistics of rows depend on; see `DataSummary`.
        log_jacobian: of the map to the outer sites.
    """

    prior: Natural
    at: Any
    log_jacobian: Float[Array, " C"]


class CollapsedPosterior(NamedTuple):
    """A split program and the summary of its data; without a summary, rows are stored and read again."""

    model: RewardModel
    split: Split
    summary: DataSummary | None
    discount: float

    def statistics_at(self, centre: Coordinates, positions: Float[Array, "C K"]) -> StatisticsAtOuterValues:
        """Return the statistics of the prior at unconstrained outer values."""

        def one(position: Float[Array, " K"]) -> StatisticsAtOuterValues:
            values, log_jacobian = self.split.space.constrain(position)
            at = () if self.summary is None else self.summary.at(centre, values)
            return StatisticsAtOuterValues(prior_statistics(self.model, self.split, centre, values), at, log_jacobian)

        return jax.vmap(one, out_axes=-1)(positions)

    def total(self, outer: StatisticsAtOuterValues, data: Any) -> Natural:
        """Return the statistics of prior and data together, (..., C)."""
        if self.summary is None:
            return jax.tree.map(jnp.add, outer.prior, data)
        return self.summary.total(outer.prior, data, outer.at)

    def log_targets(
        self, outer: StatisticsAtOuterValues, data: Any, roots: CovarianceRoots | None = None
    ) -> Float[Array, " C"]:
        """Return the log marginal density at outer values."""
        total = self.total(outer, data)
        gaussian = None if roots is None else gaussian_integral(roots, total.linear)
        return log_normalizer(self.split.layout, total, gaussian) + total.constant + outer.log_jacobian

    def cached(
        self, outer: StatisticsAtOuterValues, data: Any
    ) -> tuple[StatisticsAtOuterValues, CovarianceRoots | None]:
        """Return what a state caches of the statistics at its particles; roots replace precisions if rows can change them."""
        layout = self.split.layout
        is_dense = layout.members.size and not layout.leaves[0]
        if not (is_dense and self.split.has_shared_statistics and self.discount == 1.0):
            return outer, None
        natural, prior = self.total(outer, data), outer.prior._replace(quadratic=None)
        return outer._replace(prior=prior), factorize(precision_of(layout, natural), natural.linear)


def first_state(posterior: CollapsedPosterior, key: Key, num_particles: int, capacity: int) -> State:
    """Return a state with particles drawn from the prior."""
    model, split = posterior.model, posterior.split
    centre = jax.tree.map(lambda leaf: jnp.asarray(leaf, float), split.centre)
    prior = model.sample_prior(key, num_particles)
    positions = jax.vmap(split.space.unconstrain)({name: prior[name] for name in split.space.names})
    if posterior.summary is None:
        nothing = no_rows(split.layout, centre)
        data = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[..., None], (*leaf.shape, num_particles)), nothing)
    else:
        data = posterior.summary.empty(centre)
    outer = posterior.statistics_at(centre, positions)
    targets = posterior.log_targets(outer, data)
    generated = targets
    extra = model.terms_beside_draws()
    if extra:  # running the program ignores its factors and observed constants: weight the particles by those
        plain = posterior._replace(model=without(model, extra))
        generated = plain.log_targets(plain.statistics_at(centre, positions), data)
    is_finite = jnp.isfinite(targets) & jnp.isfinite(generated)
    zero, none = jnp.zeros((), positions.dtype), jnp.zeros((), int)
    # A density that this precision cannot represent has no weight.
    log_weights = jnp.where(is_finite, targets - generated, -jnp.inf)
    is_cached = sum(leaf.size for leaf in jax.tree.leaves(outer)) <= _MAX_CACHED
    cached, roots = posterior.cached(outer, data) if is_cached else (None, None)
    return State(
        buffer=empty_buffer(model, capacity if posterior.summary is None else 0),
        data_statistics=data,
        centre=centre,
        particles=Particles(
            positions,
            log_weights,
            log_evidence=zero,
            squared_error=zero,
            num_refreshes=none,
            evidence=PathEvidence(zero, zero, none),
            log_targets=jnp.where(is_finite, generated, 0.0),
        ),
        outer_statistics=cached,
        roots=roots,
    )


def statistics_at_particles(posterior: CollapsedPosterior, state: State) -> StatisticsAtOuterValues:
    """Return the statistics of the prior at the particles."""
    return (
        posterior.statistics_at(state.centre, state.particles.positions)
        if state.outer_statistics is None
        else state.outer_statistics
    )


def laws_of(
    posterior: CollapsedPosterior, state: State, index: Int[Array, " C"], noise: Array | None = None
) -> tuple[dict[str, Array], Posterior, Float[Array, "K C R S"]]:
    """Return the outer values of some particles and the laws of the inner sites given them, (C, ...) each.

    Precisions are arrow matrices; see `as_matrices`. Each is factorized once, for its mean and for draws.

    Args:
        noise: standard normal numbers, (K, C, R, S); None for no draws.

    Returns:
        Outer values, laws, and draws of the Gaussian blocks less their means.
    """
    layout = posterior.split.layout
    positions = state.particles.positions[index]
    values, _ = jax.vmap(posterior.split.space.constrain)(positions)

    def at_index(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf[..., index], tree)

    is_cached = state.outer_statistics is not None
    outer = at_index(state.outer_statistics) if is_cached else posterior.statistics_at(state.centre, positions)
    # Rows that are read again have a sum for each particle, others one for all.
    data = at_index(state.data_statistics) if posterior.summary is None else state.data_statistics
    natural, shift = posterior.total(outer, data), None
    steps = jnp.zeros((0, len(index), *layout.members.shape), natural.linear.dtype) if noise is None else noise
    if state.roots is not None:
        roots = jax.tree.map(lambda leaf: leaf[index], state.roots)
        added = precisions_of(roots) - padding(layout, float)
        quadratic = jax.vmap(lambda own: as_arrow(own, *layout.leaves), out_axes=-1)(added)
        natural, shift = natural._replace(quadratic=quadratic), jnp.moveaxis(roots.shift, 0, -1)
        steps = jnp.sum(roots.root * steps[..., None, :], axis=-1)
    elif layout.members.size:
        shift, steps = solve_and_step(precision_of(layout, natural), natural.linear, jnp.moveaxis(steps, 1, -1))
        steps = jnp.moveaxis(steps, -1, 1)
    laws = jax.vmap(lambda own, by: posterior_of(layout, own, state.centre, by), in_axes=-1)(natural, shift)
    return values, laws, steps


def as_matrices(laws: Posterior) -> Posterior:
    """Return laws with dense precision matrices in place of arrow matrices."""
    return laws._replace(precision=jax.vmap(as_matrix)(laws.precision))


def roundings_of(posterior: CollapsedPosterior, state: State) -> Float[Array, " M"]:
    """Return a bound on the rounding of each particle's log density, in nats, by the size of the terms in its sum."""
    outer, data = statistics_at_particles(posterior, state), state.data_statistics
    magnitude = (
        jnp.abs(data.constant) if posterior.summary is None else posterior.summary.constant_magnitude(data, outer.at)
    )
    return jnp.finfo(state.particles.positions.dtype).eps * (magnitude + jnp.abs(outer.prior.constant))
