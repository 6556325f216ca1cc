"""Fresh draws by importance: proposals from the modes of a posterior and from the cloud of draws, weighted to it.

Half of the proposals come from multivariate Student-t laws at the modes that Newton's method finds from several draws, and from
scouts that may lie where rows have put mass and no draw is, scaled by the curvature there: right for many rows, and for far
jumps. The other half come from Student-t kernels about the draws of before: right for shapes of few dimensions that are nothing
like a bell. All are weighted with the density of the whole mixture, one pass over the rows each. Three things must speak for
the result: Pareto k-hat, the effective sample size, and the draws of before, which lie where the posterior is and so show a
mode that no proposal reaches.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.special import gammaln, logsumexp
from jaxtyping import Array, Bool, Float

from ppl_bandit.engines.particles.diagnostics import (
    MAX_K_HAT,
    finite_log_weights,
    flatten_log_weights,
    pareto_k_hat,
    resample,
    weight_ess,
)
from ppl_bandit.engines.particles.log_density import LogDensity
from ppl_bandit.engines.particles.modes import find_mode
from ppl_bandit.numerics.random_bits import uniform_and_normal
from ppl_bandit.types import Key

__all__ = ["Proposal", "PriorProbes", "propose"]

_NUM_STARTS = 8  # of Newton's method: half of them at random, half as far from these and from each other as can be
_NUM_SCOUTS = 2  # of the latter, where there are scouts
_NUM_KERNELS = 200
_MAX_STEPS, _TOLERANCE = 60, 1e-2  # a mode to a tenth of a standard deviation will do
_WIDEST = 3.0  # standard deviation of a proposal in units of the cloud's
_EVEN_SHARE = 0.1  # of the modes' proposals that are spread evenly over them, whatever their estimated mass
_FAR = math.log(20.0)  # a density ratio that proposals should not meet
_MAX_MISSED = 0.02  # mass of the draws of before at such ratios


class Proposal(NamedTuple):
    """Weighted draws, P of them.

    Attributes:
        positions: in the coordinates of the cloud that was given.
        log_prior, log_likelihood: of each.
        log_weights: of each, such that the mean of their exponentials is the posterior's normalising constant.
        ess: their effective sample size.
        k_hat: their Pareto k-hat.
        missed: mass of the posterior that they do not reach, by the cloud.
        is_accepted: whether all three allow them.
    """

    positions: Float[Array, "P k"]
    log_prior: Float[Array, " P"]
    log_likelihood: Float[Array, " P"]
    log_weights: Float[Array, " P"]
    ess: Float[Array, ""]
    k_hat: Float[Array, ""]
    missed: Float[Array, ""]
    is_accepted: Bool[Array, ""]


class PriorProbes(NamedTuple):
    """Draws of the prior that stay where they are, with their log likelihood.

    Attributes:
        is_ahead: whether rows have put mass at one of them where there may be no draw.
    """

    positions: Float[Array, "S k"]
    log_likelihood: Float[Array, " S"]
    is_ahead: Bool[Array, ""]


class _Mixture(NamedTuple):
    """Student-t laws: C with roots of their own, and kernels of one width."""

    centres: Float[Array, "C k"]
    roots: Float[Array, "C k k"]
    inverses: Float[Array, "C k k"]
    log_volumes: Float[Array, " C"]
    log_probs: Float[Array, " C"]
    kernels: Float[Array, "L k"]
    width: Float[Array, ""]


def propose(
    key: Key,
    target: LogDensity,
    cloud: Float[Array, "M k"],
    log_weights: Float[Array, " M"],
    log_density: Float[Array, " M"],
    scouts: PriorProbes | None = None,
) -> Proposal:
    """Draw two proposals for every draw of a cloud, weighted to the target.

    Args:
        scouts: modes are looked for from the more likely of them, too.
        target: in coordinates in which the weighted cloud has mean 0 and unit covariance.
        log_weights: of the cloud, to the target or to something on the way there; finite somewhere.
        log_density: of the target at the cloud.
    """
    num_draws, size = cloud.shape
    key_offset, key_draw = jr.split(key)
    offsets = jr.uniform(key_offset, (3,), cloud.dtype)
    degrees = 2 * max(4, -(-size // 2))  # heavier tails would waste most of the draws in many dimensions
    num_kernels = min(_NUM_KERNELS, num_draws)
    kernels = cloud[resample(offsets[0], log_weights, num_kernels)]
    starts = _spread_out(kernels, kernels if scouts is None else _likely(scouts, offsets[0]))
    modes = jax.vmap(lambda start: find_mode(target, start, _TOLERANCE, _MAX_STEPS))(starts)
    precisions = jnp.maximum(modes.precisions, _WIDEST**-2)
    roots = modes.axes / jnp.sqrt(precisions)[:, None, :]
    inverses = jnp.swapaxes(modes.axes * jnp.sqrt(precisions)[:, None, :], 1, 2)
    gaps = jnp.einsum("cij,dcj->dci", inverses, modes.position[:, None] - modes.position)
    num_same = jnp.sum(jnp.sum(jnp.square(gaps), axis=-1) < 0.25, axis=0)
    log_mass = modes.log_density - 0.5 * jnp.sum(jnp.log(precisions), axis=1)
    log_mass = jnp.where(jnp.isfinite(log_mass), log_mass, -jnp.inf) - jnp.log(jnp.maximum(num_same, 1))
    mass = jnp.nan_to_num(jax.nn.softmax(log_mass), nan=1.0 / _NUM_STARTS)
    probs = (1.0 - _EVEN_SHARE) * mass / jnp.sum(mass) + _EVEN_SHARE / _NUM_STARTS
    ess = weight_ess(log_weights)
    mixture = _Mixture(
        modes.position,
        roots,
        inverses,
        -0.5 * jnp.sum(jnp.log(precisions), axis=1),
        jnp.log(probs),
        kernels,
        # Silverman's rule for a Gaussian, in units of the cloud's covariance.
        jnp.asarray((4.0 / ((size + 2) * jnp.maximum(ess, 1.0))) ** (1.0 / (size + 4)), cloud.dtype),
    )
    which = resample(offsets[1], jnp.log(probs), num_draws)
    noise = _student_t(key_draw, 2 * num_draws, size, degrees, cloud.dtype)
    at_modes = modes.position[which] + jnp.einsum("mij,mj->mi", roots[which], noise[:num_draws])
    turn = jnp.floor(offsets[2] * num_kernels).astype(
        int
    )  # which kernels come once more than others, where they cannot be equal
    about = mixture.kernels[(jnp.arange(num_draws) + turn) % num_kernels] + mixture.width * noise[num_draws:]
    positions = jnp.concatenate([at_modes, about])
    log_prior, log_likelihood = jax.vmap(target.parts)(positions)
    new = log_prior + log_likelihood - _log_density(mixture, positions, degrees)
    new = jnp.where(jnp.isnan(new), -jnp.inf, new)
    log_constant = logsumexp(new) - math.log(2 * num_draws)
    ratios = log_density - _log_density(mixture, cloud, degrees) - log_constant
    missed = jnp.sum(jnp.where(ratios > _FAR, jax.nn.softmax(log_weights), 0.0))
    new_ess, k_hat = weight_ess(new), pareto_k_hat(new)
    # The cloud's own noise: three standard errors of such a mass.
    may_miss = _MAX_MISSED + 3.0 * jnp.sqrt(_MAX_MISSED / jnp.maximum(ess, 1.0))
    is_accepted = (k_hat <= MAX_K_HAT) & (new_ess >= num_draws / 2) & (missed <= may_miss)
    return Proposal(positions, log_prior, log_likelihood, new, new_ess, k_hat, missed, is_accepted)


def _likely(scouts: PriorProbes, offset: Float[Array, ""]) -> Float[Array, "L k"]:
    """Return some of the scouts, in proportion to their likelihood, or to a power of it that leaves several."""
    flat = flatten_log_weights(finite_log_weights(scouts.log_likelihood), _NUM_STARTS)
    return scouts.positions[resample(offset, flat, 4 * _NUM_STARTS)]


def _spread_out(points: Float[Array, "L k"], others: Float[Array, "P k"]) -> Float[Array, "starts k"]:
    """Return some points at random, and then, one after another, the point that is farthest from all before it.

    A mode of its own that holds a quarter of the draws would be missed by eight at random once in ten times.

    Args:
        others: where the last of them are taken from.
    """
    num_random = _NUM_STARTS // 2
    chosen = points[jnp.arange(_NUM_STARTS) % len(points)]

    def choose_from(points: Array) -> Callable[[Array, Array], Array]:
        def choose(number: Array, chosen: Array) -> Array:
            gaps = jnp.sum(jnp.square(points[:, None] - chosen), axis=-1)
            gaps = jnp.where(jnp.arange(_NUM_STARTS) < number, gaps, jnp.inf)
            return chosen.at[number].set(points[jnp.argmax(jnp.min(gaps, axis=1))])

        return choose

    chosen = jax.lax.fori_loop(num_random, _NUM_STARTS - _NUM_SCOUTS, choose_from(points), chosen)
    return jax.lax.fori_loop(_NUM_STARTS - _NUM_SCOUTS, _NUM_STARTS, choose_from(others), chosen)


def _student_t(key: Key, num: int, size: int, degrees: int, dtype) -> Float[Array, "P k"]:
    """Draw from a standard Student-t law with an even number of degrees of freedom."""
    uniform, normal = uniform_and_normal(key, num * (degrees // 2), num * size, dtype)
    # A chi-squared variable with 2 n degrees of freedom is a sum of n exponentials.
    chi_squared = -2.0 * jnp.sum(jnp.log(uniform.reshape(num, -1)), axis=1)
    return normal.reshape(num, size) * jnp.sqrt(degrees / chi_squared)[:, None]


def _log_density(mixture: _Mixture, positions: Float[Array, "P k"], degrees: int) -> Float[Array, " P"]:
    size = positions.shape[1]
    constant = gammaln((degrees + size) / 2) - gammaln(degrees / 2) - 0.5 * size * math.log(degrees * math.pi)

    def log_t(squares: Array) -> Array:
        return constant - 0.5 * (degrees + size) * jnp.log1p(squares / degrees)

    def squares_at(centre: Array, inverse: Array) -> Array:
        return jnp.sum(jnp.square((positions - centre) @ inverse.T), axis=1)

    squares = jax.vmap(squares_at)(mixture.centres, mixture.inverses)
    modes = log_t(squares) + (mixture.log_probs - mixture.log_volumes)[:, None]
    products = positions @ mixture.kernels.T
    lengths = jnp.sum(jnp.square(positions), axis=1)[:, None] + jnp.sum(jnp.square(mixture.kernels), axis=1)
    squares = jnp.maximum(lengths - 2.0 * products, 0.0) / jnp.square(mixture.width)
    # Powers of 1 + r^2 / degrees do not underflow, and a whole power costs no logarithm.
    base = 1.0 / (1.0 + squares / degrees)
    power = base ** ((degrees + size) // 2) * (jnp.sqrt(base) if size % 2 else 1.0)
    kernels = constant + jnp.log(jnp.mean(power, axis=1)) - size * jnp.log(mixture.width)
    return jnp.logaddexp(logsumexp(modes, axis=0), kernels) - math.log(2.0)
