"""The figure of a bandit: what is known about each arm's expected reward, and how often each arm was played."""

from typing import Any

import numpy as np

from ppl_bandit.display.figure_style import figure_tools, reward_label, styles
from ppl_bandit.display.kernel_density import density_grid, kernel_density
from ppl_bandit.display.terminal import shown_name
from ppl_bandit.live.show.overview import ORDERS, Overview
from ppl_bandit.types import Explanation

NUM_LEADING = 15  # arms that get a row of their own; the others share one
_MAX_DENSITIES = 6  # arms whose densities can be told apart
_BLUE, _GREY = "#0072B2", "0.6"


def posterior_kind(about: Explanation) -> str:
    """Return "exact", "exact given ..." or "approximate (...)"."""
    if about.is_exact:
        return "exact"
    # `engines.choose` puts the reasons why it refused other engines first.
    own = about.reason.rpartition("; so ")[2]
    return own.partition(":")[0] if own.startswith("exact given") else f"approximate ({about.engine})"


def plot_bandit(found: Overview, played: np.ndarray, title: str, caption: str, unit: str = "") -> Any:
    """Return a figure; the caller shows or saves it.

    Args:
        played: index of the arm of every learnt reward, in order.
        unit: of the expected reward.
    """
    where = f", {found.where}" if found.where else ""
    label = f"{reward_label(unit)}{where}"
    draw = _draw_densities if len(found.arms) <= _MAX_DENSITIES else _draw_forest
    figure = draw(found, played, label)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(caption, fontsize=8, color="0.35")
    return figure


def _draw_densities(found: Overview, played: np.ndarray, label: str) -> Any:
    figure, (left, right) = figure_tools().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = np.arange(1, played.size + 1)
    for index, (arm, (colour, dash)) in enumerate(zip(map(shown_name, found.arms), styles(), strict=False)):
        grid, density = _density(found, index)
        left.plot(grid, density, color=colour, linestyle=dash, label=f"{arm} (P(best) {found.best_prob[index]:.2f})")
        left.fill_between(grid, density, color=colour, alpha=0.12, linewidth=0)
        if played.size:
            marker = "o" if played.size == 1 else None  # a line through one point is invisible
            shares = np.cumsum(played == index) / steps
            right.plot(steps, shares, color=colour, linestyle=dash, label=str(arm), linewidth=1.3, marker=marker)
    left.set(title="posterior density", xlabel=label, ylabel="density")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8)
    right.set(title="share of plays", xlabel="rewarded plays so far", ylabel="share of plays", ylim=(-0.03, 1.03))
    if not played.size:
        right.text(0.5, 0.5, "no reward yet", ha="center", transform=right.transAxes)
    return figure


def _draw_forest(found: Overview, played: np.ndarray, label: str) -> Any:
    order = found.leaders
    leading, others = order[:NUM_LEADING], order[NUM_LEADING:]
    if others.size == 1:
        leading, others = order, order[:0]
    names = [str(shown_name(found.arms[index])) for index in leading]
    rows = np.arange(len(leading) + bool(others.size))
    share = np.bincount(played, minlength=len(found.arms)) / max(played.size, 1)
    figure, axes = figure_tools().subplots(
        1, 3, figsize=(11, 0.27 * rows.size + 1.7), width_ratios=(3, 1, 1), sharey=True, layout="constrained"
    )
    axes[0].hlines(rows[: leading.size], found.low[leading], found.high[leading], color=_BLUE, linewidth=2.2)
    axes[0].plot(found.mean[leading], rows[: leading.size], "o", color="black", markersize=4.5)
    if others.size:
        names.append(f"{others.size} others")
        axes[0].hlines(rows[-1], found.low[others].min(), found.high[others].max(), color=_GREY, linewidth=2.2)
        axes[0].plot(found.mean[others], np.full(others.size, rows[-1]), "|", color=_GREY, markersize=7)
    for axis, values, heading in ((axes[1], found.best_prob, "P(best)"), (axes[2], share, "share of plays")):
        widths = [*values[leading], *([values[others].sum()] if others.size else [])]
        axis.barh(rows, widths, height=0.62, color=[_BLUE] * leading.size + [_GREY] * bool(others.size))
        for row, width in zip(rows, widths, strict=True):
            axis.annotate(f"{width:.2f}", (width, row), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        axis.set(xlabel=heading, xlim=(0.0, 1.3 * max(*widths, 0.1)))
    axes[0].set(xlabel=f"{label}: posterior mean and central 95% interval", yticks=rows, ylim=(rows[-1] + 0.6, -0.6))
    axes[0].set_yticklabels([name if len(name) <= 28 else f"{name[:27]}..." for name in names], fontsize=8.5)
    axes[0].grid(axis="x", color="0.92")
    axes[0].set_axisbelow(True)
    for axis in axes[1:]:
        axis.tick_params(left=False)
    if not played.size:
        axes[2].text(0.5, 0.5, "no reward yet", ha="center", rotation=90, va="center", transform=axes[2].transAxes)
    return figure


def _density(found: Overview, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points of an arm's density, which starts and ends at 0."""
    if found.quantiles is None:
        assert found.draws is not None
        return _smoothed(found.draws[:, index])
    values = found.quantiles[:, index]
    steps = np.diff(values)
    if np.any(steps <= 0):  # all mass in one point, up to rounding
        return np.array([values[0], values[0]]), np.array([0.0, 1.0])
    heights = np.diff(ORDERS) / steps
    return np.concatenate([values[:1], 0.5 * (values[1:] + values[:-1]), values[-1:]]), np.pad(heights, 1)


def _smoothed(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a kernel density estimate, reflected at 0 and 1 where all draws are on one side."""
    low, high = draws.min(), draws.max()
    if high <= low:
        return np.array([low, low]), np.array([0.0, 1.0])
    bounds = 0.0 if low >= 0 else -np.inf, 1.0 if 0 <= low and high <= 1 else np.inf
    grid = density_grid(draws, bounds)
    return np.concatenate([grid[:1], grid, grid[-1:]]), np.pad(kernel_density(draws, grid, bounds), 1)
