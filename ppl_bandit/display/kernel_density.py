"""Densities of draws, for figures."""

import numpy as np

_NUM_BINS = 2000


def density_grid(draws: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Return points at which to draw a density: nearly all draws and a margin, within the bounds of the support."""
    low, high = np.quantile(draws, (0.0005, 0.9995))
    margin = 0.08 * (high - low)
    return np.linspace(max(low - margin, bounds[0]), min(high + margin, bounds[1]), 300)


def kernel_density(draws: np.ndarray, grid: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Estimate a density with a Gaussian kernel, reflected at the bounds of the support to keep the mass inside."""
    centre, spread = np.median(draws), np.subtract(*np.quantile(draws, (0.84, 0.16))) / 2
    width = max(spread, 1e-12 * max(1.0, abs(centre))) * 1.06 * draws.size**-0.2
    counts, edges = np.histogram(draws, np.linspace(grid[0] - 6 * width, grid[-1] + 6 * width, _NUM_BINS + 1))
    middle = (edges[1:] + edges[:-1]) / 2
    density = np.zeros(grid.size)
    for points in (grid, *(2.0 * bound - grid for bound in bounds if np.isfinite(bound))):
        density += np.exp(-0.5 * np.square((points[:, None] - middle) / width)) @ counts
    return density / (draws.size * width * np.sqrt(2.0 * np.pi))
