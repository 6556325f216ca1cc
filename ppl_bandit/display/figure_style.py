"""The style of all figures, and densities of draws for them."""

import itertools
import os
import sys
from collections.abc import Iterator
from os import PathLike
from typing import Any

import numpy as np

# Dashes differ in black and white; the hues are distinguishable for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def figure_tools() -> Any:
    """Return matplotlib's pyplot, on a backend that needs no screen unless a notebook or the user has chosen another."""
    if "MPLBACKEND" not in os.environ and "matplotlib.pyplot" not in sys.modules:
        import matplotlib

        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def styles() -> Iterator[tuple[str, Any]]:
    """Yield pairs of colour and dash without end; the first 7 differ in both, the first 49 in at least one."""
    for number in itertools.count():
        cycle, index = divmod(number, len(_COLOURS))
        yield _COLOURS[index], _DASHES[(index + cycle) % len(_DASHES)]


def reward_label(unit: str) -> str:
    """Return the label of an axis of expected rewards, in a unit that may be empty."""
    return f"expected reward{f' ({unit})' if unit else ''}"


def save_figure(figure: Any, title: str, caption: str, path: str | PathLike) -> None:
    """Add a title above and a caption below, write the figure to a file, and close it."""
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=110)
    figure_tools().close(figure)


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
