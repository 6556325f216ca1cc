"""The conjugate update: add the natural parameters of rows to the posterior, certified, or as they are for simulated rows."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from ppl_bandit.engines.checks import Info, make_info
from ppl_bandit.engines.exact.certificate.certificate import excess_of, is_affine, worst_of
from ppl_bandit.engines.exact.certificate.chunks import Absorb, ChunkEvidence, join_chunks, split_chunks
from ppl_bandit.engines.exact.certificate.rows import read_rows
from ppl_bandit.engines.exact.families.layout import REAL, Layout
from ppl_bandit.engines.exact.families.posterior import Posterior, absorb, coordinates_at
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

MAX_ROWS_AT_ONCE = 256  # whose certificates are evaluated together
MAX_NUMBERS = 1 << 20  # second derivatives or statistics of rows, held at once


def learn_in_chunks(
    learn_chunk: Callable[[Any, Interaction], tuple[Any, ChunkEvidence]],
    state: Any,
    interaction: Interaction,
    chunk_size: int,
) -> tuple[Any, Info]:
    """Learn rows in chunks; return the old state if anything is not certified.

    Args:
        learn_chunk: (state, rows with a mask) -> the state after them, and their evidence.
    """
    num_rows = interaction.arm.shape[0]
    if interaction.mask is None:
        interaction = interaction._replace(mask=jnp.ones(num_rows, bool))
    chunks, is_row = split_chunks(interaction, num_rows, chunk_size)
    chunks = chunks._replace(mask=chunks.mask & is_row)
    after, found = jax.lax.scan(learn_chunk, state, chunks)
    residuals, in_prior, is_held = (
        join_chunks(found.residuals, num_rows),
        worst_of(found.in_prior),
        jnp.all(found.is_held),
    )
    info = make_info(
        {"certificate": jnp.maximum(jnp.max(excess_of(residuals)), excess_of(in_prior)), "precision": ~is_held},
        permanent=["certificate", "precision"],
        is_sound=jnp.all(is_affine(residuals)) & jnp.all(is_affine(found.in_prior)) & is_held,
        residual=residuals,
        prior_residual=in_prior,
    )
    return jax.tree.map(lambda new, old: jnp.where(info.is_trusted, new, old), after, state), info


def absorb_rows(
    layout: Layout, absorb_chunk: Absorb, prior: Posterior, state: Posterior, interaction: Interaction
) -> tuple[Posterior, Info]:
    """Return the posterior with rows added, and their certificates; the old posterior if anything is not certified.

    Args:
        absorb_chunk: from `chunk_absorber`.
    """
    num_rows = interaction.arm.shape[0]
    num_per_row = max(1, layout.count(REAL) * layout.members.shape[1])
    chunk_size = max(1, min(num_rows, MAX_ROWS_AT_ONCE, MAX_NUMBERS // num_per_row))
    # A sum takes a tenth of the time and doubles what is compiled, which pays for several chunks.
    is_long = num_rows > chunk_size and state.mean.dtype == jnp.float64
    weights, variant = jnp.ones(chunk_size, state.mean.dtype), jnp.zeros((), int)

    def learn_chunk(posterior: Posterior, rows: Interaction) -> tuple[Posterior, ChunkEvidence]:
        return absorb_chunk(prior, posterior, rows, weights, variant, as_sum=is_long)

    return learn_in_chunks(learn_chunk, state, interaction, chunk_size)


def add_rows(
    model: RewardModel, layout: Layout, state: Posterior, rows: Interaction
) -> tuple[Posterior, Bool[Array, ""]]:
    """Return the posterior with rows added, and whether all of them could be read; the old posterior if not.

    Certificates are left out: this is for rows that the program itself has simulated. The sum of their log likelihoods is read
    once.
    """
    if rows.mask is None:
        rows = rows._replace(mask=jnp.ones(rows.arm.shape, bool))
    assert rows.mask is not None
    weights = rows.mask.astype(state.mean.dtype)
    readings = read_rows(model, layout, coordinates_at(layout, state), rows, weights=weights)
    total = jax.tree.map(lambda leaf: leaf[0].sum(axis=0), readings.naturals)  # over the groups of outcomes
    is_sound = readings.is_sound[0]
    return absorb(layout, state, total, jnp.where(is_sound, jnp.sum(rows.mask), 0)), is_sound | ~jnp.any(rows.mask)
