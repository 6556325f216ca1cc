"""Figures of a comparison that stand alone: titles, units, error bars, and what was run; engines differ by marker and dash."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.comparison.closed_form import support_bounds
from ppl_bandit.comparison.errors import largest
from ppl_bandit.comparison.results import Comparison
from ppl_bandit.comparison.running import flatten
from ppl_bandit.live.arviz_export import observed, replicate
from ppl_bandit.numerics.compilation import quick_jit
from ppl_bandit.numerics.plotting import figure_tools

__all__ = ["FIGURES", "draw_figures"]

_MOST_PANELS = 12
_NUM_REPLICATES = 200  # of the rows, from each engine
_GRAY = "0.35"


class _Style(NamedTuple):
    colour: str
    dash: Any
    marker: str


# Told apart in black and white by dashes and markers, in colour by hues that colour-blind readers can separate.
_STYLES = (
    _Style("#0072B2", (0, (6, 2)), "o"),
    _Style("#D55E00", (0, (1.5, 1.5)), "s"),
    _Style("#009E73", (0, (6, 2, 1.5, 2)), "^"),
    _Style("#CC79A7", (0, (3, 1, 1, 1, 1, 1)), "D"),
    _Style("#E69F00", (0, (10, 3)), "v"),
    _Style("#56B4E9", (0, (4, 1)), "P"),
    _Style("#7A5C00", (0, (2, 4)), "X"),
)


_EXACT = _Style("black", "-", "*")


def draw_figures(result: Comparison, folder: Path) -> dict[str, Path]:
    """Draw every figure of a comparison as PNG, and return {name: path}."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, draw in FIGURES.items():
        figure = draw(result)
        if figure is None:
            continue
        paths[name] = folder / f"{name}.png"
        figure.savefig(paths[name], dpi=110)
        figure_tools().close(figure)
    return paths


def draw_answer(result: Comparison) -> Any:
    """Draw the expected reward of each arm with its interval, and the probability that it is best: reference and engines."""
    num_arms = len(result.arms)
    figure, axes = _canvas(result, (11.5, max(2.6, 0.42 * num_arms * (len(result.engines) + 1) + 1.4)), 1, 2)
    left, right = axes[0]
    lines = [("reference", _reference_name(result), _Style("black", "-", "|"))]
    lines += [(label, label, style) for label, style, _ in _engines(result) if label in result.standings]
    for number, (key, label, style) in enumerate(lines):
        found = result.standings[key]
        y = np.arange(num_arms) + (number + 1) / (len(lines) + 1) - 0.5
        is_reference = key == "reference"
        size = {"markersize": 11 if is_reference else 5.5, "linestyle": "none"}
        left.hlines(y, found.low, found.high, color=style.colour, linewidth=2.6 if is_reference else 1.2)
        left.plot(found.mean, y, style.marker, color=style.colour, label=label, **size)
        right.barh(
            y, found.best_prob, height=0.8 / (len(lines) + 1), color=style.colour, alpha=0.9 if is_reference else 0.6
        )
    for axis in (left, right):
        axis.set(yticks=range(num_arms), ylim=(num_arms - 0.5, -0.5))
        axis.set_yticklabels([str(arm) for arm in result.arms])
    left.set(xlabel="expected reward: posterior mean and 95% interval")
    right.set(xlabel="probability of being the best arm", xlim=(0, 1))
    _finish(figure, left, "Where the arms stand, by the reference and by each engine")
    return figure


