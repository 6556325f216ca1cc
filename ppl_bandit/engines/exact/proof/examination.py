"""Examine a program for conjugacy, once, in float64: supports, scales, proof, prior, and the likelihood of varied rewards."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.certificate.affine import Region, natural_of, region_around
from ppl_bandit.engines.exact.certificate.certificate import (
    Evidence,
    Places,
    Residual,
    is_affine,
    log_likelihoods,
    places_for,
    read_row,
    residual_of,
    worst_of,
)
from ppl_bandit.engines.exact.certificate.chunks import join_chunks, over_chunks, split_chunks
from ppl_bandit.engines.exact.families.derivation import derive
from ppl_bandit.engines.exact.families.element_blocks import map_blocks, where
from ppl_bandit.engines.exact.families.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    SiteBlock,
    absorb,
    coordinates_at,
    is_proper,
    latents_at,
    posterior_of,
    total_of,
)
from ppl_bandit.engines.exact.proof.analyticity import analyticity
from ppl_bandit.engines.exact.proof.assignment import find_scales, read_supports, start_point
from ppl_bandit.engines.exact.proof.gaussian_blocks import tie
from ppl_bandit.engines.exact.remedies import ANALYTIC_REMEDY, KEEP
from ppl_bandit.program.jaxpr.analytic import Obstacle
from ppl_bandit.program.model.probing import feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction, NotConjugate

__all__ = ["Findings", "examine", "judge", "measure"]

_NUM_POINTS = 16
_NUM_AT_HOME = 8
_MAX_ROWS = 2048
_ROWS_AT_ONCE = 128


class Findings(NamedTuple):
    """What was measured of a program: flags of obstacles, its prior, rows of data, and how far each is from affine."""

    obstacles: list[Array]
    prior: Posterior
    prior_residual: Residual
    rows: Interaction
    naturals: Natural
    residuals: Residual
    is_possible: Array


def examine(model: RewardModel, *, around_cores: bool = False) -> tuple[Layout, Posterior, Evidence]:
    """Return how a program's latents fall into families, its prior in them, and the evidence.

    Args:
        around_cores: whether to look for leaves and cores in Gaussian blocks; see `ties`.

    Raises:
        NotConjugate: with the operation or the residual that stopped it.
    """
    words: list[Obstacle] = []
    try:
        layout = tie(model, find_scales(model, read_supports(model)), around_cores=around_cores)
        found = run_once(lambda: measure(model, layout, words))
    except NotConjugate:
        raise
    except (
        Exception
    ) as error:  # whatever jax says of an operation without a second derivative, or of a device that fails
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        if isinstance(error, jax.errors.JaxRuntimeError):
            reason = f"cannot be proved conjugate: the computation failed while it ran ({said})"
            remedy = "look whether the device has memory left and works, and at what the program calls back"
        else:
            reason = f"cannot be proved conjugate: jax cannot differentiate it twice ({said})"
            remedy = (
                "use jax operations that have derivatives in both modes; an approximate engine serves it until then"
            )
        raise report.refusal(model, reason, remedy) from error
    fault, tested = judge(found, model.num_arms)
    if fault == "obstacle":
        first = next(obstacle for obstacle, happened in zip(words, found.obstacles, strict=True) if bool(happened))
        # What is found not to be conjugate says more than what could not be proved to be.
        fault, _ = judge(found._replace(obstacles=[]), model.num_arms)
        residual, row = _worst(found, is_prior=fault == "prior")
        is_bent = fault in ("prior", "likelihood") and bool(residual.tolerance < residual.nats < np.inf)
        if is_bent and first.in_program:
            raise report.bent_refusal(model, first.reason, residual, row)
        if not is_bent:
            remedy = first.remedy or (ANALYTIC_REMEDY if first.in_program else KEEP)
            raise report.refusal(model, f"cannot be proved conjugate: {first.reason}", remedy)
    if fault in ("prior", "likelihood"):
        _refuse_density(model, layout, found, is_prior=fault == "prior")
    if fault == "improper":
        _refuse_improper(model, layout, found.prior)
    if fault == "untested":
        arms = np.asarray(found.rows.arm)
        arm = min(set(range(model.num_arms)) - set(arms[tested].tolist()))
        raise report.untested_refusal(model, arm, is_blurred=bool(np.any(found.is_possible & (arms == arm))))
    evidence = Evidence(
        found.prior_residual,
        worst_of(jax.tree.map(lambda leaf: leaf[tested], found.residuals)),
        int(tested.sum()),
        _examples(model, found, tested),
        _NUM_POINTS + _NUM_AT_HOME,
    )
    return layout, found.prior, evidence


def judge(found: Findings, num_arms: int) -> tuple[str, np.ndarray]:
    """Return what stands in the way of an exact engine, "" for nothing, and which rows of data were certified."""
    # Rows whose rounding is too large are no evidence; a deviation in them is.
    is_bent = found.is_possible & ~(found.residuals.nats <= found.residuals.tolerance)
    tested = np.asarray(found.is_possible) & np.asarray(is_affine(found.residuals))
    faults = {
        "obstacle": any(bool(happened) for happened in found.obstacles),
        "prior": not bool(is_affine(found.prior_residual)),
        "improper": bool(_improper(found.prior)),
        "likelihood": bool(is_bent.any()),
        "untested": len(set(np.asarray(found.rows.arm)[tested].tolist())) < num_arms,
    }
    return next((fault for fault, stands in faults.items() if stands), ""), tested


def measure(model: RewardModel, layout: Layout, words: list[Obstacle]) -> Findings:
    """Prove, derive and certify, in one traced function; `words` is filled with what each obstacle says."""
    prior, prior_residual = _read_prior(model, layout)
    centre = coordinates_at(layout, prior)
    rows, is_possible = _trial_rows(model, latents_at(layout, centre))

    said: dict[bool, list[Obstacle]] = {}

    def prove(row: Interaction, *, is_prior: bool) -> list[Array]:
        outcomes = model.outcome_values(row.reward)
        obstacles = analyticity(model, layout, row.arm, row.context, outcomes, is_prior=is_prior)
        said[is_prior] = obstacles
        return [obstacle.is_present for obstacle in obstacles]

    def read(row: Interaction, stretch: Array) -> tuple[Natural, Residual, Array, list[Array]]:
        single = jax.tree.map(lambda leaf: leaf[None], row)
        by_outcome = read_row(model, layout, centre, single)
        natural = total_of(by_outcome)
        places = _places(layout, prior, absorb(layout, prior, natural, 1), stretch)
        evaluate = log_likelihoods(model, layout, single)
        residual = worst_of(residual_of(layout, evaluate, by_outcome, centre, places))
        return natural, residual, jnp.all(jnp.isfinite(evaluate(centre))), prove(single, is_prior=False)

    in_the_prior = prove(jax.tree.map(lambda leaf: leaf[:1], rows), is_prior=True)
    num_rows = rows.arm.shape[0]
    # Every row is tried at points of its own, also on the other side of the centre.
    rng = np.random.default_rng(13)
    stretch = jnp.asarray(rng.choice([-1.0, 1.0], size=num_rows) * rng.uniform(0.5, 1.2, size=num_rows))
    chunks, _ = split_chunks((rows, stretch), num_rows, min(num_rows, _ROWS_AT_ONCE))
    _, found = over_chunks(lambda _, chunk: (None, jax.vmap(read)(*chunk)), None, chunks)
    naturals, residuals, is_finite, in_rows = join_chunks(found, num_rows)
    words[:] = said[True] + said[False]
    return Findings(
        [*in_the_prior, *(jnp.any(happened & is_possible) for happened in in_rows)],
        prior,
        prior_residual,
        rows,
        naturals,
        residuals,
        is_possible & is_finite,
    )


def _places(layout: Layout, prior: Posterior, after: Posterior, stretch: Array) -> Places:
    home = where(is_proper(after), after, prior)  # a density that is not affine may lead nowhere
    return places_for(layout, prior, home, _NUM_POINTS, _NUM_AT_HOME, stretch)


def _read_prior(model: RewardModel, layout: Layout) -> tuple[Posterior, Residual]:
    """Read the prior's natural parameters, first anywhere to find its means, then at its means."""

    def log_prior(point: Coordinates) -> Array:
        return model.log_prior(latents_at(layout, point))

    def improve(centre: Coordinates, _: None) -> tuple[Coordinates, tuple[Coordinates, Natural]]:
        natural = derive(layout, log_prior, centre)
        better = coordinates_at(layout, posterior_of(layout, natural, centre))
        # A prior that came out improper is reported later; here it must only not break the reading.
        kept = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(new), new, old) if new.size else new, better, centre
        )
        return kept, (centre, natural)

    _, readings = jax.lax.scan(improve, start_point(layout), None, length=2)
    centre, natural = map_blocks(lambda leaf: leaf[1], readings)
    prior = posterior_of(layout, natural, centre)
    natural = map_blocks(lambda leaf: leaf[None], natural_of(layout, prior))
    places = places_for(layout, prior, prior, _NUM_POINTS + 4 * len(layout.sites), _NUM_AT_HOME)
    residual = residual_of(layout, lambda point: log_prior(point)[None], natural, coordinates_at(layout, prior), places)
    return prior, worst_of(residual)


