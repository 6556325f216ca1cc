"""Examine a program for conjugacy, once, in float64: supports, scales, proof, prior, and the likelihood of varied rewards."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from numpyro.distributions import constraints

from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.affine import Region, natural_of, region_around
from ppl_bandit.engines.exact.certificate import (
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
from ppl_bandit.engines.exact.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    SiteBlock,
    absorb,
    coordinates_at,
    derive,
    is_proper,
    latents_at,
)
from ppl_bandit.engines.exact.proof import analyticity
from ppl_bandit.numerics.compilation import quick_jit, run_once
from ppl_bandit.program.probing import feasible_latents, feasible_rewards
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Interaction, NotConjugate

__all__ = ["Findings", "examine", "judge", "measure"]

_NUM_POINTS = 16
_NUM_AT_HOME = 8
_MAX_ROWS = 2048
_ROWS_AT_ONCE = 64


class Findings(NamedTuple):
    """What was measured of a program: flags of obstacles, its prior, rows of data, and how far each is from affine."""

    obstacles: list[Array]
    prior: Posterior
    prior_residual: Residual
    rows: Interaction
    naturals: Natural
    residuals: Residual
    is_possible: Array


def examine(model: RewardModel) -> tuple[Layout, Posterior, Evidence]:
    """Return how a program's latents fall into families, its prior in them, and the evidence.

    Raises:
        NotConjugate: with the operation or the residual that stopped it.
    """
    words: list[str] = []
    try:
        layout = _find_scales(model, _read_supports(model))
        found = run_once(lambda: measure(model, layout, words))
    except NotConjugate:
        raise
    except Exception as error:  # whatever jax says of an operation without a second derivative
        raise report.refusal(
            model,
            f"cannot be proved conjugate: jax cannot differentiate it twice ({type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''})",
            "write it in jax operations that have derivatives in both modes; until then an approximate engine serves it",
        ) from error
    fault, tested = judge(found, model.num_arms)
    if fault == "obstacle":
        sentence = next(words for words, happened in zip(words, found.obstacles, strict=True) if bool(happened))
        raise report.refusal(model, f"cannot be proved conjugate: {sentence}", report.ANALYTIC_REMEDY)
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


def _read_supports(model: RewardModel) -> Layout:
    """Assign each latent site a kind by its support."""
    supports: dict[str, Any] = {}

    def bounds(seed: Array) -> dict[str, list[Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, seed)
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1))
        supports.update({name: trace[name]["fn"].support for name in model.latent_shapes})
        return {name: [jnp.asarray(leaf) for leaf in jax.tree.leaves(s)] for name, s in supports.items()}

    shapes = jax.eval_shape(bounds, 0)
    values: dict[str, list[Array]] = {name: [] for name in shapes}
    if any(shapes.values()):
        here, there = (quick_jit(bounds)(seed) for seed in (3, 4))
        for name in shapes:
            if any(bool(jnp.any(a != b)) for a, b in zip(here[name], there[name], strict=True)):
                raise report.refusal(
                    model,
                    f"is not conjugate: the support of '{name}' depends on another latent",
                    "give it a support that is fixed",
                )
        values = jax.device_get(here)
    starts = {"unit": 0, "positive": 0, "simplex": 0, "real": 0}
    sites = []
    for name, shape in model.latent_shapes.items():
        kind, low, high = _kind(model, name, supports[name], values[name])
        block = SiteBlock(name, kind, shape, starts[kind], low, high)
        starts[kind] += 1 if kind == "simplex" else block.size
        sites.append(block)
    num_positive = starts["positive"]
    return Layout(
        tuple(sites),
        np.ones(num_positive),
        np.zeros((num_positive, 0), np.int32),
        np.zeros((num_positive, 0), bool),
        np.arange(starts["real"], dtype=np.int32),  # not int64: jax caches indices across a change of its precision
    )


def _kind(model: RewardModel, name: str, support: Any, bounds: list[Array]) -> tuple[str, Any, Any]:
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if isinstance(support, type(constraints.real)):
        return "real", 0.0, 0.0
    if isinstance(support, type(constraints.simplex)):
        return "simplex", 0.0, 1.0
    if isinstance(support, constraints.greater_than):
        return "positive", _bound(support.lower_bound, bounds, 0), 0.0
    if isinstance(support, constraints.interval) and not isinstance(support, type(constraints.circular)):
        return "unit", _bound(support.lower_bound, bounds, 0), _bound(support.upper_bound, bounds, -1)
    raise report.refusal(
        model,
        f"is not conjugate: '{name}' has support {type(support).__name__.strip('_')}, which belongs to no conjugate family",
        "conjugate families live on (0, 1), on positive numbers, on the simplex and on the reals",
    )


def _bound(value: Any, bounds: list[Array], position: int) -> Any:
    return np.asarray(bounds[position]) if bounds else float(value)


def _find_scales(model: RewardModel, layout: Layout) -> Layout:
    """Find the power of each positive element that is Gamma under the prior, and the reals that each one scales.

    With s = log z the prior of a Gamma power is c s + d exp(power s), whatever real elements it scales: the ratio of its
    third to its second derivative is the power. Scaling all u by different factors then multiplies the prior precision of
    each real element by the factor of its own u, or leaves it.
    """
    num_positive, num_real = layout.count("positive"), layout.count("real")
    if num_positive == 0:
        return layout
    rng = np.random.default_rng(7)
    factors = np.exp(rng.permutation(np.linspace(0.3, 1.1, num_positive)))  # evenly spaced: no two are alike

    def measure() -> tuple[Array, Array]:
        start = _start_point(layout)

        def along(s: Array, real: Array) -> Array:
            return model.log_prior(latents_at(layout, start._replace(positive=s, real=real)))

        ones = jnp.ones(num_positive)

        def bend(s: Array) -> Array:
            return jax.jvp(jax.grad(along), (s, start.real), (ones, jnp.zeros(num_real)))[1]

        second, third = jax.jvp(bend, (start.positive,), (ones,))
        power = _snap(third / second)

        def curvature(s: Array) -> Array:
            slope = jax.grad(along, argnums=1)
            rows = jax.vmap(lambda v: jax.jvp(lambda x: slope(s, x), (start.real,), (v,))[1])(jnp.eye(num_real))
            return jnp.diagonal(rows)

        shifted = start.positive + jnp.log(jnp.asarray(factors)) / power
        return power, curvature(shifted) / curvature(start.positive)

    power, ratios = run_once(measure)
    for site in layout.of("positive"):
        if not np.all(np.isfinite(power[site.start : site.start + site.size])):
            raise report.refusal(
                model,
                f"is not conjugate: the prior of '{site.name}' is not Gamma in any power of it",
                report.scale_remedy(site.name),
            )
    owners: list[list[int]] = [[] for _ in range(num_positive)]
    free = []
    for index, ratio in enumerate(ratios):
        matches = np.flatnonzero(np.isclose(factors, ratio, rtol=1e-7))
        if np.isclose(ratio, 1.0, rtol=1e-7):
            free.append(index)
        elif matches.size == 1:
            owners[int(matches[0])].append(index)
        else:
            site = next(s for s in layout.of("real") if s.start <= index < s.start + s.size)
            positives = [s.name for s in layout.of("positive")]
            raise report.refusal(
                model,
                f"is not conjugate: the prior precision of '{site.name}' is neither fixed nor proportional to a power of one "
                f"of {positives} that is Gamma",
                f"write '{site.name}' ~ Normal(m, s * sd) with sd the noise's standard deviation, or with a fixed scale",
            )
    width = max((len(own) for own in owners), default=0)
    members, is_member = np.zeros((num_positive, width), np.int32), np.zeros((num_positive, width), bool)
    for row, own in enumerate(owners):
        members[row, : len(own)], is_member[row, : len(own)] = own, True
    return layout._replace(power=power, members=members, is_member=is_member, free=np.array(free, np.int32))


def _snap(power: Array) -> Array:
    near = jnp.round(power * 12.0) / 12.0
    return jnp.where(
        (jnp.abs(power - near) < 1e-6) & (near != 0), near, jnp.where(jnp.abs(power) < 1e-6, jnp.nan, power)
    )


def _start_point(layout: Layout) -> Coordinates:
    flat = Posterior(
        jnp.ones((layout.count("unit"), 2)),
        tuple(jnp.ones((site.size // site.shape[-1], site.shape[-1])) for site in layout.of("simplex")),
        jnp.full(layout.count("positive"), 1.3),
        jnp.ones(layout.count("positive")),
        jnp.zeros(layout.members.shape),
        jnp.broadcast_to(jnp.eye(layout.members.shape[1]), (*layout.members.shape, layout.members.shape[1])),
        jnp.zeros(layout.free.size),
        jnp.eye(layout.free.size),
        jnp.zeros((), int),
    )
    return coordinates_at(layout, flat)


def measure(model: RewardModel, layout: Layout, words: list[str]) -> Findings:
    """Prove, derive and certify, in one traced function; `words` is filled with what each obstacle says."""
    prior, prior_residual = _read_prior(model, layout)
    centre = coordinates_at(layout, prior)
    rows, is_possible = _trial_rows(model, latents_at(layout, centre))

    said: dict[bool, list[str]] = {}

    def prove(row: Interaction, *, is_prior: bool) -> list[Array]:
        outcomes = model.outcome_values(row.reward)
        obstacles = analyticity(model, layout, row.arm, row.context, outcomes, is_prior=is_prior)
        said[is_prior] = [obstacle.words for obstacle in obstacles]
        return [obstacle.happened for obstacle in obstacles]

    def read(row: Interaction, stretch: Array) -> tuple[Natural, Residual, Array, list[Array]]:
        single = jax.tree.map(lambda leaf: leaf[None], row)
        by_outcome = read_row(model, layout, centre, single)
        natural = jax.tree.map(lambda leaf: leaf.sum(axis=0), by_outcome)
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
    found = jax.lax.map(lambda chunk: jax.vmap(read)(*chunk), chunks)
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


def _places(layout: Layout, prior: Posterior, after: Posterior, stretch: Array | float, num_more: int = 0) -> Places:
    is_fine = is_proper(after)  # a density that is not affine may lead nowhere
    home = jax.tree.map(lambda new, old: jnp.where(is_fine, new, old), after, prior)
    return places_for(layout, prior, home, _NUM_POINTS + num_more, _NUM_AT_HOME, stretch)


def _read_prior(model: RewardModel, layout: Layout) -> tuple[Posterior, Residual]:
    """Read the prior's natural parameters, first anywhere to find its means, then at its means."""

    def log_prior(point: Coordinates) -> Array:
        return model.log_prior(latents_at(layout, point))

    def improve(centre: Coordinates, _: None) -> tuple[Coordinates, tuple[Coordinates, Natural]]:
        natural = derive(layout, log_prior, centre)
        better = coordinates_at(layout, _as_posterior(layout, natural, centre))
        # A prior that came out improper is reported later; here it must only not break the reading.
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(new), new, old), better, centre)
        return kept, (centre, natural)

    _, readings = jax.lax.scan(improve, _start_point(layout), None, length=2)
    centre, natural = jax.tree.map(lambda leaf: leaf[1], readings)
    prior = _as_posterior(layout, natural, centre)
    natural = jax.tree.map(lambda leaf: leaf[None], natural_of(layout, prior))
    places = _places(layout, prior, prior, 1.0, 4 * len(layout.sites))
    residual = residual_of(layout, lambda point: log_prior(point)[None], natural, coordinates_at(layout, prior), places)
    return prior, worst_of(residual)


