"""Trial rows, with many different rewards on every arm, and the certificates of their likelihood, before there are data.

Each certificate evaluates all latents at random points, and every arm has rows, so that the cost of one certificate per row
grows with the square of the number of arms. Of many rows, sums with random weights are certified: if a row deviates from
affine, so does its sum, with probability 1. If a sum fails, each of its rows is certified by itself, to find which one.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.exact.certificate.certificate import Residual
from ppl_bandit.engines.exact.certificate.chunks import Absorb, ChunkEvidence, join_chunks, split_chunks
from ppl_bandit.engines.exact.certificate.points import NUM_VARIANTS
from ppl_bandit.engines.exact.families.posterior import Posterior
from ppl_bandit.program.model.probing import feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

MAX_SINGLE_ROWS = 2048  # of more rows, sums are certified
_ROWS_PER_SUM = 16


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
    model: RewardModel, absorb_chunk: Absorb, prior: Posterior, rows: Interaction, is_feasible: Bool[Array, " N"]
) -> tuple[Residual, Bool[Array, " N"], dict[str, Float[Array, "rows E n"]]]:
    """Certify each row of data on the prior, or sums of many rows, by the function that the updates call.

    Args:
        absorb_chunk: from `chunk_absorber`.
        rows: of all arms in turn.
        is_feasible: rows that count.

    Returns:
        How far the log likelihood of each row is from affine; whether the program can produce it; and what each row on arm 0
        adds to the parameters of each group.
    """
    num_rows = rows.arm.shape[0]
    size = rows_per_sum(num_rows)
    # In the form in which rewards come to an update, so that this is traced once.
    rewards = {name: jnp.asarray(value, float) for name, value in rows.reward.items()}
    rows = rows._replace(reward=rewards if len(rewards) > 1 else rewards[model.outcomes[0]], mask=is_feasible)
    prior = jax.tree.map(lambda leaf: jnp.asarray(leaf, leaf.dtype), prior)

    def certify(rows: Interaction, size: int) -> tuple[ChunkEvidence, dict[str, Array]]:
        weights = np.random.default_rng(13).uniform(0.5, 1.0, size=rows.arm.shape[0]) ** (size > 1)
        chunks, is_row = split_chunks((rows, weights), rows.arm.shape[0], size)
        turn = np.arange(is_row.shape[0])

        def certify_chunk(own: tuple[Any, ...]) -> tuple[ChunkEvidence, dict[str, Array]]:
            (chunk, weights), is_row, variant = own
            chunk = chunk._replace(mask=chunk.mask & is_row)
            after, found = absorb_chunk(prior, prior, chunk, weights, variant, as_sum=size > 1)
            return found, {group: new - prior.elements[group] for group, new in after.elements.items()}

        return jax.lax.map(certify_chunk, (chunks, is_row, jnp.asarray((turn + turn // model.num_arms) % NUM_VARIANTS)))

    found, added = certify(rows, size)
    residuals, is_possible = join_chunks((found.residuals, found.is_possible), num_rows)
    first_arm = jax.tree.map(lambda leaf: leaf[:: model.num_arms], rows if size > 1 else added)
    return residuals, is_feasible & is_possible, certify(first_arm, 1)[1] if size > 1 else first_arm
