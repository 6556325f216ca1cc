"""Simulate one experiment of a design: rows, looks, verdicts; a pure function of a key, vectorised by `vmap`.

A look is checked by `looks.check_look`, as in the live bandit. With probabilities that are fixed between looks, or a selector
that ignores the data, only the numbers of plays of a block are drawn, not its rows. With `allocation="each"` every row is
decided from the posterior at that time.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.counts import multinomial
from ppl_bandit.selectors.winner_frequencies import draw_arm, share_equally
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import CONTINUE, NO_ARM, Look, check_look
from ppl_bandit.trials.simulated.arrivals import arrival_counts, arrivals_width, draw_delays
from ppl_bandit.trials.simulated.learners import Setting
from ppl_bandit.types import Key

__all__ = ["TrialRecord", "run_trial"]


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


class _Progress(NamedTuple):
    """The state of a trial between looks.

    Attributes:
        pending: (W, A), plays whose outcomes arrive at the next looks (rows: with "each", decisions) in turn.
        late: plays whose outcomes arrive after the last look.
        probs: allocation until the next look.
    """

    state: Any
    verdict: Look
    look: Array
    counts: Array
    outcomes: Array
    sums: Array
    pending: Array
    late: Array
    probs: Array
    peak: Array
    is_trusted: Array


def run_trial(
    key: Key, setting: Setting, environment: Environment, thresholds: Float[Array, "rules looks"]
) -> TrialRecord:
    """Simulate one trial."""
    key_world, key_init, key_run, key_end = jr.split(key, 4)
    world = environment.world(key_world)
    design, num_arms = setting.design, setting.model.num_arms
    start = _start(key_init, setting)
    run = _run_blocks if _has_blocks(design) else _run_rows
    end, counts_by_look = run(key_run, setting, world, thresholds, start)
    # Outcomes of all decisions arrive in the end, and are part of the reported estimates.
    most = design.last_rows if design.lag else 1
    end = _learn(jr.fold_in(key_end, 0), setting, world, end, _waiting(end), most)
    posterior = setting.posterior(jr.fold_in(key_end, 1), end.state)
    return TrialRecord(
        end.verdict.ending,
        end.look,
        end.verdict.arm,
        end.verdict.active,
        end.counts,
        end.outcomes,
        end.sums,
        posterior.mean(),
        posterior.quantile(0.025),
        posterior.quantile(0.975),
        world.expected_rewards(setting.model.context),
        end.verdict.evidence,
        end.peak,
        end.verdict.best_arm_probs,
        counts_by_look.reshape(-1, num_arms),
        end.is_trusted,
    )


def _start(key: Key, setting: Setting) -> _Progress:
    design, num_arms = setting.design, setting.model.num_arms
    state = setting.learner.init(key)
    active, zeros = jnp.ones(num_arms, bool), jnp.zeros(num_arms, jnp.result_type(float))
    num_rules = len(design.rules)
    verdict = Look(
        jnp.asarray(CONTINUE),
        jnp.asarray(NO_ARM),
        active,
        jnp.asarray(setting.control),
        share_equally(active, zeros.dtype),
        jnp.zeros(num_rules, zeros.dtype),
    )
    probs = share_equally(active, zeros.dtype)
    if _is_fixed(design) and not (design.burn_in and design.allocation == "looks"):
        if design.selector.name != "fixed":
            probs_now = setting.posterior(jr.fold_in(key, 1), state).best_arm_probs(active)
            verdict = verdict._replace(best_arm_probs=probs_now)
        probs = setting.allocation(jr.fold_in(key, 2), state, active, verdict.best_arm_probs, jnp.asarray(0))
    width = arrivals_width(design)
    return _Progress(
        state,
        verdict,
        jnp.asarray(0),
        zeros,
        zeros,
        zeros,
        jnp.zeros((width, num_arms), zeros.dtype),
        zeros,
        probs,
        jnp.full(num_rules, -jnp.inf, zeros.dtype),
        jnp.asarray(True),
    )


def _waiting(progress: _Progress) -> Float[Array, " A"]:
    """Return the plays of each arm whose outcomes are not known yet."""
    return jnp.sum(progress.pending, axis=0) + progress.late


def _unless_over(progress: _Progress, after: _Progress) -> _Progress:
    """Return the state after a step; a trial that has ended stays as it is."""
    is_over = progress.verdict.ending != CONTINUE
    return jax.tree.map(lambda old, new: jnp.where(is_over, old, new), progress, after)


def _learn(
    key: Key, setting: Setting, world: Environment, progress: _Progress, known: Float[Array, " A"], most: int
) -> _Progress:
    """Learn outcomes of `known` plays of each arm, `most` in all."""
    learned = setting.learner.learn(key, progress.state, world, known, most)
    return progress._replace(
        state=learned.state,
        outcomes=progress.outcomes + known,
        sums=progress.sums + learned.sums,
        is_trusted=progress.is_trusted & learned.is_trusted,
    )


def _is_fixed(design: Design) -> bool:
    """Return whether probabilities are fixed between looks, except for those of a burn-in."""
    return design.allocation == "looks" or design.selector.name == "fixed"


def _has_blocks(design: Design) -> bool:
    """Return whether all decisions between two looks have the same probabilities."""
    if design.allocation == "looks":
        return True
    is_equal = not design.burn_in or design.selector.settings.get("probs") is None
    return design.selector.name == "fixed" and is_equal


def _look(
    key: Key, setting: Setting, thresholds: Array, progress: _Progress, look: Int[Array, ""], num_rows: Int[Array, ""]
) -> _Progress:
    """Check one look, and allocate anew if the trial continues."""
    key_posterior, key_allocate = jr.split(key, 3)[:2]
    design = setting.design
    posterior = setting.posterior(key_posterior, progress.state, design.deltas)

    found = check_look(
        design,
        look,
        posterior,
        progress.verdict.active,
        None if setting.control == NO_ARM else progress.verdict.control,
        first_control=setting.control,
        thresholds=thresholds,
    )
    moved = progress._replace(verdict=found, look=look, peak=jnp.maximum(progress.peak, found.evidence))
    if _is_fixed(design):
        probs = setting.allocation(key_allocate, progress.state, found.active, found.best_arm_probs, num_rows)
        moved = moved._replace(probs=probs)
    return moved


def _run_blocks(
    key: Key, setting: Setting, world: Environment, thresholds: Array, start: _Progress
) -> tuple[_Progress, Array]:
    design = setting.design
    key_arrivals, key_looks = jr.split(key)
    arrivals = arrival_counts(key_arrivals, design)  # (K, W + 1)
    most = _most_rows(design)

    def block(progress: _Progress, row: tuple[Array, Array, Array]) -> tuple[_Progress, Array]:
        look, num_rows, arriving = row
        key_plays, key_learn, key_look = jr.split(jr.fold_in(key_looks, look), 3)
        keys = jr.split(key_plays, arriving.size)
        plays = jax.vmap(lambda key, num: multinomial(key, num, progress.probs))(keys, arriving)  # (W + 1, A)
        pending = progress.pending + plays[:-1]
        after = _learn(key_learn, setting, world, progress, pending[0], most)._replace(
            counts=progress.counts + jnp.sum(plays, axis=0),
            pending=jnp.concatenate([pending[1:], jnp.zeros_like(pending[:1])]),
            late=progress.late + plays[-1],
        )
        after = _look(key_look, setting, thresholds, after, look, num_rows)
        kept = _unless_over(progress, after)
        return kept, kept.counts

    rows = jnp.arange(design.num_looks), jnp.asarray(design.look_rows), arrivals
    return jax.lax.scan(block, start, rows)


def _most_rows(design: Design) -> int:
    """Return the most rows whose outcomes may become known at one look."""
    if isinstance(design.lag, tuple) or design.lag:
        return design.last_rows
    return int(np.max(np.diff((0, *design.look_rows))))


def _run_rows(
    key: Key, setting: Setting, world: Environment, thresholds: Array, start: _Progress
) -> tuple[_Progress, Array]:
    """Decide row by row; outcomes arrive after a number of further decisions."""
    design, model = setting.design, setting.model
    key_delays, key_rows = jr.split(key)
    decide = setting.decision_function()
    num_rows = design.last_rows
    if isinstance(design.lag, tuple):
        delays, is_known = draw_delays(key_delays, design.lag, num_rows)
        depth, most = len(design.lag), len(design.lag)
    else:
        lag = int(design.lag)  # type: ignore[arg-type]
        delays, is_known = jnp.full(num_rows, lag), jnp.ones(num_rows, bool)
        depth, most = lag + 1, 1
    looks = np.asarray(design.look_rows)
    look_of = jnp.asarray(np.searchsorted(looks, np.arange(1, num_rows + 1)))
    is_look = jnp.asarray(np.isin(np.arange(1, num_rows + 1), looks))
    start = start._replace(pending=jnp.zeros((depth, model.num_arms), start.counts.dtype))

    def row(progress: _Progress, given: Any) -> tuple[_Progress, Array]:
        number, delay, arrives, look, is_looked_at = given
        key_draw, key_select, key_equal, key_learn, key_look = jr.split(jr.fold_in(key_rows, number), 5)
        chosen = decide(key_draw, key_select, progress.state, model.context, number, progress.verdict.active)
        equal = draw_arm(key_equal, share_equally(progress.verdict.active, progress.counts.dtype))
        arm = jnp.where(number <= design.burn_in, equal, chosen.arm)
        play = jax.nn.one_hot(arm, model.num_arms, dtype=progress.counts.dtype)
        pending = progress.pending.at[delay].add(jnp.where(arrives, play, 0.0))
        after = _learn(key_learn, setting, world, progress, pending[0], most)._replace(
            counts=progress.counts + play, pending=jnp.concatenate([pending[1:], jnp.zeros_like(pending[:1])])
        )
        # The predicate is the same for all trials, so that it stays a branch under `vmap`.
        after = jax.lax.cond(
            is_looked_at, lambda own: _look(key_look, setting, thresholds, own, look, number), lambda own: own, after
        )
        kept = _unless_over(progress, after)
        return kept, kept.counts

    numbers = jnp.arange(1, num_rows + 1)
    if design.max_rows is not None:  # the last look waits for all outcomes
        is_look = is_look.at[-1].set(bool(looks.size > 1 and looks[-2] == num_rows))
    end, counts = jax.lax.scan(row, start, (numbers, delays, is_known, look_of, is_look))
    if design.max_rows is not None:
        key_learn, key_look = jr.split(jr.fold_in(key_rows, 0))
        last = _learn(key_learn, setting, world, end, jnp.sum(end.pending, axis=0), depth)
        last = last._replace(pending=jnp.zeros_like(end.pending))
        last = _look(key_look, setting, thresholds, last, jnp.asarray(looks.size - 1), jnp.asarray(num_rows))
        end = _unless_over(end, last)
    return end, counts[looks - 1]
