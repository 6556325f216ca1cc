"""Weighted particles of one block of latents, and how they are renewed when their weights say that they are stale."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.engines.particles.conditional_execution import apply_where
from ppl_bandit.engines.particles.diagnostics import (
    finite_log_weights,
    flatten_log_weights,
    resample,
    variance_of_mean,
    weight_ess,
)
from ppl_bandit.engines.particles.importance import PriorProbes, propose
from ppl_bandit.engines.particles.log_density import LogDensity, whiten
from ppl_bandit.engines.particles.moves import Kernel, MoveEvidence, hamiltonian, mean_and_root, move
from ppl_bandit.types import Key

__all__ = [
    "MIN_ESS_SHARE",
    "WeightedParticles",
    "is_trusted",
    "refresh",
    "rough_covariance",
    "sample_size",
    "prior_particles",
]

# By which latents narrow with a standard deviation of another, in logarithms, where a cloud is swept: at least 0.78 in clouds
# that had not reached the end of their neck, at most 0.34 in those of hierarchies without one.
_MIN_NARROWING = 0.5
MIN_ESS_SHARE = 0.1  # of the particles: 100 of 1,000 leave p-hat off by 0.05 at most, one standard error
_CUT = 10.0  # of a Gaussian, five standard deviations


class WeightedParticles(NamedTuple):
    """M weighted particles of a block, or, with a leading axis, of all blocks.

    Attributes:
        positions: unconstrained.
        log_weights: of the particles, up to a constant.
        log_prior, log_likelihood: of the particles, given the data of now.
        covariance: of the target, when the particles were drawn.
        step_size: for the next moves.
        variance: of the mean of a function with unit variance, over the particles as they were drawn: 1 / M if they were
            independent, more for what they remember of the particles before.
        evidence: of the moves that made them; all sound where they came by importance.
        log_evidence: of the rows of this block.
        squared_error: of the log evidence, when the particles were drawn.
        log_constant, constant_error: of the prior, with its squared error; both 0 unless the program has factors.
        num_refreshes, num_moves: how often the particles were renewed, and how often by moves.
    """

    positions: Float[Array, "*B M k"]
    log_weights: Float[Array, "*B M"]
    log_prior: Float[Array, "*B M"]
    log_likelihood: Float[Array, "*B M"]
    covariance: Float[Array, "*B k k"]
    step_size: Float[Array, "*B"]
    variance: Float[Array, "*B"]
    evidence: MoveEvidence
    log_evidence: Float[Array, "*B"]
    squared_error: Float[Array, "*B"]
    log_constant: Float[Array, "*B"]
    constant_error: Float[Array, "*B"]
    num_refreshes: Int[Array, "*B"]
    num_moves: Int[Array, "*B"]


def prior_particles(
    positions: Float[Array, "M k"], log_weights: Float[Array, " M"], log_prior: Float[Array, " M"]
) -> WeightedParticles:
    """Return the cloud of a prior from draws of it, weighted by the factors of the program."""
    num, size = positions.shape
    zero = jnp.zeros((), positions.dtype)
    none = jnp.zeros((), int)
    return WeightedParticles(
        positions,
        log_weights,
        log_prior,
        jnp.zeros_like(log_weights),
        rough_covariance(positions),
        jnp.asarray(size**-0.25, positions.dtype),
        jnp.asarray(1.0 / num, positions.dtype),
        _sound(positions.dtype),
        zero,
        zero,
        logsumexp(log_weights) - math.log(num),
        _relative_variance(log_weights),
        none,
        none,
    )


def rough_covariance(positions: Float[Array, "M k"]) -> Float[Array, "k k"]:
    """Return the covariance of draws but for their tails: a prior may have no variance.

    Differences of draws are cut off at many times their geometric mean, which always exists.
    """
    num = positions.shape[0]
    gaps = positions - jnp.roll(positions, num // 2, axis=0)  # copies of a particle stand side by side
    reach = _CUT * jnp.exp(jnp.mean(jnp.log(jnp.abs(gaps) + jnp.finfo(gaps.dtype).tiny), axis=0))
    gaps = jnp.clip(gaps, -reach, reach)
    return gaps.T @ gaps / (2 * num)


def refresh(
    key: Key,
    target: LogDensity,
    cloud: WeightedParticles,
    *,
    kernel: Kernel = hamiltonian,
    first_length: int = 4,
    first_sweep: int = 8,
    min_narrowing: float = _MIN_NARROWING,
    by_importance: bool = True,
    keeps_evidence: bool = True,
    scouts: PriorProbes | None = None,
) -> WeightedParticles:
    """Renew the particles: by importance where that has evidence, by moving every one of them elsewhere.

    Moves start at the particles in proportion to their weight. Where the weights have nearly all gone to a few of them, in a
    jump of the posterior, or where it went to a place without particles, they start at the proposals, or else on the way there;
    and at the proposals wherever these have evidence but are not to suffice: a funnel's end is far for a chain.

    Args:
        target: the posterior density of the data of now.
        min_narrowing: of a cloud whose moves sweep over single latents too; those of one that is lost always do.
        by_importance: whether importance may suffice.
        keeps_evidence: whether the log evidence is p(data), which importance estimates afresh; not with forgetting.
        scouts: places from which modes are looked for as well.
    """
    key_propose, key_offset, key_move = jr.split(key, 3)
    num = cloud.positions.shape[0]
    log_weights = finite_log_weights(cloud.log_weights)
    ess = weight_ess(log_weights)
    # Where the weights are down to a few draws, others on the way there say where modes are and how wide.
    flat = flatten_log_weights(log_weights, MIN_ESS_SHARE * num)
    centre, root = mean_and_root(cloud.positions, cloud.covariance, weight_ess(flat), jax.nn.softmax(flat))

    def inside(positions: Array) -> Array:
        return jax.scipy.linalg.solve_triangular(root, (positions - centre).T, lower=True).T

    log_density = cloud.log_prior + cloud.log_likelihood
    found = propose(
        key_propose,
        whiten(target, centre, root),
        inside(cloud.positions),
        flat,
        log_density,
        None if scouts is None else scouts._replace(positions=inside(scouts.positions)),
    )
    proposed = centre + found.positions @ root.T
    is_lost = ess < MIN_ESS_SHARE * num
    if scouts is not None:
        is_lost |= scouts.is_ahead
    is_jump = (is_lost & (found.ess >= MIN_ESS_SHARE * num)) | found.is_accepted
    is_accepted = found.is_accepted if by_importance else jnp.array(False)
    is_new = is_accepted | is_jump
    num_proposed = proposed.shape[0]
    old = jnp.full(num_proposed, -jnp.inf, log_weights.dtype).at[:num].set(flat)
    weights = jnp.where(is_new, finite_log_weights(found.log_weights), old)
    index = resample(jr.uniform(key_offset, dtype=weights.dtype), weights, num)
    starts = jnp.where(is_new, proposed[index], cloud.positions[jnp.minimum(index, num - 1)])
    error = _relative_variance(cloud.log_weights)
    volume = jnp.sum(jnp.log(jnp.diagonal(root)))
    log_evidence = logsumexp(found.log_weights) + volume - math.log(found.log_weights.shape[0]) - cloud.log_constant
    new_error = _relative_variance(found.log_weights) + cloud.constant_error
    old_error = cloud.squared_error + error
    is_closer = (new_error < old_error) & jnp.isfinite(log_evidence) & keeps_evidence
    renewed = cloud._replace(
        positions=starts,
        log_weights=jnp.zeros_like(cloud.log_weights),
        log_prior=found.log_prior[index],
        log_likelihood=found.log_likelihood[index],
        covariance=root @ root.T,
        variance=jnp.maximum(1.0 / found.ess, 1.0 / num),
        evidence=_sound(cloud.positions.dtype),
        log_evidence=jnp.where(is_closer, log_evidence, cloud.log_evidence),
        squared_error=jnp.where(is_closer, new_error, old_error),
        num_refreshes=cloud.num_refreshes + 1,
    )

    def moved() -> WeightedParticles:
        variance = jnp.where(is_jump, 1.0 / found.ess, cloud.variance + _relative_variance(flat))
        covariance = jnp.where(is_jump, jnp.cov(starts, rowvar=False).reshape(root.shape), root @ root.T)
        # Particles that are far off do not narrow yet, and need the sweeps most.
        sweeps = first_sweep, jnp.where(is_lost, 0.0, min_narrowing)
        start = starts, 1.0 / variance, covariance, cloud.step_size
        end = move(key_move, target, *start, kernel, first_length, *sweeps)
        memory = end.evidence.memory
        # Chains that begin at draws with evidence of their own need not forget them: a neck holds them fast, rightly.
        stays = (
            found.is_accepted & (end.evidence.drift <= 1.0) & jnp.all(jnp.isfinite(end.log_prior + end.log_likelihood))
        )
        evidence = end.evidence._replace(is_sound=end.evidence.is_sound | stays)
        return renewed._replace(
            positions=end.positions,
            log_prior=end.log_prior,
            log_likelihood=end.log_likelihood,
            step_size=end.step_size,
            variance=memory**2 * variance + (1.0 - memory**2) / num,
            evidence=evidence,
            num_moves=cloud.num_moves + 1,
        )

    return apply_where(~is_accepted, lambda _: moved(), renewed)


def is_trusted(cloud: WeightedParticles, ess: Float[Array, ""]) -> Bool[Array, ""]:
    """Tell whether the evidence speaks for the particles of a block: the evenness of their weights, and how they were drawn.

    Args:
        ess: effective sample size of their weights.
    """
    num = cloud.log_weights.shape[0]
    density = jnp.max(jnp.abs(jnp.where(jnp.isfinite(cloud.log_likelihood), cloud.log_likelihood, 0.0)))
    is_resolved = jnp.finfo(cloud.positions.dtype).eps * density <= 0.02  # nats that a float can tell apart
    return (
        cloud.evidence.is_sound
        & (ess >= num / 2)
        & (sample_size(cloud, ess) >= MIN_ESS_SHARE * num)
        & jnp.isfinite(cloud.log_evidence)
        & is_resolved
    )


def sample_size(cloud: WeightedParticles, ess: Float[Array, ""]) -> Float[Array, ""]:
    """Return how many independent draws the particles of a block are worth, by the effective sample size of their weights."""
    return 1.0 / (cloud.variance + variance_of_mean(ess, len(cloud.log_weights)))


def _relative_variance(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    return variance_of_mean(weight_ess(log_weights), len(log_weights))


def _sound(dtype) -> MoveEvidence:
    zero = jnp.zeros((), dtype)
    return MoveEvidence(zero, zero, zero + 1, jnp.zeros((), int), zero, jnp.array(True))
