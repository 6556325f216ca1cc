"""Reweight the draws with each new row, and run NUTS only when the weights say that the draws are stale.

Iterated batch importance sampling (Chopin 2002): a row multiplies the weight of every particle by its likelihood, which
costs one row's work and not that of all data. When the effective sample size falls below a half, or Pareto k-hat passes
0.7, chains that start at resampled particles replace them all. Mean predictive likelihoods add up to the log evidence.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.approximate.account import explain
from ppl_bandit.engines.approximate.buffer import Buffer, append, empty_buffer, fits, read, reserve, row_mask
from ppl_bandit.engines.approximate.chains import Adaptation, ChainEvidence, first_adaptation, refresh
from ppl_bandit.engines.approximate.diagnostics import MAX_K_HAT, finite_weights, pareto_k_hat, resample, weight_ess
from ppl_bandit.engines.approximate.unconstrained import unconstrained_space
from ppl_bandit.engines.settings import check_settings
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Draws, Engine, Interaction, Key

__all__ = ["ReweightInfo", "ReweightState", "reweight"]


class ReweightState(NamedTuple):
    """The data, and weighted draws of the posterior.

    Attributes:
        buffer: every row so far.
        particles: unconstrained, one row a draw.
        log_weights: of the particles, up to a constant.
        log_likelihoods: of the particles, with forgetting; kept at 0 without.
        adaptation: step size and mass matrix for the next run of the chains.
        evidence: of the last run.
        log_evidence: log p(data), the sum of log predictive densities of the rows; with forgetting, a predictive score.
        squared_error: of the log evidence, up to the last run.
        num_refreshes: runs so far.
    """

    buffer: Buffer
    particles: Float[Array, "M K"]
    log_weights: Float[Array, " M"]
    log_likelihoods: Float[Array, " M"]
    adaptation: Adaptation
    evidence: ChainEvidence
    log_evidence: Float[Array, ""]
    squared_error: Float[Array, ""]
    num_refreshes: Int[Array, ""]

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Standard error of the log evidence, as if the draws of each run were independent and exact."""
        return jnp.sqrt(self.squared_error + _squared_error(self.log_weights))


