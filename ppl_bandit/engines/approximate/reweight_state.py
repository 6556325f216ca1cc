"""The state of the `reweight` engine."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.engines.particles.weighted_particles import WeightedParticles
from ppl_bandit.engines.particles.weights import variance_of_mean, weight_ess
from ppl_bandit.engines.row_buffer import Buffer

__all__ = ["ReweightState"]


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
