"""NUTS at every update: every draw is a Markov chain that continues from the draws before."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool

from ppl_bandit.engines.approximate.block_particles import CHECKS_TEXT, BlockState, block_program
from ppl_bandit.engines.checks import Info
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.engines.particles.kernels import no_u_turn
from ppl_bandit.engines.particles.moves import MoveSettings
from ppl_bandit.engines.particles.weighted_particles import RefreshSettings
from ppl_bandit.engines.row_buffer import append_rows, reserve, row_mask, rows_that_fit
from ppl_bandit.engines.settings import check_settings, refuse_moving
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Engine, Explanation, Interaction, Key

_REFRESH = RefreshSettings(
    MoveSettings(no_u_turn, first_length=2, first_coordinate_moves=16, min_narrowing=0.0), may_accept_proposals=False
)


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
    own = block_program(model, num_draws, discount)

    def init(key: Key) -> BlockState:
        return own.first_state(key, capacity)._replace(num_pending=jnp.zeros((), int))

    def run_chains(key: Key, state: BlockState, block: Array) -> BlockState:
        particles = state.of_block(block)
        log_prior, log_likelihood = jax.vmap(own.target(state, block).parts)(particles.positions)
        weighted = particles._replace(
            log_weights=particles.log_weights + log_likelihood - particles.log_likelihood,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
        )
        return own.refresh(key, state, block, _REFRESH, weighted)._replace(num_pending=jnp.zeros((), int))

    def update(key: Key, state: BlockState, interaction: Interaction) -> tuple[BlockState, Info]:
        rows, has_room = rows_that_fit(state.buffer, interaction)
        # With a discount every row changes the posterior of every block.
        num_new = own.num_informing(rows) if discount == 1.0 else jnp.sum(row_mask(rows))
        pending = state._replace(
            buffer=append_rows(model, state.buffer, rows, merges=discount == 1.0),
            num_rows=state.num_rows + num_new,
            num_pending=state.num_pending + jnp.any(row_mask(rows)),
        )
        is_due = pending.num_pending >= refresh_every

        def is_unfinished(state: BlockState) -> Bool[Array, ""]:
            return is_due & jnp.any(state.num_rows > state.num_searched)

        def run_next(state: BlockState) -> BlockState:
            block = jnp.argmax(state.num_rows > state.num_searched)
            return run_chains(jr.fold_in(key, block), state, block)

        after = jax.lax.while_loop(is_unfinished, run_next, pending)
        return after, own.measure(after, has_room, {})

    settings: dict[str, Any] = {
        "capacity": capacity,
        "num_draws": num_draws,
        "refresh_every": refresh_every,
        "discount": discount,
    }
    capabilities = Capabilities(reserve=reserve)
    explanation = _explain(model, num_draws, refresh_every, discount)
    return Engine(init, update, own.sample, explanation, settings, capabilities)


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
            "checks": f"{CHECKS_TEXT}; of chains that started at accepted importance draws, drift and finite log densities "
            "alone",
        },
    )
