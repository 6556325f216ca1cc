"""Rows simulated from a program at a given truth, with arms in turn or chosen by a live bandit."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.live.bandit import Bandit
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.types import Interaction, Selector

__all__ = ["simulate_rows"]


def simulate_rows(
    model: RewardModel,
    truth: Mapping[str, Any],
    num_rows: int,
    *,
    contexts: Callable[[Any], Any] | None = None,
    selector: Selector | None = None,
    seed: int = 0,
) -> Interaction:
    """Simulate rows of a program whose latents are fixed to `truth`.

    Args:
        truth: {latent site: value}.
        contexts: key -> one context, for a program that takes one; None repeats the example.
        selector: chooses the arms in a live bandit; None plays them in turn.
        seed: random seed.
    """
    if isinstance(num_rows, bool) or not isinstance(num_rows, int) or num_rows < 1:
        raise ValueError(f"num_rows must be a positive integer, got {num_rows!r}")
    with jax.enable_x64(True):
        world = Environment(model, truth, contexts)
        latents = {name: jnp.asarray(value) for name, value in truth.items()}
        key_contexts, key_rewards = jr.split(jr.key(seed))
        keys = jr.split(key_contexts, num_rows)
        rows = None if model.context is None else jax.device_get(quick_jit(jax.vmap(world.draw_context))(keys))
        if selector is None:
            arms: Any = np.arange(num_rows) % model.num_arms
            draw = quick_jit(lambda key, arm, context: model.draw_reward(key, latents, arm, context))
            reward = jax.device_get(draw(key_rewards, jnp.asarray(arms), rows))
            return Interaction(arms, jax.tree.map(_as_float, reward), rows)
        return _play(model, latents, rows, num_rows, selector, seed, key_rewards)


def _play(
    model: RewardModel, latents: Any, contexts: Any, num_rows: int, selector: Selector, seed: int, key: Any
) -> Interaction:
    bandit = Bandit(model, selector=selector, seed=seed)
    draw = quick_jit(lambda key, arm, context: model.draw_reward(key, latents, arm, context))
    arms: list[Any] = []
    rewards: list[Any] = []
    for number in range(num_rows):
        context = None if contexts is None else jax.tree.map(lambda leaf, i=number: leaf[i], contexts)
        decision = bandit.select(context)
        reward = jax.tree.map(_as_float, jax.device_get(draw(jr.fold_in(key, number), decision.arm, context)))
        bandit.update(decision, reward)
        arms.append(decision.arm)
        rewards.append(reward)
    played: Any = np.array(arms)
    return Interaction(played, jax.tree.map(lambda *values: np.array(values), *rewards), contexts)


def _as_float(value: Any) -> np.ndarray:
    return np.asarray(value, float)
