"""The exact engine: prove that a program is conjugate, derive its updates, certify every datum.

There is no table of likelihoods. A likelihood is conjugate to a prior exactly when its log is affine in the prior's
sufficient statistics, which can be proved (`proof`), derived (`derivation`) and certified (`certificate`) for any program.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.certificate.affine import natural_of, recentre
from ppl_bandit.engines.exact.certificate.batch_certificate import check_together, read_together
from ppl_bandit.engines.exact.certificate.certificate import (
    Places,
    Residual,
    is_affine,
    log_likelihoods,
    places_for,
    read_row,
    residual_of,
    worst_of,
)
from ppl_bandit.engines.exact.certificate.chunks import for_each, join_chunks, over_chunks, split_chunks
from ppl_bandit.engines.exact.families.drawing import sample
from ppl_bandit.engines.exact.families.element_blocks import joined, map_blocks, where
from ppl_bandit.engines.exact.families.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    absorb,
    coordinates_at,
    forget,
    is_proper,
    is_resolved,
    latents_at,
    total_of,
)
from ppl_bandit.engines.exact.families.wider_prior import wider
from ppl_bandit.engines.exact.laws.expectation import watch_means
from ppl_bandit.engines.exact.laws.marginals import marginals_of
from ppl_bandit.engines.exact.proof.analyticity import analyticity
from ppl_bandit.engines.exact.proof.examination import examine
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.wider_prior import sites_of_expected_rewards
from ppl_bandit.runtime.unrolled_reductions import is_all, max_of
from ppl_bandit.types import Capabilities, Engine, Interaction, Key

__all__ = ["Certificates", "conjugate"]

_NUM_POINTS = 6
_NUM_AT_HOME = 4
_CHUNK_ELEMENTS = 1 << 20  # second derivatives of rows held at once
_FEWEST_TOGETHER = 64  # rows whose sum is certified: for fewer it costs more to compile than to run


_Absorbed: TypeAlias = tuple[Posterior, tuple[Residual, Bool[Array, " 2"], Float[Array, ""]]]


class Certificates(NamedTuple):
    """Evidence of an update, per row.

    Attributes:
        is_trusted: whether every row is certified, and the prior and the numbers of their posterior too; if not, nothing is
            absorbed.
        is_certified: whether the row's likelihood is proved analytic and found affine in the sufficient statistics, around
            the mean before these rows and where the posterior is after them.
        residual: largest deviation from affine that was found, in nats, and `tolerance` what rounding explains of it;
            infinite for a row that the program cannot produce or whose proof fails, 0 for a masked row.
        rounding: what rounding could hide where the posterior is, in nats.
        is_prior_certified: whether the prior, too, is affine where the posterior is now.
        prior_rounding: what rounding could hide of a deviation of the prior there, in nats.
        is_resolved: whether jax's precision holds the posterior: no count that stopped growing, no precision matrix whose
            digits cancel.
    """

    is_trusted: Bool[Array, ""]
    is_certified: Bool[Array, " N"]
    residual: Float[Array, " N"]
    tolerance: Float[Array, " N"]
    rounding: Float[Array, " N"]
    is_prior_certified: Bool[Array, ""]
    prior_rounding: Float[Array, ""]
    is_resolved: Bool[Array, ""]


def conjugate(model: RewardModel, *, discount: float = 1.0) -> Engine:
    """Return the exact engine of a program, or refuse.

    The proof and the certificates at build time run in float64; `init`, `update` and `sample` follow jax's precision.

    Args:
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing. Below 1 the natural
            parameters decay towards the prior's: the posterior is exact for the likelihood so weighted.

    Raises:
        NotConjugate: if the program is not conjugate or not provably so; its message says what stopped the proof and what
            would make the program conjugate.
    """
    check_settings(discount)
    with jax.enable_x64(True):
        layout, prior, evidence = examine(model)
        infinite, infinite_means = watch_means(model, layout, prior)

    def init(key: Key) -> Posterior:
        del key  # the prior is not random
        # With its type spelled out: jax may remember a NumPy constant across a change of its precision.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype)), prior)

    def update(key: Key, state: Posterior, interaction: Interaction) -> tuple[Posterior, Certificates]:
        # An accelerator's shortened products would pass for deviations, and rows would be turned away.
        with jax.default_matmul_precision("highest"):
            return _update(model, layout, init(key), discount, state, interaction)

    def parameters(state: Posterior) -> dict[str, dict[str, np.ndarray]]:
        return report.parameters(layout, state)

    def with_wider_prior(state: Posterior, by: Float[Array, ""]) -> Posterior:
        return wider(layout, init(jr.key(0)), state, sites_of_expected_rewards(model), by)

    return Engine(
        init,
        update,
        functools.partial(sample, layout),
        report.accepted(model, layout, prior, evidence, discount, infinite),
        settings={"discount": discount},
        capabilities=Capabilities(
            parameters=parameters,
            marginals=marginals_of(model, layout),
            infinite_means=infinite_means,
            with_wider_prior=with_wider_prior if discount == 1.0 else None,
        ),
    )


def _update(
    model: RewardModel, layout: Layout, prior: Posterior, discount: float, state: Posterior, interaction: Interaction
) -> tuple[Posterior, Certificates]:
    """Absorb rows in chunks: within a chunk all rows are read at the same means, so that their parameters add up."""
    num_rows = interaction.arm.shape[0]
    if interaction.mask is None:
        interaction = interaction._replace(mask=jnp.ones(num_rows, bool))
    num_chunk = max(1, min(num_rows, 256, _CHUNK_ELEMENTS // max(1, layout.count("real") * layout.members.shape[1])))
    chunks, is_row = split_chunks(interaction, num_rows, num_chunk)
    chunks = chunks._replace(mask=chunks.mask & is_row)
    prior_natural, prior_centre = natural_of(layout, prior), coordinates_at(layout, prior)

    def settle(posterior: Posterior, total: Natural, num_new: Array) -> _Settled:
        """Add the natural parameters of a chunk, and say where they are to be certified."""
        kept = posterior
        if discount < 1.0:
            kept, share = forget(layout, posterior, prior, discount**num_new)
            total = jax.tree.map(jnp.add, total, share)
        after = absorb(layout, kept, total, num_new)
        # Nothing is asked of places that an improper posterior would name.
        is_fine = is_proper(after)
        places = places_for(layout, posterior, where(is_fine, after, posterior), _NUM_POINTS, _NUM_AT_HOME)
        steps = places.at_home.points.real[1:] - places.at_home.points.real[0]
        is_held = is_fine & is_resolved(layout, kept, after, total, steps)
        centre = coordinates_at(layout, posterior)
        return _Settled(after, is_held, places, recentre(layout, prior_natural, prior_centre, centre)[0])

    def absorb_chunk(posterior: Posterior, rows: Any) -> _Absorbed:
        """Read and certify every row by itself."""
        centre, num_new = coordinates_at(layout, posterior), jnp.sum(rows.mask)
        by_group, is_sound = for_each(lambda row: _read_row(model, layout, centre, row), rows)
        naturals = map_blocks(lambda leaf: leaf.sum(axis=1), by_group)
        if discount < 1.0:
            num_later = num_new - jnp.cumsum(rows.mask)
            naturals = jax.vmap(lambda natural, age: jax.tree.map(lambda leaf: discount**age * leaf, natural))(
                naturals, num_later
            )
        settled = settle(posterior, total_of(naturals), num_new)
        found = for_each(
            lambda row, own: _check_row(model, layout, settled.of_prior, own, centre, settled.places, row),
            rows,
            by_group,
        )
        residuals = for_each(lambda by_term: worst_of(jax.tree.map(lambda leaf: leaf[1:], by_term)), found)
        residuals = _where(is_sound, residuals, Residual(*(jnp.array(x) for x in (jnp.inf, 0.0, jnp.inf))))
        residuals = _where(rows.mask, residuals, Residual(*(jnp.zeros(()),) * 3))
        return _absorbed(settled, residuals, jax.tree.map(lambda leaf: leaf[0, 0], found))

    def absorb_together(posterior: Posterior, rows: Any) -> _Absorbed:
        """Read and certify the sum of all rows; where it fails, each by itself, to know which."""
        centre, num_new = coordinates_at(layout, posterior), jnp.sum(rows.mask)
        weights = rows.mask * discount ** (num_new - jnp.cumsum(rows.mask))
        by_group, is_sound = read_together(model, layout, centre, rows, weights)
        settled = settle(posterior, total_of(by_group), num_new)
        found = check_together(model, layout, settled.of_prior, by_group, centre, settled.places, rows, weights)
        worst = worst_of(jax.tree.map(lambda leaf: leaf[1:], found))
        residuals = jax.tree.map(lambda leaf: jnp.where(rows.mask, leaf, 0.0), worst)
        whole = _absorbed(settled, residuals, jax.tree.map(lambda leaf: leaf[0], found))
        is_fine = is_sound & is_affine(worst) & jnp.all(whole[1][1])
        return jax.lax.cond(is_fine, lambda: whole, lambda: absorb_chunk(posterior, rows))

    is_long = num_chunk >= _FEWEST_TOGETHER and state.mean.dtype == jnp.float64
    after, (residuals, verdicts, prior_roundings) = over_chunks(
        absorb_together if is_long else absorb_chunk, state, chunks
    )
    residuals = join_chunks(residuals, num_rows)
    is_certified = is_affine(residuals)
    is_prior_certified, is_held = map(is_all, verdicts.T)
    is_sound = is_all(is_certified) & is_prior_certified & is_held
    kept = where(is_sound, after, state)
    evidence = residuals.nats, residuals.tolerance, residuals.rounding
    return kept, Certificates(is_sound, is_certified, *evidence, is_prior_certified, max_of(prior_roundings), is_held)


class _Settled(NamedTuple):
    """A posterior with a chunk of rows, before it is certified.

    Attributes:
        is_held: whether jax's precision holds it.
        places: where its densities are compared with their affine forms.
        of_prior: the prior's natural parameters, relative to the means before these rows.
    """

    posterior: Posterior
    is_held: Bool[Array, ""]
    places: Places
    of_prior: Natural


def _absorbed(settled: _Settled, residuals: Residual, of_prior: Residual) -> _Absorbed:
    """Return the posterior, and the residuals of its rows, the verdicts on prior and precision, and the prior's rounding."""
    verdicts = jnp.stack([is_affine(of_prior), settled.is_held])
    return settled.posterior, (residuals, verdicts, of_prior.rounding)