def _as_posterior(layout: Layout, natural: Natural, centre: Coordinates) -> Posterior:
    """Turn the natural parameters of a prior density, read at `centre`, into parameters: add them to an empty posterior."""
    num_members = layout.is_member.sum(axis=1)
    empty = Posterior(
        jnp.ones_like(natural.unit),
        tuple(jnp.ones_like(rows) for rows in natural.simplex),
        # log p(z) has (shape - 1/power + members/2) log u where the Gamma density of u would have shape - 1.
        jnp.asarray(1.0 / layout.power - 0.5 * num_members),
        jnp.zeros_like(natural.scale),
        jnp.where(layout.is_member, centre.real[layout.members], 0.0),
        jnp.eye(layout.members.shape[1]) * (~layout.is_member[:, :, None]).astype(float),
        centre.real[layout.free],
        jnp.zeros_like(natural.quadratic),
        jnp.zeros((), int),
    )
    return absorb(layout, empty, natural, 0)


def _trial_rows(model: RewardModel, latents: Mapping[str, Array]) -> tuple[Interaction, Array]:
    """Return rows that put many different rewards on every arm, in the example context and in smaller ones."""
    per_arm = int(np.clip(_MAX_ROWS // model.num_arms, 8, 24 * len(model.outcomes)))
    rng = np.random.default_rng(11)
    arm = jnp.tile(jnp.arange(model.num_arms), per_arm)
    repeat = np.repeat(np.arange(per_arm), model.num_arms)
    picks = rng.integers(0, 1 << 20, size=(arm.size, len(model.outcomes)))
    picks[:, 0] = repeat + np.tile(np.arange(model.num_arms), per_arm)

    def varied(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        shrink = rng.uniform(0.25, 1.0, size=leaf.shape)
        shrink[repeat % 3 == 0] = 1.0
        return leaf * shrink

    context = model.context_rows(arm.size)
    if context is not None:
        context = jax.tree.map(varied, context)
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
        ("real", eigen(prior.scaled_precision)),
        *(("simplex", rows) for rows in prior.dirichlet),
    )
    return [kind for kind, values in parameters if not np.all(np.asarray(values) > 0)]


def _refuse_improper(model: RewardModel, layout: Layout, prior: Posterior) -> None:
    names = [site.name for site in layout.of(_improper(prior)[0])]
    raise report.refusal(
        model, f"has an improper prior on {names}: its density has no finite integral", "give it a proper prior"
    )


def _refuse_density(model: RewardModel, layout: Layout, found: Findings, *, is_prior: bool) -> None:
    """Find which latents break the affine form, one site at a time, and refuse with that."""
    prior = jax.tree.map(jnp.asarray, found.prior)
    residual, row = found.prior_residual, None
    if not is_prior:
        ratios = np.asarray(found.residuals.nats) / np.asarray(found.residuals.tolerance)
        worst = int(np.argmax(np.where(found.is_possible, ratios, -1.0)))
        row = jax.tree.map(lambda leaf: leaf[worst : worst + 1], found.rows)
        residual = jax.tree.map(lambda leaf: leaf[worst], found.residuals)
    elif residual.nats <= residual.tolerance:
        raise report.blurred_refusal(model, layout, residual)

    def log_density(point: Coordinates) -> Array:
        latents = latents_at(layout, point)
        return model.log_prior(latents) if row is None else model.log_likelihood(latents, row)[0]

    centre = coordinates_at(layout, prior)

    def by_site() -> list[Array]:
        natural = natural_of(layout, prior) if row is None else derive(layout, log_density, centre)
        one = jax.tree.map(lambda leaf: leaf[None], natural)
        places = _places(layout, prior, prior, 1.0, 3 * _NUM_POINTS)
        return [
            is_affine(
                residual_of(layout, lambda point: log_density(point)[None], one, centre, _only(layout, places, site))
            )[0]
            for site in layout.sites
        ]

    alone = [site.name for site, is_fine in zip(layout.sites, run_once(by_site), strict=True) if not is_fine]
    raise report.density_refusal(model, layout, alone, residual, row, is_prior)


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
