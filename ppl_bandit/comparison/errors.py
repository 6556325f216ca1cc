"""Distances between draws and a reference, on arrays.

Latents are flattened: one column for every element of every site, `K` in all. Errors are in units of the reference's
standard deviation.
"""

from typing import NamedTuple

import numpy as np

QUANTILES = (0.025, 0.25, 0.5, 0.75, 0.975)


class Estimate(NamedTuple):
    """A mean over independent runs, and its Monte Carlo standard error (nan for a single run)."""

    value: np.ndarray
    error: np.ndarray


class ReferenceLatents(NamedTuple):
    """Moments, quantiles and samples of the latents under the reference.

    Attributes:
        mean: (K,).
        sd: (K,).
        unit: (K,), divisor of the errors: the sd, or half of the central 68% if the sd is infinite.
        quantiles: (Q, K), at QUANTILES.
        samples: (S, M, K), independent samples of the reference, of the engines' size.
    """

    mean: np.ndarray
    sd: np.ndarray
    unit: np.ndarray
    quantiles: np.ndarray
    samples: np.ndarray


class LatentErrors(NamedTuple):
    """Errors of every latent element, over the runs of an engine.

    Attributes:
        mean: (mean - reference) / unit.
        sd: sd / reference - 1; nan if the reference has no sd.
        quantiles: (Q, K), (quantile - reference) / unit.
        wasserstein: Wasserstein-1 distance to reference samples of the same size, in units.
        kolmogorov: two-sample Kolmogorov-Smirnov distance to them.
    """

    mean: Estimate
    sd: Estimate
    quantiles: Estimate
    wasserstein: Estimate
    kolmogorov: Estimate


def latent_errors(runs: np.ndarray, target: ReferenceLatents) -> LatentErrors:
    """Compare the draws of independent runs (R, M, K) with a target."""
    means, sds = runs.mean(axis=1), runs.std(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = (means - target.mean) / target.unit
        sd = np.where(np.isfinite(target.sd), sds / target.sd - 1.0, np.nan)
    quantiles = (np.quantile(runs, QUANTILES, axis=1).swapaxes(0, 1) - target.quantiles) / target.unit
    partners = [target.samples[number % len(target.samples)] for number in range(len(runs))]
    return LatentErrors(
        estimate(mean),
        estimate(sd),
        estimate(quantiles),
        estimate(
            np.stack([wasserstein(run, partner) for run, partner in zip(runs, partners, strict=True)]) / target.unit
        ),
        estimate(np.stack([kolmogorov(run, partner) for run, partner in zip(runs, partners, strict=True)])),
    )


def latent_floor(target: ReferenceLatents) -> tuple[Estimate, Estimate]:
    """Return the Wasserstein-1 and Kolmogorov-Smirnov distances between two independent reference samples, per column.

    The second number is the standard deviation of one pair.
    """
    pairs = list(zip(target.samples[::2], target.samples[1::2], strict=False))
    return (
        mean_with_sd(np.stack([wasserstein(*pair) for pair in pairs]) / target.unit),
        mean_with_sd(np.stack([kolmogorov(*pair) for pair in pairs])),
    )


def estimate(values: np.ndarray) -> Estimate:
    """Return the mean over the leading axis of independent runs, and its standard error."""
    mean, sd = mean_with_sd(values)
    return Estimate(mean, sd / np.sqrt(len(values)))


def mean_with_sd(values: np.ndarray) -> Estimate:
    """Return the mean over the leading axis, and the standard deviation of a single value."""
    number = len(values)
    sd = values.std(axis=0, ddof=1) if number > 1 else np.full(values.shape[1:], np.nan)
    return Estimate(values.mean(axis=0), sd)


def wasserstein(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the Wasserstein-1 distance of two samples (M, K) of the same size, per column."""
    return np.abs(np.sort(first, axis=0) - np.sort(second, axis=0)).mean(axis=0)


def kolmogorov(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return the largest difference of two samples' distribution functions (M, K), per column; nan if one contains nan."""
    both = np.concatenate([first, second])
    order = np.argsort(both, axis=0, kind="stable")
    step = np.where(order < len(first), 1.0 / len(first), -1.0 / len(second))
    gaps = np.abs(np.cumsum(step, axis=0))
    # Of equal values only the last one counts.
    values = np.take_along_axis(both, order, axis=0)
    is_last = np.concatenate([values[1:] != values[:-1], np.ones((1, values.shape[1]), bool)])
    return np.where(np.isnan(both).any(axis=0), np.nan, np.where(is_last, gaps, 0.0).max(axis=0))


def largest_error(values: np.ndarray) -> float:
    """Return the largest absolute value, ignoring nan; nan if all are."""
    sizes = np.abs(values)
    return float(np.nanmax(sizes)) if np.isfinite(sizes).any() else float("nan")


def total_variation(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return half the sum of absolute differences of probabilities over the last axis."""
    return 0.5 * np.abs(first - second).sum(axis=-1)


def r_hat(runs: np.ndarray) -> np.ndarray:
    """Return R-hat of independent runs (R, M, K), per column: 1 where they agree; nan for a single run."""
    number, size, _ = runs.shape
    if number < 2:
        return np.full(runs.shape[2], np.nan)
    within = runs.var(axis=1, ddof=1).mean(axis=0)
    between = runs.mean(axis=1).var(axis=0, ddof=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sqrt((size - 1) / size + between / within)
