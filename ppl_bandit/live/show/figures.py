"""The figure of a bandit: the posterior of each arm's expected reward, and the share of each arm over time."""

from typing import Any

import numpy as np

from ppl_bandit.live.show.overview import Overview
from ppl_bandit.numerics.figure_style import figure_tools, styles
from ppl_bandit.types import Explanation

__all__ = ["plot_bandit", "posterior_kind"]


def posterior_kind(about: Explanation) -> str:
    """Return "exact", "exact given ..." or "approximate (...)"."""
    if about.is_exact:
        return "exact"
    # `engines.choose` puts the reasons why it refused other engines first.
    own = about.reason.rpartition("; so ")[2]
    return own.partition(":")[0] if own.startswith("exact given") else f"approximate ({about.engine})"


def plot_bandit(found: Overview, played: np.ndarray, title: str, caption: str, unit: str = "") -> Any:
    """Return a figure of two panels; the caller shows or saves it.

    Args:
        played: index of the arm of every learnt reward, in order.
        unit: of the expected reward.
    """
    plt = figure_tools()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    where = f", {found.where}" if found.where else ""
    for index, (arm, (colour, dash)) in enumerate(zip(found.arms, styles(), strict=False)):
        grid, density = _density(found.draws[:, index])
        left.plot(grid, density, color=colour, linestyle=dash, label=f"{arm} (P(best) {found.best_prob[index]:.2f})")
        left.fill_between(grid, density, color=colour, alpha=0.12, linewidth=0)
        steps = np.arange(1, played.size + 1)
        if played.size:
            shares = np.cumsum(played == index) / steps
            marker = "o" if played.size == 1 else None  # a line through one point is invisible
            right.plot(steps, shares, color=colour, linestyle=dash, label=str(arm), linewidth=1.3, marker=marker)
    left.set(
        title=f"posterior of the expected reward{where}",
        xlabel=f"expected reward{f' ({unit})' if unit else ''}",
        ylabel="density",
    )
    left.set_ylim(bottom=0)
    left.legend(fontsize=8)
    right.set(title="share of the rewards so far", xlabel="reward number", ylabel="share", ylim=(-0.03, 1.03))
    if played.size:
        right.legend(fontsize=8)
    else:
        right.text(0.5, 0.5, "no reward yet", ha="center", transform=right.transAxes)
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=8)
    return figure


def _density(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a kernel density estimate, reflected at both ends so that all mass stays in the range of the draws."""
    low, high = draws.min(), draws.max()
    if high <= low:
        return np.array([low, low]), np.array([0.0, 1.0])
    quartiles = np.quantile(draws, [0.25, 0.75])
    spread = min(draws.std(), (quartiles[1] - quartiles[0]) / 1.349) or draws.std()
    width = 0.9 * spread * draws.size**-0.2
    grid = np.linspace(low, high, 200)
    points = np.concatenate([draws, 2 * low - draws, 2 * high - draws])
    counts, edges = np.histogram(points, bins=800, range=(low - 4 * width, high + 4 * width))
    centres = (edges[1:] + edges[:-1]) / 2
    kernel = np.exp(-0.5 * ((grid[:, None] - centres) / width) ** 2) / (width * np.sqrt(2 * np.pi))
    return grid, kernel @ counts / draws.size
