"""Examine a program for conjugacy, once, in float64: supports, scales, proof, prior, and the likelihood of varied rewards.

Before there are data, trial rows with many different rewards on every arm are certified. Each certificate evaluates all latents
at random points, and every arm has rows, so that the cost of one certificate per row grows with the square of the number of
arms. Of many rows, sums with random weights are certified: if a row deviates from affine, so does its sum, with probability 1.
If a sum fails, each of its rows is certified by itself, to find which one.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.inner.density import (
    Coordinates,
    Natural,
    Posterior,
    coordinates_at,
    generic_point,
    latents_at,
    natural_of,
    posterior_of,
    where_finite,
)
from ppl_bandit.engines.inner.layout import REAL, Layout, SiteBlock
from ppl_bandit.engines.inner.reading import ChunkEvidence, derive
from ppl_bandit.engines.inner.registry import family_of_group
from ppl_bandit.engines.proof.analyticity import not_conjugate
from ppl_bandit.engines.proof.assignment import find_scales, read_supports, split_gaussian_blocks
from ppl_bandit.engines.proof.certificate import (
    NUM_VARIANTS,
    Evidence,
    Region,
    Residual,
    inverse_roundings,
    is_affine,
    region_of,
    regions_for,
    residual_of,
    worst_of,
)
from ppl_bandit.engines.refusals import (
    density_refusal,
    proof_refusal,
    refusal,
    rounding_refusal,
    untested_refusal,
)
from ppl_bandit.engines.updates.chunks import (
    NUM_POINTS,
    Absorb,
    chunk_absorber,
    join_chunks,
    split_chunks,
)
from ppl_bandit.program.model.probing import feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once, traced_once
from ppl_bandit.types import Interaction, NotConjugate

MAX_SINGLE_ROWS = 2048  # of more rows, sums are certified
_ROWS_PER_SUM = 16  # of each of which a sum costs one certificate; if it fails, one for every row


def trial_rows(
    model: RewardModel, latents: Mapping[str, Array], per_arm: int, seed: int, *, is_systematic: bool = False
) -> tuple[Interaction, Bool[Array, " N"]]:
    """Return rows on every arm, in contexts near the example, and whether the program can produce each.

    Args:
        latents: the values given which rewards must be possible.
        is_systematic: whether to try the rewards of the first outcome in order, and the example context in every third row.
    """
    rng = np.random.default_rng(seed)
    arm = jnp.tile(jnp.arange(model.num_arms), per_arm)
    repeat = np.repeat(np.arange(per_arm), model.num_arms)
    picks = rng.integers(0, 1 << 20, size=(arm.size, len(model.outcomes)))
    # Every other reward is in units of its outcome, the rest are the same for all programs.
    picks[:, 0] += (picks[:, 0] + repeat) % 2
    if is_systematic:
        picks[:, 0] = repeat + np.tile(np.arange(model.num_arms), per_arm)
    context = model.varied_context_rows(rng, (repeat % 3 == 0) & is_systematic)
    reward, is_feasible = feasible_rewards(
        model.program, dict(latents), arm, context, model.outcome_kinds, jnp.asarray(picks)
    )
    return Interaction(arm, reward, context), is_feasible


def rows_per_sum(num_rows: int) -> int:
    """Return the number of rows that each certificate is of."""
    return 1 if num_rows <= MAX_SINGLE_ROWS else _ROWS_PER_SUM


def certify_trial_rows(
    model: RewardModel, absorb_chunk: Absorb, prior: Posterior, rows: Interaction, is_feasible: Bool[Array, " N"]
) -> tuple[Residual, Bool[Array, " N"], dict[str, Float[Array, "rows E n"]]]:
    """Certify each row of data on the prior, or sums of many rows, by the function that the updates call.

    Args:
        absorb_chunk: from `chunk_absorber`.
        rows: of all arms in turn.
        is_feasible: rows that count.

    Returns:
        How far the log likelihood of each row is from affine; whether the program can produce it; and what each row on arm 0
        adds to the parameters of each group.
    """
    num_rows = rows.arm.shape[0]
    size = rows_per_sum(num_rows)
    # In the form in which rewards come to an update, so that this is traced once.
    rewards = {name: jnp.asarray(value, float) for name, value in rows.reward.items()}
    rows = rows._replace(reward=rewards if len(rewards) > 1 else rewards[model.outcomes[0]], mask=is_feasible)
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), prior)

    def certify(rows: Interaction, size: int) -> tuple[ChunkEvidence, dict[str, Array]]:
        weights = np.random.default_rng(13).uniform(0.5, 1.0, size=rows.arm.shape[0]) ** (size > 1)
        chunks, is_row = split_chunks((rows, weights), rows.arm.shape[0], size)
        turn = np.arange(is_row.shape[0])

        def certify_chunk(own: tuple[Any, ...]) -> tuple[ChunkEvidence, dict[str, Array]]:
            (chunk, weights), is_row, variant = own
            chunk = chunk._replace(mask=chunk.mask & is_row)
            after, found = absorb_chunk(prior, prior, chunk, weights, variant, as_sum=size > 1)
            return found, {group: new - prior.elements[group] for group, new in after.elements.items()}

        return jax.lax.map(certify_chunk, (chunks, is_row, jnp.asarray((turn + turn // model.num_arms) % NUM_VARIANTS)))

    found, added = certify(rows, size)
    residuals, is_possible = join_chunks((found.residuals, found.is_possible), num_rows)
    first_arm = jax.tree.map(lambda leaf: leaf[:: model.num_arms], rows if size > 1 else added)
    return residuals, is_feasible & is_possible, certify(first_arm, 1)[1] if size > 1 else first_arm


_NUM_AROUND_CENTRE, _NUM_IN_POSTERIOR = 16, 8  # random points of the prior's certificate


class Examination(NamedTuple):
    """What was measured when a program was examined.

    Attributes:
        prior, prior_residual: the prior's parameters, and how far it is from affine.
        rows: trial rows, with their residuals, and whether the program can produce them.
        added: what the rows on arm 0 add to the parameters of each group.
    """

    prior: Posterior
    prior_residual: Residual
    rows: Interaction
    residuals: Residual
    is_possible: Array
    added: dict[str, Array]


def arrange(model: RewardModel, *, around_cores: bool = False) -> Layout:
    """Return the layout of a program's latents: their families, and the blocks of the real ones.

    Args:
        around_cores: whether to look for leaves and cores in Gaussian blocks (`gaussian_blocks`).

    Raises:
        NotConjugate: if a latent belongs to no family.
    """
    try:
        return split_gaussian_blocks(model, find_scales(model, read_supports(model)), around_cores=around_cores)
    except NotConjugate:
        raise
    except Exception as error:  # jax raises many types for an operation without a second derivative
        raise _failure(model, error) from error


def prove(model: RewardModel) -> Layout:
    """Return the layout of a program that cannot deviate from conjugate forms between the points of a certificate.

    Raises:
        NotConjugate: with the operation that stopped the proof.
    """
    layout = arrange(model)
    for is_prior in (True, False):
        gap = not_conjugate(model, layout, is_prior=is_prior)
        if gap is not None:
            raise proof_refusal(model, gap.reason, gap.remedy, in_program=gap.in_program, is_prior=is_prior)
    return layout


def examine(model: RewardModel, layout: Layout, absorb_chunk: Absorb | None = None) -> tuple[Posterior, Evidence]:
    """Return the prior of a program that is proved conjugate, and the evidence of prior and trial rows.

    Args:
        absorb_chunk: from `chunk_absorber`; updates that call it too need not trace it again.

    Raises:
        NotConjugate: with the residual that failed.
    """
    try:
        found = run_once(lambda: measure(model, layout, absorb_chunk or chunk_absorber(model, layout)))
    except Exception as error:
        raise _failure(model, error) from error
    fault, is_tested = first_fault(found, model.num_arms)
    if fault in ("prior", "likelihood"):
        raise _density_refusal(model, layout, found, is_prior=fault == "prior")
    if fault == "improper":
        names = [site.name for site in layout.of(_improper_kinds(found.prior)[0])]
        reason = f"has an improper prior on {names}: its density has no finite integral"
        raise refusal(model, reason, "give it a proper prior")
    if fault == "untested":
        arms = np.asarray(found.rows.arm)
        arm = min(set(range(model.num_arms)) - set(arms[is_tested].tolist()))
        raise untested_refusal(model, arm, is_rounded=bool(np.any(found.is_possible & (arms == arm))))
    evidence = Evidence(
        found.prior_residual,
        worst_of(jax.tree.map(lambda leaf: leaf[is_tested], found.residuals)),
        int(is_tested.sum()),
        _examples(model, found, is_tested),
        sum(NUM_POINTS),
        rows_per_sum(found.rows.arm.size),
    )
    return found.prior, evidence


def first_fault(found: Examination, num_arms: int) -> tuple[str, np.ndarray]:
    """Return the first reason against an exact engine, "" for none, and which trial rows were certified.

    The reasons: "prior", "improper", "likelihood", "untested".
    """
    # Rows whose rounding is too large are no evidence; rows that deviate are.
    deviates = found.is_possible & ~(found.residuals.nats <= found.residuals.tolerance)
    is_tested = np.asarray(found.is_possible) & np.asarray(is_affine(found.residuals))
    faults = {
        "prior": not bool(is_affine(found.prior_residual)),
        "improper": bool(_improper_kinds(found.prior)),
        "likelihood": bool(deviates.any()),
        "untested": len(set(np.asarray(found.rows.arm)[is_tested].tolist())) < num_arms,
    }
    return next((fault for fault, is_present in faults.items() if is_present), ""), is_tested


def measure(model: RewardModel, layout: Layout, absorb_chunk: Absorb) -> Examination:
    """Derive and certify the prior and the likelihood of trial rows, in one traced function."""
    prior, prior_residual = read_prior(model, layout)
    centre = coordinates_at(layout, prior)
    per_arm = int(np.clip(MAX_SINGLE_ROWS // model.num_arms, 8, 24 * len(model.outcomes)))
    rows, is_feasible = trial_rows(model, latents_at(layout, centre), per_arm, seed=11, is_systematic=True)
    return Examination(prior, prior_residual, rows, *certify_trial_rows(model, absorb_chunk, prior, rows, is_feasible))


def _failure(model: RewardModel, error: Exception) -> NotConjugate:
    """Return the refusal of a program whose examination raised an error."""
    text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if isinstance(error, jax.errors.JaxRuntimeError):
        return refusal(
            model,
            f"cannot be proved conjugate: the computation failed while it ran ({text})",
            "check that the device works and has free memory, and what the program calls back",
        )
    return refusal(
        model,
        f"cannot be proved conjugate: jax cannot differentiate it twice ({text})",
        "use jax operations that have derivatives in both modes; an approximate engine serves it until then",
    )


def read_prior(model: RewardModel, layout: Layout) -> tuple[Posterior, Residual]:
    """Derive the prior's parameters, first at any point to find its means, then at its means; and certify it."""

    @traced_once
    def log_prior(point: Coordinates) -> Array:
        return model.log_prior(latents_at(layout, point))

    def improve(centre: Coordinates, _: None) -> tuple[Coordinates, tuple[Coordinates, Natural]]:
        natural = derive(layout, log_prior, centre)
        better = coordinates_at(layout, posterior_of(layout, natural, centre))
        # An improper prior is reported later.
        return where_finite(better, centre), (centre, natural)

    _, readings = jax.lax.scan(improve, generic_point(layout), None, length=2)
    centre, natural = jax.tree.map(lambda leaf: leaf[1], readings)
    prior = posterior_of(layout, natural, centre)
    num_points = _NUM_AROUND_CENTRE + 4 * len(layout.sites), _NUM_IN_POSTERIOR
    natural, centre = natural_of(layout, prior), coordinates_at(layout, prior)
    return prior, certify_prior(layout, log_prior, natural, prior, num_points, centre)


