"""Play a bandit against a simulated world: the pure functions of the live bandit, in a scan."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int

from ppl_bandit.environment import Environment
from ppl_bandit.program import RewardModel
from ppl_bandit.types import Engine, Interaction, Key, Selector

__all__ = ["Rollout", "rollout"]


class Rollout(NamedTuple):
    """One realization, step by step.

    Attributes:
        arm: arm played.
        reward: outcome, or {outcome: value}.
        regret: expected ("pseudo") regret of the step: the best arm's true expected reward less the played arm's.
        num_candidates: N_{t+1}.
        best_arm_probs: p-hat.
    """

    arm: Int[Array, " T"]
    reward: Any
    regret: Float[Array, " T"]
    num_candidates: Int[Array, " T"]
    best_arm_probs: Float[Array, "T A"]


def rollout(
    key: Key,
    reward_model: RewardModel,
    engine: Engine,
    selector: Selector,
    environment: Environment,
    *,
    num_steps: int,
    num_samples: int = 1000,
) -> Rollout:
    """Simulate one realization; `vmap` over keys for more."""
    key_init, key_steps = jr.split(key)

    def step(state: Any, inputs: tuple[Key, Array]) -> tuple[Any, Rollout]:
        key, number = inputs
        key_context, key_draw, key_select, key_reward, key_update = jr.split(key, 5)
        context = environment.draw_context(key_context)
        table = reward_model.expected_rewards(engine.sample(key_draw, state, num_samples), context)
        chosen = selector(key_select, table, number)
        reward = environment.draw_reward(key_reward, chosen.arm, context, number)
        rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (chosen.arm, reward, context))
        state, _ = engine.update(key_update, state, Interaction(*rows))
        truth = environment.expected_rewards(context, number)
        regret = jnp.max(truth) - truth[chosen.arm]
        return state, Rollout(chosen.arm, reward, regret, chosen.num_candidates, chosen.best_arm_probs)

    steps = jr.split(key_steps, num_steps), jnp.arange(1, num_steps + 1)
    return jax.lax.scan(step, engine.init(key_init), steps)[1]
