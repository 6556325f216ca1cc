"""Figures that stand alone: titles, units, uncertainty bands, and what was run."""

import itertools
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

__all__ = ["DemoPanel", "draw_demo", "figure_tools", "finish", "styles"]

# Told apart in black and white by their dashes, in colour by hues that colour-blind readers can separate.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


class DemoPanel(NamedTuple):
    """What the demo draws of one model.

    Attributes:
        title: the model and its families.
        regret: selector -> (R, T), cumulative expected regret of each realization.
        best_arm_probs: (T, A), p-hat of one run of double sampling.
        best_arm: index of the truly best arm, or -1 where it depends on the context.
    """

    title: str
    regret: Mapping[str, np.ndarray]
    best_arm_probs: np.ndarray
    best_arm: int


def figure_tools() -> Any:
    """Return matplotlib's pyplot, on a backend that needs no screen unless the user has chosen another."""
    import matplotlib

    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    return plt


def styles() -> Iterator[tuple[str, Any]]:
    """Yield colours and dashes without end; seven of each, of which no two agree."""
    return zip(itertools.cycle(_COLOURS), itertools.cycle(_DASHES), strict=True)


def finish(figure: Any, title: str, caption: str, path: str | PathLike) -> None:
    """Say above a figure what it shows and below it what was run, write it, and let it go."""
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=110)
    figure_tools().close(figure)


def draw_demo(panels: list[DemoPanel], path: str | PathLike, footnote: str) -> None:
    """Draw cumulative regret and p-hat over time for each model, two models to a row."""
    plt = figure_tools()
    num_rows = -(-len(panels) // 2)
    figure, axes = plt.subplots(num_rows, 4, figsize=(17, 2.9 * num_rows + 0.8), squeeze=False, layout="constrained")
    for axis in axes.flat[2 * len(panels) :]:
        axis.set_visible(False)
    for position, panel in enumerate(panels):
        left, right = axes.flat[2 * position : 2 * position + 2]
        _regret(left, panel)
        _best_arm_probs(right, panel)
    title = "Bandits from NumPyro programs, exact posteriors: cumulative regret and probability of being best"
    finish(figure, title, footnote, path)


def _regret(axis: Any, panel: DemoPanel) -> None:
    for (name, runs), (colour, dash) in zip(panel.regret.items(), styles(), strict=False):
        steps = np.arange(1, runs.shape[1] + 1)
        mean = runs.mean(axis=0)
        margin = 1.96 * runs.std(axis=0, ddof=1) / np.sqrt(runs.shape[0])
        axis.plot(steps, mean, color=colour, linestyle=dash, label=name)
        axis.fill_between(steps, mean - margin, mean + margin, color=colour, alpha=0.15, linewidth=0)
    axis.set(title=panel.title, xlabel="step", ylabel="cumulative expected regret")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8, loc="upper left")


def _best_arm_probs(axis: Any, panel: DemoPanel) -> None:
    steps = np.arange(1, panel.best_arm_probs.shape[0] + 1)
    for arm, (probs, (colour, dash)) in enumerate(zip(panel.best_arm_probs.T, styles(), strict=False)):
        label = f"arm {arm} (best)" if arm == panel.best_arm else f"arm {arm}"
        axis.plot(steps, probs, color=colour, linestyle=dash, linewidth=1.1, label=label)
    axis.set(title="one run of double sampling", xlabel="step", ylabel="P(arm is best), p-hat", ylim=(-0.03, 1.03))
    axis.legend(fontsize=8, loc="best", framealpha=0.6)