def draw_densities(result: Comparison) -> Any:
    """Draw the marginal density of each latent, all engines over the exact curve."""
    chosen = _elements(result)
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    figure, axes = _canvas(result, (max(3.3 * columns, 5.5) + 1.9, 2.3 * rows + 1.1), rows, columns)
    bounds = _element_bounds(result)
    for axis, k in zip(axes.flat, chosen, strict=False):
        grid, exact = _reference_density(result, k, bounds[k])
        axis.plot(grid, exact, color="black", linewidth=2.6, alpha=0.85, label=_reference_name(result))
        for label, style, draws in _engines(result):
            if np.isfinite(draws[:, k]).all():
                smooth = _density(draws[:, k], grid, bounds[k])
                axis.plot(grid, smooth, color=style.colour, linestyle=style.dash, linewidth=1.5, label=label)
        axis.set(title=result.labels[k], yticks=[], xlim=(grid[0], grid[-1]))
        axis.set_ylim(bottom=0)
    for axis in axes.flat[len(chosen) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("density")
    what = "in closed form" if result.reference.is_exact else "a long run of NUTS"
    _finish(figure, axes.flat[0], f"Posterior of each latent: engines over the reference, {what}{_left_out(result)}")
    return figure


def draw_forest(result: Comparison) -> Any:
    """Draw the central 50% and 95% intervals of each latent, by engine; one panel for each site, with its own scale."""
    chosen = _elements(result)
    everyone = list(_engines(result))
    levels = (0.025, 0.25, 0.5, 0.75, 0.975)
    lines = [(_reference_name(result), _Style("black", "-", "|"), result.reference.target.quantiles)]
    lines += [(label, style, np.quantile(draws, levels, axis=0)) for label, style, draws in everyone]
    sites = [result.labels[k].partition("[")[0] for k in chosen]
    panels = [[k for k, site in zip(chosen, sites, strict=True) if site == name] for name in dict.fromkeys(sites)]
    height = 0.2 * len(chosen) * (len(lines) + 1) + 0.7 * len(panels) + 0.8
    figure, axes = _canvas(result, (9.5, height), len(panels), 1, height_ratios=[len(panel) for panel in panels])
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
    _finish(figure, axes[0, 0], f"Median, central 50% (thick) and 95% (thin) of each latent{_left_out(result)}")
    return figure


def draw_best_arms(result: Comparison) -> Any:
    """Draw p-hat of each arm, by engine, with error bars."""
    num_arms = len(result.arms)
    everyone = list(_engines(result))
    figure, axes = _canvas(result, (max(6.0, 0.75 * num_arms + 2.0) + 1.7, 4.0), 1, 1)
    axis, width = axes[0, 0], 0.8 / max(1, len(everyone))
    place = np.arange(num_arms)
    exact = result.reference.best_arm_probs.mean(axis=0)
    axis.bar(
        place, exact, width=0.86, color="0.9", edgecolor="black", linewidth=1.2, label=_reference_name(result), zorder=1
    )
    for number, (label, style, _) in enumerate(everyone):
        estimate = result.engines[label].decisions.best_arm_probs
        axis.errorbar(
            place + (number - (len(everyone) - 1) / 2) * width,
            estimate.value.mean(axis=0),
            2.0 * np.sqrt(np.square(estimate.error).mean(axis=0)),
            fmt=style.marker,
            color=style.colour,
            markeredgecolor="black",
            markersize=6,
            capsize=3,
            label=label,
            zorder=3,
        )
    for edge in place[:-1] + 0.5:
        axis.axvline(edge, color="0.85", linewidth=0.8, zorder=0)
    where = "" if result.contexts is None else ", averaged over contexts of the data"
    axis.set(xticks=place, xlabel="arm", ylabel="P(arm is best), p-hat", xlim=(-0.6, num_arms - 0.4))
    axis.set_ylim(bottom=0)
    names = [str(arm) for arm in result.arms]
    axis.set_xticklabels(names, rotation=30 if max(map(len, names)) * num_arms > 60 else 0)
    _finish(figure, axis, f"Probability that each arm is best{where}; bars: two standard errors over runs")
    return figure


def draw_costs(result: Comparison) -> Any:
    """Draw the largest error of an engine against the time it takes, cold and warm."""
    figure, axes = _canvas(result, (8.6, 4.4), 1, 1)
    axis = axes[0, 0]
    floor = result.reference.floor.wasserstein
    worst = int(np.argmax(floor.value))
    ceiling = floor.value[worst] + 2.0 * floor.error[worst]
    heights = [ceiling]
    for label, style, _ in _engines(result, has_exact=True):
        engine = result.engines[label]
        if not np.isfinite(engine.latents.wasserstein.value).any():
            continue
        k = int(np.nanargmax(engine.latents.wasserstein.value))
        value, error = engine.latents.wasserstein.value[k], 2.0 * engine.latents.wasserstein.error[k]
        warm, cold = float(engine.seconds_warm.value), engine.seconds_cold
        heights += [value / 2, value + error]
        axis.plot([warm, cold], [value, value], color=style.colour, linestyle=":", linewidth=1.2)
        axis.errorbar([warm], [value], [[min(error, 0.9 * value)], [error]], color=style.colour, capsize=3)
        marks = {"markeredgecolor": "black", "markersize": 10, "linestyle": "none", "label": label}
        axis.plot([warm], [value], style.marker, color=style.colour, **marks)
        axis.plot([cold], [value], style.marker, color="white", markeredgecolor=style.colour, markersize=9)
    bottom = min(heights) / 1.5
    axis.axhspan(bottom, ceiling, facecolor="0.95", edgecolor="0.8", hatch="///", linewidth=0, zorder=0)
    axis.text(
        0.99,
        0.02,
        "hatched: two samples of the reference differ by as much",
        ha="right",
        va="bottom",
        fontsize=8.5,
        transform=axis.transAxes,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )
    axis.set(xscale="log", yscale="log", xlabel="seconds from rows to draws: filled once compiled, open the first time")
    axis.set_ylabel("largest Wasserstein-1 distance\nof a latent, in posterior sds")
    axis.set_ylim(bottom, max(heights) * 1.5)
    axis.margins(x=0.15)
    _finish(figure, axis, "Error against time to compute; bars: two standard errors over runs")
    return figure


def draw_predictive(result: Comparison) -> Any:
    """Draw what each engine's posterior predicts for the rows again, beside what was observed, arm by arm."""
    rewards = observed(result.model, result.data)
    panels: list[tuple[str, str, Any]] = []
    for name in result.model.outcomes:
        panels.append((name, "mean", np.mean))
        if not set(np.unique(rewards[name])) <= {0.0, 1.0}:  # of 0 and 1 the mean tells all
            panels.append((name, "sd", np.std))
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    num_arms, everyone = len(result.arms), list(_engines(result, has_exact=True))
    size = (max(5.0, 0.6 * num_arms + 1.5) * columns + 1.5, 3.2 * rows + 1.0)
    figure, axes = _canvas(result, size, rows, columns)
    played = np.asarray(result.data.arm)
    arms = np.unique(played)
    width = 0.8 / max(1, len(everyone))
    replicated = {label: _replicates(result, label) for label, _, _ in everyone}
    for axis, (name, what, statistic) in zip(axes.flat, panels, strict=False):
        seen = [statistic(rewards[name][played == arm]) for arm in arms]
        axis.hlines(seen, arms - 0.45, arms + 0.45, color="black", linewidth=2, label="observed", zorder=1)
        for number, (label, style, _) in enumerate(everyone):
            again = np.stack([statistic(replicated[label][name][:, played == arm], axis=1) for arm in arms])
            low, high = np.quantile(again, (0.025, 0.975), axis=1)
            x = arms + (number - (len(everyone) - 1) / 2) * width
            axis.vlines(x, low, high, color=style.colour, linewidth=1.6)
            marks = {"color": style.colour, "markeredgecolor": "black", "markersize": 6}
            axis.plot(x, again.mean(axis=1), style.marker, linestyle="none", label=label, **marks)
        axis.set(title=f"{what} of {name}", xticks=range(num_arms), xlabel="arm", ylabel="over the rows of an arm")
        axis.set_xticklabels([str(arm) for arm in result.arms], rotation=30 if num_arms > 6 else 0)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    _finish(figure, axes.flat[0], "Posterior predictive check: the rows drawn again (mean, 95%), and as observed")
    return figure


def draw_stream(result: Comparison) -> Any:
    """Draw the errors as the rows grow."""
    if len(result.stream) < 2:
        return None
    figure, axes = _canvas(result, (12.5, 4.0), 1, 2)
    counts = [point.num_rows for point in result.stream]
    for label, style, _ in _engines(result):
        errors = [largest(point.engines[label][0].wasserstein.value) for point in result.stream]
        distances = [float(point.engines[label][1].other_arm_prob.value) for point in result.stream]
        for axis, values in zip(axes.flat, (errors, distances), strict=True):
            axis.plot(
                counts, values, color=style.colour, linestyle=style.dash, marker=style.marker, markeredgecolor="black",
                label=label,
            )  # fmt: skip
    floors = (
        [np.max(point.reference.floor.wasserstein.value) for point in result.stream],
        [float(point.reference.floor.other_arm_prob.value) for point in result.stream],
    )
    for axis, values in zip(axes.flat, floors, strict=True):
        axis.plot(counts, values, color="black", linewidth=2.4, label="two samples of the reference")
        axis.set(xscale="log", xlabel="rows learnt", xticks=counts)
        axis.set_xticklabels([str(count) for count in counts])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0, 0].set(title="posterior", ylabel="largest Wasserstein-1 distance\nof a latent, in posterior sds")
    axes[0, 1].set(title="decision", ylabel="P(another arm than the reference)")
    _finish(figure, axes[0, 0], "Errors as the rows grow")
    return figure


