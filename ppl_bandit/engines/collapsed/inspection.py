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
from ppl_bandit.engines.exact.certificate import Evidence, certify_row, residual_of, tolerance
from ppl_bandit.engines.exact.examination import examine
from ppl_bandit.engines.exact.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    SiteBlock,
    coordinates_at,
    derive,
    latents_at,
)
from ppl_bandit.engines.exact.proof import analyticity
from ppl_bandit.numerics.compilation import run_once
from ppl_bandit.program.probing import feasible_rewards
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["Split", "certify_rows", "inspect", "trial_rows", "try_values"]

_NUM_VALUES = 12  # outer values at which the inner sites are certified when the engine is built
_NUM_DATUM_POINTS = 6  # random points at which a datum is certified, each at two particles' outer values


class Split(NamedTuple):
    """A program cut in two.

    Attributes:
        space: where the outer sites live.
        layout: the families of the inner sites, the same for every outer value.
        prior: of the inner sites at one outer value.
        centre: the point at which densities of the inner sites are read.
        offsets: displacements for certificates.
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
    offsets: Coordinates
    values: dict[str, np.ndarray]
    outer_box: tuple[SiteBlock, ...]
    contains: Callable[[Mapping[str, Array]], Bool[Array, ""]]
    has_shared_statistics: bool
    hidden: tuple[str, ...]
    evidence: Evidence


def inspect(model: RewardModel, names: tuple[str, ...], supports: Mapping[str, Any]) -> Split:
    """Return the split of a program at the outer sites `names`, or refuse; runs in float64.

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
    values = try_values(model, space, _NUM_VALUES)
    layout, prior, offsets, evidence = examine(given(model, {name: value[0] for name, value in values.items()}))
    centre = jax.device_get(coordinates_at(layout, prior))
    split = Split(
        space, layout, prior, centre, offsets, values, (), lambda _: jnp.array(True), is_shared, hidden, evidence
    )
    for is_whole in (True, False):
        box, contains = box_of(model, space, supports, is_whole=is_whole)
        split = split._replace(outer_box=box, contains=contains)
        words, happened, prior_residual, row_residual = _measure(model, split)
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
    if not (prior_residual <= tolerance() and row_residual <= tolerance()):
        what, residual = ("prior", prior_residual) if prior_residual > tolerance() else ("likelihood", row_residual)
        raise report.refusal(
            model,
            f"is not conjugate given {', '.join(names)}: the log {what} is affine in the sufficient statistics at one value of "
            f"these but not at others - relative residual {residual:.1e}",
            "see what changes the family: a power, or which reals a scale multiplies, must not depend on outer sites",
        )
    residuals = max(evidence.prior_residual, prior_residual), max(evidence.likelihood_residual, row_residual)
    return split._replace(evidence=evidence._replace(prior_residual=residuals[0], likelihood_residual=residuals[1]))


def try_values(model: RewardModel, space: OuterSpace, num_values: int) -> dict[str, np.ndarray]:
    """Return outer values about the middle of the prior, (V, ...) each: its tails may be too heavy to compute with."""

    def draw() -> dict[str, Array]:
        prior = model.sample_prior(jr.key(17), 64)
        positions = jax.vmap(space.unconstrain)({name: prior[name] for name in space.names})
        middle = jnp.median(positions, axis=0)
        spread = 1.5 * jnp.median(jnp.abs(positions - middle), axis=0)
        steps = np.random.default_rng(19).uniform(-1.6, 1.6, size=(num_values, space.size))
        return jax.vmap(lambda position: space.constrain(position)[0])(middle + spread * steps)

    return run_once(draw)


