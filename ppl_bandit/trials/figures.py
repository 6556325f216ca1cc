"""Figures of simulated trials: status over looks, sample sizes, allocation, and errors of the reported estimates."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bandit.display.figure_style import figure_tools, ink, styles
from ppl_bandit.trials.design import Design, selector_words
from ppl_bandit.trials.looks import ENDINGS, endings
from ppl_bandit.trials.trial_runs import TrialRecord

_COLOURS = {
    "superiority": "#009E73",
    "equivalence": "#56B4E9",
    "futility": "#D55E00",
    "expected_loss": "#0072B2",
    "undecided": "#BBBBBB",
}
_MOST_CURVES = 7  # arms that can be told apart: of more, those that were played most
_OWN_COLOURS = ("#CC79A7", "#E69F00", "#F0E442")  # of rules that a user writes, in turn


def draw_characteristics(design: Design, records: Mapping[str, TrialRecord], arms: Sequence[Any]) -> Any:
    """Return a figure with one row of four panels per scenario; `arms` are names of the arms, or their numbers."""
    plt = figure_tools()
    figure, axes = plt.subplots(len(records), 4, figsize=(17, 3.6 * len(records)), squeeze=False, layout="constrained")
    for row, (name, found) in zip(axes, records.items(), strict=True):
        _draw_status(row[0], design, found)
        _draw_sizes(row[1], design, found)
        _draw_allocation(row[2], design, found, arms)
        _draw_errors(row[3], found)
        row[0].set_ylabel(f"{name}\nshare of trials")
    for axis, title in zip(
        axes[0], ("status at each look", "sample size", "allocation", "error of the estimates"), strict=True
    ):
        axis.set_title(title)
    num = next(iter(records.values())).ending.size
    rules = ", ".join(map(str, design.rules)) or "no stopping rule"
    figure.supxlabel(f"{num:,} simulated trials per scenario; {selector_words(design.selector)}; {rules}", fontsize=9)
    return figure


def _draw_status(axis: Any, design: Design, found: TrialRecord) -> None:
    rows = np.asarray(design.look_rows)
    ended = np.stack(
        [
            [np.mean((found.ending == code) & (found.look <= look)) for look in range(rows.size)]
            for code in range(1, len(endings(design)))
        ]
    )
    shown = [index for index in range(len(ended)) if ended[index, -1] > 0]
    names = [endings(design)[index + 1] for index in shown]
    own = dict(zip(endings(design)[len(ENDINGS) :], itertools.cycle(_OWN_COLOURS), strict=False))
    edges = np.append(rows, rows[-1] + max(rows[-1] // rows.size, 1))  # the last look is as wide as the others
    heights = np.concatenate([ended[shown], ended[shown, -1:]], axis=1)
    axis.stackplot(edges, heights, labels=names, colors=[(_COLOURS | own)[name] for name in names], step="post")
    axis.set(xlabel="decisions", ylim=(0.0, 1.0), xlim=(edges[0], edges[-1]))
    axis.legend(fontsize=8, loc="upper left")


def _draw_sizes(axis: Any, design: Design, found: TrialRecord) -> None:
    rows = np.asarray(design.look_rows)
    sizes, counts = np.unique(rows[found.look], return_counts=True)
    axis.step(
        [rows[0], *sizes, rows[-1]], [0.0, *(np.cumsum(counts) / counts.sum()), 1.0], where="post", color="#0072B2"
    )
    mean = rows[found.look].mean()
    axis.axvline(mean, color="#D55E00", linestyle="--", label=f"mean {mean:.0f}")
    axis.set(xlabel="decisions at the end", ylabel="share of trials ended", ylim=(0.0, 1.03))
    axis.legend(fontsize=8, loc="upper left")


def _draw_allocation(axis: Any, design: Design, found: TrialRecord, arms: Sequence[Any]) -> None:
    rows = np.asarray(design.look_rows)
    every = found.counts_by_look / np.maximum(found.counts_by_look.sum(axis=2, keepdims=True), 1.0)
    shown = np.sort(np.argsort(-every[:, -1].mean(axis=0), kind="stable")[:_MOST_CURVES])
    for index, (colour, dash) in zip(shown, styles(), strict=False):
        arm = arms[index]
        low, middle, high = np.quantile(every[:, :, index], [0.1, 0.5, 0.9], axis=0)
        label = arm if isinstance(arm, str) else f"arm {arm}"
        axis.plot(rows, middle, color=colour, linestyle=dash, marker="o", markersize=2.5, label=label)
        axis.fill_between(rows, low, high, color=colour, alpha=0.12, linewidth=0)
    top = 1.0 if shown.size == len(arms) else min(1.0, 1.5 * float(every[:, :, shown].max()))  # room for the legend
    axis.set(xlabel="decisions", ylabel="share of decisions (median, 80%)", ylim=(0.0, top))
    title = None if shown.size == len(arms) else f"{shown.size} of {len(arms)} arms"
    axis.legend(fontsize=8, title=title, title_fontsize=8)


def _draw_errors(axis: Any, found: TrialRecord) -> None:
    each = np.arange(found.ending.size)
    errors = (found.mean - found.truth)[each, found.arm]
    is_early = found.ending != ENDINGS.index("undecided")
    groups = (
        [(f"stopped early, mean {errors[is_early].mean():+.3g}", errors[is_early], "#D55E00")] if is_early.any() else []
    )
    if (~is_early).any():
        groups.append((f"undecided, mean {errors[~is_early].mean():+.3g}", errors[~is_early], "#777777"))
    low, high = np.quantile(errors, [0.001, 0.999])
    bins = np.linspace(low, high, 41)
    for label, values, colour in groups:
        weights = np.full(values.size, 1.0 / errors.size)
        axis.hist(values, bins=bins, weights=weights, color=colour, alpha=0.6, label=label)
    axis.axvline(0.0, color=ink(), linewidth=0.8)
    axis.margins(y=0.4)  # room for the legend
    axis.set(xlabel="estimate of the selected arm less its truth", ylabel="share of trials")
    axis.legend(fontsize=8)
