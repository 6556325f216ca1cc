"""The posterior along a log: what the model expected, and what a selector would have played, before each logged decision.

A reward model that is wrong costs width, not validity: what counts is that nothing at a decision depends on its own outcome
or on later ones. So rows may be learnt in blocks: within a block the posterior is that of the rows before it.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.engines.decide import decide
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Engine, Interaction, Selector

__all__ = ["PosteriorPath", "accepted_rewards", "follow_posterior"]

_MAX_BLOCKS = 500
_NUM_SAMPLES = 400


class PosteriorPath(NamedTuple):
    """What was expected before each of T decisions, and after all of them.

    Attributes:
        means: (T, A), the posterior mean of every arm's expected reward.
        probs: (T, A), the probability with which a selector plays each arm; None if none was given.
        state: the engine's state after all rows.
        log_scores: (T,), the log predictive probability, or density, of each row's outcomes; None unless requested.
    """

    means: np.ndarray
    probs: np.ndarray | None
    state: Any
    log_scores: np.ndarray | None = None


def follow_posterior(
    model: RewardModel,
    engine: Engine,
    log: LoggedDecisions,
    selector: Selector | None = None,
    *,
    has_scores: bool = False,
    seed: int = 0,
) -> PosteriorPath:
    """Learn a log in the order of its decisions, and note what was expected before each.

    Args:
        selector: its probabilities are noted too, given the posterior at each logged decision.
        has_scores: whether to compute the log predictive scores.
    """
    num_rows = log.arm.size
    size = -(-num_rows // _MAX_BLOCKS)
    num_blocks = -(-num_rows // size)
    with jax.enable_x64(True):
        key_init, key_blocks = jr.split(jr.key(seed))
        state = _with_capacity(engine, engine.init(key_init), num_blocks * size)
        read = jax.jit(functools.partial(_read_block, model, engine, selector, has_scores))
        update = jax.jit(engine.update)
        parts: tuple[list[np.ndarray], ...] = ([], [], [])
        for block in range(num_blocks):
            key_read, key_update = jr.split(jr.fold_in(key_blocks, block))
            start, stop = block * size, min((block + 1) * size, num_rows)
            rows = _interaction(model, log, start, stop, size)
            steps = jnp.arange(start + 1, start + size + 1)
            for part, found in zip(parts, read(key_read, state, rows, steps), strict=True):
                part.append(np.asarray(found)[: stop - start])
            state, _ = update(key_update, state, rows)
    means, probs, scores = map(np.concatenate, parts)
    return PosteriorPath(means, None if selector is None else probs, state, scores if has_scores else None)


def accepted_rewards(
    model: RewardModel, engine: Engine, selector: Selector, log: LoggedDecisions, *, seed: int = 0
) -> np.ndarray:
    """Return the rewards that a selector would have earned, by rejection sampling from a log.

    The selector learns from accepted rows alone. In each row it has probabilities pi(a); the row is accepted with
    probability pi(A) / (c e(A)), so that an accepted arm has the law pi. c is the largest ratio pi(a) / e(a) of the row;
    with contexts it is the same number for all rows, the largest 1 / e(a) of the log, because acceptance must not depend on
    the context. Without contexts, rows in which an arm has probability 0, such as those of a burn-in, are left out.

    Raises:
        ValueError: if the log lacks the probabilities of all arms, or no row can be used.
    """
    if log.propensities is None:
        raise ValueError(
            "rejection sampling needs the propensities of all arms in every row, not of the played arm alone"
        )
    is_used = (log.propensities > 0).all(axis=1)
    if not is_used.any() or (log.contexts is not None and not is_used.all()):
        raise ValueError(
            f"rejection sampling needs positive propensities of all arms, and {int((~is_used).sum())} of {is_used.size} rows "
            "have one that is 0: record with selectors.with_floor"
        )
    log = log._replace(
        arm=log.arm[is_used],
        reward=log.reward[is_used],
        propensity=log.propensity[is_used],
        propensities=log.propensities[is_used],
        outcomes=None if log.outcomes is None else {name: own[is_used] for name, own in log.outcomes.items()},
    )
    assert log.propensities is not None
    num_rows = log.arm.size
    bound = None if log.contexts is None else float((1.0 / log.propensities).max())

    def step(carry: tuple[Any, Any], row: tuple[Any, ...]) -> tuple[tuple[Any, Any], Any]:
        state, num_accepted = carry
        key, arm, outcome, propensities, context = row
        key_draw, key_select, key_accept, key_update = jr.split(key, 4)
        probs = decide(
            key_draw,
            key_select,
            model.expected_rewards,
            engine,
            selector,
            state,
            context,
            num_accepted + 1,
            num_samples=_NUM_SAMPLES,
        ).propensities
        ratio = probs / propensities
        limit = jnp.max(ratio) if bound is None else bound
        is_accepted = jr.uniform(key_accept) * limit < ratio[arm]
        reward, contexts = jax.tree.map(lambda leaf: leaf[None], (outcome, context))
        state, _ = engine.update(key_update, state, Interaction(arm[None], reward, contexts, is_accepted[None]))
        return (state, num_accepted + is_accepted), is_accepted

    with jax.enable_x64(True):
        key_init, key_rows = jr.split(jr.key(seed))
        state = _with_capacity(engine, engine.init(key_init), num_rows)
        rows = _interaction(model, log, 0, num_rows, num_rows)
        given = jr.split(key_rows, num_rows), rows.arm, rows.reward, jnp.asarray(log.propensities), rows.context
        _, is_accepted = jax.jit(functools.partial(jax.lax.scan, step))((state, jnp.asarray(0)), given)
    return log.reward[np.asarray(is_accepted)]


def _read_block(
    model: RewardModel,
    engine: Engine,
    selector: Selector | None,
    has_scores: bool,
    key: Any,
    state: Any,
    rows: Interaction,
    steps: Any,
) -> tuple[Any, Any, Any]:
    """Return the means of all arms, a selector's probabilities, and log predictive scores, for the rows of a block.

    Without a selector or scores their places hold the means.
    """
    key_draw, key_select = jr.split(key)
    draws = engine.sample(key_draw, state, _NUM_SAMPLES)

    def read(key_row: Any, context: Any, step: Any) -> tuple[Any, Any]:
        mean = jnp.mean(model.expected_rewards(draws, context), axis=0)
        if selector is None:
            return mean, mean
        key_own, key_choice = jr.split(key_row)
        chosen = decide(
            key_own,
            key_choice,
            model.expected_rewards,
            engine,
            selector,
            state,
            context,
            step,
            num_samples=_NUM_SAMPLES,
        )
        return mean, chosen.propensities

    means, probs = jax.vmap(read)(jr.split(key_select, steps.size), rows.context, steps)
    if not has_scores:
        return means, probs, means
    log_likelihoods = jax.vmap(lambda latents: model.log_likelihood(latents, rows))(draws)
    return means, probs, jax.nn.logsumexp(log_likelihoods, axis=0) - math.log(_NUM_SAMPLES)


def _interaction(model: RewardModel, log: LoggedDecisions, start: int, stop: int, size: int) -> Interaction:
    """Return rows of a log, repeated up to a fixed size and masked there."""
    index = np.minimum(np.arange(start, start + size), stop - 1)
    outcomes = {model.outcomes[0]: log.reward} if log.outcomes is None else log.outcomes
    if set(outcomes) != set(model.outcomes):
        raise ValueError(f"the log has the outcomes {sorted(outcomes)}, but the model has {sorted(model.outcomes)}")
    rewards = {name: jnp.asarray(np.asarray(values)[index]) for name, values in outcomes.items()}
    contexts = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[index]), log.contexts)
    return Interaction(
        jnp.asarray(log.arm[index]),
        rewards if len(rewards) > 1 else next(iter(rewards.values())),
        contexts if model.context is not None else None,
        jnp.asarray(np.arange(start, start + size) < stop),
    )


def _with_capacity(engine: Engine, state: Any, num_rows: int) -> Any:
    reserve = engine.capabilities.reserve
    return state if reserve is None else reserve(state, num_rows)