FIGURES = {
    "answer": draw_answer,
    "densities": draw_densities,
    "forest": draw_forest,
    "best_arms": draw_best_arms,
    "costs": draw_costs,
    "predictive": draw_predictive,
    "stream": draw_stream,
}


def _canvas(result: Comparison, size: tuple[float, float], rows: int, columns: int, **grid: Any) -> tuple[Any, Any]:
    figure, axes = figure_tools().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **grid)
    runs = len(next(iter(result.engines.values())).runs)
    figure.supxlabel(
        f"{result.name}: {len(result.data.arm)} rows; M = {result.num_samples} draws a run, {runs} runs, seed {result.seed}; "
        f"reference: {'exact' if result.reference.is_exact else 'long run of ' + result.reference.name}",
        fontsize=8.5,
        color=_GRAY,
    )
    return figure, axes


def _finish(figure: Any, axis: Any, title: str) -> None:
    """Write the title above, to the left, and the legend to the right of the panels."""
    num_letters = int(10.0 * (figure.get_figwidth() - 2.0))
    figure.suptitle("\n".join(textwrap.wrap(title, num_letters)), fontsize=12, x=0.01, ha="left")
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper", frameon=False, handlelength=3.2)


def _engines(result: Comparison, has_exact: bool = False) -> Iterator[tuple[str, _Style, np.ndarray]]:
    """Yield each engine with its style and its draws (R M, K).

    Args:
        has_exact: whether to yield the exact engine too where it is the reference, which is drawn by itself.
    """
    is_reference = {label: result.reference.is_exact and label == "exact" for label in result.engines}
    number = 0
    for label, engine in result.engines.items():
        if is_reference[label] and not has_exact:
            continue
        style = _EXACT if is_reference[label] else _STYLES[number % len(_STYLES)]
        number += not is_reference[label]
        yield label, style, np.concatenate([flatten(result.model, run.draws) for run in engine.runs])


