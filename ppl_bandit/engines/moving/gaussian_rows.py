"""Laws of the Gaussian blocks of a program given its other latents, without certificates, for many values at once."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.engines.collapsed.outer import given
from ppl_bandit.engines.exact.families.derivation import derive
from ppl_bandit.engines.exact.families.gaussian import blocks_of, solve_blocks, times_blocks
from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.engines.exact.families.posterior import Coordinates, Natural, Posterior, latents_at, posterior_of
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["RowForm", "absorb_form", "log_determinant", "prior_law", "read_row"]


class RowForm(NamedTuple):
    """The log likelihood of a row as a quadratic form about a centre: its value there, and its coefficients."""

    value: Float[Array, ""]
    natural: Natural


def read_row(
    model: RewardModel, layout: Layout, centre: Coordinates, values: Mapping[str, Array], row: Interaction
) -> RowForm:
    """Return the quadratic form of a row's log likelihood in the latents of a layout, with the others fixed to values."""
    view, single = given(model, values), jax.tree.map(lambda leaf: leaf[None], row._replace(mask=None))

    def log_likelihood(point: Coordinates) -> Array:
        return view.log_likelihood(latents_at(layout, point), single)[0]

    return RowForm(log_likelihood(centre), derive(layout, log_likelihood, centre))


def absorb_form(
    layout: Layout, centre: Coordinates, law: Posterior, form: RowForm
) -> tuple[Posterior, Float[Array, ""]]:
    """Return the law after a row, and the log of the row's predictive density.

    With the form g'd - d'H d / 2 relative to the mean, the predictive density is the likelihood at the mean, times
    sqrt(|P| / |P + H|) exp(g' inverse(P + H) g / 2), where P is the precision.
    """
    x = law.mean - blocks_of(layout, centre.real)
    bend = times_blocks(form.natural.quadratic, x)
    linear = form.natural.linear - bend
    at_mean = form.value + jnp.sum((form.natural.linear - 0.5 * bend) * x)
    precision = law.precision + form.natural.quadratic
    shift = solve_blocks(precision, linear)
    change = log_determinant(law.precision) - log_determinant(precision)
    log_density = at_mean + 0.5 * (change + jnp.sum(linear * shift))
    return law._replace(mean=law.mean + shift, precision=precision, num_rows=law.num_rows + 1), log_density


def prior_law(
    model: RewardModel, layout: Layout, centre: Coordinates, values: Mapping[str, Array]
) -> tuple[Posterior, Float[Array, ""]]:
    """Return the law of the latents of a layout at the first step given the others, and the log prior density of those."""
    view = given(model, values)

    def log_prior(point: Coordinates) -> Array:
        return view.log_prior(latents_at(layout, point))

    natural = derive(layout, log_prior, centre)
    law = posterior_of(layout, natural, centre)
    x = law.mean - blocks_of(layout, centre.real)
    at_mean = log_prior(centre) + jnp.sum((natural.linear - 0.5 * times_blocks(natural.quadratic, x)) * x)
    log_peak = 0.5 * (log_determinant(law.precision) - layout.is_member.sum() * jnp.log(2 * jnp.pi))
    return law, at_mean - log_peak


def log_determinant(precision: Float[Array, "R S S"]) -> Float[Array, ""]:
    """Return the log determinant of all blocks."""
    if precision.shape[-1] == 1:
        return jnp.sum(jnp.log(precision))
    return jnp.sum(jnp.linalg.slogdet(precision)[1])
