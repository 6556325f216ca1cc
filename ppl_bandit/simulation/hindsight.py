"""Regret in hindsight: a history judged by truths that could have made it, not only by the one that did.

In a world drawn from the prior, the truth and a draw from the exact posterior at the end have the same law given the history.
So the regret of its plays under posterior draws has the same law as their regret under the truth, and one simulated experiment
says as much as many: rash rules fail seldom and badly, and a run in which one happened to be right counts how it might not
have been. Differences between rules are known as well from one history as from ten to forty without hindsight.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.records import LAST
from ppl_bandit.types import Draws, Engine

__all__ = ["can_judge", "judge"]


def can_judge(reward_model: RewardModel, engine: Engine, environment: Environment) -> bool:
    """Tell whether an engine's draws have the law of the truth: an exact posterior, and worlds from its own prior.

    Worlds are drawn without the program's factors and observed constants, which the posterior counts.
    """
    has_own_law = environment.scales == (1.0,) or environment.engine is engine
    is_own = environment.truth is None and environment.reward_model is reward_model and has_own_law
    has_posterior = engine.explanation.is_exact and engine.settings.get("discount", 1.0) == 1.0
    return is_own and has_posterior and not reward_model.terms_beside_draws()


def judge(
    reward_model: RewardModel, truths: Draws, arms: Int[Array, " T"], contexts: Any
) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
    """Return the cumulative regret of a history under each of K truths, and whether it ended stuck (see `is_stuck`).

    Args:
        truths: {site: (K, ...)}.
        contexts: with a leading axis T; None for a program without.
    """
    num_steps = arms.shape[0]
    is_last = np.arange(num_steps) >= num_steps - max(1, num_steps // LAST)
    if contexts is None:
        gaps = _gaps(reward_model, truths, None)
        plays = (arms[:, None] == jnp.arange(gaps.shape[1])).astype(gaps.dtype)
        # A step of the last quarter without regret is a play of an arm without a gap.
        right = (gaps == 0).astype(gaps.dtype) @ jnp.sum(plays * is_last[:, None], axis=0)
        return gaps @ jnp.sum(plays, axis=0), right == 0

    def step(carried: tuple[Array, Array], row: Any) -> tuple[tuple[Array, Array], None]:
        (regret, is_stuck), (arm, context, counts) = carried, row
        lost = _gaps(reward_model, truths, context)[:, arm]
        return (regret + lost, is_stuck & ((lost > 0) | ~counts)), None

    num_truths = jax.tree.leaves(truths)[0].shape[0]
    nothing = jnp.zeros(num_truths, jnp.result_type(float)), jnp.ones(num_truths, bool)
    return jax.lax.scan(step, nothing, (arms, contexts, jnp.asarray(is_last)))[0]


def _gaps(reward_model: RewardModel, truths: Draws, context: Any) -> Float[Array, "K A"]:
    rewards = reward_model.expected_rewards(truths, context)
    return jnp.max(rewards, axis=1, keepdims=True) - rewards
