"""NUTS at every update: every draw is a Markov chain that continues from the draws before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.block_particles import (
    block_checks,
    draw_latents,
    draw_prior_particles,
    touched_blocks,
)
from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import independent_blocks
from ppl_bandit.engines.approximate.noncentred_refresh import refresh_block
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.checks import Info, make_info
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT
from ppl_bandit.engines.particles.kernels import no_u_turn
from ppl_bandit.engines.particles.moves import MAX_AUTOCORRELATION
from ppl_bandit.engines.particles.weighted_particles import (
    MIN_ESS_SHARE,
    RefreshSettings,
    WeightedParticles,
    sample_size,
)
from ppl_bandit.engines.particles.weights import weight_ess
from ppl_bandit.engines.row_buffer import (
    Buffer,
    append_rows,
    empty_buffer,
    reserve,
    row_mask,
    rows_that_fit,
)
from ppl_bandit.engines.settings import check_settings, refuse_moving
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Explanation, Interaction, Key

__all__ = ["NutsState", "nuts"]

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

    def update(key: Key, state: NutsState, interaction: Interaction) -> tuple[NutsState, Info]:
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
        return after, measure(after, has_room)

    def measure(state: NutsState, has_room: Bool[Array, ""]) -> Info:
        particles = state.particles
        ess = jax.vmap(weight_ess)(particles.log_weights)
        return make_info(
            {**block_checks(particles, ess), "capacity": has_room},
            permanent=["capacity"],
            is_sound=jnp.all(particles.evidence.is_sound),
            is_full=~has_room,
            num_refreshes=jnp.max(particles.num_refreshes),
            ess=jnp.min(jax.vmap(sample_size)(particles, ess)),
        )

    def sample(key: Key, state: NutsState, num_samples: int) -> Draws:
        return jax.vmap(space.constrain)(draw_latents(key, blocks, state.particles, space.size, num_samples))

    settings: dict[str, Any] = {
        "capacity": capacity,
        "num_draws": num_draws,
        "refresh_every": refresh_every,
        "discount": discount,
    }
    capabilities = Capabilities(reserve=reserve)
    explanation = _explain(model, num_draws, refresh_every, discount)
    return Engine(init, update, sample, explanation, settings, capabilities)


def _explain(model: RewardModel, num_draws: int, refresh_every: int, discount: float) -> Explanation:
    interval = "every update" if refresh_every == 1 else f"every {refresh_every} updates"
    return explain_approximate(
        model,
        "nuts",
        f"draws come from NumPyro's NUTS on all data, run again at {interval}",
        f"{num_draws} draws, each of its own chain",
        discount,
        {
            "approximated": f"the posterior, by {num_draws} draws of Markov chains; its form is arbitrary",
            "checks": f"the autocorrelation of the chains with their starting positions, at most {MAX_AUTOCORRELATION}, "
            f"effective sample size, at least {MIN_ESS_SHARE:.0%} of the draws, drift, divergences, acceptance and finite log "
            f"densities; for chains that started at importance draws with a Pareto k-hat of at most {MAX_K_HAT}, drift and "
            "finite log densities alone",
        },
    )
