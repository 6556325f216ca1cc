"""Weighted particles of one block of latents, and their renewal by importance sampling or Markov moves."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.checks import CHECKS, passing_value
from ppl_bandit.engines.particles.importance import PriorProbes, Proposal, log_unseen_mass, num_searches, propose
from ppl_bandit.engines.particles.log_density import LogDensity, whiten
from ppl_bandit.engines.particles.moves import MoveEvidence, MoveSettings, move, sound_evidence
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    flatten_log_weights,
    mean_and_root,
    resample,
    robust_covariance,
    standardize,
    variance_of_mean,
    weight_ess,
)
from ppl_bandit.engines.state import Particles
from ppl_bandit.runtime.jax_adapter import apply_where
from ppl_bandit.types import Key

# (key, whitened draws, centre, root) -> whitened starts near the draws
StartFinder = Callable[[Key, Float[Array, "S k"], Float[Array, " k"], Float[Array, "k k"]], Float[Array, "S k"]]

_NUM_DATA_STARTS, FEW_LATENTS = 32, 4  # an eighth of these starts for more latents, whose Hessians take longer
MAX_UNSEEN_MASS = CHECKS["unseen_mass"].bound  # of modes that have less than a quarter of their share of particles
# Posterior mass of a probe, and share of proposals whose likelihood is nan or infinite, that the particles may miss.
MAX_MISSED_MASS = 0.005
MIN_ESS_SHARE = CHECKS["ess"].bound
MAX_ROUNDING = 0.02  # nats of a log density; see the check of the precision


class RefreshSettings(NamedTuple):
    """Settings of `refresh_particles`.

    Attributes:
        moves: of the Markov moves.
        may_accept_proposals: whether accepted importance draws are used without moves.
        estimates_evidence: whether the log evidence is log p(data), which importance sampling estimates; not with a discount.
    """

    moves: MoveSettings = MoveSettings()
    may_accept_proposals: bool = True
    estimates_evidence: bool = True


def prior_particles(
    positions: Float[Array, "M k"],
    log_weights: Float[Array, " M"],
    log_prior: Float[Array, " M"],
    has_data_starts: bool = False,
) -> Particles:
    """Return particles drawn from the prior, weighted by the factors of the program.

    Args:
        has_data_starts: whether refreshes have a `StartFinder`.
    """
    num, size = positions.shape
    dtype = positions.dtype
    zero = jnp.zeros((), dtype)
    num_modes = num_searches(num_data_starts(size) if has_data_starts else 0)
    return Particles(
        positions,
        log_weights,
        log_evidence=zero,
        log_prior=log_prior,
        log_likelihood=jnp.zeros_like(log_weights),
        covariance=robust_covariance(positions),
        step_size=jnp.asarray(size**-0.25, dtype),
        variance=jnp.asarray(1.0 / num, dtype),
        evidence=sound_evidence(dtype),
        squared_error=zero,
        modes=positions[jnp.arange(num_modes) % num],
        log_unseen_mass=jnp.full(num_modes, -jnp.inf, dtype),
        log_constant=logsumexp(log_weights) - math.log(num),
        constant_error=_relative_variance(log_weights),
        num_refreshes=jnp.zeros((), int),
    )


def num_data_starts(size: int) -> int:
    """Return how many starts of the search for modes come from the data, for k latents."""
    return _NUM_DATA_STARTS if size <= FEW_LATENTS else _NUM_DATA_STARTS // 8


def refresh_particles(
    key: Key,
    target: LogDensity,
    particles: Particles,
    settings: RefreshSettings,
    probes: PriorProbes | None = None,
    find_starts: StartFinder | None = None,
) -> Particles:
    """Replace particles by importance draws if these are accepted, else move every particle by Markov transitions.

    Moves start at the particles in proportion to their weights. If the weights are concentrated on a few particles, they
    start at the proposals if these have a sufficient effective sample size, else at particles with tempered weights. They
    also start at accepted proposals that the settings do not allow as draws: the end of a funnel is far for a chain.

    Args:
        target: the posterior density given all rows so far.
        find_starts: returns starts for the search for modes, which the data suggest.
    """
    key_propose, key_offset, key_move = jr.split(key, 3)
    num = particles.positions.shape[0]
    log_weights = finite_log_weights(particles.log_weights)
    flat = flatten_log_weights(log_weights, MIN_ESS_SHARE * num)
    centre, root = mean_and_root(particles.positions, particles.covariance, weight_ess(flat), jax.nn.softmax(flat))
    white = standardize(particles.positions, centre, root)
    data_starts = None
    if find_starts is not None:
        bases = white[jnp.arange(num_data_starts(white.shape[1])) % num]
        data_starts = find_starts(jr.fold_in(key, 3), bases, centre, root)
    proposal = propose(
        key_propose,
        whiten(target, centre, root),
        white,
        flat,
        particles.log_prior + particles.log_likelihood,
        None if probes is None else probes._replace(positions=standardize(probes.positions, centre, root)),
        data_starts,
    )
    is_degenerate = weight_ess(log_weights) < MIN_ESS_SHARE * num
    if probes is not None:
        is_degenerate |= probes.has_unseen_mass
    uses_proposal = (is_degenerate & (proposal.ess >= MIN_ESS_SHARE * num)) | proposal.is_accepted

    proposed = centre + proposal.positions @ root.T
    old = jnp.full(len(proposed), -jnp.inf, flat.dtype).at[:num].set(flat)
    weights = jnp.where(uses_proposal, finite_log_weights(proposal.log_weights), old)
    index = resample(jr.uniform(key_offset, dtype=weights.dtype), weights, num)
    renewed = _with_evidence(particles, proposal, root, settings)._replace(
        positions=jnp.where(uses_proposal, proposed[index], particles.positions[jnp.minimum(index, num - 1)]),
        log_weights=jnp.zeros_like(particles.log_weights),
        log_prior=proposal.log_prior[index],
        log_likelihood=proposal.log_likelihood[index],
        covariance=root @ root.T,
        variance=jnp.maximum(1.0 / proposal.ess, 1.0 / num),
        evidence=sound_evidence(particles.positions.dtype),
        num_refreshes=particles.num_refreshes + 1,
    )

    def move_from_starts(renewed: Particles) -> Particles:
        moves, evidence = settings.moves, particles.evidence
        # Degenerate particles need coordinate moves most and do not show a funnel yet.
        moves = moves._replace(min_narrowing=jnp.where(is_degenerate, 0.0, moves.min_narrowing))
        covariance = jnp.cov(renewed.positions, rowvar=False).reshape(root.shape)
        covariance = jnp.where(uses_proposal, covariance, root @ root.T)
        variance = jnp.where(uses_proposal, 1.0 / proposal.ess, particles.variance + _relative_variance(flat))
        return _move(key_move, target, renewed, moves, covariance, variance, evidence, proposal.is_accepted)

    is_finished = proposal.is_accepted if settings.may_accept_proposals else jnp.array(False)
    end = apply_where(~is_finished, move_from_starts, renewed)
    # Weights and moves leave out where the density is undefined, so that nothing else would show it.
    is_undefined = jnp.isnan(proposal.log_likelihood) | (proposal.log_likelihood == jnp.inf)
    share_undefined = jnp.mean(is_undefined & jnp.isfinite(proposal.log_prior))
    return end._replace(
        evidence=end.evidence.doubted_where(share_undefined > MAX_MISSED_MASS),
        modes=centre + proposal.modes.position @ root.T,
        log_unseen_mass=log_unseen_mass(proposal, standardize(end.positions, centre, root)),
    )


def _with_evidence(
    particles: Particles, proposal: Proposal, root: Float[Array, "k k"], settings: RefreshSettings
) -> Particles:
    """Return particles with the better of two estimates of the log evidence: theirs, or that of importance sampling."""
    log_volume = jnp.sum(jnp.log(jnp.diagonal(root)))
    num_proposed = len(proposal.log_weights)
    log_evidence = logsumexp(proposal.log_weights) - math.log(num_proposed) + log_volume - particles.log_constant
    new_error = _relative_variance(proposal.log_weights) + particles.constant_error
    old_error = particles.squared_error + _relative_variance(particles.log_weights)
    is_better = (new_error < old_error) & jnp.isfinite(log_evidence) & settings.estimates_evidence
    return particles._replace(
        log_evidence=jnp.where(is_better, log_evidence, particles.log_evidence),
        squared_error=jnp.where(is_better, new_error, old_error),
    )


def _move(
    key: Key,
    target: LogDensity,
    starts: Particles,
    settings: MoveSettings,
    covariance: Float[Array, "k k"],
    variance: Float[Array, ""],
    previous: MoveEvidence,
    is_accepted: Bool[Array, ""],
) -> Particles:
    """Return particles that moved from starts.

    Args:
        covariance: estimate of the target's covariance.
        variance: of the mean of a function with unit variance, over the starts.
        previous: evidence of the last moves.
        is_accepted: whether the starts are accepted importance draws.
    """
    moved = move(key, target, starts.positions, 1.0 / variance, covariance, starts.step_size, settings, previous)
    # Chains from accepted importance draws need not become independent of them; in a funnel they cannot.
    is_finite = jnp.all(jnp.isfinite(moved.log_prior + moved.log_likelihood))
    is_sound_start = is_accepted & (moved.evidence.drift <= 1.0) & is_finite
    squared_correlation = moved.evidence.autocorrelation**2
    return starts._replace(
        positions=moved.positions,
        log_prior=moved.log_prior,
        log_likelihood=moved.log_likelihood,
        step_size=moved.step_size,
        variance=squared_correlation * variance + (1.0 - squared_correlation) / len(starts.positions),
        evidence=moved.evidence._replace(is_sound=moved.evidence.is_sound | is_sound_start),
    )


def particle_checks(particles: Particles, ess: Float[Array, ""]) -> dict[str, Float[Array, ""]]:
    """Return the checks of the particles of one block, by name.

    Args:
        ess: effective sample size of the weights.
    """
    num, dtype = len(particles.log_weights), particles.positions.dtype
    evidence = particles.evidence
    # Moves may be sound although a check failed, such as that of divergences; then report values that pass.
    of_moves = {
        name: jnp.where(evidence.is_sound, passing_value(name, own), own) for name, own in evidence.checks.items()
    }
    magnitude = jnp.max(jnp.abs(jnp.where(jnp.isfinite(particles.log_likelihood), particles.log_likelihood, 0.0)))
    checks = {
        **of_moves,
        "weight_ess": ess / num,
        "ess": jnp.minimum(of_moves["ess"], sample_size(particles, ess) / num),
        "precision": jnp.finfo(dtype).eps * magnitude > MAX_ROUNDING,
        "density": jnp.minimum(of_moves["density"], jnp.isfinite(particles.log_evidence)),
        "unseen_mass": jnp.sum(jnp.exp(particles.log_unseen_mass)),
    }
    return {name: value.astype(dtype) for name, value in checks.items()}


def sample_size(particles: Particles, ess: Float[Array, ""]) -> Float[Array, ""]:
    """Return the number of independent draws with the same Monte Carlo error as the weighted particles of a block.

    Args:
        ess: effective sample size of the weights.
    """
    return 1.0 / (particles.variance + variance_of_mean(ess, len(particles.log_weights)))


def _relative_variance(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    return variance_of_mean(weight_ess(log_weights), len(log_weights))
