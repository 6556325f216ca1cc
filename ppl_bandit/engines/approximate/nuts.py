"""NUTS at every update: every draw is a Markov chain that continues from the draws before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.block_particles import (
    block_check_values,
    draw_latents,
    draw_prior_particles,
    touched_blocks,
)
from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import independent_blocks
from ppl_bandit.engines.approximate.explanation import explain_approximate
from ppl_bandit.engines.approximate.noncentred_refresh import refresh_block
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.particles.checks import describe_failures, passed_checks
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT
from ppl_bandit.engines.particles.kernels import no_u_turn
from ppl_bandit.engines.particles.moves import MAX_AUTOCORRELATION
from ppl_bandit.engines.particles.weighted_particles import (
    MIN_ESS_SHARE,
    PARTICLE_CHECKS,
    RefreshSettings,
    WeightedParticles,
    sample_size,
)
from ppl_bandit.engines.particles.weights import weight_ess
from ppl_bandit.engines.row_buffer import (
    ROOM_CHECK,
    Buffer,
    append_rows,
    empty_buffer,
    reserve,
    row_mask,
    rows_that_fit,
)
from ppl_bandit.engines.settings import check_settings, refuse_moving
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["NutsInfo", "NutsState", "nuts"]

_CHECKS = (*PARTICLE_CHECKS, ROOM_CHECK)
_REFRESH = RefreshSettings(
    kernel=no_u_turn, first_length=2, first_coordinate_moves=16, min_narrowing=0.0, may_accept_proposals=False
)


class NutsState(NamedTuple):
    """The data, and draws of the posterior at the last run of the chains.

    Attributes:
        buffer: all rows so far.
        particles: the draws of all blocks of independent latents, with a leading axis B.
        reference: possible latents, for the blocks that are not evaluated.
        is_stale: (B,), blocks with rows since that run.
        num_pending: updates since that run.
    """

    buffer: Buffer
    particles: WeightedParticles
    reference: Float[Array, " K"]
    is_stale: Bool[Array, " B"]
    num_pending: Int[Array, ""]


class NutsInfo(NamedTuple):
    """Measures of an update; the worst over all blocks of independent latents.

    Attributes:
        is_trusted: whether all checks passed.
        ess: number of independent draws with the same Monte Carlo error.
        autocorrelation: of the draws with their positions before the last window of transitions.
        num_divergences: divergent transitions of this window.
        num_pending: updates that the draws do not include yet; below refresh_every.
        num_refreshes: runs of the chains so far, of the block with the most.
        is_full: the rows did not fit into the buffer and were not learnt; reserve capacity and update again.
        check_values: the values of all checks.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    autocorrelation: Float[Array, ""]
    num_divergences: Int[Array, ""]
    num_pending: Int[Array, ""]
    num_refreshes: Int[Array, ""]
    is_full: Bool[Array, ""]
    check_values: Float[Array, " checks"]

    def failed_checks(self) -> list[str]:
        """Name each failed check with its value and its bound."""
        return describe_failures(_CHECKS, self.check_values)


