"""The text of `reproduction.md`: every published number with ours and a verdict, the tails, the grids and the claims."""

from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np

from ppl_bandit.display.figure_style import figure_tools, save_figure, styles
from ppl_bandit.display.terminal import markdown_table
from ppl_bandit.paper import settings
from ppl_bandit.paper.parts import Claim
from ppl_bandit.paper.runs import GridRegret, ReproducedRegret
from ppl_bandit.paper.settings import BAYES_UCB, LOWEST, RANDOM, SETTINGS, THOMPSON, paper_data, paper_points
from ppl_bandit.simulation.figures import draw_band, draw_by_arm
from ppl_bandit.simulation.standings import score_selectors

if TYPE_CHECKING:
    import xarray


def write_report(
    numbers: list[ReproducedRegret],
    claims: list[Claim],
    runs: "dict[str, xarray.Dataset]",
    grids: dict[str, GridRegret],
    seed: int,
    precision: str,
    seconds: float,
) -> str:
    """Return the text of `reproduction.md`."""
    lines = [
        "# Reproduction",
        "",
        f"Seed {seed}, {precision}, {jax.devices()[0].device_kind}, {seconds / 60:.1f} minutes. Regret is expected (pseudo) "
        "regret at the last step; a number reproduces if it lies within three standard errors of the difference. For double "
        "sampling the error allows for stuck runs (one in 1,200), even if none occurred.",
        "",
    ]
    rows = []
    for f in numbers:
        number, setting = f.number, settings.SETTINGS[f.number.setting]
        sizes = str(setting.num_steps), str(runs[number.setting].sizes["realization"])
        theirs, ours = f"{number.value:.2f} +- {number.error:.2f}", f"{f.ours:.2f} +- {f.error:.2f}"
        rows.append([setting.title, *sizes, number.policy, theirs, number.source, ours, f.verdict])
    header = ["setting", "steps", "realizations", "policy", "theirs", "source", "ours", "verdict"]
    lines.append(markdown_table(header, rows))
    if runs:
        rows = []
        for name, dataset in runs.items():
            for score in score_selectors(dataset):
                tail = f"{score.median:.2f}", f"{score.high:.2f}", f"{100 * score.stuck:.2f}%"
                rows.append([settings.SETTINGS[name].title, score.selector, *tail])
        header = ["setting", "policy", "median", "99th percentile", "stuck"]
        lines += ["", "Tails of the regret distributions:", "", markdown_table(header, rows)]
    for name, grid in grids.items():
        lines += ["", *_compare_grid(name, grid)]
    if claims:
        lines += ["", "What the paper says in words:", "", markdown_table(("claim", "measured", "verdict"), claims)]
    lines += ["", *_NOTES]
    return "\n".join(lines) + "\n"


def _compare_grid(name: str, grid: GridRegret) -> list[str]:
    """Return a table of a grid's mean relative regret and the paper's, for problems with a divergence above .25."""
    is_easy = grid.divergence > 0.25
    divergence, theirs = settings.paper_points("linear_gaussian_kl" if name == "linear" else "bernoulli_kl")
    title = "linear Gaussian grid" if name == "linear" else f"Bernoulli grid, {name}"
    lines = [f"{title} ({grid.divergence.size} problems), mean relative regret where the divergence exceeds .25:", ""]
    rows = []
    for policy in (THOMPSON, BAYES_UCB):
        their_mean = theirs[policy][divergence > 0.25].mean()
        ours = grid.relative[policy][is_easy]
        error = np.sqrt(np.sum(grid.error[policy][is_easy] ** 2)) / max(is_easy.sum(), 1)
        rows.append([policy, f"{100 * their_mean:+.1f}%", f"{100 * ours.mean():+.1f}% +- {100 * error:.1f}%"])
    lines.append(markdown_table(("against", "the paper's points", "ours"), rows))
    if name != "A = 2":
        return lines
    return [*lines, "", "The paper's text announces grids of two and of three arms; its figure shows three arms only."]


_NOTES = [
    "What does not reproduce, and why:",
    "",
    "- The linear Gaussian regret figure is not the setting of its caption: two arms with weights (.4, .4) and (.8, .8) and "
    "noise .2 give a sixth of the regret that the figure shows. Three arms with weights (-.5, -.5), (0, 0), (.5, .5) and "
    "noise 1 give the figure.",
    "- The paper breaks ties of the mode by the lowest index, which favours the first arm. Policies marked "
    f'"ties lowest" do the same; "{RANDOM}" breaks ties at random, so that no result depends on the order of the arms.',
    "- The paper's figures show realised regret of 5,000 realizations, whose standard deviation (13 and 34) is mostly the "
    "noise of the rewards; ours is expected regret, which has the same mean.",
    "- The weights of the paper's linear Gaussian grid are not listed: ours are 360 problems drawn from the grid that its "
    "footnote describes, with one arm better in every context, so compare the clouds of points, not single points.",
]

_STYLE = dict(zip((THOMPSON, BAYES_UCB, LOWEST, RANDOM), styles(), strict=False))
_CURVES = {THOMPSON: "TS", BAYES_UCB: "BUCB", LOWEST: "DS"}
_MAX_LARGE_MARKERS = 60  # problems of a grid; more are drawn with smaller markers


def draw_execution(runs: "xarray.Dataset", path: Path) -> None:
    """Draw p-hat and N over time of one realization."""
    plt = figure_tools()
    run = runs.sel(selector=LOWEST)
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    draw_by_arm(axes[:1], [np.asarray(run.one_best_arm_probs)], "P(arm is best), p-hat")
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
        marks = {"facecolor": "none", "edgecolor": "black", "linewidth": 0.4}
        axis.scatter(divergence, theirs[policy], s=4, zorder=2, label="the paper", **marks)
        axis.axhline(0.0, color="black", linewidth=0.7)
        axis.set(xscale="log", xlabel="Kullback-Leibler divergence", ylabel=f"regret relative to {policy}, less 1")
        axis.legend(fontsize=8)
    caption = f"double sampling (ties lowest) after 1500 steps, {num_runs} realizations a problem; bars: 95% intervals"
    save_figure(figure, title, caption, path)


def _caption(setting: str, runs: "xarray.Dataset", one: bool = False) -> str:
    count = "one" if one else str(runs.sizes["realization"])
    return f"{SETTINGS[setting].title}; {count} realization{'' if one else 's'}, M = {runs.attrs['num_samples']}"
