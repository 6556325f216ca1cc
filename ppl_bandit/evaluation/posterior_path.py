"""The posterior along a log: what the model expected, and what a selector would have played, before each logged decision.

A reward model that is wrong costs width, not validity: what counts is that nothing at a decision depends on its own outcome
or on later ones. So rows may be learnt in blocks: within a block the posterior is that of the rows before it. If latents
move, a block is one row, and its posterior is that of its own step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import engines
from ppl_bandit.engines.decide import decision_function
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.rollouts import initial_state
from ppl_bandit.types import Engine, Interaction, Selector

__all__ = [
    "NUM_SAMPLES",
    "PosteriorPath",
    "engine_of",
    "follow_posterior",
    "rows_as_interaction",
]

_MAX_BLOCKS = 500
NUM_SAMPLES = 400  # posterior draws at each decision


class PosteriorPath(NamedTuple):
    """What was expected before each of T decisions, and after all of them.

    Attributes:
        state: the engine's state after all rows.
        means: (T, A), the posterior mean of every arm's expected reward.
        probs: (T, A), the probability with which a selector plays each arm; None if none was given.
        log_scores: (T,), the log predictive probability, or density, of each row's outcomes; None unless requested.
    """

    state: Any
    means: np.ndarray
    probs: np.ndarray | None = None
    log_scores: np.ndarray | None = None


@functools.lru_cache(maxsize=8)
def engine_of(model: RewardModel) -> Engine:
    """Return the engine that is chosen for a model; it is kept, because one log is evaluated for several targets."""
    with jax.enable_x64(True):
        return engines.choose(model)


@functools.lru_cache(maxsize=8)
def _path_functions(
    model: RewardModel, engine: Engine, selector: Selector | None, has_scores: bool
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the compiled functions that read a block and learn it; logs of one length share them."""
    read = functools.partial(_read_block, model, engine, selector, has_scores)
    return jax.jit(read), jax.jit(engine.update)


def follow_posterior(
    model: RewardModel,
    engine: Engine,
    log: LoggedDecisions,
    selector: Selector | None = None,
    *,
    has_scores: bool = False,
) -> PosteriorPath:
    """Learn a log in the order of its decisions, and note what was expected before each.

    Args:
        selector: its probabilities are noted too, given the posterior at each logged decision.
        has_scores: whether to compute the log predictive scores.
    """
    num_rows = log.arm.size
    size = 1 if model.moving_sites else -(-num_rows // _MAX_BLOCKS)
    num_blocks = -(-num_rows // size)
    with jax.enable_x64(True):
        key_init, key_blocks = jr.split(jr.key(0))
        state = initial_state(key_init, engine, num_blocks * size)
        without_text = engine._replace(explanation=None, settings=None)  # type: ignore[arg-type]  # neither changes a result
        read, update = _path_functions(model, without_text, selector, has_scores)
        parts: list[dict[str, np.ndarray]] = []
        for block in range(num_blocks):
            key_read, key_update = jr.split(jr.fold_in(key_blocks, block))
            start, stop = block * size, min((block + 1) * size, num_rows)
            rows, contexts = rows_as_interaction(model, log, start, stop, size)
            steps = jnp.arange(start + 1, start + size + 1)
            found = read(key_read, state, rows, contexts, steps)
            parts.append({name: np.asarray(values)[: stop - start] for name, values in found.items()})
            state, _ = update(key_update, state, rows)
    return PosteriorPath(state, **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def _read_block(
    model: RewardModel,
    engine: Engine,
    selector: Selector | None,
    has_scores: bool,
    key: Any,
    state: Any,
    rows: Interaction,
    contexts: Any,
    steps: Any,
) -> dict[str, Any]:
    """Return those arrays of a `PosteriorPath` that were asked for, for the rows of a block."""
    key_draw, key_select = jr.split(key)
    at_row = state
    if engine.capabilities.advance is not None:  # latents move, so the block is one row
        first = jax.tree.map(lambda leaf: leaf[0], contexts)
        at_row = engine.capabilities.advance(jr.fold_in(key_draw, 1), state, first)
    draws = engine.sample(key_draw, at_row, NUM_SAMPLES)

    def read(key_row: Any, context: Any, step: Any) -> dict[str, Any]:
        found = {"means": jnp.mean(model.expected_rewards(draws, context), axis=0)}
        if selector is not None:
            decide = decision_function(model.expected_rewards, engine, selector, NUM_SAMPLES)
            found["probs"] = decide(*jr.split(key_row), state, context, step).propensities
        return found

    found = jax.vmap(read)(jr.split(key_select, steps.size), contexts, steps)
    if has_scores:
        log_likelihoods = jax.vmap(lambda latents: model.log_likelihood(latents, rows))(draws)
        found["log_scores"] = jax.nn.logsumexp(log_likelihoods, axis=0) - math.log(NUM_SAMPLES)
    return found


def rows_as_interaction(
    model: RewardModel, log: LoggedDecisions, start: int, stop: int, size: int
) -> tuple[Interaction, Any]:
    """Return rows of a log as they are learnt, repeated up to a fixed size and masked there, and their contexts as decided."""
    index = np.minimum(np.arange(start, start + size), stop - 1)
    outcomes = {model.outcomes[0]: log.reward} if log.outcomes is None else log.outcomes
    if set(outcomes) != set(model.outcomes):
        raise ValueError(f"the log has the outcomes {sorted(outcomes)}, but the model has {sorted(model.outcomes)}")
    rewards = {name: jnp.asarray(np.asarray(values)[index]) for name, values in outcomes.items()}
    decided, learnt = None, None
    if model.context is not None:
        own = log.contexts, log.contexts if log.learnt_contexts is None else log.learnt_contexts
        decided, learnt = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), own)
    reward = rewards if len(rewards) > 1 else next(iter(rewards.values()))
    mask = jnp.asarray(np.arange(start, start + size) < stop)
    return Interaction(jnp.asarray(log.arm[index]), reward, learnt, mask), decided
