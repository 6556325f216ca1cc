"""Inspect a split of a program: is the rest conjugate given the outer sites, for every value that they can take?

At one outer value the exact engine's examination finds families, proves and certifies. That it holds for all values is proved
on the same jaxpr with the outer sites ranging over their supports as well. If the densities that the inner sites reach are
polynomials of low degree whose coefficients are analytic in the outer sites, their deviation from affine is analytic too, and
an analytic function that vanishes at random points vanishes everywhere. So certificates at random outer values are valid for
all of them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.inner.density import (
    Coordinates,
    Posterior,
    coordinates_at,
    is_proper,
    latents_at,
    posterior_of,
)
from ppl_bandit.engines.inner.layout import Layout
from ppl_bandit.engines.inner.reading import certify, derive
from ppl_bandit.engines.proof.analyticity import Gap, not_conjugate
from ppl_bandit.engines.proof.certificate import NO_RESIDUAL, Evidence, Residual, excess_of, is_affine, worst_of
from ppl_bandit.engines.proof.examination import arrange, certify_prior, examine, trial_rows
from ppl_bandit.engines.proof.outer import BOXES, OuterSpace, box_of, dependence, given, outer_space
from ppl_bandit.engines.refusals import ANALYTIC_REMEDY, refusal, rounding_refusal
from ppl_bandit.engines.rows import row_mask
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Interaction

_NUM_POINTS = (12, 6)  # random points of a certificate: around the point of reading, and where the inner sites are


class Split(NamedTuple):
    """A program divided into outer sites and inner sites, which are conjugate given the outer ones.

    Attributes:
        space: the unconstrained space of the outer sites.
        layout: the families of the inner sites, the same for every outer value.
        prior: of the inner sites at one outer value.
        centre: the point at which densities of the inner sites are differentiated.
        values: outer values that were tried, by site, (V, ...) each; the first is that of `prior`.
        box: bounds between which the outer sites range in the proof.
        has_shared_statistics: whether the likelihood of a row depends on no outer site.
        evidence: that the inner sites are conjugate.
    """

    space: OuterSpace
    layout: Layout
    prior: Posterior
    centre: Coordinates
    values: dict[str, np.ndarray]
    box: dict[str, tuple[float, float]]
    has_shared_statistics: bool
    evidence: Evidence

    def contains(self, values: Mapping[str, Array]) -> Bool[Array, ""]:
        """Return whether the proof covers outer values."""
        inside = [(values[name] >= low) & (values[name] <= high) for name, (low, high) in self.box.items()]
        return jnp.all(jnp.stack([jnp.all(own) for own in inside]))


def inspect(
    model: RewardModel, names: tuple[str, ...], supports: Mapping[str, Any], examples: Interaction | None = None
) -> Split:
    """Return the split of a program at the outer sites `names`, or refuse; runs in float64.

    Args:
        examples: rows to certify beside the trial rows.

    Raises:
        NotConjugate: with the obstacle or the residual.
    """
    outer = ", ".join(names)
    for name in names:
        if supports[name] is None:
            raise refusal(
                model, f"has an outer site '{name}' whose support depends on another latent", "give it a fixed support"
            )
    space = outer_space(model, names, supports)
    inner = tuple(name for name in model.latent_shapes if name not in names)
    reached = dependence(model, model.latent_shapes)
    hidden = tuple(name for name in names if not reached[name] & set(inner))
    is_shared = not any(reached[name] & set(names) for name in model.outcomes)
    values = _try_values(model, space, max(16, 4 * space.size + 8))
    view = given(model, {name: value[0] for name, value in values.items()})
    layout = arrange(view, around_cores=True)
    box, gap = _prove(model, layout, space, supports, hidden)
    if gap is not None:
        raise refusal(
            model, f"cannot be proved conjugate for every value of {outer}: {gap.reason}", gap.remedy or ANALYTIC_REMEDY
        )
    prior, evidence = examine(view, layout)
    centre = jax.device_get(coordinates_at(layout, prior))
    split = Split(space, layout, prior, centre, values, box, is_shared, evidence)
    in_prior, in_rows = _measure(model, split, examples)
    if not (excess_of(in_prior) <= 1.0 and excess_of(in_rows) <= 1.0):
        what, residual = ("prior", in_prior) if excess_of(in_prior) > 1.0 else ("likelihood", in_rows)
        if what == "prior" and (residual.nats <= residual.tolerance or not residual.nats < np.inf):
            raise rounding_refusal(model, layout, residual, f" at some values of {outer}")
        raise refusal(
            model,
            f"is not conjugate given {outer}: the {what} is conjugate at one value of these, but not at others",
            "see what changes the family: a power, or which reals a scale multiplies, must not depend on outer sites",
            f"the log {what} is not affine in the sufficient statistics; residual {float(residual.nats):.1e} nats",
        )
    worst_prior = max(evidence.prior, in_prior, key=lambda found: float(excess_of(found)))
    worst_row = max(evidence.likelihood, in_rows, key=lambda found: float(excess_of(found)))
    return split._replace(evidence=evidence._replace(prior=worst_prior, likelihood=worst_row))


def _prove(
    model: RewardModel, layout: Layout, space: OuterSpace, supports: Mapping[str, Any], hidden: tuple[str, ...]
) -> tuple[dict[str, tuple[float, float]], Gap | None]:
    """Return the box of outer values for which the rest is proved conjugate, and where the proof stops if there is none."""
    # What depends on no inner site need not be analytic. A density named as an outcome is not part of the prior.
    view = model.replaced(outcomes=(*model.outcomes, *hidden))

    def gap_of(own: RewardModel, box: dict[str, tuple[float, float]], *, is_prior: bool) -> Gap | None:
        return not_conjugate(own, layout, is_prior=is_prior, outer=box)

    for largest in BOXES:
        box = box_of(model, space, supports, largest)
        gap = gap_of(view, box, is_prior=True) or gap_of(model, box, is_prior=False)
        if gap is None:
            break
    return box, gap


def _try_values(model: RewardModel, space: OuterSpace, num_values: int) -> dict[str, np.ndarray]:
    """Return outer values near the middle of the prior, (V, ...) each: values in heavy tails may overflow."""

    def draw() -> dict[str, Array]:
        prior = model.sample_prior(jr.key(17), 64)
        positions = jax.vmap(space.unconstrain)({name: prior[name] for name in space.names})
        middle = jnp.median(positions, axis=0)
        spread = 1.5 * jnp.median(jnp.abs(positions - middle), axis=0)
        steps = np.random.default_rng(19).uniform(-1.6, 1.6, size=(num_values, space.size))
        return jax.vmap(lambda position: space.constrain(position)[0])(middle + spread * steps)

    return run_once(draw)


def masked_trial_rows(
    model: RewardModel,
    values: Mapping[str, Array],
    per_arm: int,
    seed: int,
    examples: Interaction | None = None,
    *,
    is_systematic: bool = False,
) -> Interaction:
    """Return trial rows, of which impossible ones are masked, followed by example rows; see `trial_rows`."""
    rows, is_feasible = trial_rows(model, values, per_arm, seed, is_systematic=is_systematic)
    rows = rows._replace(mask=is_feasible)
    if examples is None:
        return rows
    more = jax.tree.map(jnp.asarray, examples._replace(mask=jnp.ones(len(examples.arm), bool)))
    both = [part._replace(reward=model.outcome_values(part.reward)) for part in (rows, more)]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *both)


def _measure(model: RewardModel, split: Split, examples: Interaction | None) -> tuple[Residual, Residual]:
    """Return the largest residuals of prior and rows over the outer values."""
    layout, centre = split.layout, jax.tree.map(jnp.asarray, split.centre)
    first_prior = jax.tree.map(jnp.asarray, split.prior)

    def certify_at(values: Mapping[str, Array], rows: Interaction) -> tuple[Residual, Residual, Array]:
        """Return the residuals of the prior and of each row at outer values, and which rows are possible there."""
        view = given(model, values)

        def log_prior(point: Coordinates) -> Array:
            return view.log_prior(latents_at(layout, point))

        natural = derive(layout, log_prior, centre)
        prior = posterior_of(layout, natural, centre)
        # Where the prior at this outer value has its mass: elsewhere the terms of a tight prior are large, and so is rounding.
        prior = jax.tree.map(lambda own, first: jnp.where(is_proper(prior), own, first), prior, first_prior)
        in_prior = certify_prior(layout, log_prior, natural, prior, _NUM_POINTS, centre)
        _, found = certify(view, layout, prior, rows, _NUM_POINTS, centre=centre, after=prior)
        is_possible = row_mask(rows) & found.is_possible
        in_rows = jax.tree.map(lambda own, none: jnp.where(is_possible, own, none), found.residuals, NO_RESIDUAL)
        return in_prior, in_rows, is_possible

    def measure() -> tuple[Residual, Residual]:
        outer = jax.tree.map(jnp.asarray, split.values)
        latents = {**latents_at(layout, centre), **{name: value[0] for name, value in outer.items()}}
        rows = masked_trial_rows(model, latents, per_arm=2, seed=23, examples=examples)
        in_prior, in_rows, is_possible = jax.lax.map(lambda values: certify_at(values, rows), outer)
        # Rewards so far from the prior that rounding hides a deviation are no evidence, if their arm has other rows that are.
        is_hidden = (in_rows.nats <= in_rows.tolerance) & ~is_affine(in_rows)
        is_of_arm = rows.arm[:, None] == jnp.arange(model.num_arms)
        needed, tested = (
            jnp.any(own[..., None] & is_of_arm, axis=1) for own in (is_hidden, is_possible & is_affine(in_rows))
        )
        has_evidence = jnp.all(tested | ~needed)
        in_rows = jax.tree.map(lambda own, none: jnp.where(is_hidden & has_evidence, none, own), in_rows, NO_RESIDUAL)
        return worst_of(in_prior), worst_of(jax.tree.map(jnp.ravel, in_rows))

    return run_once(measure)


def certificate_excess(
    model: RewardModel,
    split: Split,
    centre: Coordinates,
    values: Mapping[str, Array],
    laws: Posterior,
    rows: Interaction,
) -> Float[Array, " N"]:
    """Certify rows at outer values, (V, ...) each, and return how close each row comes to failing: at most 1 if certified.

    Each row is compared with its affine form around the centre and where the inner sites are once these rows are absorbed. The
    result is infinite for a row that the program cannot produce, and 0 for a masked row.

    Args:
        laws: of the inner sites at these outer values, before these rows, with precisions as arrows; (V, ...) each.
    """
    layout, rows = split.layout, rows._replace(mask=row_mask(rows))

    def excess_at(own: Mapping[str, Array], law: Posterior) -> Float[Array, " N"]:
        view = given(model, own)
        _, found = certify(view, layout, law, rows, _NUM_POINTS, centre=centre)
        return excess_of(found.residuals)

    return jnp.max(jax.vmap(excess_at)(dict(values), laws), axis=0)