def _reference_name(result: Comparison) -> str:
    return "exact" if result.reference.is_exact else f"reference ({result.reference.name}, long run)"


def _elements(result: Comparison) -> list[int]:
    """Choose the latents to draw: all, or those on which an engine is farthest off."""
    if len(result.labels) <= _MOST_PANELS or not result.engines:
        return list(range(len(result.labels)))[:_MOST_PANELS]
    worst = np.nanmax([engine.latents.wasserstein.value for engine in result.engines.values()], axis=0)
    return sorted(np.argsort(-worst, kind="stable")[:_MOST_PANELS].tolist())


def _left_out(result: Comparison) -> str:
    number = len(result.labels)
    return f" (the {_MOST_PANELS} of {number} on which an engine is farthest off)" if number > _MOST_PANELS else ""


def _element_bounds(result: Comparison) -> list[tuple[float, float]]:
    with jax.enable_x64(True):
        bounds = support_bounds(result.model)
    pairs = [bounds[name] for name in result.model.latent_shapes]
    lows, highs = (np.concatenate([np.ravel(pair[side]) for pair in pairs]) for side in (0, 1))
    return list(zip(lows.tolist(), highs.tolist(), strict=True))


def _reference_density(result: Comparison, k: int, bounds: tuple[float, float]) -> tuple[np.ndarray, np.ndarray]:
    samples = result.reference.target.samples[:, :, k].ravel()
    low, high = np.quantile(samples, (0.0005, 0.9995))
    margin = 0.08 * (high - low)
    grid = np.linspace(max(low - margin, bounds[0]), min(high + margin, bounds[1]), 300)
    if result.reference.laws is None:
        return grid, _density(samples, grid, bounds)
    inner = grid[1:-1]  # a density may be infinite at a bound
    for name, shape in result.model.latent_shapes.items():
        size = int(np.prod(shape, dtype=int))
        if k < size:
            values = result.reference.laws[name].law.pdf(inner.reshape(-1, *(1,) * len(shape)))
            return inner, np.asarray(values).reshape(inner.size, -1)[:, k]
        k -= size
    raise AssertionError("every latent has a site")


def _density(draws: np.ndarray, grid: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Smooth draws with a Gaussian kernel, reflected at the bounds of the support so that no mass leaks out."""
    centre, spread = np.median(draws), np.subtract(*np.quantile(draws, (0.84, 0.16))) / 2
    width = max(spread, 1e-12 * max(1.0, abs(centre))) * 1.06 * draws.size**-0.2
    edges = np.linspace(grid[0] - 6 * width, grid[-1] + 6 * width, 2001)
    counts, _ = np.histogram(draws, edges)
    middle = (edges[1:] + edges[:-1]) / 2

    def smooth(points: np.ndarray) -> np.ndarray:
        gaps = (points[:, None] - middle) / width
        return np.exp(-0.5 * np.square(gaps)) @ counts / (draws.size * width * np.sqrt(2.0 * np.pi))

    density = smooth(grid)
    for bound in bounds:
        if np.isfinite(bound):
            density = density + smooth(2.0 * bound - grid)
    return density


def _replicates(result: Comparison, label: str) -> dict[str, np.ndarray]:
    """Draw the rows again from some of an engine's draws."""
    runs = result.engines[label].runs
    each = -(-_NUM_REPLICATES // len(runs))
    with jax.enable_x64(True):
        draws = {
            name: jnp.asarray(
                np.concatenate([run.draws[name][:: max(1, len(run.draws[name]) // each)] for run in runs])
            )
            for name in result.model.latent_shapes
        }
        rows = jax.tree.map(jnp.asarray, result.data)
        keys = jr.split(jr.key(result.seed), len(next(iter(draws.values()))))
        run = quick_jit(
            lambda keys, draws: jax.vmap(lambda key, one: replicate(result.model, key, one, rows))(keys, draws)
        )
        return jax.device_get(run(keys, draws))
