"""Simulate one experiment of a design: a rollout with looks; a pure function of a key, vectorised by `vmap`.

A look is checked by `looks.check_look`, as in the live bandit. If probabilities are fixed between looks, or the selector
ignores the data, all decisions between two looks are one step. Otherwise every decision is a step, made from the posterior at
that time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.random_bits import uniform
from ppl_bandit.selectors.selector_contract import draw_arm, pick_arm, share_equally
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import (
    Choice,
    Decide,
    Keys,
    Play,
    Played,
    Step,
    initial_state,
    no_waiting,
    play_function,
)
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import CONTINUE, NO_ARM, Look, check_look
from ppl_bandit.trials.setting import Setting, sums_by_arm
from ppl_bandit.types import Interaction, Key


class TrialRecord(NamedTuple):
    """One simulated trial.

    Attributes:
        ending: index into `looks.ENDINGS`.
        look: index of the look at which it ended.
        arm: selected arm.
        active: arms left at the end.
        counts: decisions per arm.
        outcomes: outcomes per arm, after all outcomes of the decisions have arrived.
        sums: sums of these outcomes.
        mean, low, high: posterior mean and 95% credible interval of each arm after all outcomes have arrived.
        truth: true expected rewards.
        evidence: criteria of the rules at the look at which it ended.
        peak: the largest value of each criterion at any look so far.
        best_arm_probs: at that look.
        counts_by_look: decisions per arm at each look; constant after the end.
        is_trusted: whether the engine trusted all its updates.
    """

    ending: Int[Array, ""]
    look: Int[Array, ""]
    arm: Int[Array, ""]
    active: Bool[Array, " A"]
    counts: Float[Array, " A"]
    outcomes: Float[Array, " A"]
    sums: Float[Array, " A"]
    mean: Float[Array, " A"]
    low: Float[Array, " A"]
    high: Float[Array, " A"]
    truth: Float[Array, " A"]
    evidence: Float[Array, " rules"]
    peak: Float[Array, " rules"]
    best_arm_probs: Float[Array, " A"]
    counts_by_look: Float[Array, "K A"]
    is_trusted: Bool[Array, ""]


class _Trial(NamedTuple):
    """What a trial carries beside the engine's state.

    Attributes:
        counts: decisions per arm.
        outcomes, sums: outcomes that are known, per arm.
        probs: allocation until the next look, where it is fixed.
    """

    verdict: Look
    look: Array
    counts: Array
    outcomes: Array
    sums: Array
    probs: Array
    peak: Array
    is_trusted: Array

    @property
    def is_over(self) -> Array:
        return self.verdict.ending != CONTINUE


def run_trial(
    key: Key, setting: Setting, environment: Environment, thresholds: Float[Array, "rules looks"]
) -> TrialRecord:
    """Simulate one trial."""
    key_world, key_init, key_run, key_end = jr.split(key, 4)
    world = environment.world(key_world)
    design = setting.design
    key_delays, key_steps = jr.split(key_run)
    is_block, engine = _is_fixed(design), setting.learner
    steps = _steps(key_delays, design)
    state = initial_state(key_init, engine, design.last_rows)
    lag: Any = design.lag
    is_tuple = isinstance(lag, tuple)
    waiting = no_waiting(world, len(lag) - 1 if is_tuple else lag)

    def look(key: Key, play: Play, number: Array, num_rows: Array) -> Play:
        return play._replace(own=_look(key, setting, thresholds, play.state, play.own, number, num_rows))

    def record(key: Key, play: Play, played: Played) -> tuple[Play, Array]:
        own = _learnt(setting, play.own, played.due, played.info)
        counts = own.counts + sums_by_arm(played.rows, setting.model, 1)[0]
        play, step = play._replace(own=own._replace(counts=counts)), played.step
        number, is_look = step.more
        last = step.number if step.size is None else step.number + step.size - 1
        # The predicate is the same for all trials, so that it stays a branch under `vmap`.
        play = jax.lax.cond(is_look, lambda own: look(key, own, number, last), lambda own: own, play)
        return play, play.own.counts

    play = play_function(
        key_steps,
        engine,
        _fixed_shares(design) if is_block else _each_time(setting),
        record,
        world,
        num_rows=_block_size(design) if is_block else None,
        is_delay_fixed=not is_tuple and not (is_block and design.max_rows is not None),
    )
    start = Play(state, None, waiting, _start(jr.fold_in(key_init, 1), setting, state))
    end, counts = jax.lax.scan(play, start, steps)
    if not is_block:
        counts = counts[np.asarray(design.look_rows) - 1]
    if end.waiting is not None:  # outcomes of all decisions arrive in the end, and are part of the reported estimates
        state, info = engine.update(jr.fold_in(key_end, 0), end.state, end.waiting.rows)
        end = end._replace(state=state, own=_learnt(setting, end.own, end.waiting.rows, info))
    if design.max_rows is not None and not is_block:  # the last look waits for them
        last = jnp.asarray(design.num_looks - 1), jnp.asarray(design.last_rows)
        end = look(jr.fold_in(key_end, 2), end, *last)
    posterior, own = setting.posterior(jr.fold_in(key_end, 1), end.state), end.own
    return TrialRecord(
        own.verdict.ending,
        own.look,
        own.verdict.arm,
        own.verdict.active,
        own.counts,
        own.outcomes,
        own.sums,
        posterior.mean(),
        posterior.quantile(0.025),
        posterior.quantile(0.975),
        world.expected_rewards(setting.model.context),
        own.verdict.evidence,
        own.peak,
        own.verdict.best_arm_probs,
        counts,
        own.is_trusted,
    )


def _is_fixed(design: Design) -> bool:
    """Return whether probabilities are fixed between looks, except for those of a burn-in."""
    return design.allocation == "looks" or design.selector.name == "fixed"


def _block_size(design: Design) -> int:
    return int(np.max(np.diff((0, *design.look_rows))))


def _steps(key: Key, design: Design) -> Step:
    """Return the steps of a trial: one for each decision, or one for all decisions between two looks."""
    looks, last = np.asarray(design.look_rows), design.last_rows
    if _is_fixed(design):
        index, number = np.arange(looks.size), np.concatenate([[1], looks[:-1] + 1])
        size, num_rows = np.diff(looks, prepend=0), _block_size(design)
        until = looks.copy()
        if design.max_rows is not None:  # the last look waits for all outcomes
            until[-1] = np.iinfo(np.int32).max
        more = index, np.ones(looks.size, bool)
        rows = np.minimum(number[:, None] - 1 + np.arange(num_rows), last - 1)
    else:
        index = number = until = np.arange(1, last + 1)
        size, rows = None, index - 1
        is_look = np.isin(number, looks)
        if design.max_rows is not None:  # the last look follows the scan
            is_look[-1] = looks.size > 1 and looks[-2] == last
        more = np.searchsorted(looks, number), is_look
    delay: Any = np.full(index.size, design.lag) if not isinstance(design.lag, tuple) else None
    if delay is None:
        delay = _draw_delays(key, np.asarray(design.lag), last)[rows]
    return jax.tree.map(jnp.asarray, Step(index, number, size, delay, until, more=more))


def _draw_delays(key: Key, probs: np.ndarray, num: int) -> Int[Array, " N"]:
    """Return delays, in decisions; -1 for an outcome that never arrives."""
    passed = np.cumsum(probs)
    place = jnp.searchsorted(jnp.asarray(passed), uniform(key, (num,), jnp.result_type(float)), side="right")
    last = -1 if passed[-1] < 1.0 - 1e-9 else passed.size - 1
    return jnp.where(place < passed.size, place, last)


def _each_time(setting: Setting) -> Decide:
    """Return the decision of the design's selector, from the present posterior; equal shares in the burn-in."""
    design, select = setting.design, setting.decision_function()

    def decide(keys: Keys, play: Play, step: Step, context: Any) -> Choice:
        active = play.own.verdict.active
        arm = select(keys.draw, keys.select, play.state, context, step.number, active).arm
        if design.burn_in:
            equal = draw_arm(jr.fold_in(keys.select, 1), share_equally(active, play.own.counts.dtype))
            arm = jnp.where(step.number <= design.burn_in, equal, arm)
        return Choice(arm, None, ~play.own.is_over)

    return decide


