"""The exact engine: prove that a program is conjugate, derive its updates, certify every datum.

There is no table of likelihoods. A likelihood is conjugate to a prior exactly when its log is affine in the prior's
sufficient statistics, which can be proved (`proof`), derived (`families`) and certified (`certificate`) for any program.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact import report
from ppl_bandit.engines.exact.certificate import certify_row, tolerance
from ppl_bandit.engines.exact.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.examination import examine
from ppl_bandit.engines.exact.families import (
    Coordinates,
    Layout,
    Natural,
    Posterior,
    absorb,
    coordinates_at,
    forget,
    is_proper,
    latents_at,
    sample,
    total_of,
)
from ppl_bandit.engines.exact.marginals import marginals_of
from ppl_bandit.engines.exact.proof import analyticity
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Interaction, Key

__all__ = ["Certificates", "conjugate"]

_NUM_POINTS = 6
_CHUNK_ELEMENTS = 1 << 20  # second derivatives of rows held at once


class Certificates(NamedTuple):
    """Evidence of an update, per row.

    Attributes:
        is_trusted: whether every row is certified and their posterior is a proper one in jax's precision; if not, nothing
            is absorbed.
        is_certified: whether the row's likelihood is proved analytic and found affine in the sufficient statistics.
        residual: largest relative deviation from affine that was found; infinite for a row that the program cannot produce
            or whose proof fails, 0 for a masked row.
    """

    is_trusted: Bool[Array, ""]
    is_certified: Bool[Array, " N"]
    residual: Float[Array, " N"]


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
        layout, prior, offsets, evidence = examine(model)
    offsets = jax.tree.map(lambda leaf: leaf[:_NUM_POINTS], offsets)

    def init(key: Key) -> Posterior:
        del key  # the prior is not random
        return jax.tree.map(jnp.asarray, prior)

    def update(key: Key, state: Posterior, interaction: Interaction) -> tuple[Posterior, Certificates]:
        return _update(model, layout, offsets, init(key) if discount < 1.0 else None, discount, state, interaction)

    def draw(key: Key, state: Posterior, num_samples: int) -> Draws:
        return sample(layout, key, state, num_samples)

    def parameters(state: Posterior) -> dict[str, dict[str, np.ndarray]]:
        return report.parameters(layout, state)

    return Engine(
        init,
        update,
        draw,
        report.accepted(model, layout, prior, evidence, discount),
        parameters,
        marginals=marginals_of(model, layout),
        settings={"discount": discount},
    )


def _update(
    model: RewardModel,
    layout: Layout,
    offsets: Coordinates,
    prior: Posterior | None,
    discount: float,
    state: Posterior,
    interaction: Interaction,
) -> tuple[Posterior, Certificates]:
    """Absorb rows in chunks: within a chunk all rows are read at the same means, so that their parameters add up.

    Args:
        prior: what a discounted posterior decays to; None without a discount.
    """
    num_rows = interaction.arm.shape[0]
    if interaction.mask is None:
        interaction = interaction._replace(mask=jnp.ones(num_rows, bool))
    num_real = layout.count("real")
    num_chunk = max(
        1, min(num_rows, 256, _CHUNK_ELEMENTS // max(1, num_real * max(layout.free.size, layout.members.shape[1])))
    )
    chunks, is_row = split_chunks(interaction, num_rows, num_chunk)
    chunks = chunks._replace(mask=chunks.mask & is_row)

    def absorb_chunk(posterior: Posterior, rows: Any) -> tuple[Posterior, Array]:
        centre = coordinates_at(layout, posterior)
        naturals, residuals = jax.vmap(lambda row: _read_row(model, layout, offsets, centre, row))(rows)
        num_new = jnp.sum(rows.mask)
        if prior is None:
            return absorb(layout, posterior, total_of(naturals), num_new), residuals
        num_later = num_new - jnp.cumsum(rows.mask)
        weighted = jax.vmap(lambda natural, age: jax.tree.map(lambda leaf: discount**age * leaf, natural))(
            naturals, num_later
        )
        kept, share = forget(posterior, prior, discount**num_new)
        return absorb(layout, kept, jax.tree.map(jnp.add, total_of(weighted), share), num_new), residuals

    after, residuals = jax.lax.scan(absorb_chunk, state, chunks)
    residual = join_chunks(residuals, num_rows)
    is_certified = residual <= tolerance()
    is_sound = jnp.all(is_certified) & is_proper(after)
    return jax.tree.map(lambda new, old: jnp.where(is_sound, new, old), after, state), Certificates(
        is_sound, is_certified, residual
    )


def _read_row(
    model: RewardModel, layout: Layout, offsets: Coordinates, centre: Coordinates, row: Any
) -> tuple[Natural, Float[Array, ""]]:
    single = jax.tree.map(lambda leaf: leaf[None], row)
    natural, residual = certify_row(model, layout, centre, offsets, single)
    # A program may branch on its data, so that what was proved of other rows need not hold for this one.
    obstacles = analyticity(
        model, layout, single.arm, single.context, model.outcome_values(single.reward), is_prior=False
    )
    is_sound = (row.arm >= 0) & (row.arm < model.num_arms)
    for possible in model.in_support(latents_at(layout, centre), single).values():
        is_sound &= possible[0]
    for obstacle in obstacles:
        is_sound &= ~obstacle.happened
    # Padding may hold anything, even what has no finite derivative.
    natural = jax.tree.map(lambda leaf: jnp.where(row.mask, leaf, 0.0), natural)
    return natural, jnp.where(row.mask, jnp.where(is_sound, residual, jnp.inf), 0.0)
