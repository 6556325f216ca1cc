"""Rows simulated from a program at a given truth, with arms in turn or chosen by a bandit."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import engines
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.types import Interaction, Selector


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
        selector: chooses the arms, as in `simulate` with `engines.choose`; None plays them in turn.
        seed: random seed.
    """
    check_count(num_rows, "num_rows")
    with jax.enable_x64(True):
        world = Environment(model, truth, contexts)
        if selector is not None:
            return _play(world, num_rows, selector, seed)
        key_contexts, key_rewards = jr.split(jr.key(seed))
        keys, steps = jr.split(key_contexts, num_rows), jnp.arange(1, num_rows + 1)
        rows = None if model.context is None else jax.device_get(quick_jit(jax.vmap(world.draw_context))(keys, steps))
        if model.moving_sites:
            world = Environment.from_path(model, _path(world, jr.fold_in(key_rewards, num_rows), num_rows), contexts)
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


def _play(world: Environment, num_rows: int, selector: Selector, seed: int) -> Interaction:
    model = world.reward_model
    engine = engines.choose(model)

    def play(key: Any) -> Any:
        record, contexts, _ = rollout(key, model, engine, selector, world, num_steps=num_rows)
        return Interaction(record.arm, record.reward, contexts)

    played = jax.device_get(quick_jit(play)(jr.key(seed)))
    return played._replace(reward=jax.tree.map(_as_float, played.reward))


def _as_float(value: Any) -> np.ndarray:
    return np.asarray(value, float)
