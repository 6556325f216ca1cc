"""What an engine has learnt. The state of `conjugate` is a law alone, an `inner.density.Posterior`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp
from jaxtyping import Array, Float

from ppl_bandit.engines.particles.weights import variance_of_mean, weight_ess


class Particles(NamedTuple):
    """M weighted particles; with a leading axis, of B blocks of latents, whose posteriors multiply, or of two filters.

    What an engine does not need is None: no array, neither traced nor stored.

    Attributes:
        positions: unconstrained latents, (M, k); of a filter what its particles know, a pytree (2, H, ...).
        log_weights: up to a constant; on a path of targets, from the density of `log_targets` to the newest target.
        log_evidence: of the rows; of a block, of its own rows.
        squared_error: of the log evidence, at the last refresh, as if particles of a refresh were independent and exact. None
            for two filters, whose difference shows the error.
        num_refreshes: how often the particles were renewed.
        evidence: of the last moves, `MoveEvidence` or `PathEvidence`.
        log_targets: on a path, the log density of which the positions are an equally weighted sample.
        log_prior, log_likelihood: of the particles, given all rows so far.
        covariance: of the target, at the last refresh.
        step_size: for the next moves.
        variance: of the mean of a function with unit variance, over the particles of the last refresh: 1 / M if they were
            independent, more if they depend on the particles before.
        modes: that the search of the last refresh found, and log_unseen_mass, the log posterior mass of those with too few
            particles; -inf for the others.
        log_constant, constant_error: log normalising constant of the prior and its squared error; both 0 unless the program
            has factors.
    """

    positions: Any
    log_weights: Float[Array, "*B M"]
    log_evidence: Float[Array, "*B"]
    squared_error: Any = None
    num_refreshes: Any = None
    evidence: Any = None
    log_targets: Any = None
    log_prior: Any = None
    log_likelihood: Any = None
    covariance: Any = None
    step_size: Any = None
    variance: Any = None
    modes: Any = None
    log_unseen_mass: Any = None
    log_constant: Any = None
    constant_error: Any = None


class State(NamedTuple):
    """What an engine has learnt; what it does not need is None.

    Attributes:
        law: of all latents, a `Posterior` (`kalman`).
        log_evidence: log p(data) so far beside a law; particles have their own.
        particles: of the latents without a closed form.
        buffer: the rows, if they are read again; of `collapsed` otherwise without capacity: only the number of rows counts.
        data_statistics: sums of statistics of the rows (`collapsed`); if rows are read again, one sum for each particle,
            (..., M).
        centre: the point at which densities of the inner sites are expanded.
        outer_statistics: statistics of the prior at the particles, cached until these move; None if they are too large.
        roots: of the covariances of dense Gaussian blocks given all data, in place of the precisions in `outer_statistics`;
            None if the blocks are factorized at every step.
        search: what `reweight` and `nuts` know of the blocks of latents; see `BlockSearch`.
        clock: the time, if latents move.
        window: the latest rows, for the moves of static latents of a filter; None without static latents.
    """

    law: Any = None
    log_evidence: Any = None
    particles: Any = None
    buffer: Any = None
    data_statistics: Any = None
    centre: Any = None
    outer_statistics: Any = None
    roots: Any = None
    search: Any = None
    clock: Any = None
    window: Any = None

    def evidence(self) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return log p(data) so far, and its standard error; with a discount, the sum of log predictive densities."""
        own = self.particles
        if own is None:
            return self.log_evidence, jnp.zeros_like(self.log_evidence)
        if own.squared_error is None:  # two independent estimates
            mean = logsumexp(jnp.asarray(own.log_evidence)) - jnp.log(len(own.log_evidence))
            return mean, 0.5 * jnp.abs(own.log_evidence[0] - own.log_evidence[1])
        num = own.log_weights.shape[-1]
        ess = jax.vmap(weight_ess)(own.log_weights.reshape(-1, num)).reshape(own.log_evidence.shape)
        return jnp.sum(own.log_evidence), jnp.sqrt(jnp.sum(own.squared_error + variance_of_mean(ess, num)))


def stored_evidence(state: State) -> tuple[float, float]:
    """Return the log evidence of a state, and its standard error."""
    log_evidence, error = state.evidence()
    return float(log_evidence), float(error)
