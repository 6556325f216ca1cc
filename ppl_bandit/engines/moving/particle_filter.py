"""The particle filter of any program whose latents move: propagate by the program's own step, weight, resample.

Two independent filters share the particles; how far they disagree is evidence that can fail. Every learnt row is one step. The
size of the state is fixed, so that neither memory nor time grows with the steps.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.exact.explanation import program_name
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
from ppl_bandit.engines.moving.window import StaticMoves, Window, static_moves
from ppl_bandit.engines.particles.checks import Check, describe_failures, passed_checks
from ppl_bandit.engines.particles.weights import resample
from ppl_bandit.engines.settings import check_settings, stored_evidence
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Explanation, Interaction, Key

__all__ = ["FilterInfo", "FilterState", "particle_filter"]

_CHECKS = (
    Check("the effective sample size, as a share of the particles,", 0.1, is_minimum=True),
    Check("k-hat of the weights", 0.7),
    Check("the difference of the means of two independent filters, in standard deviations,", 0.5),
    Check("likelihood", failure="the likelihood of the row is not finite at any particle"),
)


class FilterState(NamedTuple):
    """Particles of two filters at the last step, {site: (2, H, ...)}, with their weights.

    Attributes:
        log_evidences: log p(data) so far, by each filter.
        window: the latest rows and paths, for the moves of static latents; None if all latents move.
        num_refreshes: number of times that the particles were resampled.
    """

    latents: dict[str, Array]
    log_weights: Float[Array, "2 H"]
    clock: Clock
    log_evidences: Float[Array, " 2"]
    window: Window | None
    num_refreshes: Int[Array, ""]

    @property
    def log_evidence(self) -> Float[Array, ""]:
        """Log p(data) so far."""
        return pooled_evidence(self.log_evidences)

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Its standard error, by the difference of two independent estimates."""
        return evidence_error(self.log_evidences)


