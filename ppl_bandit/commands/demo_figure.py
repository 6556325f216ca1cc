"""The demo's figure, with one message: a program goes in, a bandit comes out, and it learns."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.numerics.figure_style import figure_tools, save_figure, styles

__all__ = ["Learning", "draw_demo"]

_NUM_BLOCKS = 15  # points of a curve: a single step of few realizations is too noisy to be drawn


class Learning(NamedTuple):
    """How one model's bandit learnt.

    Attributes:
        title: the model and its families.
        is_best: (R, T), whether the arm played was the best one.
        chance: share of the best arm under random play.
    """

    title: str
    is_best: np.ndarray
    chance: float


def draw_demo(program: str, learnt: Sequence[Learning], path: str | PathLike, footnote: str) -> None:
    """Draw the program of the first model on the left, and how often each model's bandit played the best arm on the right.

    Args:
        program: source of the first model's program.
    """
    figure, (left, right) = figure_tools().subplots(
        1, 2, figsize=(12.8, 4.8), layout="constrained", width_ratios=(1.2, 1)
    )
    _code(left, program, learnt[0])
    _curves(right, learnt)
    save_figure(figure, "Write the reward model; get the bandit; it learns", footnote, path)


def _code(axis: Any, program: str, first: Learning) -> None:
    lines = [
        "import numpyro",
        "import numpyro.distributions as dist",
        "from ppl_bandit import Bandit",
        "",
        f"num_arms = {round(1 / first.chance)}",
        "",
        *program.rstrip().splitlines(),
        "",
        "bandit = Bandit(model, num_arms)",
        "decision = bandit.select()",
        "bandit.update(decision, reward=1)",
    ]
    axis.set_axis_off()
    axis.set_title("What you write", loc="left", fontsize=12)
    axis.text(
        0.03,
        0.5,
        "\n".join(lines),
        transform=axis.transAxes,
        va="center",
        family="monospace",
        fontsize=9,
        linespacing=1.5,
        bbox={"boxstyle": "round,pad=0.9", "facecolor": "#f5f7fa", "edgecolor": "#c8d0da"},
    )


def _curves(axis: Any, learnt: Sequence[Learning]) -> None:
    num_steps = learnt[0].is_best.shape[1]
    edges = np.linspace(0, num_steps, _NUM_BLOCKS + 1).astype(int)
    centres = (edges[:-1] + edges[1:]) / 2
    ends = []
    for number, (model, (colour, dash)) in enumerate(zip(learnt, styles(), strict=False)):
        each = np.stack([model.is_best[:, a:b].mean(axis=1) for a, b in zip(edges[:-1], edges[1:], strict=True)])
        share = 100.0 * each.mean(axis=1)
        x, y = np.array([0.0, *centres, num_steps]), np.array([100.0 * model.chance, *share, share[-1]])
        axis.plot(x, y, color=colour, linestyle=dash, linewidth=2.4 if number == 0 else 1.2, zorder=3 - (number > 0))
        if number == 0:
            margin = 196.0 * each.std(axis=1, ddof=1) / np.sqrt(each.shape[1])
            low, high = np.clip(share - margin, 0, 100), np.clip(share + margin, 0, 100)
            axis.fill_between(centres, low, high, color=colour, alpha=0.18, linewidth=0)
        ends.append((share[-1], model.title, colour))
    axis.set(
        xlabel="decisions made, each followed by its reward",
        ylabel="decisions for the best arm (%)",
        xlim=(0, num_steps),
        ylim=(0, 103),
        yticks=range(0, 101, 20),
    )
    axis.set_title(f"What it does: {_number(len(learnt))}, each proved exact", loc="left", fontsize=12)
    axis.text(0.02 * num_steps, 4, "each starts where random play stays, 1 / number of arms", fontsize=8.5, color="0.4")
    axis.spines[["top", "right"]].set_visible(False)
    _label(axis, ends, num_steps)


def _number(count: int) -> str:
    return {1: "one program", 6: "six programs"}.get(count, f"{count} programs")


def _label(axis: Any, ends: list[tuple[float, str, str]], num_steps: int) -> None:
    """Write each curve's name beside its end, pushed apart where they would overlap."""
    gap, ceiling = 5.2, 101.0
    for share, title, colour in sorted(ends, reverse=True):
        place = min(share, ceiling)
        ceiling = place - gap
        axis.plot(
            [num_steps * right for right in (1.0, 1.03, 1.05)],
            [share, place, place],
            color=colour,
            linewidth=0.7,
            clip_on=False,
        )
        axis.text(1.06 * num_steps, place, f"{share:.0f}%  {title}", va="center", fontsize=9, color=colour)
