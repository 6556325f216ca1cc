"""Read and certify many rows as one: the log likelihood of all of them is affine, or it is not.

A posterior adds up the log likelihoods of its rows, and only their sum has to be affine in the sufficient statistics. So many
rows are read by the derivatives of the sum and certified by its values, at a fraction of what each by itself would cost.
Deviations of single rows cannot hide in it: what cancels in the sum at random points is not in the posterior either.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.certificate.certificate import Places, Residual, residual_of
from ppl_bandit.engines.exact.families.derivation import derive
from ppl_bandit.engines.exact.families.element_blocks import joined, map_blocks
from ppl_bandit.engines.exact.families.families import Coordinates, Layout, Natural, latents_at
from ppl_bandit.engines.exact.proof.analyticity import analyticity
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import log_prob
from ppl_bandit.types import Interaction

__all__ = ["check_together", "read_together"]


def read_together(
    model: RewardModel, layout: Layout, centre: Coordinates, rows: Interaction, weights: Float[Array, " N"]
) -> tuple[Natural, Bool[Array, ""]]:
    """Return the natural parameters of weighted rows, added up, with a leading axis over groups of outcomes.

    Returns:
        The parameters, and whether the program can produce every row and is analytic for it.
    """
    rows = _filled(rows)
    num_groups = len(model.outcome_groups)

    def of_group(one: Float[Array, " groups"]) -> Natural:
        return derive(layout, lambda point: one @ _by_group(model, layout, point, rows, weights)[0], centre)

    if num_groups == 1:
        naturals = map_blocks(lambda leaf: leaf[None], of_group(jnp.ones(1)))
    else:
        naturals = jax.vmap(of_group)(jnp.eye(num_groups))
    outcomes = model.outcome_values(rows.reward)
    is_sound = jnp.all((rows.arm >= 0) & (rows.arm < model.num_arms))
    for possible in model.in_support(latents_at(layout, centre), rows).values():
        is_sound &= jnp.all(possible)
    for obstacle in analyticity(model, layout, rows.arm, rows.context, outcomes, is_prior=False):
        is_sound &= ~obstacle.is_present
    return naturals, is_sound


def check_together(
    model: RewardModel,
    layout: Layout,
    prior: Natural,
    by_group: Natural,
    centre: Coordinates,
    places: Places,
    rows: Interaction,
    weights: Float[Array, " N"],
) -> Residual:
    """Compare the prior and the sum of weighted rows with their affine forms, in this order; outcomes by group."""
    rows = _filled(rows)

    def evaluate(point: Coordinates) -> Float[Array, " terms"]:
        terms, prior = _by_group(model, layout, point, rows, weights)
        return jnp.concatenate([prior[None], terms])

    naturals = jax.tree.map(lambda first, rest: joined(first[None], rest), prior, by_group)
    return residual_of(layout, evaluate, naturals, centre, places, rows.arm.shape[0])


def _by_group(
    model: RewardModel, layout: Layout, point: Coordinates, rows: Interaction, weights: Float[Array, " N"]
) -> tuple[Float[Array, " groups"], Float[Array, ""]]:
    """Return the log likelihood of weighted rows by group of outcomes, and the log prior."""
    trace = model.trace(latents_at(layout, point), rows.arm, rows.context, model.outcome_values(rows.reward))
    by_outcome = {name: weights @ log_prob(trace[name]) for name in model.outcomes}
    terms = [jnp.asarray(sum(by_outcome[name] for name in group)) for group in model.outcome_groups]
    return jnp.stack(terms), model.log_prior_of(trace)


def _filled(rows: Any) -> Interaction:
    """Return rows of which those that do not count are copies of one that does: they may hold what has no derivative."""
    source = jnp.where(rows.mask, jnp.arange(rows.mask.shape[0]), jnp.argmax(rows.mask))
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[source], rows._replace(mask=None))
