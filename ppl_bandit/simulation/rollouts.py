"""Decide, reveal, learn, record: the one step of every simulation, and the rollouts that are made of it.

A step makes N decisions from one posterior. How it decides is a function: by a selector, by taking the arms of a log, by
accepting rows of a log, or by probabilities that stay the same between two looks. Outcomes come from a simulated world or from
a log, at once or after a number of further decisions. What is recorded, and what happens at a look, is a function of the
caller.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.types import Engine, Interaction, Key, Selection, Selector


class Step(NamedTuple):
    """What one step is given. In a rollout every leaf has a leading axis T; None is not given.

    Attributes:
        index: distinguishes the random numbers of the steps.
        number: of the first decision, from 1.
        size: number of decisions; the others of N rows are padding. None is N.
        delay: number of further decisions after which an outcome is known, of all rows or (N,); negative for never.
        until: outcomes of decision i with delay d are revealed if i + d <= until.
        rows: N logged rows, as they are learnt.
        contexts: of logged rows, as they were decided.
        propensities: of logged rows, of all arms.
        more: what the caller's own functions read.
    """

    index: Any
    number: Any
    size: Any = None
    delay: Any = None
    until: Any = None
    rows: Interaction | None = None
    contexts: Any = None
    propensities: Any = None
    more: Any = None


class Waiting(NamedTuple):
    """Rows whose outcomes are not known yet, in the order of their decisions; W of them, masked where there are fewer.

    Attributes:
        due: the number of the decision after which each is known.
    """

    rows: Interaction
    due: Int[Array, " W"]


class Play(NamedTuple):
    """What goes from step to step.

    Attributes:
        state: of the engine.
        truth: the present truth of a world that moves.
        waiting: outcomes that are not known yet; None if they are known at once.
        own: what the caller's functions read and replace.
    """

    state: Any
    truth: Any = None
    waiting: Waiting | None = None
    own: Any = None


class Keys(NamedTuple):
    """The random keys of a step."""

    context: Key
    draw: Key
    select: Key
    reward: Key
    update: Key


class Choice(NamedTuple):
    """What a step decided.

    Attributes:
        arm: a scalar, or (N,).
        chosen: how, for the record.
        is_kept: whether the decision takes place, or (N,); None for all.
    """

    arm: Int[Array, "*N"]
    chosen: Any = None
    is_kept: Any = None


class Played(NamedTuple):
    """What happened in a step, for the record.

    Attributes:
        world: at this step; None for a log.
        context, reward: of the decision, or with a leading axis N.
        rows: the N rows.
        due: the rows whose outcomes were revealed and learnt.
        info: what the engine says about its update.
    """

    step: Step
    world: Environment | None
    choice: Choice
    context: Any
    reward: Any
    rows: Interaction
    due: Interaction
    info: Any


Decide = Callable[[Keys, Play, Step, Any], Choice]


def play_function(
    key: Key,
    engine: Engine,
    decide: Decide,
    record: Callable[[Key, Play, Played], tuple[Play, Any]],
    world: Environment | None = None,
    *,
    num_rows: int | None = None,
    is_delay_fixed: bool = True,
) -> Callable[[Play, Step], tuple[Play, Any]]:
    """Return the traced step (play, step) -> (play, record), for `jax.lax.scan`.

    Args:
        decide: (keys, play, step, context) -> `Choice`.
        record: (key, play after the step, `Played`) -> (play, what is recorded).
        world: of contexts and outcomes; None takes those of the steps' rows.
        num_rows: N decisions in a step of a world; None makes one, without the axis N.
        is_delay_fixed: whether all outcomes have the same delay, so that a step reveals at most N of them.
    """

    def play(before: Play, step: Step) -> tuple[Play, Any]:
        key_step = jr.fold_in(key, step.index)
        keys, now = Keys(*jr.split(key_step, 5)), world
        if world is not None and before.truth is not None:
            now = world.at(before.truth)
        context = step.contexts if now is None else _draw_contexts(now, keys.context, step.number, num_rows)
        choice = decide(keys, before, step, context)
        if now is None:
            assert step.rows is not None
            reward, rows = step.rows.reward, step.rows
            kept = choice.is_kept if rows.mask is None or choice.is_kept is None else choice.is_kept & rows.mask
            rows = rows._replace(mask=rows.mask if kept is None else kept)
        else:
            reward = now.draw_reward(keys.reward, choice.arm, context, step.number)
            rows = Interaction(choice.arm, reward, context, choice.is_kept)
            if num_rows is None:
                rows = jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], rows)
        due, waiting = (rows, None) if before.waiting is None else _reveal(before.waiting, rows, step, is_delay_fixed)
        state, info = engine.update(keys.update, before.state, due)
        truth = None if now is None else now.step(jr.fold_in(key_step, 5))
        after = Play(state, truth, waiting, before.own)
        return record(jr.fold_in(key_step, 6), after, Played(step, now, choice, context, reward, rows, due, info))

    return play


def _draw_contexts(world: Environment, key: Key, number: Any, num_rows: int | None) -> Any:
    if num_rows is None:
        return world.draw_context(key, number)
    if world.reward_model.context is None:
        return None
    return jax.vmap(world.draw_context)(jr.split(key, num_rows), number + jnp.arange(num_rows))


def no_waiting(world: Environment, num: int) -> Waiting | None:
    """Return no outcomes, with room for `num`; None for 0."""

    def draw(key: Key) -> tuple[Any, Any]:
        context = world.draw_context(key)
        return context, world.draw_reward(key, jnp.asarray(0), context)

    if num == 0:
        return None
    context, reward = jax.tree.map(lambda own: jnp.zeros((num, *own.shape), own.dtype), jax.eval_shape(draw, jr.key(0)))
    number = jnp.zeros(num, int)
    return Waiting(Interaction(number, reward, context, jnp.zeros(num, bool)), number)


def _reveal(before: Waiting, rows: Interaction, step: Step, is_delay_fixed: bool) -> tuple[Interaction, Waiting]:
    """Return the rows that become known, and those that wait.

    No row waits longer than the last W: `before` and the new rows are one queue, which `step.size` rows leave.
    """
    num_new, num_waiting = rows.arm.shape[0], before.due.shape[0]
    delay = jnp.broadcast_to(step.delay, (num_new,))
    known = (delay >= 0) if rows.mask is None else rows.mask & (delay >= 0)
    new = Waiting(rows._replace(mask=known), step.number + jnp.arange(num_new) + delay)
    every = jax.tree.map(lambda *own: jnp.concatenate([leaf.astype(own[0].dtype) for leaf in own]), before, new)
    is_due = every.rows.mask & (every.due <= step.until)
    due = every.rows._replace(mask=is_due)
    if is_delay_fixed:  # the oldest
        due = jax.tree.map(lambda leaf: leaf[:num_new], due)
    left = every._replace(rows=every.rows._replace(mask=every.rows.mask & ~is_due))
    num_left = num_new if step.size is None else step.size
    waiting = jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, num_left, num_waiting), left)
    return due, waiting


_TYPES = int, float, int, float  # of the fields of a `Selection`; those of a user's selector may differ


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
    selector: Selector | Sequence[Selector],
    environment: Environment,
    *,
    num_steps: int,
    num_samples: int = 1000,
    draws: bool = False,
    place: int | Int[Array, ""] = 0,
) -> tuple[Rollout, Any, Any]:
    """Simulate one realization; return its steps, its contexts (T, ...) and the engine's last state. `vmap` over keys for more.

    Args:
        selector: a selector, or several, of which the one at `place` decides.
        draws: whether to draw all latents and fill the table even if a cheaper way exists (`engines.decide`).
    """
    key_init, key_steps = jr.split(key)
    first = environment.world(world_key(key))
    selectors = [selector] if isinstance(selector, Selector) else selector
    ways = [decision_function(reward_model.expected_rewards, engine, own, num_samples, draws) for own in selectors]
    typed = [lambda *given, way=way: Selection(*map(jnp.asarray, way(*given), _TYPES)) for way in ways]

    def decide(keys: Keys, play: Play, step: Step, context: Any) -> Choice:
        chosen = jax.lax.switch(place, typed, keys.draw, keys.select, play.state, context, step.number)
        return Choice(chosen.arm, chosen)

    start, numbers = initial_state(key_init, engine, num_steps), jnp.arange(1, num_steps + 1)
    play = play_function(key_steps, engine, decide, _record, first)
    end, (record, contexts) = jax.lax.scan(play, Play(start, first.moving_truth), Step(numbers, numbers))
    return record, contexts, end.state


def _record(key: Key, play: Play, played: Played) -> tuple[Play, tuple[Rollout, Any]]:
    del key
    chosen: Selection = played.choice.chosen
    world = played.world
    assert world is not None
    truth = world.expected_rewards(played.context, played.step.number)
    record = Rollout(
        chosen.arm,
        played.reward,
        jnp.max(truth) - truth[chosen.arm],
        chosen.num_candidates,
        chosen.best_arm_probs,
        jnp.asarray(getattr(played.info, "is_trusted", True)),
        jnp.max(truth) - played.reward if world.reward_model.is_reward_an_outcome else None,
    )
    return play, (record, played.context)


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


def take_logged(keys: Keys, play: Play, step: Step, context: Any) -> Choice:
    """Take the arms of a log."""
    assert step.rows is not None
    return Choice(step.rows.arm)


def accept_logged(select: Callable[..., Selection], bound: Any) -> Decide:
    """Return the decision to take one logged row, or to leave it out, so that the arms of those taken have a selector's law.

    A row is taken with probability pi(A) / (c e(A)), where pi are the selector's probabilities and e the log's.

    Args:
        select: made by `decision_function`; `play.own` is the number of rows taken before.
        bound: c; None takes the largest pi(a) / e(a) of each row.
    """

    def decide(keys: Keys, play: Play, step: Step, context: Any) -> Choice:
        assert step.rows is not None
        context = jax.tree.map(lambda leaf: leaf[0], context)
        probs = select(keys.draw, keys.select, play.state, context, play.own + 1).propensities
        ratio = probs / step.propensities[0]
        limit = jnp.max(ratio) if bound is None else bound
        return Choice(step.rows.arm, None, jr.uniform(keys.reward, (1,)) * limit < ratio[step.rows.arm])

    return decide


def log_steps(rows: Interaction, contexts: Any = None, propensities: Any = None, *, size: int = 1) -> Step:
    """Cut the rows of a log into steps of `size` rows, with the last one repeated and masked at the end.

    The number of steps is the next power of two, so that logs of similar lengths share a compiled function.
    """
    num_rows = len(rows.arm)
    num_steps = 1 << (-(-num_rows // size) - 1).bit_length()
    place = np.arange(num_steps * size)

    def cut(leaf: Any) -> np.ndarray:
        found = np.asarray(leaf)[np.minimum(place, num_rows - 1)]
        return found.reshape(num_steps, size, *found.shape[1:])

    first = place[::size]
    own = jax.tree.map(cut, (rows._replace(mask=None), contexts, propensities))
    sizes = np.clip(num_rows - first, 0, size)
    mask = (place < num_rows).reshape(num_steps, size)
    return Step(np.arange(num_steps), first + 1, sizes, None, None, own[0]._replace(mask=mask), *own[1:])


def follow_log(play: Callable[[Play, Step], tuple[Play, Any]], start: Play, steps: Step) -> tuple[Play, Any]:
    """Play the steps of a log, without those that are padding; their records are 0."""
    play = jax.jit(play)  # so that it is traced once, for its shapes and for the steps

    def follow(before: Play, step: Step) -> tuple[Play, Any]:
        record = jax.eval_shape(play, before, step)[1]
        nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), record)
        return jax.lax.cond(step.size > 0, play, lambda before, step: (before, nothing), before, step)

    return jax.lax.scan(follow, start, steps)
