"""The state of the `reweight` engine, and the measures that an update returns."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.checks import Check, describe_failures
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT
from ppl_bandit.engines.particles.weighted_particles import PARTICLE_CHECKS, WeightedParticles
from ppl_bandit.engines.particles.weights import variance_of_mean, weight_ess
from ppl_bandit.engines.row_buffer import ROOM_CHECK, Buffer

__all__ = ["REWEIGHT_CHECKS", "ReweightInfo", "ReweightState"]

REWEIGHT_CHECKS = (*PARTICLE_CHECKS, Check("Pareto k-hat of the weights", MAX_K_HAT), ROOM_CHECK)


class ReweightState(NamedTuple):
    """The data, and weighted draws of the posterior of every block.

    Attributes:
        buffer: all rows so far.
        particles: of all blocks, with a leading axis B.
        reference: possible latents, for the blocks that are not evaluated.
        probes: draws of the prior of all blocks.
        log_probe_mass: log posterior mass of each probe in units of a particle's; at most 0 at the last refresh.
        num_rows, num_searched: rows that inform each block, now and at its last refresh, which searched for modes.
        num_narrow: rows since then whose likelihood is too narrow for the particles to resolve.
    """

    buffer: Buffer
    particles: WeightedParticles
    reference: Float[Array, " K"]
    probes: Float[Array, "B S k"]
    log_probe_mass: Float[Array, "B S"]
    num_rows: Int[Array, " B"]
    num_searched: Int[Array, " B"]
    num_narrow: Int[Array, " B"]

    @property
    def log_evidence(self) -> Float[Array, ""]:
        """Log of p(data), the sum of the rows' log predictive densities; with a discount, a predictive score."""
        return jnp.sum(self.particles.log_evidence)

    @property
    def log_evidence_error(self) -> Float[Array, ""]:
        """Standard error of the log evidence, as if the draws of each refresh were independent and exact."""
        ess = jax.vmap(weight_ess)(self.particles.log_weights)
        num_particles = self.particles.log_weights.shape[-1]
        return jnp.sqrt(jnp.sum(self.particles.squared_error + variance_of_mean(ess, num_particles)))


class ReweightInfo(NamedTuple):
    """Measures of an update; the worst over all blocks.

    Attributes:
        is_trusted: whether all checks passed.
        ess: number of independent draws with the same Monte Carlo error as the weighted particles.
        k_hat: Pareto k-hat of the weights; 0 if no weight is large.
        autocorrelation: of the particles with the starting positions of the last moves; 0 without moves.
        num_divergences: divergent transitions of these moves.
        is_unfinished: the budget of an update of one row ended these moves; they continue with a later update.
        num_refreshes: refreshes so far, over all blocks.
        num_moves: refreshes by moves, because importance sampling failed its checks.
        log_evidence: log p(data) so far.
        log_evidence_error: its standard error, as if the draws of each refresh were independent and exact.
        is_full: the rows did not fit into the buffer and were not learnt; reserve capacity and update again.
        check_values: the values of all checks.
    """

    is_trusted: Bool[Array, ""]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    autocorrelation: Float[Array, ""]
    num_divergences: Int[Array, ""]
    is_unfinished: Bool[Array, ""]
    num_refreshes: Int[Array, ""]
    num_moves: Int[Array, ""]
    log_evidence: Float[Array, ""]
    log_evidence_error: Float[Array, ""]
    is_full: Bool[Array, ""]
    check_values: Float[Array, " checks"]

    def failed_checks(self) -> list[str]:
        """Name each failed check with its value and its bound."""
        return describe_failures(REWEIGHT_CHECKS, self.check_values)
