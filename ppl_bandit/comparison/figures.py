"""Figures of a comparison: arms, decisions, costs, predictive checks, and errors as the rows grow."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.comparison.latent_figures import (
    EngineStyle,
    add_title_and_legend,
    draw_densities,
    draw_forest,
    each_engine,
    leading_arms,
    new_figure,
    reference_name,
)
from ppl_bandit.comparison.results import Comparison, largest_error
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.live.exports import observed_outcomes, replicate_outcomes
from ppl_bandit.runtime.compile_ahead import quick_jit

_NUM_REPLICATES = 200  # replicated data sets per engine


def draw_figures(result: Comparison, folder: Path) -> dict[str, Path]:
    """Draw every figure of a comparison as PNG, and return {name: path}."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, draw in COMPARISON_FIGURES.items():
        figure = draw(result)
        if figure is None:
            continue
        paths[name] = folder / f"{name}.png"
        figure.savefig(paths[name], dpi=110)
        figure_tools().close(figure)
    return paths


def draw_answer(result: Comparison) -> Any:
    """Draw the expected reward of each arm with its interval, and the probability that it is best: reference and engines."""
    shown, note = leading_arms(result)
    num_arms = shown.size
    line_height = 0.42 if num_arms <= 6 else 0.12  # inches, of one engine in the row of an arm
    figure, axes = new_figure(result, (11.5, max(2.6, line_height * num_arms * (len(result.engines) + 1) + 1.4)), 1, 2)
    left, right = axes[0]
    lines = [("reference", reference_name(result), EngineStyle("black", "-", "|"))]
    lines += [(label, label, style) for label, style, _ in each_engine(result) if label in result.overviews]
    for number, (key, label, style) in enumerate(lines):
        found = result.overviews[key]
        y = np.arange(num_arms) + (number + 1) / (len(lines) + 1) - 0.5
        is_reference = key == "reference"
        size = {"markersize": 11 if is_reference else 5.5, "linestyle": "none"}
        left.hlines(y, found.low[shown], found.high[shown], color=style.colour, linewidth=2.6 if is_reference else 1.2)
        left.plot(found.mean[shown], y, style.marker, color=style.colour, label=label, **size)
        bars = {"height": 0.8 / (len(lines) + 1), "color": style.colour, "alpha": 0.9 if is_reference else 0.6}
        right.barh(y, found.best_prob[shown], **bars)
    for axis in (left, right):
        axis.set(yticks=range(num_arms), ylim=(num_arms - 0.5, -0.5))
        axis.set_yticklabels([str(result.arms[index]) for index in shown])
    left.set(xlabel="expected reward: posterior mean and 95% interval")
    right.set(xlabel="probability of being the best arm", xlim=(0, 1))
    add_title_and_legend(
        figure, left, f"Expected reward and P(best) of each arm, by the reference and by each engine{note}"
    )
    return figure


def draw_best_arms(result: Comparison) -> Any:
    """Draw p-hat of each arm, by engine, with error bars."""
    shown, note = leading_arms(result)
    num_arms = shown.size
    drawn_engines = list(each_engine(result))
    figure, axes = new_figure(result, (max(6.0, 0.75 * num_arms + 2.0) + 1.7, 4.0), 1, 1)
    axis, width = axes[0, 0], 0.8 / max(1, len(drawn_engines))
    place = np.arange(num_arms)
    exact = result.reference.best_arm_probs.mean(axis=0)[shown]
    axis.bar(
        place, exact, width=0.86, color="0.9", edgecolor="black", linewidth=1.2, label=reference_name(result), zorder=1
    )
    for number, (label, style, _) in enumerate(drawn_engines):
        estimate = result.engines[label].decisions.best_arm_probs
        mean = estimate.value.mean(axis=0)[shown]
        margin = 2.0 * np.sqrt(np.square(estimate.error).mean(axis=0))[shown]
        x = place + (number - (len(drawn_engines) - 1) / 2) * width
        margins = np.minimum(margin, mean), np.minimum(margin, 1.0 - mean)  # a probability stays inside [0, 1]
        marks = {"color": style.colour, "markeredgecolor": "black", "markersize": 6, "capsize": 3, "zorder": 3}
        axis.errorbar(x, mean, margins, fmt=style.marker, label=label, **marks)
    for edge in place[:-1] + 0.5:
        axis.axvline(edge, color="0.85", linewidth=0.8, zorder=0)
    where = "" if result.contexts is None else ", averaged over contexts of the data"
    axis.set(xticks=place, xlabel="arm", ylabel="P(arm is best), p-hat", xlim=(-0.6, num_arms - 0.4))
    axis.set_ylim(bottom=0)
    names = [str(result.arms[index]) for index in shown]
    axis.set_xticklabels(names, rotation=30 if max(map(len, names)) * num_arms > 60 else 0)
    add_title_and_legend(
        figure, axis, f"Probability that each arm is best{where}; bars: two standard errors over runs{note}"
    )
    return figure


