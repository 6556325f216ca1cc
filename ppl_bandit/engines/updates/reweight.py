"""Iterated batch importance sampling: reweight the particles with each new row, and renew them when they are stale.

A row multiplies the weight of every particle by its likelihood, which costs one row's work and not that of all data (Chopin
2002). Independent blocks of latents are weighted separately, and a row changes one block. When the effective sample size of a
block falls below a half, or Pareto k-hat exceeds 0.7, its particles are renewed by importance sampling, or by Markov moves
where importance sampling fails its checks. Particles whose moves failed their checks are renewed again as soon as rows of
their arms have changed the weights a little. An update of one row has a budget of density evaluations: moves that it ends
continue once the rows have grown by a quarter, or when few particles count, and the draws are not trusted until their checks
pass.

Weights cannot show posterior mass where there are no particles. Some draws of the prior, the probes, stay where they are. When
the rows give a probe much more posterior mass than it had at the last refresh, the particles are renewed as well, and
Newton's method also starts at the probes. Modes of a narrow likelihood are not near any draw of the prior: they are searched
where the outcomes are (`row_starts`), at the first row of a block, at the end of a batch, whenever its rows have grown by a
quarter, or doubled if it has more than four latents, and when 2% of its rows are narrow and have not been searched yet.
Modes with too few particles are probes from then on.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.checks import CHECKS, Info, check_settings, refuse_moving
from ppl_bandit.engines.explanation import explain_approximate
from ppl_bandit.engines.particles.blocks import CHUNK_SIZE
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, notable_k_hat
from ppl_bandit.engines.particles.importance import PriorProbes
from ppl_bandit.engines.particles.log_density import num_operations
from ppl_bandit.engines.particles.refresh_blocks import record_readings
from ppl_bandit.engines.particles.weighted_particles import (
    FEW_LATENTS,
    MAX_MISSED_MASS,
    MAX_UNSEEN_MASS,
    MIN_ESS_SHARE,
    RefreshSettings,
)
from ppl_bandit.engines.particles.weights import normalize_weights, weight_ess
from ppl_bandit.engines.rows import append_row, as_rows, reserve, rows_that_fit, take_rows
from ppl_bandit.engines.state import State, stored_evidence
from ppl_bandit.engines.updates.block_particles import CHECKS_TEXT, BlockProgram, block_program, of_block
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.jax_adapter import apply_where
from ppl_bandit.types import Capabilities, Draws, Engine, Explanation, Interaction, Key

_MIN_ESS = CHECKS["weight_ess"].bound  # effective sample size after an update, as a share of the particles
_MIN_ESS_IN_BATCH = 0.2  # inside a batch, where no decision is made
_MIN_ESS_UNSOUND = 0.9  # of particles whose moves failed their checks: above it the posterior is still the same
# Growth of the rows of a block between searches for modes, if it has few or many latents. Moves that ended at their budget
# continue after the first of these.
_GROWTH, _GROWTH_OF_MANY = 1.25, 2.0
# A row is narrow if its likelihood at its own location is M / 10 times its predictive density: fewer than about ten of the M
# particles are where it is large. A mode that a narrow row has alone is one of many such modes, and has at most about the
# share of one row.
_MIN_RESOLVED = 10
_NUM_PEAKS = 16  # particles at which the likelihood at the location is evaluated
# Budget of the moves of one row: operations (`num_operations`) for each particle. Chosen for about one second an update with
# 1,000 particles on one core of a server, from evaluations that took 0.12 to 0.25 ms per 1,000 operations.
MAX_WORK = 3_000_000
_MIN_EVALUATIONS = 64  # of the density, whatever they cost: a first window and its coordinate moves
_MAX_CONTINUED = 10  # moves in a row that may end at the budget; further ones wait until the particles are stale
_PROBE_SHARE = 0.125  # probes, as a share of the particles


class _BatchProgress(NamedTuple):
    """A batch of which some rows are absorbed.

    Attributes:
        row: index of the next row.
        ess: effective sample sizes of the weights; 0 for a block with unseen mass.
        k_hat: of the block that was examined last.
        was_stale: whether that block was renewed.
        is_unsound: blocks with rows in this batch whose particles failed the checks of their moves.
        is_unfinished: blocks whose moves the budget of an earlier update ended, until they continue.
    """

    state: State
    row: Int[Array, ""]
    ess: Float[Array, " B"]
    k_hat: Float[Array, ""]
    was_stale: Bool[Array, ""]
    is_unsound: Bool[Array, " B"]
    is_unfinished: Bool[Array, " B"]


def reweight(model: RewardModel, *, num_particles: int = 1000, capacity: int = 64, discount: float = 1.0) -> Engine:
    """Return the engine that reweights its draws with each row and renews them when they are stale.

    A batch is absorbed row by row, with refreshes in between, so that no row can exhaust the particles. Rows between
    refreshes cost microseconds, and the number of refreshes grows as the logarithm of the number of rows.

    Args:
        num_particles: weighted draws in the state, for each block of independent latents; `sample` takes M of them in
            proportion to their weights, each floor or ceil of M x weight times, so that draws repeat.
        capacity: rows of data that the first state has room for; equal rows are stored once, with a count.
        discount: weight of a row's log likelihood relative to the next row's; 1 discounts nothing. Below 1, equal rows have
            different ages and are stored separately.
    """
    check_settings(discount, num_particles=num_particles, capacity=capacity)
    refuse_moving(model, "reweight")
    if num_particles < 4:
        raise ValueError(f"num_particles must be at least 4, got {num_particles}")
    program = block_program(model, num_particles, discount)

    def init(key: Key) -> State:
        return _first_state(program, key, capacity)

    def quick_update(key: Key, state: State, interaction: Interaction) -> tuple[State, Info, Bool[Array, ""]]:
        """Absorb one row as `update` does if no block must be renewed then; see `Capabilities.quick_update`."""
        del key
        return _quick_update(program, state, interaction)

    def update(key: Key, state: State, interaction: Interaction) -> tuple[State, Info]:
        return _update(program, key, state, interaction)

    def record(state: State) -> None:
        record_readings(program.space, program.blocks, state.buffer, state.search.reference)

    settings: dict[str, Any] = {"num_particles": num_particles, "capacity": capacity, "discount": discount}
    capabilities = Capabilities(
        reserve=reserve, quick_update=quick_update, record_readings=record, log_evidence=stored_evidence
    )
    explanation = _explain(model, num_particles, discount, program.space.size, program.blocks.coordinates.shape)
    return Engine(init, update, program.sample, explanation, settings, capabilities)


def _first_state(program: BlockProgram, key: Key, capacity: int) -> State:
    """Return draws of the prior, some of which are also probes."""
    state = program.first_state(key, capacity)
    num_probes = max(4, math.ceil(_PROBE_SHARE * program.num_particles))
    probes = state.particles.positions[:, jnp.arange(num_probes) % program.num_particles]
    # Every probe is also a particle.
    no_mass = jnp.zeros(probes.shape[:2], probes.dtype)
    search = state.search
    more = {"probes": probes, "log_probe_mass": no_mass, "num_narrow": jnp.zeros_like(search.num_rows)}
    return state._replace(search=search._replace(**more))


def _max_log_probe_mass(program: BlockProgram) -> float:
    """Return the log mass, in units of a particle's, above which a probe shows that particles are missing."""
    return math.log(max(2.0, MAX_MISSED_MASS * program.num_particles))


