"""Inspect a split of a program: is the rest conjugate given the outer sites, for every value that they can take?

At one outer value the exact engine's examination finds families, proves and certifies. That it holds for all values is proved
on the same jaxpr with the outer sites ranging over their supports as well: if every density that the inner sites reach is
analytic in inner and outer sites together, so is its deviation from affine; and an analytic function that vanishes at random
points vanishes everywhere. So certificates at random outer values speak for all of them.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.collapsed.outer import OuterSpace, box_of, dependence, given, outer_space
from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.certificate.affine import recentre
from ppl_bandit.engines.exact.certificate.certificate import (
    Evidence,
    Places,
    Residual,
    excess_of,
    log_likelihoods,
    places_for,
    read_row,
    residual_of,
    worst_of,
)
from ppl_bandit.engines.exact.families.derivation import derive
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
)
from ppl_bandit.engines.exact.proof.analyticity import analyticity
from ppl_bandit.engines.exact.proof.examination import examine
from ppl_bandit.engines.row_buffer import row_mask
from ppl_bandit.numerics.arrow_matrices import as_arrow
from ppl_bandit.program.model.probing import feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction

__all__ = ["Split", "certify_rows", "inspect", "trial_rows"]

_NUM_POINTS, _NUM_AT_HOME = (
    12,
    6,
)  # random points at which densities are certified, around their centre and in their law


class Split(NamedTuple):
    """A program cut in two.

    Attributes:
        space: where the outer sites live.
        layout: the families of the inner sites, the same for every outer value.
        prior: of the inner sites at one outer value.
        centre: the point at which densities of the inner sites are read.
        values: outer values that were tried, by site, (V, ...) each; the first is that of `prior`.
        outer_box: the box over which outer sites range in the proof.
        contains: whether outer values lie in that box.
        has_shared_statistics: whether no outer site reaches a row's likelihood.
        hidden: outer sites whose own density no inner site reaches.
        evidence: of the inner sites.
    """

    space: OuterSpace
    layout: Layout
    prior: Posterior
    centre: Coordinates
    values: dict[str, np.ndarray]
    outer_box: tuple[SiteBlock, ...]
    contains: Callable[[Mapping[str, Array]], Bool[Array, ""]]
    has_shared_statistics: bool
    hidden: tuple[str, ...]
    evidence: Evidence


def inspect(
    model: RewardModel, names: tuple[str, ...], supports: Mapping[str, Any], examples: Interaction | None = None
) -> Split:
    """Return the split of a program at the outer sites `names`, or refuse; runs in float64.

    Args:
        examples: rows that are certified beside those that are made up here.

    Raises:
        NotConjugate: with what stands in the way.
    """
    for name in names:
        if supports[name] is None:
            raise report.refusal(
                model, f"has an outer site '{name}' whose support depends on another latent", "give it a fixed support"
            )
    space = outer_space(model, names, supports)
    inner = tuple(name for name in model.latent_shapes if name not in names)
    reached = dependence(model, model.latent_shapes)
    hidden = tuple(name for name in names if not reached[name] & set(inner))
    is_shared = not any(reached[name] & set(names) for name in model.outcomes)
    values = _try_values(model, space, max(16, 4 * space.size + 8))
    layout, prior, evidence = examine(
        given(model, {name: value[0] for name, value in values.items()}), around_cores=True
    )
    centre = jax.device_get(coordinates_at(layout, prior))
    split = Split(space, layout, prior, centre, values, (), lambda _: jnp.array(True), is_shared, hidden, evidence)
    for is_whole in (True, False):
        box, contains = box_of(model, space, supports, is_whole=is_whole)
        split = split._replace(outer_box=box, contains=contains)
        words, happened, in_prior, in_rows = _measure(model, split, examples)
        obstacles = [sentence for sentence, is_there in zip(words, happened, strict=True) if is_there]
        if not obstacles:
            break
    if obstacles:
        outer = ", ".join(names)
        raise report.refusal(
            model,
            f"cannot be proved conjugate for every value of {outer}: {obstacles[0]}",
            report.ANALYTIC_REMEDY,
        )
    if not (excess_of(in_prior) <= 1.0 and excess_of(in_rows) <= 1.0):
        what, residual = ("prior", in_prior) if excess_of(in_prior) > 1.0 else ("likelihood", in_rows)
        raise report.refusal(
            model,
            f"is not conjugate given {', '.join(names)}: the log {what} is affine in the sufficient statistics at one value of "
            f"these but not at others - residual {float(residual.nats):.1e} nats",
            "see what changes the family: a power, or which reals a scale multiplies, must not depend on outer sites",
        )
    prior_found = max(evidence.prior, in_prior, key=lambda found: float(excess_of(found)))
    rows_found = max(evidence.likelihood, in_rows, key=lambda found: float(excess_of(found)))
    return split._replace(evidence=evidence._replace(prior=prior_found, likelihood=rows_found))


def _try_values(model: RewardModel, space: OuterSpace, num_values: int) -> dict[str, np.ndarray]:
    """Return outer values about the middle of the prior, (V, ...) each: its tails may be too heavy to compute with."""

    def draw() -> dict[str, Array]:
        prior = model.sample_prior(jr.key(17), 64)
        positions = jax.vmap(space.unconstrain)({name: prior[name] for name in space.names})
        middle = jnp.median(positions, axis=0)
        spread = 1.5 * jnp.median(jnp.abs(positions - middle), axis=0)
        steps = np.random.default_rng(19).uniform(-1.6, 1.6, size=(num_values, space.size))
        return jax.vmap(lambda position: space.constrain(position)[0])(middle + spread * steps)

    return run_once(draw)


def trial_rows(
    model: RewardModel, values: Mapping[str, Array], per_arm: int, seed: int, examples: Interaction | None = None
) -> Interaction:
    """Return rows with different rewards on every arm, in contexts about the example; impossible ones are masked.

    Args:
        examples: rows that come last.
    """
    rng = np.random.default_rng(seed)
    arm = jnp.tile(jnp.arange(model.num_arms), per_arm)
    picks = rng.integers(0, 1 << 20, size=(arm.size, len(model.outcomes)))

    context = model.varied_context_rows(rng, np.zeros(arm.size, bool))
    reward, is_possible = feasible_rewards(
        model.program, dict(values), arm, context, model.outcome_kinds, jnp.asarray(picks)
    )
    rows = Interaction(arm, reward, context, is_possible)
    if examples is None:
        return rows
    more = jax.tree.map(jnp.asarray, examples._replace(mask=jnp.ones(len(examples.arm), bool)))
    both = [part._replace(reward=model.outcome_values(part.reward)) for part in (rows, more)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)


def _measure(
    model: RewardModel, split: Split, examples: Interaction | None
) -> tuple[list[str], list[bool], Residual, Residual]:
    """Return the obstacles to a proof over the box, and the largest residuals over the outer values."""
    layout, centre = split.layout, jax.tree.map(jnp.asarray, split.centre)
    words: list[str] = []

    def at(values: Mapping[str, Array], rows: Interaction, places: Places) -> tuple[Residual, Residual]:
        view = given(model, values)

        def log_prior(point: Coordinates) -> Array:
            return view.log_prior(latents_at(layout, point))

        natural = jax.tree.map(lambda leaf: leaf[None], derive(layout, log_prior, centre))
        in_prior = worst_of(residual_of(layout, lambda point: log_prior(point)[None], natural, centre, places))

        def row_residual(row: Any) -> Residual:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            by_outcome = read_row(view, layout, centre, single)
            found = worst_of(residual_of(layout, log_likelihoods(view, layout, single), by_outcome, centre, places))
            is_finite = jnp.isfinite(view.log_likelihood(latents_at(layout, centre), single)[0])
            return _where(row.mask & is_finite, found)

        return in_prior, worst_of(jax.vmap(row_residual)(rows))

    def measure() -> tuple[list[Array], Residual, Residual]:
        outer = jax.tree.map(jnp.asarray, split.values)
        anywhere = {**latents_at(layout, centre), **{name: value[0] for name, value in outer.items()}}
        rows = trial_rows(model, anywhere, per_arm=2, seed=23, examples=examples)
        prior = jax.tree.map(jnp.asarray, split.prior)
        places = places_for(layout, prior, prior, _NUM_POINTS, _NUM_AT_HOME)
        in_prior, in_rows = jax.lax.map(lambda values: at(values, rows, places), outer)
        first = jax.tree.map(lambda leaf: leaf[:1], rows)
        said, happened = _obstacles(model, split, first, is_prior=True)

        def prove(row: Any) -> list[Array]:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            row_said, row_happened = _obstacles(model, split, single, is_prior=False)
            words[:] = said + row_said
            return row_happened

        in_each = jax.vmap(prove)(rows)
        assert rows.mask is not None
        flags = [*happened, *(jnp.any(flag & rows.mask) for flag in in_each)]
        return flags, worst_of(in_prior), worst_of(in_rows)

    flags, in_prior, in_rows = run_once(measure)
    return words, [bool(flag) for flag in flags], in_prior, in_rows


def _where(is_counted: Bool[Array, ""], residual: Residual) -> Residual:
    """Return a residual, or one that finds nothing."""
    nothing = Residual(*(jnp.asarray(x, residual.nats.dtype) for x in (0.0, 1.0, 0.0)))
    return jax.tree.map(lambda own, none: jnp.where(is_counted, own, none), residual, nothing)


def _obstacles(model: RewardModel, split: Split, row: Interaction, *, is_prior: bool) -> tuple[list[str], list[Array]]:
    """Return what could stand in the way of a proof with inner and outer sites both ranging over boxes."""
    both = split.layout._replace(sites=split.layout.sites + split.outer_box)
    view = model
    if is_prior and split.hidden:
        # What no inner site reaches need not be analytic: a density named as an outcome is no part of the prior.
        view = copy.copy(model)
        view.outcomes = (*model.outcomes, *split.hidden)
    found = analyticity(view, both, row.arm, row.context, model.outcome_values(row.reward), is_prior=is_prior)
    return [obstacle.reason for obstacle in found], [obstacle.is_present for obstacle in found]


def certify_rows(
    model: RewardModel,
    split: Split,
    centre: Coordinates,
    values: Mapping[str, Array],
    laws: Posterior,
    rows: Interaction,
) -> Float[Array, " N"]:
    """Certify rows at outer values, (V, ...) each, and return how close each row comes to failing: at most 1 if it does not.

    Each is compared with its affine form around the centre, and where the inner sites will be once these rows are absorbed. It
    is infinite for a row that the program cannot produce or whose proof fails, and 0 for a masked row.

    Args:
        laws: of the inner sites at these outer values, before these rows, precisions as arrows; (V, ...) each.
    """
    layout = split.layout

    def at(own: Mapping[str, Array], law: Posterior) -> tuple[Array, Array]:
        view = given(model, own)

        def read(row: Any) -> Natural:
            by_outcome = read_row(view, layout, centre, jax.tree.map(lambda leaf: leaf[None], row))
            return jax.tree.map(lambda leaf: jnp.where(row.mask, leaf, 0.0), by_outcome)

        by_outcomes = jax.vmap(read)(rows)
        total = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=(0, 1)), by_outcomes)
        there = recentre(layout, total, centre, coordinates_at(layout, law))[0]
        there = there._replace(quadratic=as_arrow(there.quadratic, *layout.leaves))
        after = absorb(layout, law, there, jnp.sum(row_mask(rows)))
        # Nothing is asked of places that an improper posterior would name.
        after = jax.tree.map(lambda new, old: jnp.where(is_proper(after), new, old), after, law)
        places = places_for(layout, law, after, _NUM_POINTS, _NUM_AT_HOME, centre=centre)

        def check(row: Any, by_outcome: Natural) -> tuple[Array, Array]:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            found = residual_of(layout, log_likelihoods(view, layout, single), by_outcome, centre, places)
            is_possible = jnp.array(True)
            for possible in view.in_support(latents_at(layout, centre), single).values():
                is_possible &= possible[0]
            return excess_of(worst_of(found)), is_possible

        return jax.vmap(check)(rows, by_outcomes)

    excess, is_possible = jax.vmap(at)(dict(values), laws)

    def is_proved(row: Any) -> Bool[Array, ""]:
        is_sound = (row.arm >= 0) & (row.arm < model.num_arms)
        single = jax.tree.map(lambda leaf: leaf[None], row)
        for happened in _obstacles(model, split, single, is_prior=False)[1]:
            is_sound &= ~happened
        return is_sound

    is_sound = jax.vmap(is_proved)(rows) & jnp.all(is_possible, axis=0)
    worst = jnp.max(jnp.where(jnp.isnan(excess), jnp.inf, excess), axis=0)
    return jnp.where(row_mask(rows), jnp.where(is_sound, worst, jnp.inf), 0.0)
