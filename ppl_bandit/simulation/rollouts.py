"""One realization of a bandit against a simulated world: the pure functions of the live bandit, in a scan."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics import sampling
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.types import Engine, Interaction, Key, Selection, Selector

__all__ = ["Rollout", "rollout"]


class Rollout(NamedTuple):
    """One realization, step by step.

    Attributes:
        arm: arm played.
        reward: outcome, or {outcome: value}.
        regret: expected ("pseudo") regret of the step: the best arm's true expected reward less the played arm's.
        num_candidates: N_{t+1}.
        best_arm_probs: p-hat.
        is_trusted: whether the engine stands by its update after the step.
    """

    arm: Int[Array, " T"]
    reward: Any
    regret: Float[Array, " T"]
    num_candidates: Int[Array, " T"]
    best_arm_probs: Float[Array, "T A"]
    is_trusted: Bool[Array, " T"]


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
) -> Rollout:
    """Simulate one realization; `vmap` over keys for more.

    Where the engine knows the probability P that each arm is best, and the selector looks at p-hat alone, p-hat is drawn
    from its own law, Multinomial(M, P) / M, and not counted in a table of M draws.

    Args:
        draws: whether to draw the table all the same.
    """
    key_init, key_steps = jr.split(key)
    environment = environment.world(jr.fold_in(key, 2))  # 0 and 1 would be the two keys above

    def choose(key_draw: Key, key_select: Key, state: Any, context: Any, number: Array) -> Selection:
        marginals = None if engine.marginals is None else engine.marginals(state, context)
        from_shares = selector.from_shares
        if not draws and marginals is not None and marginals.best_arm_probs is not None and from_shares is not None:
            shares = marginals.best_arm_probs(None)
            if not selector.is_exact:
                shares = sampling.multinomial(key_draw, num_samples, shares) / num_samples
            return from_shares(key_select, shares, number, marginals=marginals)
        table = reward_model.expected_rewards(engine.sample(key_draw, state, num_samples), context)
        if not selector.uses_marginals:
            return selector(key_select, table, number)
        return selector(key_select, table, number, marginals=marginals)

    def step(state: Any, number: Array) -> tuple[Any, Rollout]:
        key_context, key_draw, key_select, key_reward, key_update = jr.split(jr.fold_in(key_steps, number), 5)
        context = environment.draw_context(key_context)
        chosen = choose(key_draw, key_select, state, context, number)
        reward = environment.draw_reward(key_reward, chosen.arm, context, number)
        rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], (chosen.arm, reward, context))
        state, info = engine.update(key_update, state, Interaction(*rows))
        truth = environment.expected_rewards(context, number)
        return state, Rollout(
            chosen.arm,
            reward,
            jnp.max(truth) - truth[chosen.arm],
            chosen.num_candidates,
            chosen.best_arm_probs,
            jnp.asarray(getattr(info, "is_trusted", True)),
        )

    return jax.lax.scan(step, _start(key_init, engine, num_steps), jnp.arange(1, num_steps + 1))[1]


def _start(key: Key, engine: Engine, num_steps: int) -> Any:
    """Return the engine's first state, with room for all steps: what room adds to it is the same for every key."""
    state = engine.init(key)
    if engine.reserve is None:
        return state
    with jax.ensure_compile_time_eval():
        roomy = engine.reserve(engine.init(jr.key(0)), num_steps)
    return jax.tree.map(lambda own, large: own if own.shape == large.shape else large, state, roomy)
