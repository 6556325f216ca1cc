"""Exact updates: rows of a chunk are read, certified and absorbed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.checks import Info, make_info
from ppl_bandit.engines.inner.density import Posterior, absorb, coordinates_at
from ppl_bandit.engines.inner.layout import REAL, Layout
from ppl_bandit.engines.inner.reading import ChunkEvidence, certify, read_rows
from ppl_bandit.engines.proof.certificate import excess_of, is_affine, worst_of
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_POINTS = (6, 4)  # random points of a certificate: around the point of reading, and where the posterior is


Absorb = Callable[..., tuple[Posterior, ChunkEvidence]]


def chunk_absorber(model: RewardModel, layout: Layout, discount: float = 1.0) -> Absorb:
    """Return (prior, posterior, rows, weights, variant, as_sum) -> (the posterior with the rows added, their evidence).

    The examination of a program and the
    updates of its engine call the same function, which is traced once for each number of rows.

    The rows have a mask, `weights` are those of their log likelihoods, and `variant` is that of the points. With `as_sum` the
    weighted sum of all rows is certified and, if that fails, every row, to find which one.
    """

    def absorb_chunk(
        prior: Posterior,
        posterior: Posterior,
        rows: Interaction,
        weights: Float[Array, " N"],
        variant: Int[Array, ""],
        *,
        as_sum: bool,
    ) -> tuple[Posterior, ChunkEvidence]:
        assert rows.mask is not None
        num_new = jnp.sum(rows.mask)
        after, evidence = certify(
            model,
            layout,
            posterior,
            rows,
            NUM_POINTS,
            weights=rows.mask * weights * discount ** (num_new - jnp.cumsum(rows.mask)),
            as_sum=as_sum,
            prior=prior,
            keep=discount**num_new if discount < 1.0 else None,
            variant=variant,
        )
        if not as_sum:
            return after, evidence
        evidence = evidence._replace(is_possible=jnp.broadcast_to(evidence.is_possible, rows.mask.shape))
        is_fine = jnp.all(is_affine(evidence.residuals)) & is_affine(evidence.in_prior) & evidence.is_held

        def each() -> tuple[Posterior, ChunkEvidence]:
            return absorb_chunk(prior, posterior, rows, weights, variant, as_sum=False)

        return jax.lax.cond(is_fine, lambda: (after, evidence), each)

    return jax.jit(absorb_chunk, static_argnames="as_sum")


def split_chunks(rows: Any, num_rows: int, size: int) -> tuple[Any, Array]:
    """Return rows as (chunks, size, ...), and whether each is a row of the input.

    The last chunk is padded with copies of the first row.

    Args:
        size: at most the number of rows.
    """
    num_chunks = -(-num_rows // size)
    index = jnp.arange(num_chunks * size)
    is_row = index < num_rows

    def split(leaf: Array) -> Array:
        leaf = jnp.asarray(leaf)
        return leaf[jnp.where(is_row, index, 0)].reshape((num_chunks, size, *leaf.shape[1:]))

    return jax.tree.map(split, rows), is_row.reshape(num_chunks, size)


def join_chunks(chunks: Any, num_rows: int) -> Any:
    """Undo `split_chunks`."""
    return jax.tree.map(lambda leaf: leaf.reshape((leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]))[:num_rows], chunks)


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
