"""Evidence of how good draws are: effective sample sizes, Pareto k-hat, and how far particles forgot where they were."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto

__all__ = [
    "MAX_K_HAT",
    "MAX_MEAN_SHIFT",
    "MAX_SD_SHIFT",
    "NormalizedWeights",
    "chain_ess",
    "finite_log_weights",
    "flatten_log_weights",
    "memory_and_drift",
    "moment_shifts",
    "notable_k_hat",
    "pareto_k_hat",
    "resample",
    "variance_of_mean",
    "normalize_weights",
    "weight_ess",
]

MAX_K_HAT = (
    0.7  # beyond it the error of importance sampling no longer falls with the number of draws (Vehtari et al. 2024)
)
# Of unweighted draws, which are to be within 0.2 posterior standard deviations and 20%; k-hat allows more, because weights
# could still put it right. Of a fit that is too narrow the weights see a third to a half of the error, of the mean of a skewed
# posterior three quarters.
MAX_MEAN_SHIFT = 0.15  # posterior standard deviations
MAX_SD_SHIFT = 0.1  # of a standard deviation
_NUM_ERRORS = (
    6.0  # standard errors that a mean may drift: of a hundred means one drifts by three, and weights hide a third
)


def weight_ess(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    """Return the effective sample size of weighted draws, 1 / sum w^2 (Kish); 0 where no weight is finite."""
    return normalize_weights(log_weights).ess


class NormalizedWeights(NamedTuple):
    """Weights that add up to 1, their effective sample size, and the log of their mean before they did."""

    weights: Float[Array, " M"]
    ess: Float[Array, ""]
    log_mean: Float[Array, ""]


def normalize_weights(log_weights: Float[Array, " M"]) -> NormalizedWeights:
    """Return weights by their logarithms, of which none is nan or positive infinity; see `finite_log_weights`."""
    largest = jnp.max(log_weights)
    largest = jnp.where(largest > -jnp.inf, largest, 0.0)
    relative = jnp.exp(log_weights - largest)
    total = jnp.sum(relative)
    weights = relative / total
    ess = 1.0 / jnp.sum(jnp.square(weights))
    log_mean = largest + jnp.log(total) - math.log(log_weights.shape[0])
    return NormalizedWeights(weights, jnp.where(jnp.isfinite(ess), ess, 0.0), log_mean)


def variance_of_mean(ess: Float[Array, "*B"], num: int) -> Float[Array, "*B"]:
    """Return the relative variance of the mean of M independent weights: (M / ess - 1) / M."""
    return jnp.maximum(1.0 / jnp.maximum(ess, 1.0) - 1.0 / num, 0.0)


def finite_log_weights(log_weights: Float[Array, " M"]) -> Float[Array, " M"]:
    """Return weights that can be drawn from: nan counts as impossible, and where nothing is possible all are equal."""
    log_weights = jnp.where(jnp.isnan(log_weights) | (log_weights == jnp.inf), -jnp.inf, log_weights)
    return jnp.where(jnp.any(log_weights > -jnp.inf), log_weights, 0.0)


def flatten_log_weights(log_weights: Float[Array, " M"], min_ess: float) -> Float[Array, " M"]:
    """Return weights to a power of 1, 1/2, 1/4, ..., the first at which the effective sample size is large enough.

    Where new rows leave nearly all weight to a few draws, these are the draws on the way there. Weights that are equal by then
    are as even as they get: of four draws the size may be rounded to less than 4, and an impossible one adds nothing to it.
    """

    def is_uneven(flat: Float[Array, " M"]) -> Array:
        is_possible = flat > -jnp.inf
        return (weight_ess(flat) < min_ess) & jnp.any(is_possible & (flat < jnp.max(flat)))

    return jax.lax.while_loop(is_uneven, lambda flat: 0.5 * flat, log_weights)


def pareto_k_hat(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    """Return k-hat, the shape of a generalised Pareto law fitted to the largest importance weights.

    The tail is the largest 3 sqrt(M) weights, at most a fifth of them, and the estimate is drawn towards 1/2 with the weight
    of ten draws (Vehtari et al. 2024). Weights that are nearly equal have k-hat 0; weights that are not finite have k-hat inf.
    """
    num_draws = log_weights.shape[0]
    num_tail = max(5, math.ceil(min(0.2 * num_draws, 3.0 * math.sqrt(num_draws))))
    top = jnp.max(log_weights)
    relative = log_weights - jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(_largest(relative, num_tail + 1)[::-1])
    exceedances = weights[1:] - weights[0]
    shape, _ = fit_generalized_pareto(exceedances, is_sorted=True)
    shape = (num_tail * shape + 5.0) / (num_tail + 10.0)
    # Where the largest weights agree to a thousandth, or to the rounding of a log density, there is no tail to fit.
    is_flat = jnp.max(exceedances) <= jnp.maximum(1e-3, 10 * jnp.finfo(weights.dtype).eps * jnp.abs(top))
    k_hat = jnp.where(is_flat, 0.0, shape)
    is_sound = jnp.isfinite(top) & jnp.isfinite(k_hat) & ~jnp.any(jnp.isnan(log_weights))
    return jnp.where(is_sound, k_hat, jnp.inf)


def notable_k_hat(log_weights: Float[Array, " M"], weighed: NormalizedWeights) -> Float[Array, ""]:
    """Return k-hat, or 0 without fitting a tail where no weight stands out so far that the tail beyond it could matter.

    Let the largest of M weights be c of their means. Had they a tail of k = 0.7, the largest weight that they do not show
    would be c + (0.03 + 0.7) c / (1 - 0.7) on average, with probability 1 / M each: they miss 3.4 c / M of all weight. Up to
    c = sqrt(M) / 7 that is half of 1 / sqrt(M), the relative Monte Carlo error that M independent draws have anyway.

    Args:
        weighed: the same weights.
    """
    num_draws = log_weights.shape[0]
    is_even = jnp.max(weighed.weights) * num_draws <= math.sqrt(num_draws) / 7.0
    return jax.lax.cond(is_even, lambda: jnp.zeros((), log_weights.dtype), lambda: pareto_k_hat(log_weights))


def _largest(values: Float[Array, " M"], num: int) -> Float[Array, " num"]:
    """Return the largest values, in descending order but for what single precision does not tell apart, the smallest last.

    In single precision places are found in a tenth of the time. Rounding keeps the order of what it tells apart: where it left
    out a value that is larger than one that it took, double precision sorts them.
    """
    # Their places are asked for, not their values: XLA takes the fast way only then.
    _, places = jax.lax.top_k(values.astype(jnp.float32), num)
    found = values[places]
    last = jnp.argmin(found)
    found = found.at[last].set(found[-1]).at[-1].set(found[last])
    if values.dtype == jnp.float32:
        return found
    is_found = jnp.sum(values > found[-1]) == jnp.sum(found > found[-1])
    return jax.lax.cond(is_found, lambda: found, lambda: jax.lax.top_k(values, num)[0])


def moment_shifts(
    positions: Float[Array, "M K"], log_weights: Float[Array, " M"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return how far weights move the draws' means, in standard deviations, and their standard deviations, of themselves.

    Both are the largest of all coordinates. Where k-hat allows the weights, they are the errors of unweighted draws, up to
    1 / sqrt(n) and, for a Gaussian, 1 / sqrt(2 n), n the effective sample size.
    """
    weights = jax.nn.softmax(finite_log_weights(log_weights))
    mean = weights @ positions
    sd = jnp.sqrt(weights @ jnp.square(positions - mean))
    shift = jnp.abs(jnp.mean(positions, axis=0) - mean) / sd
    return jnp.max(shift), jnp.max(jnp.abs(jnp.std(positions, axis=0) / sd - 1.0))


