"""Absorb rows in certified chunks of equal size, so that memory is bounded and shapes are fixed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.certificate.certificate import Residual, is_affine
from ppl_bandit.engines.exact.certificate.rows import certify, read_rows
from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.engines.exact.families.posterior import (
    Posterior,
    absorb,
    coordinates_at,
    discount_towards_prior,
    is_resolved,
    natural_of,
    relative_to,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

NUM_POINTS = (6, 4)  # random points of a certificate: around the point of reading, and where the posterior is


class ChunkEvidence(NamedTuple):
    """The evidence for a chunk of N rows.

    Attributes:
        residuals: of the rows; infinite for a row that the program cannot produce, 0 for a masked one.
        in_prior: how far the prior is from affine where the posterior is now.
        is_possible: whether the program can produce each row, or, of a sum, all rows that count.
        is_held: whether jax's precision holds the posterior.
    """

    residuals: Residual
    in_prior: Residual
    is_possible: Bool[Array, "..."]
    is_held: Bool[Array, ""]


Absorb = Callable[..., tuple[Posterior, ChunkEvidence]]


def chunk_absorber(model: RewardModel, layout: Layout, discount: float = 1.0) -> Absorb:
    """Return (prior, posterior, rows, weights, variant, as_sum) -> (the posterior with the rows added, their evidence).

    All rows of a chunk are read at the same means, so that their parameters add up. The examination of a program and the
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
        centre, num_new = coordinates_at(layout, posterior), jnp.sum(rows.mask)
        counted = rows.mask * weights * discount ** (num_new - jnp.cumsum(rows.mask))
        weights_of_sum = counted if as_sum else None
        readings = read_rows(model, layout, centre, rows, weights=weights_of_sum)
        naturals = jax.tree.map(lambda leaf: leaf.sum(axis=1), readings.naturals)
        start = posterior
        total = jax.tree.map(lambda leaf: leaf[0] if as_sum else jnp.tensordot(counted, leaf, axes=1), naturals)
        if discount < 1.0:
            start, prior_share = discount_towards_prior(layout, posterior, prior, discount**num_new)
            total = jax.tree.map(jnp.add, total, prior_share)
        after = absorb(layout, start, total, num_new)
        prior_here = relative_to(layout, natural_of(layout, prior), coordinates_at(layout, prior), centre)
        found = certify(
            model,
            layout,
            readings,
            rows,
            posterior,
            after,
            NUM_POINTS,
            weights=weights_of_sum,
            prior=prior_here,
            variant=variant,
        )
        assert found.in_prior is not None
        is_held = is_resolved(layout, start, after, total, found.steps)
        evidence = ChunkEvidence(found.residuals, found.in_prior, readings.is_possible, is_held)
        if not as_sum:
            return after, evidence
        is_possible = jnp.broadcast_to(readings.is_possible, rows.mask.shape)
        evidence = evidence._replace(is_possible=is_possible)
        is_fine = jnp.all(is_affine(found.residuals)) & is_affine(found.in_prior) & is_held

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
