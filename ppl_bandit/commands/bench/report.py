"""Results of `ppl-bandit bench` as Markdown and as a figure."""

from pathlib import Path
from typing import Any, NamedTuple

from ppl_bandit.display.figure_style import figure_tools, save_figure
from ppl_bandit.display.text_tables import markdown_table

__all__ = ["BenchResult", "draw_live", "live_table", "markdown"]


class BenchResult(NamedTuple):
    """What was measured, in plain values.

    Attributes:
        facts: date, machine, versions, settings.
        live: {case: [row of an implementation]}; microseconds.
        batches: {name: decisions or rows per second}.
        growth: {name: value} of an approximate engine whose data exceed their initial capacity.
        start: {case: {"cold" or "cached": {"built", "decided", "updated": seconds since the process began}}}.
        memory: largest memory of this process, in megabytes.
    """

    facts: dict[str, Any]
    live: dict[str, list[dict[str, Any]]]
    batches: dict[str, float]
    growth: dict[str, float]
    start: dict[str, Any]
    memory: float


def markdown(found: BenchResult) -> str:
    """Return the results as Markdown."""
    facts = found.facts
    lines = [
        f"{facts['date']}; {facts['machine']}; Python {facts['python']}; "
        + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    ]
    for name, rows in found.live.items():
        lines += live_table(name, rows, facts["num_steps"], facts["num_samples"])
    if found.batches:
        lines += ["", "**batches**, linear", ""]
        lines += [f"- {name}: {number:,.0f}" for name, number in found.batches.items()]
    if found.growth:
        lines += ["", "**growth**, logistic", ""]
        lines += [f"- {name}: {number:g}" for name, number in found.growth.items()]
    if found.start:
        lines += ["", "**from the start of the process**, seconds", ""]
        cells = [
            [f"{name}, {state}", *(f"{mark:.2f}" for mark in marks.values())]
            for name, states in found.start.items()
            for state, marks in states.items()
        ]
        lines.append(markdown_table(["", "imported", "built", "first decision", "first update"], cells))
    return "\n".join([*lines, "", f"largest memory of this process: {found.memory:,.0f} MB"])


def live_table(name: str, rows: list[dict[str, Any]], num_steps: int, num_samples: int) -> list[str]:
    """Return the lines of the table of one case."""
    title = f"**{name}**, {num_steps} live steps (select + update), M = {num_samples}"
    header = ("", "median, us", "99th percentile", "worst", "relative", "method")
    cells = [
        [row["name"], *(f"{row[key]:,.0f}" for key in ("median_us", "p99_us", "worst_us"))]
        + [f"{row['relative_to_ppl_bandit']:.2f}", row["note"]]
        for row in rows
    ]
    return ["", title, "", markdown_table(header, cells)]


def draw_live(found: BenchResult, path: Path) -> None:
    """Draw the median time of a live step of every implementation, one panel per case."""
    figure, axes = figure_tools().subplots(
        1, len(found.live), figsize=(5.0 * len(found.live), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (name, rows) in zip(axes[0], found.live.items(), strict=True):
        names, middle = [row["name"] for row in rows][::-1], [row["median_us"] for row in rows][::-1]
        colours = ["#0072B2" if label.startswith("ppl_bandit") else "#777777" for label in names]
        axis.scatter(middle, names, c=colours, s=45, zorder=3)  # not bars: a logarithmic axis has no zero to start from
        for label, value in zip(names, middle, strict=True):
            axis.annotate(f"{value:,.0f}", (value, label), (7, -3), textcoords="offset points", fontsize=8)
        axis.set(xscale="log", xlabel="median, microseconds (logarithmic)", title=name)
        axis.margins(x=0.25, y=0.1)
        axis.grid(axis="x", color="0.92")
    facts = found.facts
    caption = f"{facts['date']}, {facts['machine']}, {facts['num_steps']} steps each, M = {facts['num_samples']}"
    save_figure(figure, "One live step: select and update", caption, path)