def _search_growth(program: BlockProgram) -> float:
    """Return the growth of the rows of a block after which a row by itself causes a search for modes."""
    return _GROWTH if program.blocks.coordinates.shape[1] <= FEW_LATENTS else _GROWTH_OF_MANY


def _constrained(program: BlockProgram, state: State) -> Draws:
    """Return the latents of the particles, then of the probes, of all blocks together."""
    return program.constrained(jnp.concatenate([state.particles.positions, state.search.probes], axis=1))


def _is_row_narrow(
    program: BlockProgram, latents: Draws, rows: Interaction, log_predictive: Float[Array, ""]
) -> Bool[Array, ""]:
    """Tell whether a row's likelihood is so narrow that a mode of its own may have no particle."""
    locations, num_particles = program.space.locations, program.num_particles
    if locations is None:
        return jnp.array(False)
    some = jax.tree.map(lambda leaf: leaf[: min(_NUM_PEAKS, num_particles)], latents)
    log_peaks = jax.vmap(lambda own: locations(own, rows).log_peak[0])(some)
    return jnp.median(log_peaks) - log_predictive > math.log(max(2.0, num_particles / _MIN_RESOLVED))


def _absorb(program: BlockProgram, state: State, latents: Draws, row: Interaction) -> tuple[State, Bool[Array, " B"]]:
    """Multiply the weights of a row's block by its likelihood, and store the row.

    Args:
        latents: `_constrained(program, state)`.

    Returns:
        The state, and the blocks with unseen mass at a probe.
    """
    particles, is_counted, block = state.particles, row.mask, jnp.asarray(program.blocks.of_arm)[row.arm]
    assert is_counted is not None
    rows = jax.tree.map(lambda leaf: leaf[None], row)
    log_likelihood = jax.vmap(lambda own: program.space.log_likelihood(own, rows)[0])(latents)
    gained, gained_by_probes = log_likelihood[: program.num_particles], log_likelihood[program.num_particles :]
    if program.discount < 1.0:
        lost = jnp.where(is_counted, (program.discount - 1.0) * particles.log_likelihood, 0.0)
        particles = particles._replace(
            log_weights=particles.log_weights + lost, log_likelihood=particles.log_likelihood + lost
        )
    before = particles.log_weights[block]
    log_predictive = jnp.where(is_counted, logsumexp(before + gained) - logsumexp(before), 0.0)
    particles = particles._replace(
        log_weights=particles.log_weights.at[block].add(gained),
        log_likelihood=particles.log_likelihood.at[block].add(gained),
        log_evidence=particles.log_evidence.at[block].add(log_predictive),
    )
    is_narrow = is_counted & _is_row_narrow(program, latents, rows, log_predictive)
    mass_gain = jnp.where(is_counted, gained_by_probes - log_predictive, 0.0)
    log_probe_mass = state.search.log_probe_mass.at[block].add(mass_gain)
    search = state.search._replace(
        log_probe_mass=log_probe_mass,
        num_rows=state.search.num_rows.at[block].add(is_counted),
        num_narrow=state.search.num_narrow.at[block].add(is_narrow),
    )
    buffer = append_row(state.buffer, row, is_counted, merges=program.discount == 1.0)
    return state._replace(buffer=buffer, particles=particles, search=search), jnp.max(
        log_probe_mass, axis=1
    ) > _max_log_probe_mass(program)


