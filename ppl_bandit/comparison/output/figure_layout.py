"""Layout of a comparison's figures: a style for each engine, a caption with the settings, a title and a legend."""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.comparison.measurement.engine_runs import flatten_latents
from ppl_bandit.comparison.measurement.results import Comparison
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.live.show.rendering import NUM_LEADING

_GRAY = "0.35"


class EngineStyle(NamedTuple):
    """Colour, dashes and marker of an engine."""

    colour: str
    dash: Any
    marker: str


# Distinct in black and white by dashes and markers, and in colour for colour-blind readers.
_STYLES = (
    EngineStyle("#0072B2", (0, (6, 2)), "o"),
    EngineStyle("#D55E00", (0, (1.5, 1.5)), "s"),
    EngineStyle("#009E73", (0, (6, 2, 1.5, 2)), "^"),
    EngineStyle("#CC79A7", (0, (3, 1, 1, 1, 1, 1)), "D"),
    EngineStyle("#E69F00", (0, (10, 3)), "v"),
    EngineStyle("#56B4E9", (0, (4, 1)), "P"),
    EngineStyle("#7A5C00", (0, (2, 4)), "X"),
)
_EXACT = EngineStyle("black", "-", "*")


def new_figure(result: Comparison, size: tuple[float, float], rows: int, columns: int, **grid: Any) -> tuple[Any, Any]:
    """Return a figure with (rows, columns) axes and the settings of the comparison as caption."""
    figure, axes = figure_tools().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **grid)
    runs = len(next(iter(result.engines.values())).runs)
    figure.supxlabel(
        f"{result.name}: {len(result.data.arm)} rows; M = {result.num_samples} draws a run, {runs} runs, seed {result.seed}; "
        f"reference: {'exact' if result.reference.is_exact else 'long run of ' + result.reference.name}",
        fontsize=8.5,
        color=_GRAY,
    )
    return figure, axes


def add_title_and_legend(figure: Any, axis: Any, title: str) -> None:
    """Write the title above the panels and the legend to their right."""
    num_letters = int(10.0 * (figure.get_figwidth() - 2.0))
    figure.suptitle("\n".join(textwrap.wrap(title, num_letters)), fontsize=12, x=0.01, ha="left")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, handlelength=3.2)


def each_engine(result: Comparison, has_exact: bool = False) -> Iterator[tuple[str, EngineStyle, np.ndarray]]:
    """Yield each engine with its style and its draws (R M, K).

    Args:
        has_exact: whether to yield the exact engine too if it is the reference, which figures draw separately.
    """
    is_reference = {label: result.reference.is_exact and label == "exact" for label in result.engines}
    number = 0
    for label, engine in result.engines.items():
        if is_reference[label] and not has_exact:
            continue
        style = _EXACT if is_reference[label] else _STYLES[number % len(_STYLES)]
        number += not is_reference[label]
        yield label, style, np.concatenate([flatten_latents(result.model, run.draws) for run in engine.runs])


def leading_arms(result: Comparison) -> tuple[np.ndarray, str]:
    """Return the indices of the arms to draw, all or the 15 with the largest means, and a remark for the title."""
    order = result.overviews["reference"].leaders
    if order.size <= NUM_LEADING + 1:
        return np.arange(order.size), ""
    return order[:NUM_LEADING], f" (the {NUM_LEADING} of {order.size} arms with the largest means)"


def reference_name(result: Comparison) -> str:
    """Return the reference's name for a legend."""
    return "exact" if result.reference.is_exact else f"reference ({result.reference.name}, long run)"