def certify_prior(
    layout: Layout,
    log_prior: Callable[[Coordinates], Array],
    natural: Natural,
    prior: Posterior,
    num_points: tuple[int, int],
    centre: Coordinates,
) -> Residual:
    """Return how far a log prior is from affine with natural parameters that are relative to `centre`."""
    regions = regions_for(layout, prior, prior, *num_points, centre=centre)
    num_roundings = inverse_roundings(layout, natural.quadratic)
    natural = jax.tree.map(lambda leaf: leaf[None], natural)
    found, _ = residual_of(
        layout, lambda point: log_prior(point)[None], natural, centre, regions, num_roundings=num_roundings
    )
    return worst_of(found)


def _improper_kinds(prior: Posterior) -> list[str]:
    """Return the kinds of latents whose prior has no finite integral."""
    kinds = [family_of_group(group).kind for group, own in prior.elements.items() if not np.all(np.asarray(own) > 0)]
    precision = np.asarray(prior.precision)
    is_finite = bool(np.all(np.isfinite(precision)))
    is_definite = not precision.size or (is_finite and np.all(np.linalg.eigvalsh(precision) > 0))
    return kinds if is_definite else [*kinds, REAL]


def _is_singular(prior: Posterior) -> bool:
    """Return whether rounding hides the smallest eigenvalue of a precision matrix: reals coupled too tightly.

    It is nan if the program factorizes a covariance matrix whose smallest eigenvalue rounding hides.
    """
    precision = np.asarray(prior.precision)
    if not precision.size or not np.all(np.isfinite(precision)):
        return bool(precision.shape[-1] > 1 and np.any(np.isnan(precision)))
    eigen = np.linalg.eigvalsh(precision)
    return bool(np.any(eigen[:, 0] <= np.finfo(precision.dtype).eps * precision.shape[-1] * eigen[:, -1]))


