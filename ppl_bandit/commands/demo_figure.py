"""The demo's figure: regret and the probability of being best, model by model."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.numerics.plotting import figure_tools, finish, styles

__all__ = ["DemoPanel", "draw_demo"]


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