def draw_costs(result: Comparison) -> Any:
    """Draw the largest error of an engine against the time it takes, cold and warm."""
    figure, axes = new_figure(result, (8.6, 4.4), 1, 1)
    axis = axes[0, 0]
    floor = result.reference.floor.wasserstein
    worst = int(np.argmax(floor.value))
    ceiling = floor.value[worst] + 2.0 * floor.error[worst]
    heights = [ceiling]
    for label, style, _ in each_engine(result, has_exact=True):
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
    note = "hatched: distance between two samples of the reference"
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axis.text(0.99, 0.02, note, ha="right", va="bottom", fontsize=8.5, transform=axis.transAxes, bbox=box)
    axis.set(xscale="log", yscale="log", xlabel="seconds from rows to draws: filled once compiled, open the first time")
    axis.set_ylabel("largest Wasserstein-1 distance\nof a latent, in posterior sds")
    axis.set_ylim(bottom, max(heights) * 1.5)
    axis.margins(x=0.15)
    add_title_and_legend(figure, axis, "Error against time to compute; bars: two standard errors over runs")
    return figure


def draw_predictive(result: Comparison) -> Any:
    """Draw the posterior predictive distribution of each engine and the observed rows, for every arm.

    None if latents move: the draws are those of the next step, and do not predict earlier rows.
    """
    if result.model.moving_sites:
        return None
    rewards = observed_outcomes(result.model, result.data)
    panels: list[tuple[str, str, Any]] = []
    for name in result.model.outcomes:
        panels.append((name, "mean", np.mean))
        if not set(np.unique(rewards[name])) <= {0.0, 1.0}:  # for outcomes 0 and 1 the mean determines the sd
            panels.append((name, "sd", np.std))
    columns, rows = min(2, len(panels)), -(-len(panels) // 2)
    shown, note = leading_arms(result)
    num_arms, drawn_engines = shown.size, list(each_engine(result, has_exact=True))
    size = (max(5.0, 0.6 * num_arms + 1.5) * columns + 1.5, 3.2 * rows + 1.0)
    figure, axes = new_figure(result, size, rows, columns)
    played = np.asarray(result.data.arm)
    has_rows = np.isin(shown, played)
    arms, place = shown[has_rows], np.flatnonzero(has_rows)
    width = 0.8 / max(1, len(drawn_engines))
    replicate = _replicator(result)
    replicated = {label: replicate(label) for label, _, _ in drawn_engines}
    for axis, (name, what, statistic) in zip(axes.flat, panels, strict=False):
        seen = [statistic(rewards[name][played == arm]) for arm in arms]
        axis.hlines(seen, place - 0.45, place + 0.45, color="black", linewidth=2, label="observed", zorder=1)
        for number, (label, style, _) in enumerate(drawn_engines):
            values = np.stack([statistic(replicated[label][name][:, played == arm], axis=1) for arm in arms])
            low, high = np.quantile(values, (0.025, 0.975), axis=1)
            x = place + (number - (len(drawn_engines) - 1) / 2) * width
            axis.vlines(x, low, high, color=style.colour, linewidth=1.6)
            marks = {"color": style.colour, "markeredgecolor": "black", "markersize": 6}
            axis.plot(x, values.mean(axis=1), style.marker, linestyle="none", label=label, **marks)
        axis.set(title=f"{what} of {name}", xticks=range(num_arms), xlabel="arm", ylabel="over the rows of an arm")
        axis.set_xticklabels([str(result.arms[index]) for index in shown], rotation=30 if num_arms > 6 else 0)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    add_title_and_legend(
        figure, axes.flat[0], f"Posterior predictive check: replicated rows (mean, 95%), and observed rows{note}"
    )
    return figure


def draw_stream(result: Comparison) -> Any:
    """Draw the errors as the rows grow."""
    if len(result.stream) < 2:
        return None
    figure, axes = new_figure(result, (12.5, 4.0), 1, 2)
    counts = [point.num_rows for point in result.stream]
    for label, style, _ in each_engine(result):
        errors = [largest_error(point.engines[label][0].wasserstein.value) for point in result.stream]
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
        axis.set(xscale="log", xlabel="rows learned", xticks=counts)
        axis.set_xticklabels([str(count) for count in counts])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
    axes[0, 0].set(title="posterior", ylabel="largest Wasserstein-1 distance\nof a latent, in posterior sds")
    axes[0, 1].set(title="decision", ylabel="P(another arm than the reference)")
    add_title_and_legend(figure, axes[0, 0], "Errors as the rows grow")
    return figure


COMPARISON_FIGURES = {
    "answer": draw_answer,
    "densities": draw_densities,
    "forest": draw_forest,
    "best_arms": draw_best_arms,
    "costs": draw_costs,
    "predictive": draw_predictive,
    "stream": draw_stream,
}


def _replicator(result: Comparison) -> Callable[[str], dict[str, np.ndarray]]:
    """Return a function label -> outcomes replicated from that engine's draws; it is compiled once for all engines."""
    rows = jax.tree.map(np.asarray, result.data)
    run = quick_jit(
        lambda keys, draws: jax.vmap(lambda key, one: replicate_outcomes(result.model, key, one, rows))(keys, draws)
    )

    def replicate(label: str) -> dict[str, np.ndarray]:
        runs = result.engines[label].runs
        each = -(-_NUM_REPLICATES // len(runs))
        with jax.enable_x64(True):
            draws = {
                name: jnp.asarray(
                    np.concatenate([run.draws[name][:: max(1, len(run.draws[name]) // each)] for run in runs])
                )
                for name in result.model.latent_shapes
            }
            keys = jr.split(jr.key(result.seed), len(next(iter(draws.values()))))
            return jax.device_get(run(keys, draws))

    return replicate