def resample(offset: Float[Array, ""], log_weights: Float[Array, " M"], num_samples: int) -> Int[Array, " samples"]:
    """Draw indices in proportion to weights, equal ones far apart.

    Systematic: index m is drawn floor or ceil of num_samples x weight times, so that with equal weights every draw is used
    before any is used again.

    Args:
        offset: uniform on [0, 1): all that is random here.
    """
    num_draws = log_weights.shape[0]
    cumulative = jnp.cumsum(jax.nn.softmax(log_weights))
    # Points (j + offset) / num_samples, j = 0, 1, ...: how many lie below each cumulative weight.
    below = jnp.ceil(cumulative / cumulative[-1] * num_samples - offset).astype(int)
    steps = jnp.zeros(num_samples, int).at[below[:-1]].add(1, mode="drop")
    index = jnp.minimum(jnp.cumsum(steps), num_draws - 1)
    # Neighbours are often the same draw; a stride near the golden section puts them far apart, and needs no random sort.
    stride = next(n for n in range(int(0.618 * num_samples) + 1, 2 * num_samples + 2) if math.gcd(n, num_samples) == 1)
    turn = jnp.floor(offset * num_samples).astype(int)
    return index[(jnp.arange(num_samples) * stride + turn) % num_samples]


def chain_ess(chains: Float[Array, "C S K"]) -> Float[Array, " K"]:
    """Return the effective sample size of C chains of S draws, per coordinate.

    Autocorrelations of all chains are combined with the variance between chains, and summed up to the first pair that is
    not positive (Geyer's initial monotone sequence, as in Stan). Chains that disagree or do not move count for little.
    """
    num_chains, num_steps, _ = chains.shape
    means = jnp.mean(chains, axis=1)
    centred = chains - means[:, None]
    spectrum = jnp.fft.rfft(centred, n=2 * num_steps, axis=1)
    autocovariance = jnp.fft.irfft(jnp.square(jnp.abs(spectrum)), n=2 * num_steps, axis=1)[:, :num_steps] / num_steps
    within = jnp.mean(autocovariance[:, 0], axis=0) * num_steps / (num_steps - 1)
    pooled = within * (num_steps - 1) / num_steps
    if num_chains > 1:
        pooled += jnp.var(means, axis=0, ddof=1)
    correlation = 1.0 - (within - jnp.mean(autocovariance, axis=0)) / pooled
    correlation = correlation.at[0].set(1.0)
    num_pairs = num_steps // 2
    pairs = correlation[0 : 2 * num_pairs : 2] + correlation[1 : 2 * num_pairs : 2]
    is_positive = jnp.cumprod(pairs > 0, axis=0).astype(bool)
    monotone = jax.lax.cummin(jnp.where(is_positive, pairs, 0.0), axis=0)
    time = -1.0 + 2.0 * jnp.sum(monotone, axis=0)
    total = num_chains * num_steps
    ess = total / jnp.maximum(time, 1.0 / math.log10(max(total, 10)))
    return jnp.where(jnp.all(jnp.isfinite(correlation), axis=0), ess, 0.0)


