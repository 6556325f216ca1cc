"""Kalman filters over particles: exact given a few static latents, such as the scale of the steps.

Each particle is a value of these outer latents with the Kalman filter of the others given it (Rao-Blackwellised). The
predictive density of each row weights the particles. After a resampling, Metropolis-Hastings moves of the outer latents
replay the rows of a window from the filters at its start. The first window starts at the prior, so that its moves are
exact. When it is full, the next starts with a Gaussian law of the outer latents, fitted to the particles, and with each
particle's own filter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.collapsed.outer import given
from ppl_bandit.engines.exact.families.posterior import Posterior
from ppl_bandit.engines.moving.linear_step import LinearStep, invert_blocks, shortest_step
from ppl_bandit.engines.moving.outer_split import FilterSplit, explain_split, split_program
from ppl_bandit.engines.moving.replay import Filters, Replay, each_particle, filters_of
from ppl_bandit.engines.moving.steps import Clock, elapsed_until, first_clock, learn_in_order, require_moving
from ppl_bandit.engines.moving.two_filters import (
    NUM_FILTERS,
    disagreement,
    evidence_error,
    pick,
    pooled_evidence,
    pooled_log_weights,
    resample_each,
    reweigh,
)
from ppl_bandit.engines.moving.two_steps import is_linear_step, joint_layout
from ppl_bandit.engines.particles.checks import Check, describe_failures, passed_checks
from ppl_bandit.engines.particles.weights import resample
from ppl_bandit.engines.settings import check_settings, stored_evidence
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["CollapsedKalmanState", "collapsed_kalman"]

_CHECKS = (
    Check("the effective sample size, as a share of the particles,", 0.1, is_minimum=True),
    Check("k-hat of the weights", 0.7),
    Check("the difference of the means of two independent sets of particles, in standard deviations,", 0.7),
    Check("certificate", failure="the row's likelihood or the step before it is not Gaussian given the outer latents"),
)


class CollapsedKalmanState(NamedTuple):
    """Two independent sets of H particles.

    Attributes:
        positions: of the outer latents, in unconstrained space.
        laws: the filter of the other latents at each particle, at the last step.
        steps: the step of the other latents at each particle; None if it depends on the time elapsed.
        num_refreshes: number of times that the particles were resampled.
    """

    positions: Float[Array, "2 H K"]
    log_weights: Float[Array, "2 H"]
    laws: Posterior
    steps: LinearStep | None
    clock: Clock
    log_evidences: Float[Array, " 2"]
    replay: Replay
    num_refreshes: Int[Array, ""]

    @property
    def log_evidence(self) -> Float[Array, ""]:
        """Log p(data) so far."""
        return pooled_evidence(self.log_evidences)

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Its standard error, by the difference of two independent estimates."""
        return evidence_error(self.log_evidences)


