"""The paper's figures, with its curves and points and ours."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ppl_bandit.display.figure_style import figure_tools, save_figure, styles
from ppl_bandit.paper.runs import GridRegret
from ppl_bandit.paper.settings import BAYES_UCB, LOWEST, RANDOM, SETTINGS, THOMPSON, paper_data, paper_points
from ppl_bandit.simulation.figures import draw_band, draw_by_arm

if TYPE_CHECKING:
    import xarray

_STYLE = dict(zip((THOMPSON, BAYES_UCB, LOWEST, RANDOM), styles(), strict=False))
_CURVES = {THOMPSON: "TS", BAYES_UCB: "BUCB", LOWEST: "DS"}
_MAX_LARGE_MARKERS = 60  # problems of a grid; more are drawn with smaller markers


def draw_execution(runs: "xarray.Dataset", path: Path) -> None:
    """Draw p-hat and N over time of one realization."""
    plt = figure_tools()
    run = runs.sel(selector=LOWEST)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    draw_by_arm(axes[0], np.asarray(run.one_best_arm_probs), "P(arm is best), p-hat")
    axes[0].set(ylim=(-0.03, 1.03), title="p-hat over time")
    axes[0].legend()
    axes[1].step(run.step, run.one_num_candidates, color="black", linewidth=0.9)
    axes[1].set(xlabel="step", ylabel="candidates, N", yscale="log", title="N over time")
    save_figure(figure, "One execution of double sampling", _caption("bernoulli-three", runs, one=True), path)


def draw_correct_actions(runs: "xarray.Dataset", path: Path) -> None:
    """Draw the share of realizations that play the best arm; the band is the standard deviation of one play."""
    plt = figure_tools()
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), sharey=True, layout="constrained")
    for axis, rival in zip(axes, (THOMPSON, BAYES_UCB), strict=True):
        for policy in (rival, LOWEST):
            colour, dash = _STYLE[policy]
            share = np.asarray(runs.sel(selector=policy).optimal_share)
            spread = np.sqrt(share * (1 - share))
            axis.plot(runs.step, share, color=colour, linestyle=dash, label=policy)
            axis.fill_between(runs.step, share - spread, share + spread, color=colour, alpha=0.15, linewidth=0)
        axis.set(xlabel="step", ylabel="P(best arm is played)", xscale="log", ylim=(0, 1.3))
        axis.legend(loc="lower right")
    caption = _caption("bernoulli", runs) + "; bands: one standard deviation of a single play"
    save_figure(figure, "Correct actions", caption, path)


def draw_regret(runs: "xarray.Dataset", setting: str, path: Path) -> None:
    """Draw mean cumulative regret with the paper's own curves."""
    plt = figure_tools()
    curves = paper_data("regret_curves")
    kind = "bernoulli" if SETTINGS[setting].rates else "lingauss"
    figure, axis = plt.subplots(figsize=(9, 5.4), layout="constrained")
    for policy, (colour, dash) in _STYLE.items():
        draw_band(axis, runs.sel(selector=policy), f"{policy}, ours", colour, dash)
        if policy in _CURVES:
            paper = curves[f"{kind}_{_CURVES[policy]}"]["mean"]
            axis.plot(
                curves["t"], paper, color=colour, marker="o", markersize=3, markevery=6, linewidth=0.6, alpha=0.7,
                label=f"{policy}, the paper's figure",
            )  # fmt: skip
    axis.set(xlabel="step", ylabel="cumulative regret (ours: expected; paper: realised)", ylim=(0, None))
    axis.legend(fontsize=8)
    caption = _caption(setting, runs) + "; bands: 95% interval of the mean"
    save_figure(figure, f"Cumulative regret: {SETTINGS[setting].title}", caption, path)


def draw_grid(grids: dict[str, GridRegret], data: str, title: str, num_runs: int, path: Path) -> None:
    """Draw relative regret against divergence, with the paper's points on top."""
    plt = figure_tools()
    divergence, theirs = paper_points(data)
    figure, axes = plt.subplots(1, 2, figsize=(13, 5), sharey=True, layout="constrained")
    for axis, policy in zip(axes, (THOMPSON, BAYES_UCB), strict=True):
        for (name, grid), (colour, _), marker in zip(grids.items(), styles(), "osv^", strict=False):
            axis.errorbar(
                grid.divergence, grid.relative[policy], yerr=1.96 * grid.error[policy], fmt=marker,
                markersize=4 if grid.divergence.size <= _MAX_LARGE_MARKERS else 2.5, color=colour, elinewidth=0.6, alpha=0.8,
                zorder=1, label=f"ours, {name} ({grid.divergence.size} problems)",
            )  # fmt: skip
        axis.scatter(
            divergence,
            theirs[policy],
            s=4,
            facecolor="none",
            edgecolor="black",
            linewidth=0.4,
            zorder=2,
            label="the paper",
        )
        axis.axhline(0.0, color="black", linewidth=0.7)
        axis.set(xscale="log", xlabel="Kullback-Leibler divergence", ylabel=f"regret relative to {policy}, less 1")
        axis.legend(fontsize=8)
    caption = f"double sampling (ties lowest) after 1500 steps, {num_runs} realizations a problem; bars: 95% intervals"
    save_figure(figure, title, caption, path)


def _caption(setting: str, runs: "xarray.Dataset", one: bool = False) -> str:
    count = "one" if one else str(runs.sizes["realization"])
    return f"{SETTINGS[setting].title}; {count} realization{'' if one else 's'}, M = {runs.attrs['num_samples']}"
