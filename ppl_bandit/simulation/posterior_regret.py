"""Posterior regret: judge a simulated history by draws from its exact posterior ("hindsight").

In a world drawn from the prior, the truth and a draw from the exact posterior at the end have the same law given the history.
So the regret of the plays under posterior draws has the same law as their regret under the truth, and averaging over several
draws removes the variance due to the truth (Rao-Blackwell). Rules that explore too little fail rarely and badly; one such
history counts the failures that could have happened. To compare rules, one history is worth ten to forty without it.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.datasets import LAST_QUARTER
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.types import Draws, Engine


def has_posterior_regret(reward_model: RewardModel, engine: Engine, environment: Environment) -> bool:
    """Return whether posterior draws have the law of the truth: the posterior is exact, and worlds come from its prior.

    This fails for latents that move, whose posterior is that of the last step, and for programs with factors or observed
    constants: worlds are drawn without them, the posterior includes them.
    """
    is_prior = environment.truth is None and environment.draws is None and not reward_model.moving_sites
    is_own = is_prior and environment.reward_model is reward_model
    has_posterior = engine.explanation.is_exact and engine.settings.get("discount", 1.0) == 1.0
    return is_own and has_posterior and not reward_model.terms_beside_draws()


def posterior_regret(
    reward_model: RewardModel, truths: Draws, arms: Int[Array, " T"], contexts: Any
) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
    """Return the cumulative regret of a history under each of K truths, and whether it ended stuck (see `is_stuck`).

    Args:
        truths: {site: (K, ...)}.
        contexts: with a leading axis T; None for a program without.
    """
    num_steps = arms.shape[0]
    is_last = np.arange(num_steps) >= num_steps - max(1, num_steps // LAST_QUARTER)
    if contexts is None:
        gaps = _gaps(reward_model, truths, None)
        plays = (arms[:, None] == jnp.arange(gaps.shape[1])).astype(gaps.dtype)
        # A step without regret plays an arm without a gap.
        num_right = (gaps == 0).astype(gaps.dtype) @ jnp.sum(plays * is_last[:, None], axis=0)
        return gaps @ jnp.sum(plays, axis=0), num_right == 0

    def step(carry: tuple[Array, Array], row: Any) -> tuple[tuple[Array, Array], None]:
        (regret, is_stuck), (arm, context, counts) = carry, row
        step_regret = _gaps(reward_model, truths, context)[:, arm]
        return (regret + step_regret, is_stuck & ((step_regret > 0) | ~counts)), None

    num_truths = jax.tree.leaves(truths)[0].shape[0]
    zero = jnp.zeros(num_truths, jnp.result_type(float)), jnp.ones(num_truths, bool)
    return jax.lax.scan(step, zero, (arms, contexts, jnp.asarray(is_last)))[0]


def _gaps(reward_model: RewardModel, truths: Draws, context: Any) -> Float[Array, "K A"]:
    rewards = reward_model.expected_rewards(truths, context)
    return jnp.max(rewards, axis=1, keepdims=True) - rewards
