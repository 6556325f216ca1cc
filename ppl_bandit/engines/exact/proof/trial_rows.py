"""Trial rows: data with many different rewards on every arm, for which a program is certified before it sees real data."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ppl_bandit.program.model.probing import feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["trial_rows"]


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