def _read_row(model: RewardModel, layout: Layout, centre: Coordinates, row: Any) -> tuple[Natural, Bool[Array, ""]]:
    """Return a row's natural parameters, by outcome, and whether the program can produce it and is analytic for it.

    Where not, or where the row is masked, the parameters are 0: padding may hold anything, even what has no derivative.
    """
    single = jax.tree.map(lambda leaf: leaf[None], row)
    natural = read_row(model, layout, centre, single)
    # A program may branch on its data, so that what was proved of other rows need not hold for this one.
    obstacles = analyticity(
        model, layout, single.arm, single.context, model.outcome_values(single.reward), is_prior=False
    )
    is_sound = (row.arm >= 0) & (row.arm < model.num_arms)
    for possible in model.in_support(latents_at(layout, centre), single).values():
        is_sound &= possible[0]
    for obstacle in obstacles:
        is_sound &= ~obstacle.is_present
    for leaf in jax.tree.leaves(natural):
        if leaf.size:
            is_sound &= is_all(jnp.isfinite(leaf))
    is_read = row.mask & is_sound
    return jax.tree.map(lambda leaf: jnp.where(is_read, leaf, 0.0) if leaf.size else leaf, natural), is_sound


def _check_row(
    model: RewardModel,
    layout: Layout,
    prior: Natural,
    by_group: Natural,
    centre: Coordinates,
    places: Places,
    row: Any,
) -> Residual:
    """Compare the prior and a row's likelihood with their affine forms, in this order, each group of outcomes by itself."""
    naturals = jax.tree.map(lambda first, rest: joined(first[None], rest), prior, by_group)
    single = jax.tree.map(lambda leaf: leaf[None], row)
    return residual_of(layout, log_likelihoods(model, layout, single, with_prior=True), naturals, centre, places)


def _where(condition: Bool[Array, " N"], residuals: Residual, other: Residual) -> Residual:
    return jax.tree.map(lambda own, replaced: jnp.where(condition, own, replaced.astype(own.dtype)), residuals, other)
