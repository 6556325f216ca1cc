"""Rows simulated from a program at a given truth, with arms in turn or chosen by a live bandit."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.inputs.numbers import check_count
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
    """Simulate rows of a program whose latents are fixed to `truth`; latents that move start there, and take a step a row.

    Args:
        truth: {latent site: value}.
        contexts: key -> one context, for a program that takes one; None repeats the example.
        selector: chooses the arms in a live bandit; None plays them in turn.
        seed: random seed.
    """
    check_count(num_rows, "num_rows")
    with jax.enable_x64(True):
        world = Environment(model, truth, contexts)
        key_contexts, key_rewards = jr.split(jr.key(seed))
        keys, steps = jr.split(key_contexts, num_rows), jnp.arange(1, num_rows + 1)
        rows = None if model.context is None else jax.device_get(quick_jit(jax.vmap(world.draw_context))(keys, steps))
        if model.moving_sites:
            world = Environment.from_path(model, _path(world, jr.fold_in(key_rewards, num_rows), num_rows), contexts)
        if selector is not None:
            return _play(world, rows, num_rows, selector, seed, key_rewards)
        arms: Any = np.arange(num_rows) % model.num_arms

        def draw(arm: Any, context: Any) -> Any:
            if not model.moving_sites:
                return world.draw_reward(key_rewards, arm, context)
            return jax.vmap(world.draw_reward)(jr.split(key_rewards, num_rows), arm, context, steps)

        reward = jax.device_get(quick_jit(draw)(jnp.asarray(arms), rows))
        return Interaction(arms, jax.tree.map(_as_float, reward), rows)


def _path(world: Environment, key: Any, num_rows: int) -> dict[str, np.ndarray]:
    """Return the truth of every row, {site: (N, ...)}, of a world that moves."""

    def step(truth: Any, key: Any) -> tuple[Any, Any]:
        return world.at(truth).step(key), truth

    def walk() -> Any:
        return jax.lax.scan(step, world.moving_truth, jr.split(key, num_rows))[1]

    return jax.device_get(quick_jit(walk)())


def _play(world: Environment, contexts: Any, num_rows: int, selector: Selector, seed: int, key: Any) -> Interaction:
    bandit = Bandit(world.reward_model, selector=selector, seed=seed)
    draw = quick_jit(world.draw_reward)
    arms: list[Any] = []
    rewards: list[Any] = []
    for number in range(num_rows):
        context = None if contexts is None else jax.tree.map(lambda leaf, i=number: leaf[i], contexts)
        decision = bandit.select(context)
        outcome = draw(jr.fold_in(key, number), decision.arm, context, number + 1)
        reward = jax.tree.map(_as_float, jax.device_get(outcome))
        bandit.update(decision, reward)
        arms.append(decision.arm)
        rewards.append(reward)
    played: Any = np.array(arms)
    return Interaction(played, jax.tree.map(lambda *values: np.array(values), *rewards), contexts)


def _as_float(value: Any) -> np.ndarray:
    return np.asarray(value, float)
