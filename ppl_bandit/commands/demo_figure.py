"""The demo's figure, with one message: programs went in, bandits came out that lose a fraction of what random play loses."""

from collections.abc import Mapping
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.numerics.plotting import figure_tools, finish, styles

__all__ = ["DemoPlay", "draw_demo"]


class DemoPlay(NamedTuple):
    """What the demo draws of one model.

    Attributes:
        title: the model and its families.
        regret: selector -> (R, T), cumulative expected regret of each realization.
        random_regret: expected regret of one step of playing arms at random.
    """

    title: str
    regret: Mapping[str, np.ndarray]
    random_regret: float


def draw_demo(plays: list[DemoPlay], path: str | PathLike, footnote: str) -> None:
    """Draw one experiment over time on the left, and every model's regret against random play on the right."""
    plt = figure_tools()
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(12.5, max(4.2, 0.42 * len(plays) + 1.6)), layout="constrained", width_ratios=(1, 1.25)
    )
    _over_time(left, plays[0])
    _against_random(right, plays)
    number = {1: "One program, one bandit", 9: "Nine programs, nine bandits"}.get(len(plays), f"{len(plays)} programs")
    finish(figure, f"{number}: every posterior proved exact, none coded by hand", footnote, path)


def _over_time(axis: Any, play: DemoPlay) -> None:
    num_steps = next(iter(play.regret.values())).shape[1]
    steps = np.arange(1, num_steps + 1)
    axis.plot(steps, play.random_regret * steps, color="0.5", linestyle=":", label="random play")
    for (name, runs), (colour, dash) in zip(play.regret.items(), styles(), strict=False):
        mean = runs.mean(axis=0)
        margin = 1.96 * runs.std(axis=0, ddof=1) / np.sqrt(runs.shape[0])
        axis.plot(steps, mean, color=colour, linestyle=dash, label=name)
        axis.fill_between(steps, np.maximum(mean - margin, 0.0), mean + margin, color=colour, alpha=0.15, linewidth=0)
    axis.set(title=play.title, xlabel="step", ylabel="cumulative expected regret (rewards)")
    axis.set_ylim(bottom=0)
    axis.legend(loc="upper left")


def _against_random(axis: Any, plays: list[DemoPlay]) -> None:
    places = np.arange(len(plays))
    for number, (name, (colour, _)) in enumerate(zip(plays[0].regret, styles(), strict=False)):
        shares = [100.0 * p.regret[name][:, -1] / (p.random_regret * p.regret[name].shape[1]) for p in plays]
        mean = np.array([share.mean() for share in shares])
        margin = np.array([1.96 * share.std(ddof=1) / np.sqrt(share.size) for share in shares])
        low = np.minimum(margin, mean)  # regret is not negative
        marker = "os^D"[number % 4]
        axis.errorbar(mean, places + 0.22 * (number - 0.5), xerr=(low, margin), fmt=marker, color=colour, label=name)
    axis.axvline(100.0, color="0.5", linestyle=":", label="random play")
    axis.set(
        yticks=places, xlabel="regret at the end, % of what random play loses", title="all models, same two selectors"
    )
    axis.set_yticklabels([play.title for play in plays])
    axis.set_ylim(len(plays) - 0.5, -0.5)
    axis.set_xlim(0, 112)
    axis.legend(loc="lower right")
