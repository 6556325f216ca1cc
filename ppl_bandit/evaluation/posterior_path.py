"""The posterior along a log: what the model expected, and what a selector would have played, before each logged decision.

It is a rollout that takes the log's arms and outcomes. A reward model that is wrong costs width, not validity: what counts is
that nothing at a decision depends on its own outcome or on later ones. So rows may be learnt in blocks: within a block the
posterior is that of the rows before it. If latents move, a block is one row, and its posterior is that of its own step.
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
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.simulation.rollouts import (
    Choice,
    Keys,
    Play,
    Played,
    Step,
    follow_log,
    initial_state,
    log_steps,
    play_function,
)
from ppl_bandit.types import Engine, Interaction, Selector

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


def without_text(engine: Engine) -> Engine:
    """Return an engine that can be a key: without what changes no result."""
    return engine._replace(explanation=None, settings=None)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=8)
def _path_function(
    model: RewardModel, engine: Engine, selector: Selector | None, has_scores: bool
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Return the compiled function (key, state, steps) -> (last state, what was read); logs of similar lengths share it."""

    def decide(keys: Keys, play: Play, step: Step, contexts: Any) -> Choice:
        assert step.rows is not None
        return Choice(step.rows.arm, _read(model, engine, selector, has_scores, keys.context, play.state, step))

    def record(key: Any, play: Play, played: Played) -> tuple[Play, dict[str, Any]]:
        return play, played.choice.chosen

    @quick_jit
    def follow(key: Any, state: Any, steps: Step) -> tuple[Any, dict[str, Any]]:
        end, found = follow_log(play_function(key, engine, decide, record), Play(state), steps)
        return end.state, found

    return follow


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
    with jax.enable_x64(True):
        key_init, key_blocks = jr.split(jr.key(0))
        state = initial_state(key_init, engine, -(-num_rows // size) * size)
        follow = _path_function(model, without_text(engine), selector, has_scores)
        state, found = follow(key_blocks, state, log_steps(*rows_of_log(model, log), size=size))
        found = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(-1, *leaf.shape[2:])[:num_rows], found)
    return PosteriorPath(state, **found)


def _read(
    model: RewardModel, engine: Engine, selector: Selector | None, has_scores: bool, key: Any, state: Any, step: Step
) -> dict[str, Any]:
    """Return those arrays of a `PosteriorPath` that were asked for, for the rows of a step, before they are learnt."""
    key_draw, key_select = jr.split(key)
    at_row, rows, contexts = state, step.rows, step.contexts
    assert rows is not None
    if engine.capabilities.advance is not None:  # latents move, so the step is one row
        first = jax.tree.map(lambda leaf: leaf[0], contexts)
        at_row = engine.capabilities.advance(jr.fold_in(key_draw, 1), state, first)
    draws = engine.sample(key_draw, at_row, NUM_SAMPLES)

    def read(key_row: Any, context: Any, number: Any) -> dict[str, Any]:
        found = {"means": jnp.mean(model.expected_rewards(draws, context), axis=0)}
        if selector is not None:
            decide = decision_function(model.expected_rewards, engine, selector, NUM_SAMPLES)
            found["probs"] = decide(*jr.split(key_row), state, context, number).propensities
        return found

    num_rows = rows.arm.shape[0]
    found = jax.vmap(read)(jr.split(key_select, num_rows), contexts, step.number + jnp.arange(num_rows))
    if has_scores:
        log_likelihoods = jax.vmap(lambda latents: model.log_likelihood(latents, rows))(draws)
        found["log_scores"] = jax.nn.logsumexp(log_likelihoods, axis=0) - math.log(NUM_SAMPLES)
    return found


def rows_of_log(model: RewardModel, log: LoggedDecisions) -> tuple[Interaction, Any]:
    """Return the rows of a log as they are learnt, and their contexts as they were decided."""
    outcomes = {model.outcomes[0]: log.reward} if log.outcomes is None else log.outcomes
    if set(outcomes) != set(model.outcomes):
        raise ValueError(f"the log has the outcomes {sorted(outcomes)}, but the model has {sorted(model.outcomes)}")
    decided, learnt = None, None
    if model.context is not None:
        decided, learnt = log.contexts, log.contexts if log.learnt_contexts is None else log.learnt_contexts
    reward = dict(outcomes) if len(outcomes) > 1 else next(iter(outcomes.values()))
    return Interaction(log.arm, reward, learnt), decided  # type: ignore[arg-type]
