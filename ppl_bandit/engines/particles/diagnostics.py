"""Diagnostics of draws: Pareto k-hat, moment shifts, effective sample size of chains, autocorrelation of moved particles."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ppl_bandit.engines.checks import CHECKS
from ppl_bandit.engines.particles.weights import NormalizedWeights, finite_log_weights
from ppl_bandit.numerics.pareto_tail import fit_generalized_pareto

MAX_K_HAT = CHECKS["k_hat"].bound
MAX_SD_SHIFT = CHECKS["sd_shift"].bound
# Standard errors that a mean may drift: of a hundred means one drifts by three, and weights hide a third.
_NUM_ERRORS = 6.0


def pareto_k_hat(log_weights: Float[Array, " M"]) -> Float[Array, ""]:
    """Return k-hat, the shape of a generalised Pareto law fitted to the largest importance weights.

    The tail is the largest 3 sqrt(M) weights, at most a fifth of them. The estimate is shrunk towards 1/2 with the weight of
    ten draws (Vehtari et al. 2024). k-hat is 0 for nearly equal weights and inf for weights that are not finite.
    """
    num_draws = log_weights.shape[0]
    num_tail = max(5, math.ceil(min(0.2 * num_draws, 3.0 * math.sqrt(num_draws))))
    top = jnp.max(log_weights)
    relative = log_weights - jnp.where(jnp.isfinite(top), top, 0.0)
    weights = jnp.exp(_largest(relative, num_tail + 1))
    exceedances = weights[1:] - weights[0]
    shape, _ = fit_generalized_pareto(exceedances)
    shape = (num_tail * shape + 5.0) / (num_tail + 10.0)
    # Largest weights that agree to a thousandth, or to the rounding of a log density, have no tail to fit.
    is_flat = jnp.max(exceedances) <= jnp.maximum(1e-3, 10 * jnp.finfo(weights.dtype).eps * jnp.abs(top))
    k_hat = jnp.where(is_flat, 0.0, shape)
    is_sound = jnp.isfinite(top) & jnp.isfinite(k_hat) & ~jnp.any(jnp.isnan(log_weights))
    return jnp.where(is_sound, k_hat, jnp.inf)


def notable_k_hat(log_weights: Float[Array, " M"], normalized: NormalizedWeights) -> Float[Array, ""]:
    """Return k-hat, or 0 without fitting a tail if the largest weight is too small for the tail to matter.

    Let the largest of M weights be c times their mean. If their tail had k = 0.7, the largest weight that they do not show
    would be c + (0.03 + 0.7) c / (1 - 0.7) on average, with probability 1 / M each: the sample misses 3.4 c / M of the total
    weight. Up to c = sqrt(M) / 7 that is half of 1 / sqrt(M), the relative Monte Carlo error of M independent draws.

    Args:
        normalized: the same weights.
    """
    num_draws = log_weights.shape[0]
    is_even = jnp.max(normalized.weights) * num_draws <= math.sqrt(num_draws) / 7.0
    return jax.lax.cond(is_even, lambda: jnp.zeros((), log_weights.dtype), lambda: pareto_k_hat(log_weights))


def _largest(values: Float[Array, " M"], num: int) -> Float[Array, " num"]:
    """Return the largest values in ascending order.

    The candidates are selected in single precision, which makes `pareto_k_hat` 2.6 times as fast. Where rounding excluded a
    value larger than a selected one, all values are sorted in double precision.
    """
    _, places = jax.lax.top_k(values.astype(jnp.float32), num)
    found = jnp.sort(values[places])
    is_complete = jnp.sum(values > found[0]) == jnp.sum(found > found[0])
    return jax.lax.cond(is_complete, lambda: found, lambda: jnp.sort(values)[-num:])


def moment_shifts(
    positions: Float[Array, "M K"], log_weights: Float[Array, " M"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return how far weights move the means of draws, and their standard deviations, both in weighted standard deviations.

    Both are the largest over all coordinates. If k-hat is small, they are the errors of the unweighted draws, up to a
    Monte Carlo error of 1 / sqrt(n) and, for a Gaussian, 1 / sqrt(2 n), with n the effective sample size.
    """
    weights = jax.nn.softmax(finite_log_weights(log_weights))
    mean = weights @ positions
    sd = jnp.sqrt(weights @ jnp.square(positions - mean))
    shift = jnp.abs(jnp.mean(positions, axis=0) - mean) / sd
    return jnp.max(shift), jnp.max(jnp.abs(jnp.std(positions, axis=0) / sd - 1.0))


