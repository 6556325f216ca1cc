"""Figures of simulations: regret, choice of arms, and p-hat and N of one realization over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bandit.display.figure_style import figure_tools, ink, save_figure, styles
from ppl_bandit.simulation.standings import Tuned

if TYPE_CHECKING:
    import xarray

_MOST_ON_LINEAR_AXIS = 50  # candidates: differences between few of them are then still seen
_MAX_CURVES = 7  # arms that can be told apart in one panel


def draw_run(found: "xarray.Dataset", out: Path, caption: str) -> None:
    """Write `regret.png`, `arms.png` and `one_run.png`.

    Args:
        found: a summary dataset over selectors.
    """
    plt = figure_tools()
    names = [str(name) for name in found.selector.values]

    figure, axes = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    for name, (colour, dash) in zip(names, styles(), strict=False):
        draw_band(axes[0], found.sel(selector=name), name, colour, dash)
        _tail(axes[1], found.sel(selector=name), name, colour, dash)
    axes[0].set(title="mean, with the 95% interval of the mean", xlabel="step", ylabel="cumulative expected regret")
    axes[1].set(title="median (line) to 99th percentile (top)", xlabel="step", ylabel="cumulative expected regret")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize=9)
    save_figure(figure, "Cumulative expected regret", caption, out / "regret.png")

    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(4.6 * columns, 3.4 * rows), squeeze=False, layout="constrained", sharey=True
    )
    shares = [np.asarray(found.sel(selector=name).play_share) for name in names]
    draw_by_arm(axes.flat[: len(names)], shares, "share of realizations")
    for axis, name in zip(axes.flat, names, strict=False):
        axis.set(title=name, ylim=(-0.03, 1.03))
    for axis in axes.flat[len(names) :]:
        axis.set_visible(False)
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(figure, "Which arm is played at each step", caption, out / "arms.png")

    figure, axes = plt.subplots(
        2 * rows, columns, figsize=(4.4 * columns, 5.4 * rows), squeeze=False, layout="constrained"
    )
    above, below = axes[::2].ravel(), axes[1::2].ravel()
    best_arm_probs = [np.asarray(found.sel(selector=name).one_best_arm_probs) for name in names]
    draw_by_arm(above[: len(names)], best_arm_probs, "P(arm is best)")
    for axis in (*above[len(names) :], *below):
        axis.set_visible(False)
    for upper, axis, name in zip(above, below, names, strict=False):
        run = found.sel(selector=name)
        upper.set(title=name, ylim=(-0.03, 1.03))
        candidates = np.asarray(run.one_num_candidates)
        most = candidates.max(initial=0)
        axis.step(run.step, np.maximum(candidates, 0.8), color=ink(), linewidth=0.9, where="mid")
        scale: dict[str, Any] = {"yscale": "log"} if most > _MOST_ON_LINEAR_AXIS else {"ylim": (0, 1.08 * max(2, most))}
        axis.set(
            xlabel="step", ylabel="candidates drawn", visible=bool(most > 1), **scale
        )  # most selectors draw one or none
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    save_figure(
        figure, "One realization: probability of being best, and draws a decision took", caption, out / "one_run.png"
    )


def draw_tuned(tuned: Tuned, out: Path, caption: str) -> None:
    """Write `tune.png`: each candidate's mean regret with its 95% interval and its tail, the chosen one at the top."""
    plt = figure_tools()
    standings = tuned.standings[::-1]
    places = np.arange(len(standings))
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.36 * len(standings)), layout="constrained")
    for place, s in zip(places, standings, strict=True):
        colour = "#0072B2" if s.name == tuned.name else "#777777"
        axis.errorbar(s.mean, place, xerr=1.96 * s.error, fmt="o", color=colour, capsize=3, markersize=5)
        axis.plot([s.high, s.highest], [place, place], linestyle="none", marker="|", markersize=11, color=colour)
    axis.set_yticks(places, [s.name for s in standings])
    smallest, largest = min(s.mean - 1.96 * s.error for s in standings), max(s.highest for s in standings)
    scale: dict[str, Any] = (
        {"xscale": "log"} if 0 < 30 * smallest < largest else {"xlim": (min(0, 1.05 * smallest), None)}
    )
    axis.set(xlabel="regret: mean, 95% interval; bars: 95th and 99th percentile", **scale)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    title = f"Regret of {tuned.horizon} decisions in {tuned.num_worlds} worlds from the prior"
    save_figure(figure, title, caption, out / "tune.png")


def draw_band(axis: Any, found: "xarray.Dataset", name: str, colour: str, dash: Any) -> None:
    """Draw the mean cumulative regret of a selector, with the 95% interval of the mean."""
    mean, error = found.cumulative_regret_mean, found.cumulative_regret_sd / np.sqrt(found.num_runs)
    axis.plot(found.step, mean, color=colour, linestyle=dash, label=name)
    axis.fill_between(found.step, mean - 1.96 * error, mean + 1.96 * error, color=colour, alpha=0.2, linewidth=0)


def _tail(axis: Any, found: "xarray.Dataset", name: str, colour: str, dash: Any) -> None:
    quantiles = found.cumulative_regret_quantiles
    axis.plot(found.checkpoint, quantiles.sel(quantile=0.5), color=colour, linestyle=dash, label=name)
    axis.plot(found.checkpoint, quantiles.sel(quantile=0.99), color=colour, linestyle=dash, linewidth=0.8)
    axis.fill_between(
        found.checkpoint, quantiles.sel(quantile=0.5), quantiles.sel(quantile=0.99), color=colour, alpha=0.07
    )


def draw_by_arm(axes: Any, shares: Sequence[np.ndarray], label: str) -> None:
    """Draw a curve for each arm, the same arms in all panels; of many, those with the largest means, and the others' sum."""
    num_arms = shares[0].shape[1]
    shown = np.arange(num_arms)
    if num_arms > _MAX_CURVES:
        means = np.sum([np.nan_to_num(each).mean(axis=0) for each in shares], axis=0)
        shown = np.sort(np.argsort(-means, kind="stable")[: _MAX_CURVES - 1])
    for axis, each in zip(axes, shares, strict=True):
        steps = np.arange(1, len(each) + 1)
        if shown.size < num_arms:
            rest, name = np.delete(each, shown, axis=1).sum(axis=1), f"{num_arms - shown.size} others"
            axis.plot(steps, rest, color="0.6", label=name, linewidth=1.2)
        for arm, (colour, dash) in zip(shown, styles(), strict=False):
            axis.plot(steps, each[:, arm], color=colour, linestyle=dash, label=f"arm {arm}", linewidth=1.2)
        axis.set(xlabel="step", ylabel=label)
