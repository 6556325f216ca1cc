"""NUTS at every update: every draw is a chain, which starts where the last one ended."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.block_posterior import block_posterior
from ppl_bandit.engines.approximate.blocks import independent_blocks
from ppl_bandit.engines.approximate.explanation import explain
from ppl_bandit.engines.approximate.noncentred_refresh import renew
from ppl_bandit.engines.approximate.reweight import draw_latents, draw_prior_particles
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, weight_ess
from ppl_bandit.engines.particles.moves import MAX_MEMORY, no_u_turn
from ppl_bandit.engines.particles.weighted_particles import MIN_ESS_SHARE, WeightedParticles, is_trusted, sample_size
from ppl_bandit.engines.row_buffer import Buffer, append_rows, empty_buffer, has_room_for, reserve, row_mask
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Interaction, Key

__all__ = ["NutsInfo", "NutsState", "nuts"]


class NutsState(NamedTuple):
    """The data, and draws of the posterior as of the last run of the chains.

    Attributes:
        buffer: every row so far.
        clouds: the draws of all blocks of independent latents, with a leading axis B.
        reference: some possible latents, for the blocks that are not looked at.
        is_stale: (B,), blocks with rows since that run.
        num_pending: updates since that run.
    """

    buffer: Buffer
    clouds: WeightedParticles
    reference: Float[Array, " K"]
    is_stale: Bool[Array, " B"]
    num_pending: Int[Array, ""]


class NutsInfo(NamedTuple):
    """Evidence of an update; of several blocks of independent latents, the worst.

    Attributes:
        is_trusted: whether the last run was sound and the rows were absorbed.
        ess: how many independent draws the draws are worth.
        memory: largest correlation of draws with where their chain was before the last window of transitions.
        num_divergences: among the transitions of this window.
        num_pending: updates that the draws do not know of yet; below refresh_every.
        num_refreshes: runs of the chains so far, of the block with the most.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    memory: Float[Array, ""]
    num_divergences: Int[Array, ""]
    num_pending: Int[Array, ""]
    num_refreshes: Int[Array, ""]
    is_full: Bool[Array, ""]


def nuts(
    model: RewardModel,
    *,
    capacity: int = 64,
    num_draws: int = 1000,
    refresh_every: int = 1,
    discount: float = 1.0,
) -> Engine:
    """Return the engine that runs NumPyro's NUTS on all data at every update.

    Every draw is a chain of its own. They start at importance draws where these have evidence, and elsewhere at the draws of
    the posterior before, in proportion to how well these explain the new rows, with their covariance as mass matrix; all make
    as many transitions as they need to forget it.

    Args:
        capacity: rows of data that the first state has room for; equal rows are kept once, with a count.
        num_draws: draws held in the state; `sample` takes M of them, each floor or ceil of M / num_draws times in random
            order, so that with M above num_draws draws repeat.
        refresh_every: the chains run at every so many updates; in between, draws do not know the latest rows.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.
    """
    check_settings(discount, capacity=capacity, num_draws=num_draws, refresh_every=refresh_every)
    if num_draws < 4:
        raise ValueError(f"num_draws must be at least 4, got {num_draws}")
    space = unconstrained_space(model)
    blocks = independent_blocks(model, space)
    num_blocks = len(blocks.coordinates)
    of_arm = jnp.asarray(blocks.of_arm)

    def init(key: Key) -> NutsState:
        clouds, reference = draw_prior_particles(key, space, blocks, num_draws)
        none = jnp.zeros(num_blocks, bool)
        return NutsState(empty_buffer(model, capacity), clouds, reference, none, jnp.zeros((), int))

    def run(key: Key, state: NutsState, block: Array) -> NutsState:
        given = space, blocks, block, state.buffer, state.reference, discount
        target = block_posterior(*given)
        cloud = jax.tree.map(lambda leaf: leaf[block], state.clouds)
        log_prior, log_likelihood = jax.vmap(target.parts)(cloud.positions)
        stale = cloud._replace(
            log_weights=cloud.log_weights + log_likelihood - cloud.log_likelihood,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
        )
        cloud = renew(
            key,
            target,
            stale,
            *given,
            kernel=no_u_turn,
            first_length=2,
            first_sweep=16,
            min_narrowing=0.0,
            by_importance=False,
        )
        return state._replace(
            clouds=jax.tree.map(lambda all_, one: all_.at[block].set(one), state.clouds, cloud),
            is_stale=state.is_stale.at[block].set(False),
            num_pending=jnp.zeros((), int),
        )

    def update(key: Key, state: NutsState, interaction: Interaction) -> tuple[NutsState, NutsInfo]:
        has_room = has_room_for(state.buffer, interaction)
        mask = row_mask(interaction) & has_room
        buffer = append_rows(model, state.buffer, interaction._replace(mask=mask), merges=discount == 1.0)
        touched = (
            jnp.zeros(num_blocks, bool).at[jnp.where(mask, of_arm[interaction.arm], num_blocks)].set(True, mode="drop")
        )
        # With forgetting every block changes with every row.
        is_stale = state.is_stale | (touched if discount == 1.0 else jnp.any(mask))
        pending = state._replace(buffer=buffer, is_stale=is_stale, num_pending=state.num_pending + jnp.any(mask))
        is_due = pending.num_pending >= refresh_every

        def is_wanting(state: NutsState) -> Bool[Array, ""]:
            return is_due & jnp.any(state.is_stale)

        def run_next(state: NutsState) -> NutsState:
            block = jnp.argmax(state.is_stale)
            return run(jr.fold_in(key, block), state, block)

        after = jax.lax.while_loop(is_wanting, run_next, pending)
        clouds = after.clouds
        ess = jax.vmap(weight_ess)(clouds.log_weights)
        info = NutsInfo(
            jnp.all(jax.vmap(is_trusted)(clouds, ess)) & has_room,
            jnp.min(jax.vmap(sample_size)(clouds, ess)),
            jnp.max(clouds.evidence.memory),
            jnp.sum(clouds.evidence.num_divergences),
            after.num_pending,
            jnp.max(clouds.num_refreshes),
            ~has_room,
        )
        return after, info

    def sample(key: Key, state: NutsState, num_samples: int) -> Draws:
        return jax.vmap(space.constrain)(draw_latents(key, blocks, state.clouds, space.size, num_samples))

    often = "every update" if refresh_every == 1 else f"every {refresh_every} updates"
    explanation = explain(
        model,
        "nuts",
        f"draws come from NumPyro's NUTS on all data, run again at {often}",
        f"{num_draws} draws, each of its own chain",
        discount,
        [
            f"approximated: the posterior by {num_draws} draws, which converge as chains do; nothing is assumed about its form",
            f"evidence: the correlation of the draws with where their chains started, at most {MAX_MEMORY}, effective sample "
            f"size, at least {MIN_ESS_SHARE:.0%} of the draws, drift, divergences, acceptance and finite energies; where they "
            f"started at importance draws with a Pareto k-hat of at most {MAX_K_HAT}, drift and finite energies alone",
        ],
    )
    settings = {
        "capacity": capacity,
        "num_draws": num_draws,
        "refresh_every": refresh_every,
        "discount": discount,
    }
    capabilities = Capabilities(reserve=reserve, is_traceable_without_program=True)
    return Engine(init, update, sample, explanation, settings, capabilities)
