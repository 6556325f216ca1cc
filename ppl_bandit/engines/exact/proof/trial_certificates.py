"""Trial rows, with many different rewards on every arm, and the certificates of their likelihood, before there are data.

Each certificate evaluates all latents at random points, and every arm has rows, so that the cost of one certificate per row
grows with the square of the number of arms. Of many rows, sums with random weights are certified: if a row deviates from
affine, so does its sum, with probability 1. If a sum fails, each of its rows is certified by itself, to find which one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.certificate.certificate import Residual, is_affine, worst_of
from ppl_bandit.engines.exact.certificate.chunks import join_chunks, split_chunks
from ppl_bandit.engines.exact.certificate.points import regions_for
from ppl_bandit.engines.exact.certificate.rows import compare_rows, read_rows
from ppl_bandit.engines.exact.families.layout import Layout
from ppl_bandit.engines.exact.families.posterior import Natural, Posterior, absorb, coordinates_at, total_of
from ppl_bandit.program.model.probing import feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = [
    "MAX_SINGLE_ROWS",
    "NUM_AROUND_CENTRE",
    "NUM_IN_POSTERIOR",
    "TrialCertificates",
    "certify_trial_rows",
    "rows_per_sum",
    "trial_rows",
]

NUM_AROUND_CENTRE, NUM_IN_POSTERIOR = 16, 8  # random points of a certificate
MAX_SINGLE_ROWS = 2048  # of more rows, sums are certified
_ROWS_PER_SUM = 16
_MAX_ROWS_AT_ONCE = 128


class TrialCertificates(NamedTuple):
    """Evidence for each of N rows.

    Attributes:
        residuals: how far the log likelihood is from affine, at the points that are closest to failing.
        is_possible: whether the program can produce the row.
    """

    residuals: Residual
    is_possible: Bool[Array, " N"]


def trial_rows(
    model: RewardModel, latents: Mapping[str, Array], per_arm: int, seed: int, *, is_systematic: bool = False
) -> tuple[Interaction, Bool[Array, " N"]]:
    """Return rows on every arm, in contexts near the example, and whether the program can produce each.

    Args:
        latents: the values given which rewards must be possible.
        is_systematic: whether to try the rewards of the first outcome in order, and the example context in every third row.
    """
    rng = np.random.default_rng(seed)
    arm = jnp.tile(jnp.arange(model.num_arms), per_arm)
    repeat = np.repeat(np.arange(per_arm), model.num_arms)
    picks = rng.integers(0, 1 << 20, size=(arm.size, len(model.outcomes)))
    if is_systematic:
        picks[:, 0] = repeat + np.tile(np.arange(model.num_arms), per_arm)
    context = model.varied_context_rows(rng, (repeat % 3 == 0) & is_systematic)
    reward, is_feasible = feasible_rewards(
        model.program, dict(latents), arm, context, model.outcome_kinds, jnp.asarray(picks)
    )
    return Interaction(arm, reward, context), is_feasible


def rows_per_sum(num_rows: int) -> int:
    """Return the number of rows that each certificate is of."""
    return 1 if num_rows <= MAX_SINGLE_ROWS else _ROWS_PER_SUM


def certify_trial_rows(
    model: RewardModel,
    layout: Layout,
    prior: Posterior,
    rows: Interaction,
    is_feasible: Bool[Array, " N"],
) -> tuple[TrialCertificates, Natural]:
    """Certify rows of data on the prior; return also the natural parameters of every `num_arms`-th row.

    Args:
        rows: of all arms in turn.
        is_feasible: rows that count.
    """
    centre, num_rows = coordinates_at(layout, prior), rows.arm.shape[0]

    def certify(
        rows: Interaction, stretch: Array, weights: Float[Array, " n"] | None = None
    ) -> tuple[TrialCertificates, Natural]:
        """Certify one row or, given weights, a sum of rows."""
        readings = read_rows(model, layout, centre, rows, weights=weights)
        total = total_of(jax.tree.map(lambda leaf: leaf[0], readings.naturals))
        after = absorb(layout, prior, total, rows.arm.shape[0])
        regions = regions_for(layout, prior, after, NUM_AROUND_CENTRE, NUM_IN_POSTERIOR, stretch)
        found = compare_rows(model, layout, readings.naturals, centre, regions, rows, weights=weights)
        residual = worst_of(jax.tree.map(lambda leaf: leaf[0], found))
        return TrialCertificates(residual, readings.is_possible[0]), total

    def certify_each(rows: Interaction, stretch: Float[Array, " n"]) -> tuple[TrialCertificates, Natural]:
        return jax.vmap(lambda row, own: certify(jax.tree.map(lambda leaf: leaf[None], row), own))(rows, stretch)

    def certify_sum(rows: Interaction, stretch: Float[Array, " n"], weights: Float[Array, " n"]) -> TrialCertificates:
        def each() -> TrialCertificates:
            return certify_each(rows._replace(mask=None), stretch)[0]

        whole, _ = certify(rows, stretch[0], weights)
        is_fine = whole.is_possible & is_affine(whole.residuals)
        repeated = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, stretch.shape), whole)
        return jax.lax.cond(is_fine, lambda: repeated, each)

    # Every certificate has points of its own, also on the other side of the centre.
    rng = np.random.default_rng(13)
    stretch = jnp.asarray(rng.choice([-1.0, 1.0], size=num_rows) * rng.uniform(0.5, 1.2, size=num_rows))
    size = rows_per_sum(num_rows)
    if size == 1:
        chunks, _ = split_chunks((rows, stretch), num_rows, min(num_rows, _MAX_ROWS_AT_ONCE))
        certificates, naturals = join_chunks(jax.lax.map(lambda chunk: certify_each(*chunk), chunks), num_rows)
        return certificates, jax.tree.map(lambda leaf: leaf[:: model.num_arms], naturals)
    weights = jnp.where(is_feasible, rng.uniform(0.5, 1.0, size=num_rows), 0.0)
    chunks, _ = split_chunks((rows._replace(mask=is_feasible), stretch, weights), num_rows, size)
    certificates = join_chunks(jax.lax.map(lambda chunk: certify_sum(*chunk), chunks), num_rows)
    on_first_arm = read_rows(model, layout, centre, jax.tree.map(lambda leaf: leaf[:: model.num_arms], rows))
    return certificates, jax.vmap(total_of)(on_first_arm.naturals)