class CollapsedKalmanInfo(NamedTuple):
    """Measures of an update, at the last row.

    Attributes:
        is_trusted: whether all checks passed.
        ess: effective sample size of all particles, twice that of the worse set, before any resampling.
        may_recover: whether the next rows can restore the trust: not if a row is not certified.
        is_full: always false; rows beyond the window are not stored.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    disagreement: Float[Array, ""]
    num_refreshes: Int[Array, ""]
    may_recover: Bool[Array, ""]
    is_full: Bool[Array, ""]
    check_values: Float[Array, " checks"]

    def failed_checks(self) -> list[str]:
        """Name each failed check with its value and its bound."""
        return describe_failures(_CHECKS, self.check_values)


def collapsed_kalman(
    model: RewardModel, outer: tuple[str, ...] | None = None, *, num_particles: int = 1000, window: int = 200
) -> Engine:
    """Return Kalman filters over particles of a few static latents, or refuse.

    Args:
        outer: static latents given which the program is linear Gaussian; None finds the smallest set.
        num_particles: of both sets together.
        window: rows that a move of the outer latents replays at most.

    Raises:
        NotConjugate: if the program is not linear Gaussian given a few static latents, or not provably so.
        ValueError: if no latent moves, or a setting is invalid.
    """
    require_moving(model, "collapsed_kalman")
    check_settings(1.0, num_particles=num_particles, window=window)
    num_own = -(-num_particles // NUM_FILTERS)
    with jax.enable_x64(True):
        split = split_program(model, outer)
        filters = filters_of(model, split, window)
        shortest, is_step = _clocked_step(model, split, filters) if model.has_clock else (0.0, None)

    def init(key: Key) -> CollapsedKalmanState:
        drawn = model.sample_prior(key, NUM_FILTERS * num_own)
        outer_draws = {name: drawn[name] for name in split.space.names}
        positions = jax.vmap(split.space.unconstrain)(outer_draws).reshape(NUM_FILTERS, num_own, split.space.size)
        laws, _ = each_particle(filters.start)(positions)
        return CollapsedKalmanState(
            positions,
            jnp.zeros((NUM_FILTERS, num_own)),
            laws,
            None if model.has_clock else each_particle(filters.step)(positions),
            first_clock(),
            jnp.zeros(NUM_FILTERS),
            filters.empty_replay(laws),
            jnp.zeros((), int),
        )

    def predicted(state: CollapsedKalmanState, context: Any = None) -> CollapsedKalmanState:
        elapsed, clock = elapsed_until(model, state.clock, context, shortest)
        return state._replace(laws=filters.predict(state.positions, state.steps, state.laws, elapsed), clock=clock)

    def advance(key: Key, state: CollapsedKalmanState, context: Any) -> CollapsedKalmanState:
        del key  # a prediction is not random
        return predicted(state, context)

    def learn(key: Key, state: CollapsedKalmanState, row: Interaction) -> tuple[CollapsedKalmanState, Any]:
        elapsed, _ = elapsed_until(model, state.clock, row.context, shortest)
        before = predicted(state, row.context)
        laws, log_densities = each_particle(lambda at, law: filters.absorb(at, law, row))(before.positions, before.laws)
        new = reweigh(before.log_weights, log_densities)
        difference = _disagreement(before.positions, laws, new.weights)
        first = jax.tree.map(lambda leaf: leaf[:, 0], (before.positions, before.laws))
        is_certified = jnp.all(jax.vmap(lambda at, law: filters.is_certified(at, law, row))(*first))
        if is_step is not None:
            is_certified &= is_step(elapsed)
        share = new.ess / (NUM_FILTERS * num_own)
        values = jnp.stack([share, new.k_hat, difference, is_certified.astype(share.dtype)])
        after = before._replace(
            laws=laws,
            log_weights=new.log_weights,
            clock=before.clock.after_row(),
            log_evidences=before.log_evidences + new.log_densities,
        )
        replay = filters.extend(before.replay, after.positions, laws, new.weights, row, elapsed)
        after = after._replace(replay=replay)
        renewed = jax.lax.cond(new.is_uneven, lambda: _renew(filters, key, after), lambda: after)
        is_trusted = jnp.all(passed_checks(_CHECKS, values))
        flags = renewed.num_refreshes, is_certified, jnp.array(False)
        return renewed, CollapsedKalmanInfo(is_trusted, new.ess, new.k_hat, difference, *flags, values)

    def update(key: Key, state: CollapsedKalmanState, interaction: Interaction) -> tuple[CollapsedKalmanState, Any]:
        return learn_in_order(learn, key, state, interaction)

    def sample(key: Key, state: CollapsedKalmanState, num_samples: int) -> Draws:
        key_pick, key_draw = jr.split(key)
        picks = resample(jr.uniform(key_pick), pooled_log_weights(state.log_weights), num_samples)
        now = predicted(state)
        positions, laws = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:])[picks], (now.positions, now.laws))
        return jax.vmap(filters.draw)(jr.split(key_draw, num_samples), positions, laws)

    return Engine(
        init,
        update,
        sample,
        explain_split(model, split, num_own, window),
        settings={"num_particles": num_particles, "window": window},
        # Without a clock every decision reads the next step, which `sample` takes itself.
        capabilities=Capabilities(advance=advance if model.has_clock else None, log_evidence=stored_evidence),
    )


def _clocked_step(
    model: RewardModel, split: FilterSplit, filters: Filters
) -> tuple[float, Callable[[Array], Bool[Array, ""]]]:
    """Return the shortest step of a program with a clock, and a function of a time: whether its step is linear Gaussian.

    A step is certified at one value of the outer latents, as at the build: its density is proved analytic in them.
    """
    law, _ = run_once(lambda: filters.start(split.space.unconstrain(split.values)))
    view = given(model, split.values)
    joint = joint_layout(view)
    return shortest_step(model, split.layout, law, split.values), lambda elapsed: is_linear_step(view, joint, elapsed)


def _renew(filters: Filters, key: Key, state: CollapsedKalmanState) -> CollapsedKalmanState:
    """Resample both sets of particles, and move their outer latents."""
    key_resample, key_move = jr.split(key)
    particles = state.positions, state.laws, state.steps, state.replay.laws
    positions, laws, steps, bases = pick(particles, resample_each(key_resample, state.log_weights))
    replay = state.replay._replace(laws=bases)
    positions, (laws, steps) = filters.move(key_move, replay, positions, laws, steps)
    return state._replace(
        positions=positions,
        laws=laws,
        log_weights=jnp.zeros_like(state.log_weights),
        steps=steps,
        replay=replay,
        num_refreshes=state.num_refreshes + 1,
    )


def _disagreement(positions: Float[Array, "2 H K"], laws: Posterior, weights: Float[Array, "2 H"]) -> Float[Array, ""]:
    """Return the largest difference of the sets' means, over outer latents and means of the others, in standard deviations."""
    variances = jnp.diagonal(invert_blocks(laws.precision), axis1=-2, axis2=-1)
    values = [positions, laws.mean.reshape(*weights.shape, -1)]
    within = [jnp.zeros_like(positions), variances.reshape(*weights.shape, -1)]
    return disagreement(jnp.concatenate(values, axis=-1), weights, jnp.concatenate(within, axis=-1))