def chain_ess(chains: Float[Array, "C S K"]) -> Float[Array, " K"]:
    """Return the effective sample size of C chains of S draws, per coordinate.

    Autocorrelations of all chains are combined with the variance between chains, and summed up to the first pair that is
    not positive (Geyer's initial monotone sequence, as in Stan). Chains that disagree, or that do not move, have a small
    effective sample size.
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


def coordinate_autocorrelation(start: Float[Array, "M k"], end: Float[Array, "M k"]) -> Float[Array, ""]:
    """Return the largest absolute correlation of start and end over coordinates and over their squared deviations.

    It is cheap enough to be evaluated after every transition; `autocorrelation_and_drift` also covers oblique directions
    and energies.
    """
    first, last = start - jnp.mean(start, axis=0), end - jnp.mean(end, axis=0)
    linear, squares = _correlation(first, last), _correlation(jnp.square(first), jnp.square(last))
    largest = jnp.max(jnp.abs(jnp.concatenate([linear, squares])))
    return jnp.where(jnp.isnan(largest), 1.0, largest)


def autocorrelation_and_drift(
    start: Float[Array, "M k"],
    end: Float[Array, "M k"],
    start_energies: Float[Array, " M"],
    end_energies: Float[Array, " M"],
    ess: Float[Array, ""],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return how strongly moved particles correlate with their starting positions, and how far their means drifted.

    The autocorrelation is the largest correlation of start and end over all directions (a canonical correlation), over the
    squared coordinates, which distinguish tails and modes from the centre, and of the energies. By chance, M particles in k
    dimensions correlate by 2 sqrt(k / M) in the worst direction; that amount is subtracted.

    Args:
        ess: effective sample size of the start.

    Returns:
        The autocorrelation, and the largest shift of a mean, a mean square or the mean energy, in units of six standard
        errors.
    """
    num, size = start.shape
    both = jnp.concatenate([start, end])
    centre = jnp.mean(both, axis=0)
    values, axes = jnp.linalg.eigh((both - centre).T @ (both - centre) / (2 * num))
    white = axes / jnp.sqrt(jnp.maximum(values, jnp.finfo(start.dtype).tiny))
    cross = _standardized((start - centre) @ white).T @ _standardized((end - centre) @ white) / num
    linear = jnp.sqrt(jnp.max(jnp.linalg.eigvalsh(cross.T @ cross)))
    # Squares are taken along the coordinates: the canonical axes were selected for the largest difference of start and end.
    first, last = start - centre, end - centre
    squares = jnp.max(jnp.abs(_correlation(jnp.square(first), jnp.square(last))))
    energy = jnp.abs(_correlation(start_energies[:, None], end_energies[:, None]))[0]
    by_chance = 2.0 / math.sqrt(num)
    largest = jnp.maximum(linear - by_chance * math.sqrt(size), jnp.maximum(squares, energy) - by_chance)
    autocorrelation = jnp.clip(jnp.nan_to_num(largest, nan=1.0), 0.0, 1.0)
    before = jnp.concatenate([first, jnp.square(first), start_energies[:, None]], axis=1)
    after = jnp.concatenate([last, jnp.square(last), end_energies[:, None]], axis=1)
    sd = jnp.sqrt(0.5 * (jnp.var(before, axis=0) + jnp.var(after, axis=0)))
    shift = jnp.max(jnp.abs(jnp.mean(after, axis=0) - jnp.mean(before, axis=0)) / sd)
    drift = shift / (_NUM_ERRORS * jnp.sqrt(1.0 / jnp.maximum(ess, 1.0) + 1.0 / num))
    return autocorrelation, jnp.nan_to_num(drift, nan=jnp.inf)


def _standardized(columns: Float[Array, "M k"]) -> Float[Array, "M k"]:
    centred = columns - jnp.mean(columns, axis=0)
    return centred / jnp.sqrt(jnp.mean(jnp.square(centred), axis=0))


def _correlation(first: Float[Array, "M k"], last: Float[Array, "M k"]) -> Float[Array, " k"]:
    return jnp.mean(_standardized(first) * _standardized(last), axis=0)
