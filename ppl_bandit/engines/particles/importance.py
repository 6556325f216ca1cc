"""Importance sampling of a posterior from a mixture of Student-t laws at its modes and around existing particles.

Half of the proposals come from Student-t laws at the modes that Newton's method finds, scaled by the curvature there: they
suit posteriors of many rows, and posteriors that have moved far. The other half come from Student-t kernels around the
particles: they suit low-dimensional posteriors of any shape. Every proposal is weighted with the density of the whole
mixture. The result is accepted if Pareto k-hat, the effective sample size and the coverage of the old particles allow it: old
particles with a high density ratio show a mode that the proposals miss.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import logsumexp
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.checks import CHECKS
from ppl_bandit.engines.particles.diagnostics import MAX_K_HAT, notable_k_hat
from ppl_bandit.engines.particles.log_density import LogDensity, Mode, find_mode
from ppl_bandit.engines.particles.weights import (
    finite_log_weights,
    flatten_log_weights,
    log_kernel,
    log_normalizing_constant,
    normalize_weights,
    resample,
    student_t_draws,
    weight_ess,
)
from ppl_bandit.numerics.random_bits import uniform_and_normal
from ppl_bandit.types import Key

_NUM_STARTS = 8  # of Newton's method: half at random, half as far as possible from these and from each other
_NUM_GUIDED = (
    2  # of the latter, at probes if there are any; as many random starts are replaced by those that the data suggest
)
_NUM_KERNELS = (
    200  # particles at which kernels of the proposal stand, and among which starts of Newton's method are chosen
)
_TOLERANCE = 1e-2  # a mode to a tenth of a standard deviation suffices
_MAX_SD = 3.0  # standard deviation of a proposal, in those of the particles
_UNIFORM_SHARE = 0.1  # of the proposals at modes, spread evenly over the modes whatever their estimated mass
_MAX_LOG_RATIO = math.log(20.0)  # log density ratio of particles that the proposals cover
_MAX_MISSED = CHECKS["unseen_mass"].bound  # posterior mass of particles, and of modes, that they do not cover
_MAX_HELD_OUT = 0.25  # share of the data's starts whose modes are not proposed: they test whether the others suffice


class Proposal(NamedTuple):
    """P weighted draws.

    Attributes:
        positions: in whitened coordinates.
        log_weights: the mean of their exponentials estimates the normalising constant of the target.
        ess: their effective sample size.
        is_accepted: whether k-hat, the effective sample size and the coverage of the old particles allow their use.
        modes: that Newton's method found.
        log_mode_mass: log posterior mass of the Gaussian approximation at each mode; -inf where Newton's method did not
            converge, or found a mode again.
    """

    positions: Float[Array, "P k"]
    log_prior: Float[Array, " P"]
    log_likelihood: Float[Array, " P"]
    log_weights: Float[Array, " P"]
    ess: Float[Array, ""]
    is_accepted: Bool[Array, ""]
    modes: Mode
    log_mode_mass: Float[Array, " modes"]


class PriorProbes(NamedTuple):
    """Fixed draws of the prior that detect posterior mass where there are no particles.

    Attributes:
        has_unseen_mass: whether the rows have given a probe more posterior mass than particles may miss.
    """

    positions: Float[Array, "S k"]
    log_likelihood: Float[Array, " S"]
    has_unseen_mass: Bool[Array, ""]


class _Mixture(NamedTuple):
    """Student-t laws: C components with their own roots, and L kernels of one width."""

    centres: Float[Array, "C k"]
    roots: Float[Array, "C k k"]
    inverses: Float[Array, "C k k"]
    log_volumes: Float[Array, " C"]
    log_probs: Float[Array, " C"]
    kernels: Float[Array, "L k"]
    width: Float[Array, ""]


def num_searches(num_data_starts: int) -> int:
    """Return the number of modes that `propose` searches."""
    return _NUM_STARTS + max(num_data_starts - _NUM_GUIDED, 0)


def propose(
    key: Key,
    target: LogDensity,
    positions: Float[Array, "M k"],
    log_weights: Float[Array, " M"],
    log_density: Float[Array, " M"],
    probes: PriorProbes | None = None,
    data_starts: Float[Array, "S k"] | None = None,
) -> Proposal:
    """Draw 2 M proposals, weighted to the target.

    Args:
        target: in coordinates in which the weighted particles have mean 0 and unit covariance.
        positions: old particles.
        log_weights: of the old particles, to the target or a tempered version of it; finite somewhere.
        log_density: of the target at the old particles.
        probes: Newton's method also starts at the more likely of them.
        data_starts: further starts of Newton's method. A quarter of their modes is not proposed.
    """
    num_draws, size = positions.shape
    key_offset, key_draw = jr.split(key)
    offsets = jr.uniform(key_offset, (3,), positions.dtype)
    degrees = 2 * max(4, -(-size // 2))  # in many dimensions heavier tails would waste most of the draws
    ess = weight_ess(log_weights)

    kernels = positions[resample(offsets[0], log_weights, min(_NUM_KERNELS, num_draws))]
    starts = _distant_points(kernels, kernels if probes is None else _likely_probes(probes, offsets[0]))
    num_used = len(starts)
    if data_starts is not None:
        starts = jnp.concatenate([starts[_NUM_GUIDED:], data_starts])
        num_used = len(starts) - int(_MAX_HELD_OUT * len(data_starts))
    modes = jax.vmap(lambda start: find_mode(target, start, _TOLERANCE))(starts)
    is_same = _same_modes(modes)
    mixture = _mixture(jax.tree.map(lambda leaf: leaf[:num_used], modes), is_same[:num_used, :num_used], kernels, ess)
    proposed = _draw(key_draw, mixture, num_draws, degrees, offsets)

    log_prior, log_likelihood = jax.vmap(target.parts)(proposed)
    new = log_prior + log_likelihood - _log_mixture(mixture, proposed, degrees)
    new = jnp.where(jnp.isnan(new), -jnp.inf, new)
    log_constant = logsumexp(new) - math.log(2 * num_draws)
    log_ratios = log_density - _log_mixture(mixture, positions, degrees) - log_constant
    missed = jnp.sum(jnp.where(log_ratios > _MAX_LOG_RATIO, jax.nn.softmax(log_weights), 0.0))
    # The mass of old particles is itself uncertain: allow three standard errors.
    max_missed = _MAX_MISSED + 3.0 * jnp.sqrt(_MAX_MISSED / jnp.maximum(ess, 1.0))
    normalized = normalize_weights(new)
    log_volumes = 0.5 * (size * math.log(2.0 * math.pi) - jnp.sum(jnp.log(modes.precisions), axis=1))
    is_counted = modes.is_converged & ~_is_repeated(modes, is_same)
    log_mass = jnp.where(is_counted, modes.log_density + log_volumes - log_constant, -jnp.inf)
    is_uncovered = modes.log_density - _log_mixture(mixture, modes.position, degrees) - log_constant > _MAX_LOG_RATIO
    missed_by_modes = jnp.sum(jnp.where(is_uncovered, jnp.exp(log_mass), 0.0))
    is_accepted = (notable_k_hat(new, normalized) <= MAX_K_HAT) & (normalized.ess >= num_draws / 2)
    is_accepted &= (missed <= max_missed) & (missed_by_modes <= _MAX_MISSED)
    return Proposal(proposed, log_prior, log_likelihood, new, normalized.ess, is_accepted, modes, log_mass)


def log_unseen_mass(proposal: Proposal, positions: Float[Array, "M k"]) -> Float[Array, " modes"]:
    """Return the log posterior mass of each mode around which particles have less than a quarter of it, -inf for others.

    Args:
        positions: the particles, in the coordinates of the proposal.
    """
    size = positions.shape[1]
    reach = (math.sqrt(size) + 4.0) ** 2

    def share_around(position: Array, precisions: Array, axes: Array) -> Array:
        steps = ((positions - position) @ axes) * jnp.sqrt(precisions)
        return jnp.mean((jnp.sum(jnp.square(steps), axis=1) < reach).astype(positions.dtype))

    modes = proposal.modes
    shares = jax.vmap(share_around)(modes.position, modes.precisions, modes.axes)
    log_mass = jnp.minimum(proposal.log_mode_mass, 0.0)
    return jnp.where(shares < 0.25 * jnp.exp(log_mass), log_mass, -jnp.inf)


def _likely_probes(probes: PriorProbes, offset: Float[Array, ""]) -> Float[Array, "L k"]:
    """Resample probes in proportion to their likelihood, tempered so that several of them count."""
    flat = flatten_log_weights(finite_log_weights(probes.log_likelihood), _NUM_STARTS)
    return probes.positions[resample(offset, flat, 4 * _NUM_STARTS)]


def _distant_points(points: Float[Array, "L k"], others: Float[Array, "P k"]) -> Float[Array, "starts k"]:
    """Return some random points, then repeatedly the point that is farthest from those chosen before.

    Eight random points would miss a mode that holds a quarter of the draws once in ten times.

    Args:
        points: in random order.
        others: the last `_NUM_GUIDED` points are chosen from these.
    """
    chosen = points[jnp.arange(_NUM_STARTS) % len(points)]

    def choose_from(points: Array) -> Callable[[Array, Array], Array]:
        def choose(number: Array, chosen: Array) -> Array:
            gaps = jnp.sum(jnp.square(points[:, None] - chosen), axis=-1)
            gaps = jnp.where(jnp.arange(_NUM_STARTS) < number, gaps, jnp.inf)
            return chosen.at[number].set(points[jnp.argmax(jnp.min(gaps, axis=1))])

        return choose

    first_other = _NUM_STARTS - _NUM_GUIDED
    chosen = jax.lax.fori_loop(_NUM_STARTS // 2, first_other, choose_from(points), chosen)
    return jax.lax.fori_loop(first_other, _NUM_STARTS, choose_from(others), chosen)


def _same_modes(modes: Mode) -> Bool[Array, "modes modes"]:
    """Tell which modes lie within half a standard deviation of which others: several starts may lead to one mode."""
    steps = jnp.einsum("dji,cdj->cdi", modes.axes, modes.position[:, None] - modes.position)
    return jnp.sum(jnp.square(steps) * jnp.maximum(modes.precisions, _MAX_SD**-2), axis=-1) < 0.25


def _is_repeated(modes: Mode, is_same: Bool[Array, "modes modes"]) -> Bool[Array, " modes"]:
    """Tell which modes are those of earlier starts; a narrow mode in the centre of a wide one is not."""
    return jnp.any(jnp.tril(is_same & is_same.T & modes.is_converged, -1), axis=1)


def _mixture(modes: Mode, is_same: Bool[Array, "C C"], kernels: Float[Array, "L k"], ess: Float[Array, ""]) -> _Mixture:
    """Return Student-t laws at modes, in proportion to their estimated mass, and around kernels.

    Args:
        is_same: modes that share their mass.
    """
    size = kernels.shape[1]
    precisions = jnp.maximum(modes.precisions, _MAX_SD**-2)
    roots = modes.axes / jnp.sqrt(precisions)[:, None, :]
    inverses = jnp.swapaxes(modes.axes * jnp.sqrt(precisions)[:, None, :], 1, 2)
    log_volumes = -0.5 * jnp.sum(jnp.log(precisions), axis=1)
    num_same = jnp.sum(is_same, axis=0)
    log_mass = modes.log_density + log_volumes
    log_mass = jnp.where(jnp.isfinite(log_mass), log_mass, -jnp.inf) - jnp.log(jnp.maximum(num_same, 1))
    num_modes = len(log_mass)
    mass = jnp.nan_to_num(jax.nn.softmax(log_mass), nan=1.0 / num_modes)
    probs = (1.0 - _UNIFORM_SHARE) * mass / jnp.sum(mass) + _UNIFORM_SHARE / num_modes
    # Silverman's rule for a standard Gaussian.
    width = jnp.asarray((4.0 / ((size + 2) * jnp.maximum(ess, 1.0))) ** (1.0 / (size + 4)), kernels.dtype)
    return _Mixture(modes.position, roots, inverses, log_volumes, jnp.log(probs), kernels, width)


def _draw(
    key: Key, mixture: _Mixture, num_draws: int, degrees: int, offsets: Float[Array, " 3"]
) -> Float[Array, "P k"]:
    """Draw from the mixture: half of 2 M draws at the modes, half around the kernels."""
    num_kernels, size = mixture.kernels.shape
    num = 2 * num_draws
    uniform, normal = uniform_and_normal(key, num * (degrees // 2), num * size, mixture.kernels.dtype)
    noise = student_t_draws(uniform.reshape(num, -1), normal.reshape(num, size))
    which = resample(offsets[1], mixture.log_probs, num_draws)
    at_modes = mixture.centres[which] + jnp.einsum("mij,mj->mi", mixture.roots[which], noise[:num_draws])
    # A random first kernel: where M is no multiple of the number of kernels, some are used once more than others.
    first = jnp.floor(offsets[2] * num_kernels).astype(int)
    around = mixture.kernels[(jnp.arange(num_draws) + first) % num_kernels] + mixture.width * noise[num_draws:]
    return jnp.concatenate([at_modes, around])


def _log_mixture(mixture: _Mixture, positions: Float[Array, "P k"], degrees: int) -> Float[Array, " P"]:
    """Return the log density of the mixture."""
    size = positions.shape[1]
    constant = log_normalizing_constant(degrees, size)

    def squares_at(centre: Array, inverse: Array) -> Array:
        return jnp.sum(jnp.square((positions - centre) @ inverse.T), axis=1)

    squares = jax.vmap(squares_at)(mixture.centres, mixture.inverses)
    modes = constant + log_kernel(squares, degrees, size) + (mixture.log_probs - mixture.log_volumes)[:, None]
    products = positions @ mixture.kernels.T
    lengths = jnp.sum(jnp.square(positions), axis=1)[:, None] + jnp.sum(jnp.square(mixture.kernels), axis=1)
    squares = jnp.maximum(lengths - 2.0 * products, 0.0) / jnp.square(mixture.width)
    # An integer power needs no logarithm for each pair of a draw and a kernel, and does not underflow.
    base = 1.0 / (1.0 + squares / degrees)
    power = base ** ((degrees + size) // 2) * (jnp.sqrt(base) if size % 2 else 1.0)
    kernels = constant + jnp.log(jnp.mean(power, axis=1)) - size * jnp.log(mixture.width)
    return jnp.logaddexp(logsumexp(modes, axis=0), kernels) - math.log(2.0)