class FilterInfo(NamedTuple):
    """Measures of an update.

    Attributes:
        is_trusted: whether all checks passed at the last row.
        ess: effective sample size of all particles, twice that of the worse filter, before any resampling.
        k_hat: Pareto k-hat of the weights; 0 if no weight is large.
        disagreement: largest difference of the filters' means, in standard deviations.
        num_refreshes: number of times that the particles were resampled.
        check_values: the values of all checks.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    disagreement: Float[Array, ""]
    num_refreshes: Int[Array, ""]
    check_values: Float[Array, " checks"]

    def failed_checks(self) -> list[str]:
        """Name each failed check with its value and its bound."""
        return describe_failures(_CHECKS, self.check_values)


def particle_filter(model: RewardModel, *, num_particles: int = 4000, window: int = 50) -> Engine:
    """Return the particle filter of a program whose latents move.

    Args:
        num_particles: of both filters together.
        window: rows over which the static latents are moved after a resampling; not used if all latents move.

    Raises:
        ValueError: if no latent moves, or a setting is invalid.
    """
    require_moving(model, "particle_filter")
    check_settings(1.0, num_particles=num_particles, window=window)
    num_own = -(-num_particles // NUM_FILTERS)
    moves = static_moves(model, window)

    def init(key: Key) -> FilterState:
        drawn = model.sample_prior(key, NUM_FILTERS * num_own)
        latents = {name: value.reshape(NUM_FILTERS, num_own, *value.shape[1:]) for name, value in drawn.items()}
        start = None if moves is None else moves.start(latents)
        zeros = jnp.zeros((NUM_FILTERS, num_own)), first_clock(), jnp.zeros(NUM_FILTERS)
        return FilterState(latents, *zeros, start, jnp.zeros((), int))

    def advance(key: Key, state: FilterState, context: Any) -> FilterState:
        elapsed, clock = elapsed_until(model, state.clock, context)
        return state._replace(latents=_propagate(model, key, state.latents, elapsed), clock=clock)

    def learn(key: Key, state: FilterState, row: Interaction) -> tuple[FilterState, FilterInfo]:
        key_move, key_renew = jr.split(key)
        elapsed, _ = elapsed_until(model, state.clock, row.context)
        moved = advance(key_move, state, row.context)
        single = jax.tree.map(lambda leaf: leaf[None], row._replace(mask=None))
        each = jax.vmap(jax.vmap(lambda latents: model.log_likelihood(latents, single)[0]))
        log_likelihoods = each(moved.latents)
        is_finite = jnp.all(jnp.any(jnp.isfinite(log_likelihoods), axis=1))
        after = reweigh(moved.log_weights, log_likelihoods)
        flat = [value.reshape(*after.weights.shape, -1) for value in moved.latents.values()]
        difference = disagreement(jnp.concatenate(flat, axis=-1), after.weights)
        share = after.ess / (NUM_FILTERS * num_own)
        values = jnp.stack([share, after.k_hat, difference, is_finite.astype(share.dtype)])
        found = moved._replace(
            log_weights=after.log_weights,
            clock=moved.clock.after_row(),
            log_evidences=moved.log_evidences + after.log_densities,
        )
        if moves is not None:
            found = found._replace(window=moves.extend(found.window, found.latents, after.weights, row, elapsed))
        renewed = jax.lax.cond(after.is_uneven, lambda: _renew(moves, key_renew, found), lambda: found)
        is_trusted = jnp.all(passed_checks(_CHECKS, values))
        return renewed, FilterInfo(is_trusted, after.ess, after.k_hat, difference, renewed.num_refreshes, values)

    def update(key: Key, state: FilterState, interaction: Interaction) -> tuple[FilterState, FilterInfo]:
        return learn_in_order(learn, key, state, interaction)

    def sample(key: Key, state: FilterState, num_samples: int) -> Draws:
        key_pick, key_move = jr.split(key)
        picks = resample(jr.uniform(key_pick), pooled_log_weights(state.log_weights), num_samples)
        chosen = {name: value.reshape(-1, *value.shape[2:])[picks][None] for name, value in state.latents.items()}
        elapsed, _ = elapsed_until(model, state.clock, None)
        return {name: value[0] for name, value in _propagate(model, key_move, chosen, elapsed).items()}

    return Engine(
        init,
        update,
        sample,
        _explain(model, num_own, None if moves is None else window),
        settings={"num_particles": num_particles, "window": window},
        # Without a clock every decision reads the next step, and `sample` takes it for the particles that it draws alone.
        capabilities=Capabilities(advance=advance if model.has_clock else None, log_evidence=stored_evidence),
    )


def _propagate(model: RewardModel, key: Key, latents: dict[str, Array], elapsed: Float[Array, ""]) -> dict[str, Array]:
    """Draw the next step of every particle, {site: (F, H, ...)}; the same particles if no time has elapsed."""
    shape = next(iter(latents.values())).shape[:2]
    given = jnp.where(elapsed > 0.0, elapsed, 1.0) if model.has_clock else None
    keys = jr.split(key, shape)
    later = jax.vmap(jax.vmap(lambda key, own: model.draw_transition(key, own, given)))(keys, latents)
    return {name: jnp.where(elapsed > 0.0, later[name], own) for name, own in latents.items()}


def _renew(moves: StaticMoves | None, key: Key, state: FilterState) -> FilterState:
    """Resample both filters, and move their static latents."""
    key_resample, key_move = jr.split(key)
    index = resample_each(key_resample, state.log_weights)
    latents, window = pick(state.latents, index), state.window
    if moves is not None and window is not None:
        paths = jax.vmap(lambda own: pick(own, index))(window.path)
        window = window._replace(path=paths)
        latents = moves.move(key_move, window, latents)
    return state._replace(
        latents=latents,
        log_weights=jnp.zeros_like(state.log_weights),
        window=window,
        num_refreshes=state.num_refreshes + 1,
    )


def _explain(model: RewardModel, num_own: int, window: int | None) -> Explanation:
    moving = ", ".join(model.moving_sites)
    static = [name for name in model.latent_shapes if name not in model.moving_sites]
    lines = [
        f"{program_name(model)}: APPROXIMATE, by a particle filter: {NUM_FILTERS} independent filters of {num_own} particles.",
        "",
        f"  {moving}: advanced by the program's own time step",
    ]
    if static:
        lines.append(
            f"  {', '.join(static)}: static, renewed by Markov steps after each resampling, over the last rows "
            f"(at most {window})"
        )
    time = 'context["time"] is the time of a step' if model.has_clock else "every learnt reward is one step"
    lines += [
        f"  time: {time}; a decision predicts to its own time, then reads the table",
        f"  expected reward: {model.expected_reward_method}",
        "  evidence: effective sample size, k-hat of the weights, and the disagreement of the two filters, at every row",
    ]
    sites = {name: "particles" for name in model.latent_shapes}
    return Explanation("particle_filter", False, "a particle filter for latents that move", sites, "\n".join(lines))
