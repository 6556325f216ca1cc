"""The predictive probability of success: simulate the rest of an experiment from the posterior, and judge each continuation."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.counts import multinomial
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.trials.simulated.learners import Setting
from ppl_bandit.trials.stopping import StoppingRule
from ppl_bandit.types import Key

__all__ = ["predict_success"]


def predict_success(
    key: Key,
    setting: Setting,
    state: Any,
    rule: StoppingRule,
    probs: Float[Array, " A"],
    active: Bool[Array, " A"],
    control: Int[Array, ""],
    waiting: Float[Array, " A"],
    num_left: Int[Array, ""],
) -> Float[Array, ""]:
    """Return the share of simulated continuations in which superiority holds when all outcomes are known.

    Each continuation has its own world, drawn from the posterior. Outcomes that are late arrive, and the rows that are left are
    allocated with the present probabilities. Its standard error is at most .5 / sqrt(num_futures).

    Args:
        waiting: plays whose outcomes are not known yet.
        num_left: decisions until success is judged; if 0 or fewer, no more are made.
    """
    model, engine, learner = setting.model, setting.engine, setting.learner
    num_left = jnp.maximum(num_left, 0)
    allowed = jnp.where(active, probs, 0.0)
    shares = allowed / jnp.sum(allowed)
    lag = setting.design.lag
    arriving = min(sum(lag), 1.0) if isinstance(lag, tuple) else 1.0  # share of the outcomes that arrive at all
    categories = jnp.append(arriving * shares, 1.0 - arriving)
    most = rule.settings["at"]

    def is_success(key: Key, latents: Any) -> Bool[Array, ""]:
        key_plays, key_learn, key_read = jr.split(key, 3)
        counts = waiting + multinomial(key_plays, num_left, categories)[:-1]  # type: ignore[arg-type]
        later = learner.learn(key_learn, state, Environment(model, latents), counts, most).state
        posterior = setting.posterior(key_read, later)
        if setting.control < 0:
            return jnp.max(posterior.best_arm_probs(active)) >= rule.settings["success"]
        rivals = active & (jnp.arange(active.size) != control)
        better = jnp.where(rivals, posterior.gap_probs(0.0, control), 0.0)
        return jnp.max(better) >= rule.settings["success"]

    key_worlds, key_futures = jr.split(key)
    worlds = engine.sample(key_worlds, state, setting.num_futures)
    found = jax.vmap(is_success)(jr.split(key_futures, setting.num_futures), worlds)
    return jnp.mean(found.astype(probs.dtype))