def _trial_rows(model: RewardModel, latents: Mapping[str, Array]) -> tuple[Interaction, Array]:
    """Return rows that put many different rewards on every arm, in the example context and in others about it."""
    per_arm = int(np.clip(_MAX_ROWS // model.num_arms, 8, 24 * len(model.outcomes)))
    rng = np.random.default_rng(11)
    arm = jnp.tile(jnp.arange(model.num_arms), per_arm)
    repeat = np.repeat(np.arange(per_arm), model.num_arms)
    picks = rng.integers(0, 1 << 20, size=(arm.size, len(model.outcomes)))
    picks[:, 0] = repeat + np.tile(np.arange(model.num_arms), per_arm)

    context = model.varied_context_rows(rng, repeat % 3 == 0)
    reward, is_possible = feasible_rewards(
        model.program, latents, arm, context, model.outcome_kinds, jnp.asarray(picks)
    )
    return Interaction(arm, reward, context), is_possible


def _improper(prior: Posterior) -> list[str]:
    """Return the kinds of latents whose prior has no finite integral."""

    def eigen(precision: Any) -> np.ndarray:
        return np.linalg.eigvalsh(np.asarray(precision)) if precision.shape[-1] else np.ones(1)

    parameters = (
        ("unit", prior.beta),
        ("positive", prior.shape),
        ("positive", prior.rate),
        ("real", eigen(prior.precision)),
        *(("simplex", rows) for rows in prior.dirichlet),
    )
    return [kind for kind, values in parameters if not np.all(np.asarray(values) > 0)]


def _is_singular(prior: Posterior) -> bool:
    """Tell whether rounding leaves a precision matrix without a smallest eigenvalue: reals tied too tightly to each other."""
    precision = np.asarray(prior.precision)
    if not precision.size or not np.all(np.isfinite(precision)):
        return False
    eigen = np.linalg.eigvalsh(precision)
    return bool(np.any(eigen[:, 0] <= np.finfo(precision.dtype).eps * precision.shape[-1] * eigen[:, -1]))


def _refuse_improper(model: RewardModel, layout: Layout, prior: Posterior) -> None:
    names = [site.name for site in layout.of(_improper(prior)[0])]
    raise report.refusal(
        model, f"has an improper prior on {names}: its density has no finite integral", "give it a proper prior"
    )


def _refuse_density(model: RewardModel, layout: Layout, found: Findings, *, is_prior: bool) -> None:
    """Find which latents break the affine form, one site at a time, and refuse with that."""
    residual, row = _worst(found, is_prior=is_prior)
    if is_prior and (residual.nats <= residual.tolerance or _is_singular(found.prior)):
        raise report.blurred_refusal(model, layout, residual)

    def log_density(point: Coordinates) -> Array:
        latents = latents_at(layout, point)
        return model.log_prior(latents) if row is None else model.log_likelihood(latents, row)[0]

    def by_site() -> list[Array]:
        prior = jax.tree.map(jnp.asarray, found.prior)
        centre = coordinates_at(layout, prior)
        natural = natural_of(layout, prior) if row is None else derive(layout, log_density, centre)
        one = jax.tree.map(lambda leaf: leaf[None], natural)
        places = places_for(layout, prior, prior, 4 * _NUM_POINTS, _NUM_AT_HOME)
        return [
            is_affine(
                residual_of(layout, lambda point: log_density(point)[None], one, centre, _only(layout, places, site))
            )[0]
            for site in layout.sites
        ]

    alone = [site.name for site, is_fine in zip(layout.sites, run_once(by_site), strict=True) if not is_fine]
    raise report.density_refusal(model, layout, alone, residual, row, is_prior)


def _worst(found: Findings, *, is_prior: bool) -> tuple[Residual, Any]:
    """Return the residual that fails the most, and its row of data; None for the prior."""
    if is_prior:
        return found.prior_residual, None
    ratios = np.asarray(found.residuals.nats) / np.asarray(found.residuals.tolerance)
    worst = int(np.argmax(np.where(found.is_possible, ratios, -1.0)))
    row = jax.tree.map(lambda leaf: leaf[worst : worst + 1], found.rows)
    return jax.tree.map(lambda leaf: leaf[worst], found.residuals), row


def _only(layout: Layout, places: Places, site: SiteBlock) -> list[Region]:
    """Return points that differ from the first in one site alone."""
    span = slice(site.start, site.start + site.size)
    regions = []
    for points in (region.points for region in places):
        still = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[:1], leaf.shape), points)
        if site.kind == "simplex":
            rows = list(still.simplex)
            rows[site.start] = points.simplex[site.start]
            moved = still._replace(simplex=tuple(rows))
        else:
            block = getattr(still, site.kind).at[:, span].set(getattr(points, site.kind)[:, span])
            moved = still._replace(**{site.kind: block})
        regions.append(region_around(layout, moved))
    return regions


def _examples(model: RewardModel, found: Findings, tested: np.ndarray) -> tuple[tuple[dict[str, float], Natural], ...]:
    """Return the rows of arm 0 that were tested, plain rewards first."""
    given = found.rows.reward
    rewards = given if isinstance(given, dict) else {model.outcomes[0]: given}
    picked: dict[tuple[float, ...], int] = {}
    for i in np.flatnonzero(tested & (np.asarray(found.rows.arm) == 0)):
        picked.setdefault(tuple(float(rewards[name][i]) for name in model.outcomes), int(i))
    plain = sorted(
        picked.items(), key=lambda item: (sum(abs(value) + 2 * (value % 1 != 0) for value in item[0]), item[0])
    )
    return tuple(
        (dict(zip(model.outcomes, values, strict=True)), jax.tree.map(lambda leaf, i=i: leaf[i], found.naturals))
        for values, i in plain
    )
