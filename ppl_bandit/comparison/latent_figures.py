"""Figures of the latents of a comparison: densities and intervals of the engines and the reference."""

import textwrap
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.comparison.engine_runs import flatten_latents
from ppl_bandit.comparison.results import Comparison, support_bounds
from ppl_bandit.display.figure_style import density_grid, figure_tools, kernel_density
from ppl_bandit.live.rendering import NUM_LEADING

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


_MAX_PANELS = 12


def draw_densities(result: Comparison) -> Any:
    """Draw the marginal density of each latent, all engines over the exact curve."""
    chosen = _elements(result)
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, axes = new_figure(result, (max(3.3 * columns, 5.5) + 1.9, 2.3 * rows + 1.1), rows, columns)
    bounds = _element_bounds(result)
    for axis, k in zip(axes.flat, chosen, strict=False):
        grid, exact = _reference_density(result, k, bounds[k])
        axis.plot(grid, exact, color="black", linewidth=2.6, alpha=0.85, label=reference_name(result))
        for label, style, draws in each_engine(result):
            if np.isfinite(draws[:, k]).all():
                smooth = kernel_density(draws[:, k], grid, bounds[k])
                axis.plot(grid, smooth, color=style.colour, linestyle=style.dash, linewidth=1.5, label=label)
        axis.set(title=result.labels[k], yticks=[], xlim=(grid[0], grid[-1]))
        axis.set_ylim(bottom=0)
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("density")
    what = "in closed form" if result.reference.is_exact else "a long run of NUTS"
    add_title_and_legend(
        figure, axes.flat[0], f"Posterior of each latent: engines over the reference, {what}{_selection_note(result)}"
    )
    return figure


def draw_forest(result: Comparison) -> Any:
    """Draw the central 50% and 95% intervals of each latent, by engine; one panel for each site, with its own scale."""
    chosen = _elements(result)
    levels = (0.025, 0.25, 0.5, 0.75, 0.975)
    lines = [(reference_name(result), EngineStyle("black", "-", "|"), result.reference.target.quantiles)]
    lines += [(label, style, np.quantile(draws, levels, axis=0)) for label, style, draws in each_engine(result)]
    sites = [result.labels[k].partition("[")[0] for k in chosen]
    panels = [[k for k, site in zip(chosen, sites, strict=True) if site == name] for name in dict.fromkeys(sites)]
    height = 0.2 * len(chosen) * (len(lines) + 1) + 0.7 * len(panels) + 0.8
    figure, axes = new_figure(result, (9.5, height), len(panels), 1, height_ratios=[len(panel) for panel in panels])
    for axis, panel in zip(axes[:, 0], panels, strict=True):
        for position, k in enumerate(panel):
            if position % 2:
                axis.axhspan(position - 0.5, position + 0.5, color="0.94", linewidth=0)
            for number, (label, style, quantiles) in enumerate(lines):
                y = position + (number + 1) / (len(lines) + 1) - 0.5
                low, first, middle, third, high = quantiles[:, k]
                axis.plot([low, high], [y, y], color=style.colour, linewidth=1.1)
                axis.plot([first, third], [y, y], color=style.colour, linewidth=3.2, solid_capstyle="butt")
                size = 9 if style.marker == "|" else 5.5
                marks = {"markeredgecolor": "black", "markersize": size, "linestyle": "none"}
                axis.plot([middle], [y], style.marker, color=style.colour, label=None if position else label, **marks)
        axis.set(yticks=range(len(panel)), ylim=(len(panel) - 0.5, -0.5))
        axis.set_yticklabels([result.labels[k] for k in panel])
    axes[-1, 0].set_xlabel("value of the latent")
    add_title_and_legend(
        figure, axes[0, 0], f"Median, central 50% (thick) and 95% (thin) of each latent{_selection_note(result)}"
    )
    return figure


def _elements(result: Comparison) -> list[int]:
    """Return the latents to draw: all, or those with the largest errors."""
    if len(result.labels) <= _MAX_PANELS or not result.engines:
        return list(range(len(result.labels)))[:_MAX_PANELS]
    worst = np.nanmax([engine.latents.wasserstein.value for engine in result.engines.values()], axis=0)
    return sorted(np.argsort(-worst, kind="stable")[:_MAX_PANELS].tolist())


def _selection_note(result: Comparison) -> str:
    number = len(result.labels)
    return f" (the {_MAX_PANELS} of {number} with the largest errors)" if number > _MAX_PANELS else ""


def _element_bounds(result: Comparison) -> list[tuple[float, float]]:
    with jax.enable_x64(True):
        bounds = support_bounds(result.model)
    pairs = [bounds[name] for name in result.model.latent_shapes]
    lows, highs = (np.concatenate([np.ravel(pair[side]) for pair in pairs]) for side in (0, 1))
    return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _reference_density(result: Comparison, k: int, bounds: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    samples = result.reference.target.samples[:, :, k].ravel()
    grid = density_grid(samples, bounds)
    if result.reference.laws is None:
        return grid, kernel_density(samples, grid, bounds)
    inner = grid[1:-1]  # a density may be infinite at a bound
    for name, shape in result.model.latent_shapes.items():
        size = int(np.prod(shape, dtype=int))
        if k < size:
            values = result.reference.laws[name].law.pdf(inner.reshape(-1, *(1,) * len(shape)))
            return inner, np.asarray(values).reshape(inner.size, -1)[:, k]
        k -= size
    raise AssertionError("every latent has a site")