def memory_and_drift(
    start: Float[Array, "M k"],
    end: Float[Array, "M k"],
    start_energies: Float[Array, " M"],
    end_energies: Float[Array, " M"],
    ess: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return how well particles remember where they started, and how far their means went.

    Memory is the largest correlation of start and end over all directions, over the squares of the coordinates, which tell
    tails and modes from the middle, and of the energies. By chance, M particles in k dimensions correlate by 2 sqrt(k / M)
    in the worst direction; that much is taken off.

    Args:
        ess: effective sample size of the start.

    Returns:
        The memory, and the largest shift of a mean, a mean square or the mean energy, in units of six standard errors.
    """
    num, size = start.shape
    both = jnp.concatenate([start, end])
    centre = jnp.mean(both, axis=0)
    values, axes = jnp.linalg.eigh((both - centre).T @ (both - centre) / (2 * num))
    white = axes / jnp.sqrt(jnp.maximum(values, jnp.finfo(start.dtype).tiny))
    cross = _standard((start - centre) @ white).T @ _standard((end - centre) @ white) / num
    linear = jnp.sqrt(jnp.max(jnp.linalg.eigvalsh(cross.T @ cross)))
    # Not along the axes just found: chance itself chose these as the ones along which start and end differ the most.
    first, last = start - centre, end - centre
    squares = jnp.max(jnp.abs(_correlation(jnp.square(first), jnp.square(last))))
    energy = jnp.abs(_correlation(start_energies[:, None], end_energies[:, None]))[0]
    by_chance = 2.0 / math.sqrt(num)
    memory = jnp.maximum(linear - by_chance * math.sqrt(size), jnp.maximum(squares, energy) - by_chance)
    memory = jnp.clip(jnp.nan_to_num(memory, nan=1.0), 0.0, 1.0)
    before = jnp.concatenate([first, jnp.square(first), start_energies[:, None]], axis=1)
    after = jnp.concatenate([last, jnp.square(last), end_energies[:, None]], axis=1)
    sd = jnp.sqrt(0.5 * (jnp.var(before, axis=0) + jnp.var(after, axis=0)))
    shift = jnp.max(jnp.abs(jnp.mean(after, axis=0) - jnp.mean(before, axis=0)) / sd)
    drift = shift / (_NUM_ERRORS * jnp.sqrt(1.0 / jnp.maximum(ess, 1.0) + 1.0 / num))
    return memory, jnp.nan_to_num(drift, nan=jnp.inf)


def _standard(columns: Float[Array, "M k"]) -> Float[Array, "M k"]:
    centred = columns - jnp.mean(columns, axis=0)
    return centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=0))


def _correlation(first: Float[Array, "M k"], last: Float[Array, "M k"]) -> Float[Array, " k"]:
    return jnp.mean(_standard(first) * _standard(last), axis=0)
