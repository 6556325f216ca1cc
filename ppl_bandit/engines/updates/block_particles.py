"""Engines whose posterior is weighted particles of each independent block of latents: their state, draws and refreshes.

`reweight` and `nuts` differ in when a block is refreshed, and in the settings of the refresh.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.checks import Info, check_settings, checks_text, make_info, refuse_moving, worst_values
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.engines.particles.blocks import Blocks, block_posterior, independent_blocks
from ppl_bandit.engines.particles.importance import PriorProbes
from ppl_bandit.engines.particles.kernels import no_u_turn
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.moves import MoveSettings
from ppl_bandit.engines.particles.refresh_blocks import refresh_block
from ppl_bandit.engines.particles.space import Space, unconstrained_space
from ppl_bandit.engines.particles.weighted_particles import (
    RefreshSettings,
    particle_checks,
    prior_particles,
    sample_size,
)
from ppl_bandit.engines.particles.weights import finite_log_weights, resample, weight_ess
from ppl_bandit.engines.rows import append_rows, empty_buffer, reserve, row_mask, rows_that_fit
from ppl_bandit.engines.state import Particles, State
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Capabilities, Draws, Engine, Explanation, Interaction, Key

_CHECKS = "ess weight_ess k_hat autocorrelation drift divergences acceptance unmoved density unseen_mass"
CHECKS_TEXT = checks_text(_CHECKS.split())


class BlockSearch(NamedTuple):
    """What is known of B blocks beside their particles: how many rows inform them, and where mass may be unseen.

    Attributes:
        reference: possible latents, for the blocks that are not evaluated.
        num_rows, num_searched: rows that inform each block, now and at its last refresh, which searched for modes.
        probes: draws of the prior of all blocks, (B, S, k); None without a watch for unseen mass, as are the next two.
        log_probe_mass: log posterior mass of each probe in units of a particle's, (B, S); at most 0 at the last refresh.
        num_narrow: rows since then whose likelihood is too narrow for the particles to resolve, (B,).
        num_pending: updates since the last refresh; None if a refresh does not wait for a number of them.
    """

    reference: Float[Array, " K"]
    num_rows: Int[Array, " B"]
    num_searched: Int[Array, " B"]
    probes: Any = None
    log_probe_mass: Any = None
    num_narrow: Any = None
    num_pending: Any = None


class BlockProgram(NamedTuple):
    """A program, its independent blocks of latents, and the number of particles of each.

    Attributes:
        discount: weight of a row's log likelihood relative to the next row's.
    """

    model: RewardModel
    space: Space
    blocks: Blocks
    num_particles: int
    discount: float

    def first_state(self, key: Key, capacity: int) -> State:
        """Return a state with draws of the prior."""
        particles, reference = _draw_prior_particles(key, self.space, self.blocks, self.num_particles)
        none = jnp.zeros(len(self.blocks.coordinates), int)
        buffer = empty_buffer(self.model, capacity)
        return State(particles=particles, buffer=buffer, search=BlockSearch(reference, none, none))

    def target(self, state: State, block: Int[Array, ""]) -> LogDensity:
        """Return the posterior density of a block."""
        return block_posterior(self.space, self.blocks, block, state.buffer, state.search.reference, self.discount)

    def refresh(
        self,
        key: Key,
        state: State,
        block: Int[Array, ""],
        settings: RefreshSettings,
        own: Particles,
        probes: PriorProbes | None = None,
    ) -> State:
        """Refresh the particles of a block.

        Args:
            own: the particles of the block, weighted with all rows.
        """
        given = self.space, self.blocks, block, state.buffer, state.search.reference, self.discount
        own = refresh_block(key, self.target(state, block), own, settings, *given, probes=probes)
        search = state.search
        return state._replace(
            particles=jax.tree.map(lambda all_, one: all_.at[block].set(one), state.particles, own),
            search=search._replace(num_searched=search.num_searched.at[block].set(search.num_rows[block])),
        )

    def num_informing(self, rows: Interaction) -> Int[Array, " B"]:
        """Return how many of the rows that their mask selects inform each block."""
        num_blocks = len(self.blocks.coordinates)
        block = jnp.where(row_mask(rows), jnp.asarray(self.blocks.of_arm)[rows.arm], num_blocks)
        return jnp.zeros(num_blocks, int).at[block].add(1, mode="drop")

    def measure(self, state: State, has_room: Bool[Array, ""], checks: Mapping[str, Any], **measures: Any) -> Info:
        """Return the measures of an update: of every check the worst value over blocks.

        Args:
            checks: further checks, by name.
            measures: further fields of `Info`.
        """
        particles = state.particles
        ess = jax.vmap(weight_ess)(particles.log_weights)
        return make_info(
            {**worst_values(jax.vmap(particle_checks)(particles, ess)), "capacity": has_room, **checks},
            permanent=["capacity"],
            is_sound=jnp.all(particles.evidence.is_sound),
            is_full=~has_room,
            num_refreshes=jnp.sum(particles.num_refreshes),
            ess=jnp.min(jax.vmap(sample_size)(particles, ess)),
            **measures,
        )

    def sample(self, key: Key, state: State, num_samples: int) -> Draws:
        """Draw all latents: those of each block in proportion to its weights, independently of the other blocks."""
        particles = state.particles
        offsets = jr.uniform(key, (len(self.blocks.coordinates),), particles.positions.dtype)
        index = jax.vmap(lambda offset, weights: resample(offset, finite_log_weights(weights), num_samples))(
            offsets, particles.log_weights
        )
        return self.constrained(jnp.take_along_axis(particles.positions, index[..., None], axis=1))

    def constrained(self, positions: Float[Array, "B M k"]) -> Draws:
        """Return draws of all latents from draws of each block."""
        num_blocks, num, width = positions.shape
        column = np.argsort(self.blocks.coordinates.ravel(), kind="stable")[: self.space.size]
        joined = jnp.swapaxes(positions, 0, 1).reshape(num, num_blocks * width)
        is_ordered = np.array_equal(column, np.arange(num_blocks * width))
        return jax.vmap(self.space.constrain)(joined if is_ordered else joined[:, column])


def of_block(state: State, block: Int[Array, ""]) -> Particles:
    """Return the particles of one block."""
    return jax.tree.map(lambda leaf: leaf[block], state.particles)


def block_program(model: RewardModel, num_particles: int, discount: float) -> BlockProgram:
    """Return a program with its independent blocks of latents."""
    space = unconstrained_space(model)
    return BlockProgram(model, space, independent_blocks(model, space), num_particles, discount)


def _draw_prior_particles(key: Key, space: Space, blocks: Blocks, num: int) -> tuple[Particles, Float[Array, " K"]]:
    """Draw particles of all blocks from the prior.

    Returns:
        The particles with a leading axis over blocks, and one draw of all latents.
    """
    key_prior, key_padding = jr.split(key)
    positions, log_factors = space.draw_prior(key_prior, num)
    log_terms = jax.vmap(space.log_prior)(positions)
    own_terms, is_latent = jnp.asarray(blocks.terms), jnp.asarray(blocks.is_latent)
    padding = jr.normal(key_padding, (len(blocks.coordinates), num, blocks.coordinates.shape[1]), positions.dtype)
    by_block = positions[:, jnp.minimum(jnp.asarray(blocks.coordinates), space.size - 1)].swapaxes(0, 1)
    by_block = jnp.where(is_latent[:, None], by_block, padding)
    log_padding = -0.5 * (jnp.square(padding) + jnp.log(2 * jnp.pi))
    log_padding = jnp.sum(jnp.where(is_latent[:, None], 0.0, log_padding), axis=-1)

    def sum_own(terms: Float[Array, "M terms"]) -> Float[Array, "B M"]:
        return jnp.sum(jnp.where(own_terms[:, None], terms, 0.0), axis=-1)

    has_data_starts = space.locations is not None

    def draws_of(own: Array, log_weights: Array, log_prior: Array) -> Particles:
        return prior_particles(own, log_weights, log_prior, has_data_starts)

    particles = jax.vmap(draws_of)(by_block, sum_own(log_factors), sum_own(log_terms) + log_padding)
    return particles, positions[0]


_REFRESH = RefreshSettings(
    MoveSettings(no_u_turn, first_length=2, first_coordinate_moves=16, min_narrowing=0.0), may_accept_proposals=False
)


def _with_pending(state: State, num_pending: Int[Array, ""]) -> State:
    return state._replace(search=state.search._replace(num_pending=num_pending))


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

    def init(key: Key) -> State:
        return _with_pending(own.first_state(key, capacity), jnp.zeros((), int))

    def run_chains(key: Key, state: State, block: Array) -> State:
        particles = of_block(state, block)
        log_prior, log_likelihood = jax.vmap(own.target(state, block).parts)(particles.positions)
        weighted = particles._replace(
            log_weights=particles.log_weights + log_likelihood - particles.log_likelihood,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
        )
        return _with_pending(own.refresh(key, state, block, _REFRESH, weighted), jnp.zeros((), int))

    def update(key: Key, state: State, interaction: Interaction) -> tuple[State, Info]:
        rows, has_room = rows_that_fit(state.buffer, interaction)
        # With a discount every row changes the posterior of every block.
        num_new = own.num_informing(rows) if discount == 1.0 else jnp.sum(row_mask(rows))
        search = state.search
        pending = state._replace(
            buffer=append_rows(model, state.buffer, rows, merges=discount == 1.0),
            search=search._replace(
                num_rows=search.num_rows + num_new, num_pending=search.num_pending + jnp.any(row_mask(rows))
            ),
        )
        is_due = pending.search.num_pending >= refresh_every

        def is_unfinished(state: State) -> Bool[Array, ""]:
            return is_due & jnp.any(state.search.num_rows > state.search.num_searched)

        def run_next(state: State) -> State:
            block = jnp.argmax(state.search.num_rows > state.search.num_searched)
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
