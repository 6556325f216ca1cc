"""Simulate one realization: the pure functions of the live bandit, in a scan over steps."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.types import Engine, Interaction, Key, Selector

__all__ = ["Rollout", "initial_state", "rollout", "world_key"]


class Rollout(NamedTuple):
    """One realization, step by step.

    Attributes:
        arm: arm played.
        reward: outcome, or {outcome: value}.
        regret: expected ("pseudo") regret of the step: the best arm's true expected reward less the played arm's.
        num_candidates: N_{t+1}.
        best_arm_probs: p-hat.
        is_trusted: whether the engine trusts its update after the step.
        realised_regret: the best arm's true expected reward less the reward; None if the reward is not the only outcome.
    """

    arm: Int[Array, " T"]
    reward: Any
    regret: Float[Array, " T"]
    num_candidates: Int[Array, " T"]
    best_arm_probs: Float[Array, "T A"]
    is_trusted: Bool[Array, " T"]
    realised_regret: Float[Array, " T"] | None = None


def rollout(
    key: Key,
    reward_model: RewardModel,
    engine: Engine,
    selector: Selector,
    environment: Environment,
    *,
    num_steps: int,
    num_samples: int = 1000,
    draws: bool = False,
) -> tuple[Rollout, Any, Any]:
    """Simulate one realization; return its steps, its contexts (T, ...) and the engine's last state. `vmap` over keys for more.

    Args:
        draws: whether to draw all latents and fill the table even if a cheaper way exists (`engines.decide`).
    """
    key_init, key_steps = jr.split(key)
    first = environment.world(world_key(key))
    decide = decision_function(reward_model.expected_rewards, engine, selector, num_samples, draws)

    def step(carry: tuple[Any, Any], number: Array) -> tuple[tuple[Any, Any], tuple[Rollout, Any]]:
        state, truth = carry
        key_step = jr.fold_in(key_steps, number)
        key_context, key_draw, key_select, key_reward, key_update = jr.split(key_step, 5)
        environment = first if truth is None else first.at(truth)
        context = environment.draw_context(key_context, number)
        chosen = decide(key_draw, key_select, state, context, number)
        reward = environment.draw_reward(key_reward, chosen.arm, context, number)
        rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (chosen.arm, reward, context))
        state, info = engine.update(key_update, state, Interaction(*rows))
        truth = environment.expected_rewards(context, number)
        record = Rollout(
            chosen.arm,
            reward,
            jnp.max(truth) - truth[chosen.arm],
            chosen.num_candidates,
            chosen.best_arm_probs,
            jnp.asarray(getattr(info, "is_trusted", True)),
            jnp.max(truth) - reward if environment.reward_model.is_reward_an_outcome else None,
        )
        return (state, environment.step(jr.fold_in(key_step, 5))), (record, context)

    start, numbers = initial_state(key_init, engine, num_steps), jnp.arange(1, num_steps + 1)
    (state, _), (record, contexts) = jax.lax.scan(step, (start, first.moving_truth), numbers)
    return record, contexts, state


def world_key(key: Key) -> Key:
    """Return the key with which the world of a realization is drawn, given the realization's key."""
    return jr.fold_in(key, 2)  # distinct from the two keys that the rollout splits it into


def initial_state(key: Key, engine: Engine, num_steps: int) -> Any:
    """Return the prior state with capacity for all steps; the added memory is the same for every key."""
    state = engine.init(key)
    if engine.capabilities.reserve is None:
        return state
    with jax.ensure_compile_time_eval():
        large = engine.capabilities.reserve(engine.init(jr.key(0)), num_steps)
    return jax.tree.map(lambda own, other: own if own.shape == other.shape else other, state, large)
