"""NUTS at every update: every draw is a chain, which starts where the last one ended."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.account import explain
from ppl_bandit.engines.approximate.blocks import one_block
from ppl_bandit.engines.approximate.buffer import Buffer, append, empty_buffer, fits, reserve, row_mask
from ppl_bandit.engines.approximate.cloud import MIN_ESS_SHARE, Cloud, is_trusted, refresh, sample_size, when
from ppl_bandit.engines.approximate.moves import MAX_MEMORY, no_u_turn
from ppl_bandit.engines.approximate.reweight import draw_prior_clouds, sample_clouds
from ppl_bandit.engines.approximate.target import block_target
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Interaction, Key

__all__ = ["NutsInfo", "NutsState", "nuts"]


class NutsState(NamedTuple):
    """The data, and draws of the posterior as of the last run of the chains.

    Attributes:
        buffer: every row so far.
        cloud: the draws, with a leading axis of one block.
        reference: some possible latents.
        num_pending: updates since that run.
    """

    buffer: Buffer
    cloud: Cloud
    reference: Float[Array, " K"]
    num_pending: Int[Array, ""]


class NutsInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether the last run was sound and the rows were absorbed.
        ess: how many independent draws the draws are worth.
        memory: largest correlation of draws with where their chain was before the last window of transitions.
        num_divergences: among the transitions of this window.
        num_pending: updates that the draws do not know of yet; below refresh_every.
        num_refreshes: runs of the chains so far.
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

    Every draw is a chain of its own. They start at the draws of the posterior before, in proportion to how well these explain
    the new rows, with their covariance as mass matrix, and all make as many transitions as they need to forget it.

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
    blocks = one_block(model, space)

    def init(key: Key) -> NutsState:
        cloud, reference = draw_prior_clouds(key, space, blocks, num_draws)
        return NutsState(empty_buffer(model, capacity), cloud, reference, jnp.zeros((), int))

    def run(key: Key, state: NutsState) -> NutsState:
        target = block_target(model, space, blocks, 0, state.buffer, state.reference, discount)
        cloud = jax.tree.map(lambda leaf: leaf[0], state.cloud)
        log_prior, log_likelihood = jax.vmap(target.parts)(cloud.positions)
        stale = cloud._replace(
            log_weights=cloud.log_weights + log_likelihood - cloud.log_likelihood,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
        )
        cloud = refresh(key, target, stale, kernel=no_u_turn, first_length=2, by_importance=False)
        return state._replace(cloud=jax.tree.map(lambda leaf: leaf[None], cloud), num_pending=jnp.zeros((), int))

    def update(key: Key, state: NutsState, interaction: Interaction) -> tuple[NutsState, NutsInfo]:
        has_room = fits(state.buffer, interaction)
        mask = row_mask(interaction) & has_room
        buffer = append(model, state.buffer, interaction._replace(mask=mask), merges=discount == 1.0)
        pending = state._replace(buffer=buffer, num_pending=state.num_pending + jnp.any(mask))
        after = when(pending.num_pending >= refresh_every, lambda state: run(key, state), pending)
        cloud = jax.tree.map(lambda leaf: leaf[0], after.cloud)
        info = NutsInfo(
            is_trusted(cloud) & has_room,
            sample_size(cloud),
            cloud.evidence.memory,
            cloud.evidence.num_divergences,
            after.num_pending,
            cloud.num_refreshes,
            ~has_room,
        )
        return after, info

    def sample(key: Key, state: NutsState, num_samples: int) -> Draws:
        return jax.vmap(space.constrain)(sample_clouds(key, blocks, state.cloud, space.size, num_samples))

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
            f"size, at least {MIN_ESS_SHARE:.0%} of the draws, drift, divergences, acceptance and finite energies",
        ],
    )
    return Engine(init, update, sample, explanation, reserve=reserve)