def _stalest_block(
    program: BlockProgram, state: State, ess: Float[Array, " B"], is_doubtful: Bool[Array, " B"], may_rest: bool
) -> tuple[Array, Array, Array]:
    """Return the block with the least effective sample size, its k-hat, and whether it must be renewed.

    Args:
        may_rest: whether moves that ended at their budget wait for more rows while enough particles count.
    """
    num_particles = program.num_particles
    has_grown = state.search.num_rows >= _GROWTH * state.search.num_searched
    is_resting = state.particles.evidence.is_unfinished & ~has_grown & (ess >= MIN_ESS_SHARE * num_particles)
    is_resting &= may_rest
    ess = jnp.where(is_resting, jnp.inf, jnp.where(is_doubtful, 0.0, ess))
    block = jnp.argmin(ess)
    log_weights = state.particles.log_weights[block]
    k_hat = notable_k_hat(log_weights, normalize_weights(log_weights))
    is_stale = ((ess[block] < _MIN_ESS * num_particles) | (k_hat > MAX_K_HAT)) & ~is_resting[block]
    return block, k_hat, is_stale


def _refresh(program: BlockProgram, key: Key, state: State, block: Int[Array, ""], has_budget: bool) -> State:
    """Renew the particles of a block, and watch its probes and the modes with too few particles from now on."""
    target, is_discounted = program.target(state, block), program.discount < 1.0
    positions, search = state.search.probes[block], state.search
    num_probes = len(positions)
    log_likelihood = jax.vmap(lambda x: target.parts(x)[1])(positions)
    has_unseen_mass = jnp.max(search.log_probe_mass[block]) > _max_log_probe_mass(program)
    settings = RefreshSettings(estimates_evidence=not is_discounted)
    if has_budget:
        num_chunks = jnp.maximum(-(-jnp.minimum(search.num_rows[block], state.buffer.num_rows) // CHUNK_SIZE), 1)
        work = num_operations(target.value_and_grad, positions[0])
        max_evaluations = jnp.maximum(MAX_WORK / (work * num_chunks), _MIN_EVALUATIONS)
        settings = settings._replace(moves=settings.moves._replace(max_evaluations=max_evaluations))
    probes = PriorProbes(positions, log_likelihood, has_unseen_mass)
    after = program.refresh(key, state, block, settings, of_block(state, block), probes)
    own = of_block(after, block)
    # Each of the S probes has 1 / S of the prior mass. With a discount the evidence is unknown.
    log_mass = log_likelihood - own.log_evidence + math.log(program.num_particles / num_probes)
    log_mass = jnp.zeros_like(log_mass) if is_discounted else jnp.minimum(log_mass, 0.0)
    # Modes without particles are watched as the last probes: later rows may favour them.
    num_modes = min(len(own.modes), num_probes // 2)
    rarest = jnp.argsort(-own.log_unseen_mass)[:num_modes]
    log_unseen = jnp.minimum(own.log_unseen_mass[rarest] + math.log(program.num_particles), 0.0)
    is_watched = log_unseen > -jnp.inf
    first = num_probes - num_modes
    positions = positions.at[first:].set(jnp.where(is_watched[:, None], own.modes[rarest], positions[first:]))
    log_mass = log_mass.at[first:].set(jnp.where(is_watched, log_unseen, log_mass[first:]))
    watched = after.search._replace(
        probes=search.probes.at[block].set(positions),
        log_probe_mass=search.log_probe_mass.at[block].set(log_mass),
        num_narrow=search.num_narrow.at[block].set(0),
    )
    return after._replace(search=watched)


def _is_search_due(program: BlockProgram, state: State, growth: float) -> Bool[Array, " B"]:
    """Tell which blocks have grown so many times, or have narrow rows, since their last search for modes."""
    if program.space.locations is None:
        return jnp.zeros(len(program.blocks.coordinates), bool)
    search = state.search
    has_grown = (search.num_rows > search.num_searched) & (search.num_rows >= growth * search.num_searched)
    return has_grown | (search.num_narrow > MAX_UNSEEN_MASS * search.num_rows)


def _doubted_blocks(
    program: BlockProgram, state: State, rows: Interaction
) -> tuple[Bool[Array, " B"], Bool[Array, " B"]]:
    """Tell which blocks of these rows have particles that failed their checks, and which blocks' moves continue."""
    evidence = state.particles.evidence
    may_continue = evidence.num_unfinished < _MAX_CONTINUED
    is_unsound = (program.num_informing(rows) > 0) & ~evidence.is_sound & may_continue
    return is_unsound, evidence.is_unfinished & may_continue


def _counted_rows(program: BlockProgram, state: State, interaction: Interaction) -> tuple[Interaction, Bool[Array, ""]]:
    """Return the rows, masked if they do not fit, and whether they fit."""
    rows, has_room = rows_that_fit(state.buffer, interaction)
    return as_rows(program.model, state.buffer, rows), has_room


def _measure(program: BlockProgram, state: State, k_hat: Float[Array, ""], has_room: Bool[Array, ""]) -> Info:
    log_evidence, error = state.evidence()
    is_unfinished = jnp.any(state.particles.evidence.is_unfinished)
    measures = {"is_unfinished": is_unfinished, "log_evidence": log_evidence, "log_evidence_error": error}
    return program.measure(state, has_room, {"k_hat": k_hat}, **measures)


def _quick_update(program: BlockProgram, state: State, interaction: Interaction) -> tuple[State, Info, Bool[Array, ""]]:
    """Absorb one row; return also whether that is the whole update."""
    rows, has_room = _counted_rows(program, state, interaction)
    row = take_rows(rows, jnp.zeros((), int))
    after, has_unseen_mass = _absorb(program, state, _constrained(program, state), row)
    ess = jax.vmap(weight_ess)(after.particles.log_weights)
    is_unsound, is_unfinished = _doubted_blocks(program, state, rows)
    is_doubtful = is_unsound & (ess < _MIN_ESS_UNSOUND * program.num_particles) | is_unfinished
    is_doubtful |= _is_search_due(program, after, _search_growth(program))
    ess = jnp.where(has_unseen_mass, 0.0, ess)
    _, k_hat, is_stale = _stalest_block(program, after, ess, is_doubtful, may_rest=True)
    return after, _measure(program, after, k_hat, has_room), ~is_stale


def _update(program: BlockProgram, key: Key, state: State, interaction: Interaction) -> tuple[State, Info]:
    """Absorb rows one by one, and renew the blocks that are stale in between and at the end."""
    rows, has_room = _counted_rows(program, state, interaction)
    num_rows = rows.arm.shape[0]

    def is_unfinished(progress: _BatchProgress) -> Bool[Array, ""]:
        return (progress.row < num_rows) | progress.was_stale

    def absorb_and_refresh(progress: _BatchProgress) -> _BatchProgress:
        return _renew_stalest(program, key, _absorb_until_stale(program, progress, rows), num_rows)

    ess = jax.vmap(weight_ess)(state.particles.log_weights)
    is_unsound, is_cut = _doubted_blocks(program, state, rows)
    none, no = jnp.zeros((), int), jnp.array(False)
    start = _BatchProgress(state, none, ess, jnp.zeros_like(ess[0]), no, is_unsound, is_cut)
    end = jax.lax.while_loop(is_unfinished, absorb_and_refresh, start)
    return end.state, _measure(program, end.state, end.k_hat, has_room)


def _absorb_until_stale(program: BlockProgram, progress: _BatchProgress, rows: Interaction) -> _BatchProgress:
    """Absorb rows until the weights of a block are uneven, or no row is left."""
    latents, num_rows = _constrained(program, progress.state), rows.arm.shape[0]

    def absorb_next(progress: _BatchProgress) -> _BatchProgress:
        row = take_rows(rows, progress.row)
        state, has_unseen_mass = _absorb(program, progress.state, latents, row)
        log_weights, block = state.particles.log_weights, jnp.asarray(program.blocks.of_arm)[row.arm]
        if program.discount < 1.0:  # a row changes the weights of every block
            ess = jax.vmap(weight_ess)(log_weights)
        else:
            ess = progress.ess.at[block].set(weight_ess(log_weights[block]))
        return progress._replace(state=state, row=progress.row + 1, ess=jnp.where(has_unseen_mass, 0.0, ess))

    def is_fresh(progress: _BatchProgress) -> Bool[Array, ""]:
        is_left = progress.row < num_rows
        if num_rows == 1:  # is absorbed first: a block whose moves rest is not renewed before
            return is_left
        return is_left & jnp.all(progress.ess >= _MIN_ESS_IN_BATCH * program.num_particles)

    return jax.lax.while_loop(is_fresh, absorb_next, progress)


def _renew_stalest(program: BlockProgram, key: Key, progress: _BatchProgress, num_rows: int) -> _BatchProgress:
    """Renew the block with the least effective sample size, if that is necessary."""
    is_doubtful = progress.is_unsound & (progress.ess < _MIN_ESS_UNSOUND * program.num_particles)
    is_doubtful |= progress.is_unfinished
    # A batch is searched at its end: its last rows may have modes of their own.
    is_doubtful |= _is_search_due(program, progress.state, _search_growth(program) if num_rows == 1 else 1.0)
    is_doubtful &= progress.row >= num_rows
    block, k_hat, is_stale = _stalest_block(program, progress.state, progress.ess, is_doubtful, may_rest=num_rows == 1)
    key_block = jr.fold_in(jr.fold_in(key, progress.row), block)
    renewed = apply_where(
        is_stale, lambda state: _refresh(program, key_block, state, block, num_rows == 1), progress.state
    )
    return _BatchProgress(
        renewed,
        progress.row,
        progress.ess.at[block].set(jnp.where(is_stale, program.num_particles, progress.ess[block])),
        k_hat,
        is_stale,
        progress.is_unsound.at[block].set(progress.is_unsound[block] & ~is_stale),
        progress.is_unfinished.at[block].set(progress.is_unfinished[block] & ~is_stale),
    )


def _explain(model: RewardModel, num_particles: int, discount: float, size: int, shape: tuple[int, ...]) -> Explanation:
    num_blocks, largest = shape
    separate = f", in {num_blocks} independent blocks of at most {largest}" if num_blocks > 1 else ""
    return explain_approximate(
        model,
        "reweight",
        "each row reweights the draws; stale draws are replaced by importance sampling on all data, or by Hamiltonian steps "
        "where importance sampling fails its checks",
        f"{num_particles} weighted draws",
        discount,
        {
            "approximated": f"the posterior, by {num_particles} weighted draws of {size} latent numbers{separate}; its form is "
            "arbitrary",
            "checks": CHECKS_TEXT,
            "not seen": "a region that neither a draw nor the search for modes reaches, and modes that together hold less "
            f"than {MAX_UNSEEN_MASS:.0%} of the mass",
        },
    )