def nuts(
    model: RewardModel,
    *,
    capacity: int = 64,
    num_draws: int = 1000,
    refresh_every: int = 1,
    discount: float = 1.0,
) -> Engine:
    """Return the engine that runs NumPyro's NUTS on all data at every update.

    Every draw is a chain of its own. The chains start at importance draws if these pass their checks, else at the draws of the
    last posterior, in proportion to their likelihood of the new rows, with their covariance as mass matrix. All make as many
    transitions as their autocorrelation requires.

    Args:
        capacity: rows of data that the first state has room for; equal rows are stored once, with a count.
        num_draws: draws in the state; `sample` takes M of them, each floor or ceil of M / num_draws times in random
            order, so that with M above num_draws draws repeat.
        refresh_every: the chains run at every so many updates; in between, the draws do not include the latest rows.
        discount: weight of a row's log likelihood relative to the next row's; 1 discounts nothing.
    """
    check_settings(discount, capacity=capacity, num_draws=num_draws, refresh_every=refresh_every)
    refuse_moving(model, "nuts")
    if num_draws < 4:
        raise ValueError(f"num_draws must be at least 4, got {num_draws}")
    space = unconstrained_space(model)
    blocks = independent_blocks(model, space)
    num_blocks = len(blocks.coordinates)

    def init(key: Key) -> NutsState:
        particles, reference = draw_prior_particles(key, space, blocks, num_draws)
        is_stale = jnp.zeros(num_blocks, bool)
        return NutsState(empty_buffer(model, capacity), particles, reference, is_stale, jnp.zeros((), int))

    def run_chains(key: Key, state: NutsState, block: Array) -> NutsState:
        given = space, blocks, block, state.buffer, state.reference, discount
        target = block_posterior(*given)
        own = jax.tree.map(lambda leaf: leaf[block], state.particles)
        log_prior, log_likelihood = jax.vmap(target.parts)(own.positions)
        stale = own._replace(
            log_weights=own.log_weights + log_likelihood - own.log_likelihood,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
        )
        own = refresh_block(key, target, stale, _REFRESH, *given)
        return state._replace(
            particles=jax.tree.map(lambda all_, one: all_.at[block].set(one), state.particles, own),
            is_stale=state.is_stale.at[block].set(False),
            num_pending=jnp.zeros((), int),
        )

    def update(key: Key, state: NutsState, interaction: Interaction) -> tuple[NutsState, NutsInfo]:
        rows, has_room = rows_that_fit(state.buffer, interaction)
        has_rows = jnp.any(row_mask(rows))
        # With a discount every row changes the posterior of every block.
        is_touched = touched_blocks(blocks, rows) if discount == 1.0 else has_rows
        pending = state._replace(
            buffer=append_rows(model, state.buffer, rows, merges=discount == 1.0),
            is_stale=state.is_stale | is_touched,
            num_pending=state.num_pending + has_rows,
        )
        is_due = pending.num_pending >= refresh_every

        def is_unfinished(state: NutsState) -> Bool[Array, ""]:
            return is_due & jnp.any(state.is_stale)

        def run_next(state: NutsState) -> NutsState:
            block = jnp.argmax(state.is_stale)
            return run_chains(jr.fold_in(key, block), state, block)

        after = jax.lax.while_loop(is_unfinished, run_next, pending)
        return after, make_info(after, has_room)

    def make_info(state: NutsState, has_room: Bool[Array, ""]) -> NutsInfo:
        particles = state.particles
        ess = jax.vmap(weight_ess)(particles.log_weights)
        values = block_check_values(particles, ess)
        values = jnp.append(values, has_room.astype(values.dtype))
        return NutsInfo(
            is_trusted=jnp.all(passed_checks(_CHECKS, values)) & jnp.all(particles.evidence.is_sound),
            ess=jnp.min(jax.vmap(sample_size)(particles, ess)),
            autocorrelation=jnp.max(particles.evidence.autocorrelation),
            num_divergences=jnp.sum(particles.evidence.num_divergences),
            num_pending=state.num_pending,
            num_refreshes=jnp.max(particles.num_refreshes),
            is_full=~has_room,
            check_values=values,
        )

    def sample(key: Key, state: NutsState, num_samples: int) -> Draws:
        return jax.vmap(space.constrain)(draw_latents(key, blocks, state.particles, space.size, num_samples))

    interval = "every update" if refresh_every == 1 else f"every {refresh_every} updates"
    explanation = explain_approximate(
        model,
        "nuts",
        f"draws come from NumPyro's NUTS on all data, run again at {interval}",
        f"{num_draws} draws, each of its own chain",
        discount,
        [
            f"approximated: the posterior, by {num_draws} draws of Markov chains; its form is arbitrary",
            f"checks: the autocorrelation of the chains with their starting positions, at most {MAX_AUTOCORRELATION}, "
            f"effective sample size, at least {MIN_ESS_SHARE:.0%} of the draws, drift, divergences, acceptance and finite log "
            f"densities; for chains that started at importance draws with a Pareto k-hat of at most {MAX_K_HAT}, drift and "
            "finite log densities alone",
        ],
    )
    settings: dict[str, Any] = {
        "capacity": capacity,
        "num_draws": num_draws,
        "refresh_every": refresh_every,
        "discount": discount,
    }
    capabilities = Capabilities(reserve=reserve)
    return Engine(init, update, sample, explanation, settings, capabilities)