def _fixed_shares(design: Design) -> Decide:
    """Return the decisions between two looks, by the probabilities of the last look; equal shares in the burn-in."""

    def decide(keys: Keys, play: Play, step: Step, context: Any) -> Choice:
        own, num_rows = play.own, _block_size(design)
        uniforms, place = uniform(keys.select, (num_rows,), own.probs.dtype), jnp.arange(num_rows)
        arm = jax.vmap(pick_arm, (0, None))(uniforms, own.probs)
        if design.burn_in and design.allocation == "each":
            equal = jax.vmap(pick_arm, (0, None))(uniforms, share_equally(own.verdict.active, own.probs.dtype))
            arm = jnp.where(step.number + place <= design.burn_in, equal, arm)
        return Choice(arm, None, (place < step.size) & ~own.is_over)

    return decide


def _start(key: Key, setting: Setting, state: Any) -> _Trial:
    design, num_arms = setting.design, setting.model.num_arms
    active, zeros = jnp.ones(num_arms, bool), jnp.zeros(num_arms, jnp.result_type(float))
    num_rules = len(design.rules)
    probs = best = share_equally(active, zeros.dtype)
    if _is_fixed(design) and not (design.burn_in and design.allocation == "looks"):
        if design.selector.name != "fixed":
            best = setting.posterior(jr.fold_in(key, 1), state).best_arm_probs(active)
        probs = setting.allocation(jr.fold_in(key, 2), state, active, best, jnp.asarray(0))
    control = jnp.asarray(setting.control)
    none = jnp.zeros(num_rules, zeros.dtype)
    verdict = Look(jnp.asarray(CONTINUE), jnp.asarray(NO_ARM), active, control, best, none)
    return _Trial(verdict, jnp.asarray(0), zeros, zeros, zeros, probs, none - jnp.inf, jnp.asarray(True))


def _learnt(setting: Setting, own: _Trial, due: Interaction, info: Any) -> _Trial:
    num, total = sums_by_arm(due, setting.model, 2)
    is_trusted = own.is_trusted & jnp.asarray(getattr(info, "is_trusted", True))
    return own._replace(outcomes=own.outcomes + num, sums=own.sums + total, is_trusted=is_trusted)


def _look(
    key: Key, setting: Setting, thresholds: Array, state: Any, own: _Trial, look: Int[Array, ""], num_rows: Array
) -> _Trial:
    """Check one look, and allocate anew if the trial continues; a trial that has ended stays as it is."""
    key_posterior, key_allocate = jr.split(key)
    design = setting.design
    found = check_look(
        design,
        look,
        setting.posterior(key_posterior, state, design.deltas),
        own.verdict.active,
        None if setting.control == NO_ARM else own.verdict.control,
        first_control=setting.control,
        thresholds=thresholds,
    )
    after = own._replace(verdict=found, look=look, peak=jnp.maximum(own.peak, found.evidence))
    if _is_fixed(design):
        probs = setting.allocation(key_allocate, state, found.active, found.best_arm_probs, num_rows)
        after = after._replace(probs=probs)
    return jax.tree.map(lambda old, new: jnp.where(own.is_over, old, new), own, after)