def _density_refusal(model: RewardModel, layout: Layout, found: Examination, *, is_prior: bool) -> NotConjugate:
    """Return the refusal of a density that is not affine, with the sites that break the form by themselves."""
    residual, row = _worst_residual(found, is_prior=is_prior)
    if is_prior and (residual.nats <= residual.tolerance or _is_singular(found.prior)):
        return rounding_refusal(model, layout, residual)

    def log_density(point: Coordinates) -> Array:
        latents = latents_at(layout, point)
        return model.log_prior(latents) if row is None else model.log_likelihood(latents, row)[0]

    def is_affine_in_each_site() -> list[Array]:
        prior = jax.tree.map(jnp.asarray, found.prior)
        centre = coordinates_at(layout, prior)
        natural = natural_of(layout, prior) if row is None else derive(layout, log_density, centre)
        natural = jax.tree.map(lambda leaf: leaf[None], natural)
        regions = regions_for(layout, prior, prior, 4 * _NUM_AROUND_CENTRE, _NUM_IN_POSTERIOR)

        def is_affine_in(site: SiteBlock) -> Array:
            own = [_move_site_alone(layout, region, site) for region in regions]
            return is_affine(residual_of(layout, lambda point: log_density(point)[None], natural, centre, own)[0])[0]

        return [is_affine_in(site) for site in layout.sites]

    is_fine = run_once(is_affine_in_each_site)
    alone = [site.name for site, fine in zip(layout.sites, is_fine, strict=True) if not fine]
    return density_refusal(model, layout, alone, residual, row)


