"""The conjugate update: add the natural parameters of rows to the posterior, certified ones once, simulated ones many times."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.checks import Info, make_info
from ppl_bandit.engines.exact.certificate.certificate import excess_of, is_affine, worst_of
from ppl_bandit.engines.exact.certificate.chunks import Absorb, ChunkEvidence, join_chunks, split_chunks
from ppl_bandit.engines.exact.certificate.rows import read_rows
from ppl_bandit.engines.exact.families.layout import REAL, Layout
from ppl_bandit.engines.exact.families.posterior import Natural, Posterior, absorb, coordinates_at, relative_to
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.jax_adapter import outside_trace
from ppl_bandit.types import Interaction

__all__ = ["MAX_NUMBERS", "MAX_ROWS_AT_ONCE", "absorb_rows", "learn_in_chunks", "tabulate_rows"]

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


def tabulate_rows(
    model: RewardModel, layout: Layout, prior: Posterior, rows: Interaction
) -> Callable[[Posterior, Float[Array, " N"], Int[Array, ""]], Posterior] | None:
    """Return (posterior, weights, number of rows) -> the posterior with each row added as often as its weight says.

    The rows are read at the prior's means, and certificates are left out: this is for simulated rows. A weight may be negative
    where the sum over all rows is a likelihood.

    Returns:
        None if the program cannot produce a row, or its likelihood is not proved analytic.
    """
    with outside_trace(), jax.enable_x64(True):

        def read() -> tuple[Natural, Array]:
            centre = coordinates_at(layout, jax.tree.map(jnp.asarray, prior))
            readings = read_rows(model, layout, centre, rows)
            return jax.tree.map(lambda leaf: leaf.sum(axis=1), readings.naturals), readings.is_sound

        naturals, is_sound = run_once(read)
        start = jax.tree.map(np.asarray, coordinates_at(layout, prior))
        naturals = jax.tree.map(np.asarray, naturals)
    if not np.all(is_sound):
        return None

    def add(posterior: Posterior, weights: Float[Array, " N"], num_rows: Int[Array, ""]) -> Posterior:
        dtype = posterior.mean.dtype
        total = jax.tree.map(lambda leaf: jnp.tensordot(weights, jnp.asarray(leaf, dtype), axes=1), naturals)
        origin = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), start)
        total = relative_to(layout, total, origin, coordinates_at(layout, posterior))
        return absorb(layout, posterior, total, num_rows)

    return add