class ReweightInfo(NamedTuple):
    """Evidence of an update.

    Attributes:
        is_trusted: whether the weights are even, the last run of the chains was sound and the rows were absorbed.
        ess: effective sample size of the weights.
        k_hat: Pareto k-hat of the weights.
        chain_ess: smallest effective sample size over the unconstrained coordinates of the last run.
        num_divergences: in the last run.
        num_refreshes: runs of the chains so far.
        log_evidence: log p(data) so far.
        log_evidence_error: its standard error, sqrt(sum of 1 / ess - 1 / M over the runs), as if the draws of each run were
            independent and exact.
        is_full: the rows had no room and were left out; reserve room and update again.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    chain_ess: Float[Array, ""]
    num_divergences: Int[Array, ""]
    num_refreshes: Int[Array, ""]
    log_evidence: Float[Array, ""]
    log_evidence_error: Float[Array, ""]
    is_full: Bool[Array, ""]


def reweight(
    model: RewardModel,
    *,
    num_particles: int = 1000,
    capacity: int = 64,
    num_chains: int = 100,
    num_warmup: int = 100,
    discount: float = 1.0,
) -> Engine:
    """Return the engine that reweights its draws with each row and runs NUTS when they are stale.

    A batch is absorbed row by row, so that a batch and a sequence give the same law, and no row can exhaust draws that a
    refresh would have kept fresh.

    Args:
        num_particles: weighted draws held in the state; `sample` takes M of them in proportion to their weight, each floor
            or ceil of M x weight times in random order, so that draws repeat.
        capacity: rows of data that the first state has room for.
        num_chains: chains of a refresh, many and short, all started at different particles where the weights allow it, so
            that neither modes nor tails are lost; it divides num_particles.
        num_warmup: transitions of each chain before drawing, when few particles are left.
        discount: weight of a row's log likelihood relative to the next row's; 1 forgets nothing.
    """
    check_settings(
        discount, num_particles=num_particles, capacity=capacity, num_chains=num_chains, num_warmup=num_warmup
    )
    if num_particles % num_chains or num_particles < 4 * num_chains:
        raise ValueError(
            f"num_particles must be a multiple of num_chains, at least 4 times; got {num_particles} and {num_chains}"
        )
    space = unconstrained_space(model)

    def init(key: Key) -> ReweightState:
        particles, log_weights = space.draw_prior(key, num_particles)
        evidence = ChainEvidence(jnp.asarray(num_particles, float), jnp.zeros((), int), jnp.array(True))
        zero = jnp.zeros(())
        return ReweightState(
            empty_buffer(model, capacity),
            particles,
            log_weights,
            jnp.zeros_like(log_weights),
            first_adaptation(particles),
            evidence,
            zero,
            zero,
            jnp.zeros((), int),
        )

    def absorb(state: ReweightState, row: Interaction, is_counted: Bool[Array, ""]) -> ReweightState:
        """Multiply the weights by the likelihood of one row, if it counts."""
        rows = jax.tree.map(lambda leaf: leaf[None], row)

        def likelihood(position: Float[Array, " K"]) -> Float[Array, ""]:
            return model.log_likelihood(space.constrain(position), rows)[0]

        gained = jax.vmap(likelihood)(state.particles)
        forgotten = jnp.where(is_counted, (discount - 1.0) * state.log_likelihoods, 0.0)
        before = state.log_weights + forgotten
        predictive = logsumexp(before + gained) - logsumexp(before)
        return state._replace(
            log_weights=before + gained,
            log_likelihoods=state.log_likelihoods + forgotten + gained if discount < 1.0 else state.log_likelihoods,
            log_evidence=state.log_evidence + jnp.where(is_counted, predictive, 0.0),
        )

    def renew(key: Key, state: ReweightState) -> ReweightState:
        data = read(state.buffer, discount)
        chains = refresh(
            key,
            lambda position: -space.log_joint(position, data),
            state.particles,
            state.log_weights,
            state.adaptation,
            num_chains,
            num_warmup,
        )
        if discount < 1.0:
            log_likelihoods = jax.vmap(
                lambda position: data.weights @ model.log_likelihood(space.constrain(position), data.rows)
            )(chains.draws)
        else:
            log_likelihoods = state.log_likelihoods
        return state._replace(
            particles=chains.draws,
            log_weights=jnp.zeros_like(state.log_weights),
            log_likelihoods=log_likelihoods,
            adaptation=chains.adaptation,
            evidence=chains.evidence,
            squared_error=state.squared_error + _squared_error(state.log_weights),
            num_refreshes=state.num_refreshes + 1,
        )

    def update(key: Key, state: ReweightState, interaction: Interaction) -> tuple[ReweightState, ReweightInfo]:
        has_room = fits(state.buffer, interaction)
        mask = row_mask(interaction) & has_room
        whole = append(model, state.buffer, interaction._replace(mask=mask))
        rows = Interaction(interaction.arm, model.outcome_values(interaction.reward), interaction.context, mask)

        def step(state: ReweightState, new: tuple[Key, Interaction, Array]) -> tuple[ReweightState, None]:
            key, row, is_counted = new
            # All rows lie in the buffer already; a refresh sees those up to this one.
            num_rows = state.buffer.num_rows + is_counted
            state = absorb(state._replace(buffer=whole._replace(num_rows=num_rows)), row, is_counted)
            is_stale = (weight_ess(state.log_weights) < num_particles / 2) | (
                pareto_k_hat(state.log_weights) > MAX_K_HAT
            )
            return jax.lax.cond(is_stale, renew, lambda _, state: state, key, state), None

        after, _ = jax.lax.scan(step, state, (jr.split(key, mask.shape[0]), rows, mask))
        ess, k_hat = weight_ess(after.log_weights), pareto_k_hat(after.log_weights)
        is_even = (ess >= num_particles / 2) & (k_hat <= MAX_K_HAT)
        info = ReweightInfo(
            is_even & after.evidence.is_sound & has_room & jnp.isfinite(after.log_evidence),
            ess,
            k_hat,
            after.evidence.ess,
            after.evidence.num_divergences,
            after.num_refreshes,
            after.log_evidence,
            after.log_evidence_error,
            ~has_room,
        )
        return after, info

    def sample(key: Key, state: ReweightState, num_samples: int) -> Draws:
        index = resample(key, finite_weights(state.log_weights), num_samples)
        return jax.vmap(space.constrain)(state.particles[index])

    explanation = explain(
        model,
        "reweight",
        "each row reweights the draws; when they are stale, NumPyro's NUTS on all data replaces them",
        f"{num_particles} weighted draws",
        discount,
        [
            f"approximated: the posterior by {num_particles} weighted draws; nothing is assumed about its form",
            f"evidence: effective sample size of the weights, at least {num_particles // 2}; Pareto k-hat, at most "
            f"{MAX_K_HAT}; effective sample size, divergences and finite energies of the last NUTS run",
        ],
    )
    settings = {
        "num_particles": num_particles,
        "capacity": capacity,
        "num_chains": num_chains,
        "num_warmup": num_warmup,
        "discount": discount,
    }
    return Engine(init, update, sample, explanation, reserve=reserve, settings=settings)


def _squared_error(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    # Relative variance of a mean of M independent weights: (M / ess - 1) / M.
    return jnp.maximum(1.0 / jnp.maximum(weight_ess(log_weights), 1.0) - 1.0 / log_weights.shape[0], 0.0)