def trial_rows(model: RewardModel, values: Mapping[str, Array], per_arm: int, seed: int) -> Interaction:
    """Return rows with different rewards on every arm, in contexts about the example; impossible ones are masked."""
    rng = np.random.default_rng(seed)
    arm = jnp.tile(jnp.arange(model.num_arms), per_arm)
    picks = rng.integers(0, 1 << 20, size=(arm.size, len(model.outcomes)))

    def varied(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return leaf * rng.uniform(0.25, 1.0, size=leaf.shape)

    context = model.context_rows(arm.size)
    context = None if context is None else jax.tree.map(varied, context)
    reward, is_possible = feasible_rewards(
        model.program, dict(values), arm, context, model.outcome_kinds, jnp.asarray(picks)
    )
    return Interaction(arm, reward, context, is_possible)


def _measure(model: RewardModel, split: Split) -> tuple[list[str], list[bool], float, float]:
    """Return the obstacles to a proof over the box, and the largest residuals over the outer values."""
    layout, centre = split.layout, jax.tree.map(jnp.asarray, split.centre)
    words: list[str] = []

    def at(values: Mapping[str, Array], rows: Interaction) -> tuple[Array, Array]:
        view = given(model, values)

        def log_prior(point: Coordinates) -> Array:
            return view.log_prior(latents_at(layout, point))

        in_prior = residual_of(layout, log_prior, derive(layout, log_prior, centre), centre, split.offsets)

        def row_residual(row: Any) -> Array:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            _, residual = certify_row(view, layout, centre, split.offsets, single)
            is_finite = jnp.isfinite(view.log_likelihood(latents_at(layout, centre), single)[0])
            return jnp.where(row.mask & is_finite, residual, 0.0)

        return in_prior, jnp.max(jax.vmap(row_residual)(rows))

    def measure() -> tuple[list[Array], Array, Array]:
        outer = jax.tree.map(jnp.asarray, split.values)
        anywhere = {**latents_at(layout, centre), **{name: value[0] for name, value in outer.items()}}
        rows = trial_rows(model, anywhere, per_arm=2, seed=23)
        in_prior, in_rows = jax.lax.map(lambda values: at(values, rows), outer)
        first = jax.tree.map(lambda leaf: leaf[:1], rows)
        said, happened = _obstacles(model, split, first, is_prior=True)

        def prove(row: Any) -> list[Array]:
            single = jax.tree.map(lambda leaf: leaf[None], row)
            row_said, row_happened = _obstacles(model, split, single, is_prior=False)
            words[:] = said + row_said
            return row_happened

        in_each = jax.vmap(prove)(rows)
        flags = [*happened, *(jnp.any(flag & rows.mask) for flag in in_each)]
        return flags, jnp.max(in_prior), jnp.max(in_rows)

    flags, in_prior, in_rows = run_once(measure)
    return words, [bool(flag) for flag in flags], float(in_prior), float(in_rows)


def _obstacles(model: RewardModel, split: Split, row: Interaction, *, is_prior: bool) -> tuple[list[str], list[Array]]:
    """Return what could stand in the way of a proof with inner and outer sites both ranging over boxes."""
    both = split.layout._replace(sites=split.layout.sites + split.outer_box)
    view = model
    if is_prior and split.hidden:
        # What no inner site reaches need not be analytic: a density named as an outcome is no part of the prior.
        view = copy.copy(model)
        view.outcomes = (*model.outcomes, *split.hidden)
    found = analyticity(view, both, row.arm, row.context, model.outcome_values(row.reward), is_prior=is_prior)
    return [obstacle.words for obstacle in found], [obstacle.happened for obstacle in found]


def certify_rows(
    model: RewardModel,
    split: Split,
    centre: Coordinates,
    values: Mapping[str, Array],
    rows: Interaction,
) -> tuple[Natural, Float[Array, " N"]]:
    """Certify rows at outer values, (V, ...) each, and return what they add at the first of them with each row's residual.

    A residual is infinite for a row that the program cannot produce or whose proof fails, and 0 for a masked row.
    """
    layout = split.layout
    offsets = jax.tree.map(lambda leaf: leaf[:_NUM_DATUM_POINTS], split.offsets)

    def certify_one(row: Any) -> tuple[Natural, Float[Array, ""]]:
        single = jax.tree.map(lambda leaf: leaf[None], row)

        def at(own: Mapping[str, Array]) -> tuple[Natural, Array, Array]:
            view = given(model, own)
            natural, residual = certify_row(view, layout, centre, offsets, single)
            is_possible = jnp.array(True)
            for possible in view.in_support(latents_at(layout, centre), single).values():
                is_possible &= possible[0]
            return natural, residual, is_possible

        naturals, residuals, is_possible = jax.vmap(at)(dict(values))
        is_sound = (row.arm >= 0) & (row.arm < model.num_arms) & jnp.all(is_possible)
        for happened in _obstacles(model, split, single, is_prior=False)[1]:
            is_sound &= ~happened
        natural = jax.tree.map(lambda leaf: jnp.where(row.mask, leaf[0], 0.0), naturals)
        return natural, jnp.where(row.mask, jnp.where(is_sound, jnp.max(residuals), jnp.inf), 0.0)

    return jax.vmap(certify_one)(rows)