def _worst_residual(found: Examination, *, is_prior: bool) -> tuple[Residual, Any]:
    """Return the residual that fails the most, and its row of data; None for the prior."""
    if is_prior:
        return found.prior_residual, None
    ratios = np.asarray(found.residuals.nats) / np.asarray(found.residuals.tolerance)
    worst = int(np.argmax(np.where(found.is_possible, ratios, -1.0)))
    row = jax.tree.map(lambda leaf: leaf[worst : worst + 1], found.rows)
    return jax.tree.map(lambda leaf: leaf[worst], found.residuals), row


def _move_site_alone(layout: Layout, region: Region, site: SiteBlock) -> Region:
    """Return a region whose points differ from the first in one site alone."""
    points = region.points
    fixed = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), points)
    if site.kind == REAL:
        moved = fixed._replace(real=fixed.real.at[:, site.span].set(points.real[:, site.span]))
    else:
        own = fixed.elements[site.group].at[:, site.span].set(points.elements[site.group][:, site.span])
        moved = fixed._replace(elements={**fixed.elements, site.group: own})
    return region_of(layout, moved)


def _examples(
    model: RewardModel, found: Examination, is_tested: np.ndarray
) -> tuple[tuple[dict[str, float], dict[str, Array]], ...]:
    """Return the certified rows of arm 0 and what they add to parameters, those with small whole rewards first."""
    rewards = found.rows.reward
    rows: dict[tuple[float, ...], int] = {}
    for i in np.flatnonzero(is_tested & (np.asarray(found.rows.arm) == 0)):
        rows.setdefault(tuple(float(rewards[name][i]) for name in model.outcomes), int(i))

    def size(item: tuple[tuple[float, ...], int]) -> tuple[float, tuple[float, ...]]:
        return sum(abs(value) + 2 * (value % 1 != 0) for value in item[0]), item[0]

    return tuple(
        (
            dict(zip(model.outcomes, values, strict=True)),
            jax.tree.map(lambda leaf, i=i: leaf[i // model.num_arms], found.added),
        )
        for values, i in sorted(rows.items(), key=size)
    )
