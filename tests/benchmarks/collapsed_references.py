"""Quadrature over the outer sites of the partly conjugate models, in NumPy, for any number of rows.

A grid over the unconstrained outer sites, with the rest integrated out by textbook formulas; the grid is laid again around what
the last one found, until it covers eight standard deviations on each side. Draws of the arms' expected rewards follow.
"""

from typing import NamedTuple

import numpy as np
from scipy import stats
from scipy.special import betaln

NUM_DRAWS = 200_000
_PER_DIM = {1: 2001, 2: 141, 3: 37}
_ROUNDS = 6


class Reference(NamedTuple):
    """A box of unconstrained outer values, (K,) each; points (G, K) -> log densities (G,); (rng, points) -> draws (G, A)."""

    low: np.ndarray
    high: np.ndarray
    log_density: object
    draw: object


def exact_draws(reference, seed=0):
    """Return draws (R, A) of the arms' expected rewards."""
    rng = np.random.default_rng(seed)
    low, high = np.array(reference.low, float), np.array(reference.high, float)
    for _ in range(_ROUNDS):
        axes = [np.linspace(a, b, _PER_DIM[low.size]) for a, b in zip(low, high, strict=True)]
        points = np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing="ij")], axis=1)
        log_density = reference.log_density(points)
        weights = np.exp(log_density - np.nanmax(log_density))
        weights = np.nan_to_num(weights) / np.nansum(weights)
        mean = weights @ points
        sd = np.sqrt(weights @ (points - mean) ** 2) + (high - low) / _PER_DIM[low.size]
        low, high = np.maximum(reference.low, mean - 8 * sd), np.minimum(reference.high, mean + 8 * sd)
    picks = rng.choice(len(points), NUM_DRAWS, p=weights)
    return reference.draw(rng, points[picks])


def _regression(low, high, log_prior, precision, noise, design, y, readout):
    """Gaussian regressions whose prior precision, (G, D, D), and noise, (G,), are functions of the outer values."""
    cross, moment, square = design.T @ design, design.T @ y, y @ y

    def parts(points):
        prior, s = precision(points), noise(points)
        factor = np.linalg.cholesky(prior + cross / s[:, None, None] ** 2)
        half = np.linalg.solve(factor, (moment / s[:, None] ** 2)[:, :, None])[:, :, 0]
        return prior, s, factor, half

    def log_density(points):
        prior, s, factor, half = parts(points)
        log_det = 2 * np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(axis=1)
        fit = 0.5 * (half**2).sum(axis=1) - 0.5 * square / s**2 - y.size * np.log(s)
        return log_prior(points) + 0.5 * (np.linalg.slogdet(prior)[1] - log_det) + fit

    def draw(rng, points):
        _, _, factor, half = parts(points)
        noise_ = half + rng.standard_normal(half.shape)
        latents = np.linalg.solve(np.swapaxes(factor, 1, 2), noise_[:, :, None])[:, :, 0]
        return latents @ readout.T

    return Reference(np.array(low), np.array(high), log_density, draw)


def _hierarchy_precision(spreads, num_arms=5):
    found = np.zeros((spreads.size, num_arms + 1, num_arms + 1))
    found[:, 0, 0] = 0.25 + num_arms / spreads**2
    found[:, 0, 1:] = found[:, 1:, 0] = (-1 / spreads**2)[:, None]
    found[:, range(1, num_arms + 1), range(1, num_arms + 1)] = (1 / spreads**2)[:, None]
    return found


def _half_normal(log_value):
    return stats.halfnorm.logpdf(np.exp(log_value)) + log_value


def gaussian_hierarchy(arm, reward, context):
    """Spread ~ HalfNormal(1), common ~ Normal(0, 2), mean ~ Normal(common, spread), reward ~ Normal(mean, 1)."""
    return _regression(
        [np.log(1e-3)],
        [np.log(8.0)],
        lambda x: _half_normal(x[:, 0]),
        lambda x: _hierarchy_precision(np.exp(x[:, 0])),
        lambda x: np.ones(len(x)),
        np.eye(6)[1:][arm],
        reward,
        np.eye(6)[1:],
    )


def hierarchical_spread(arm, reward, context):
    """The same with noise ~ LogNormal(0, .5)."""
    return _regression(
        [np.log(1e-3), np.log(0.1)],
        [np.log(8.0), np.log(8.0)],
        lambda x: _half_normal(x[:, 0]) + stats.norm(0.0, 0.5).logpdf(x[:, 1]),
        lambda x: _hierarchy_precision(np.exp(x[:, 0])),
        lambda x: np.exp(x[:, 1]),
        np.eye(6)[1:][arm],
        reward,
        np.eye(6)[1:],
    )


def beta_hierarchy(arm, reward, context):
    """Mean ~ Beta(1, 3), concentration ~ LogNormal(3, 1), rates ~ Beta(mean x concentration, ...)."""
    wins, losses = (np.bincount(arm[reward == r], minlength=5) for r in (1, 0))

    def shapes(x):
        mean, size = 1 / (1 + np.exp(-x[:, 0])), np.exp(x[:, 1])
        return mean * size, (1 - mean) * size

    def log_density(x):
        a, b = shapes(x)
        mean = a / (a + b)
        prior = stats.beta(1.0, 3.0).logpdf(mean) + np.log(mean * (1 - mean)) + stats.norm(3.0, 1.0).logpdf(x[:, 1])
        return prior + sum(betaln(a + w, b + f) - betaln(a, b) for w, f in zip(wins, losses, strict=True))

    def draw(rng, x):
        a, b = shapes(x)
        return rng.beta(a[:, None] + wins, b[:, None] + losses)

    return Reference(np.array([-9.0, -3.0]), np.array([5.0, 10.0]), log_density, draw)


def ridge_regression(arm, reward, context):
    """Scales ~ HalfNormal(1) of two groups of features, noise ~ LogNormal(-.5, .5), weights ~ Normal(0, scale)."""

    def precision(x):
        scales = np.exp(np.repeat(x[:, :2], 3, axis=1))
        return np.eye(12) * np.tile(scales**-2.0, (1, 2))[:, :, None]

    design = np.zeros((arm.size, 2, 6))
    design[np.arange(arm.size), arm] = context
    return _regression(
        [np.log(1e-3)] * 2 + [np.log(0.05)],
        [np.log(6.0)] * 2 + [np.log(8.0)],
        lambda x: _half_normal(x[:, 0]) + _half_normal(x[:, 1]) + stats.norm(-0.5, 0.5).logpdf(x[:, 2]),
        precision,
        lambda x: np.exp(x[:, 2]),
        design.reshape(arm.size, 12),
        reward,
        np.kron(np.eye(2), np.ones(6)),
    )


REFERENCES = {
    reference.__name__: reference
    for reference in (gaussian_hierarchy, hierarchical_spread, beta_hierarchy, ridge_regression)
}
