"""NUTS at every update: chains that start where the last ones ended, with their adaptation."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.account import explain
from ppl_bandit.engines.approximate.buffer import Buffer, append, empty_buffer, fits, read, reserve, row_mask
from ppl_bandit.engines.approximate.chains import Adaptation, ChainEvidence, first_adaptation, refresh
from ppl_bandit.engines.approximate.diagnostics import finite_weights, resample
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Interaction, Key

__all__ = ["NutsInfo", "NutsState", "nuts"]


class NutsState(NamedTuple):
    """The data, and draws of the posterior as of the last run of the chains.

    Attributes:
        buffer: every row so far.
        draws: unconstrained, one row a draw.
        log_weights: equal, except before the first run of a program whose prior has factors.
        log_density: of each draw, for the data it was drawn with.
        adaptation: step size and mass matrix for the next run.
        evidence: of the last run.
        num_pending: updates since that run.
        num_refreshes: runs so far.
    """

    buffer: Buffer
    draws: Float[Array, "M K"]
    log_weights: Float[Array, " M"]
    log_density: Float[Array, " M"]
    adaptation: Adaptation
    evidence: ChainEvidence
    num_pending: Int[Array, ""]
    num_refreshes: Int[Array, ""]


class NutsInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether the last run was sound and the rows were absorbed.
        ess: smallest effective sample size over the unconstrained coordinates.
        num_divergences: in the last run.
        num_pending: updates that the draws do not know of yet; below refresh_every.
        num_refreshes: runs of the chains so far.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    num_divergences: Int[Array, ""]
    num_pending: Int[Array, ""]
    num_refreshes: Int[Array, ""]
    is_full: Bool[Array, ""]


def nuts(
    model: RewardModel,
    *,
    capacity: int = 64,
    num_draws: int = 1000,
    num_chains: int = 100,
    num_warmup: int = 100,
    refresh_every: int = 1,
    discount: float = 1.0,
) -> Engine:
    """Return the engine that runs NumPyro's NUTS on all data at every update.

    The chains start at draws of the posterior before, chosen by how well they explain the new rows, and keep its covariance
    as mass matrix, so that the warm-up is needed only when an update moves the posterior far.

    Args:
        capacity: rows of data that the first state has room for.
        num_draws: draws held in the state; `sample` takes M of them, each floor or ceil of M / num_draws times in random
            order, so that with M above num_draws draws repeat.
        num_chains: chains in step, many and short, because they start where the posterior already is; it divides
            num_draws.
        num_warmup: transitions of each chain before drawing, when the posterior has moved far.
        refresh_every: the chains run at every so many updates; in between, draws do not know the latest rows.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.
    """
    check_settings(
        discount,
        capacity=capacity,
        num_draws=num_draws,
        num_chains=num_chains,
        num_warmup=num_warmup,
        refresh_every=refresh_every,
    )
    if num_draws % num_chains or num_draws < 4 * num_chains:
        raise ValueError(
            f"num_draws must be a multiple of num_chains, at least 4 times; got {num_draws} and {num_chains}"
        )
    space = unconstrained_space(model)

    def init(key: Key) -> NutsState:
        buffer = empty_buffer(model, capacity)
        draws, log_weights = space.draw_prior(key, num_draws)
        log_density = jax.vmap(space.log_joint, (0, None))(draws, read(buffer)) - log_weights
        evidence = ChainEvidence(jnp.asarray(num_draws, float), jnp.zeros((), int), jnp.array(True))
        none = jnp.zeros((), int)
        return NutsState(buffer, draws, log_weights, log_density, first_adaptation(draws), evidence, none, none)

    def run(key: Key, state: NutsState) -> NutsState:
        data = read(state.buffer, discount)
        log_weights = jax.vmap(space.log_joint, (0, None))(state.draws, data) - state.log_density
        chains = refresh(
            key,
            lambda position: -space.log_joint(position, data),
            state.draws,
            log_weights,
            state.adaptation,
            num_chains,
            num_warmup,
        )
        equal = jnp.zeros_like(state.log_weights)
        none = jnp.zeros_like(state.num_pending)
        return NutsState(state.buffer, chains.draws, equal, *chains[1:], none, state.num_refreshes + 1)

    def update(key: Key, state: NutsState, interaction: Interaction) -> tuple[NutsState, NutsInfo]:
        has_room = fits(state.buffer, interaction)
        mask = row_mask(interaction) & has_room
        buffer = append(model, state.buffer, interaction._replace(mask=mask))
        pending = state._replace(buffer=buffer, num_pending=state.num_pending + jnp.any(mask))
        is_due = pending.num_pending >= refresh_every
        after = jax.lax.cond(is_due, run, lambda _, state: state, key, pending)
        info = NutsInfo(
            after.evidence.is_sound & has_room,
            after.evidence.ess,
            after.evidence.num_divergences,
            after.num_pending,
            after.num_refreshes,
            ~has_room,
        )
        return after, info

    def sample(key: Key, state: NutsState, num_samples: int) -> Draws:
        index = resample(key, finite_weights(state.log_weights), num_samples)
        return jax.vmap(space.constrain)(state.draws[index])

    often = "every update" if refresh_every == 1 else f"every {refresh_every} updates"
    explanation = explain(
        model,
        "nuts",
        f"draws come from NumPyro's NUTS on all data, run again at {often}",
        f"{num_draws} draws of {num_chains} chains",
        discount,
        [
            f"approximated: the posterior by {num_draws} draws, which are correlated and converge as chains do; nothing is "
            "assumed about its form",
            "evidence: effective sample size, divergences, finite energies, at every run",
        ],
    )
    settings = {
        "capacity": capacity,
        "num_draws": num_draws,
        "num_chains": num_chains,
        "num_warmup": num_warmup,
        "refresh_every": refresh_every,
        "discount": discount,
    }
    return Engine(init, update, sample, explanation, reserve=reserve, settings=settings)
