"""The style of all figures, and densities of draws for them."""

import base64
import contextlib
import datetime
import html
import importlib.metadata
import io
import itertools
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bandit.display.terminal import printable

# Dashes differ in black and white; the hues are distinguishable for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", None)  # None: the colour of texts
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def figure_tools() -> Any:
    """Return matplotlib's pyplot, on a backend that needs no screen unless a notebook or the user has chosen another."""
    if "MPLBACKEND" not in os.environ and "matplotlib.pyplot" not in sys.modules:
        import matplotlib

        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def ink() -> str:
    """Return the colour of texts, for what is black on white: a style of the user may have a dark background."""
    return figure_tools().rcParams["text.color"]


def styles() -> Iterator[tuple[str, Any]]:
    """Yield pairs of colour and dash without end; the first 7 differ in both, the first 49 in at least one."""
    for number in itertools.count():
        cycle, index = divmod(number, len(_COLOURS))
        yield _COLOURS[index] or ink(), _DASHES[(index + cycle) % len(_DASHES)]


def reward_label(unit: str) -> str:
    """Return the label of an axis of expected rewards, in a unit that may be empty."""
    return f"expected reward{f' ({unit})' if unit else ''}"


def save_figure(figure: Any, title: str, caption: str, path: str | PathLike) -> None:
    """Add a title above and a caption below, write the figure to a file, and close it."""
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=110)
    figure_tools().close(figure)


_NUM_BINS = 2000


def density_grid(draws: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Return points at which to draw a density: nearly all draws and a margin, within the bounds of the support."""
    low, high = np.quantile(draws, (0.0005, 0.9995))
    margin = 0.08 * (high - low)
    return np.linspace(max(low - margin, bounds[0]), min(high + margin, bounds[1]), 300)


def kernel_density(draws: np.ndarray, grid: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """Estimate a density with a Gaussian kernel, reflected at the bounds of the support to keep the mass inside."""
    centre, spread = np.median(draws), np.subtract(*np.quantile(draws, (0.84, 0.16))) / 2
    width = max(spread, 1e-12 * max(1.0, abs(centre))) * 1.06 * draws.size**-0.2
    counts, edges = np.histogram(draws, np.linspace(grid[0] - 6 * width, grid[-1] + 6 * width, _NUM_BINS + 1))
    middle = (edges[1:] + edges[:-1]) / 2
    density = np.zeros(grid.size)
    for points in (grid, *(2.0 * bound - grid for bound in bounds if np.isfinite(bound))):
        density += np.exp(-0.5 * np.square((points[:, None] - middle) / width)) @ counts
    return density / (draws.size * width * np.sqrt(2.0 * np.pi))


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1b1b; max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0.2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.lead { color: #555; margin-top: 0; } p.answer { font-size: 1.12rem; }
p.note { color: #444; font-size: 13px; max-width: 60rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 14px 3px 0; border-bottom: 1px solid #ddd; white-space: nowrap; }
th { border-bottom: 2px solid #555; }
pre { background: #f5f5f5; padding: 0.8rem 1rem; overflow-x: auto; font-size: 12.5px; line-height: 1.4; }
img { max-width: 100%; height: auto; }
figure { margin: 1.2rem 0; }
@media (prefers-color-scheme: dark) {
  figure img { filter: invert(1) hue-rotate(180deg); mix-blend-mode: screen; }
  body { color: #e4e4e4; background: #16181c; } p.lead, p.note { color: #aaa; } pre { background: #22252b; }
  th, td { border-bottom-color: #3a3d44; } a { color: #7ab8e8; }
}
""".strip()

_PACKAGES = ("ppl_bandit", "numpyro", "jax", "jaxlib", "numpy", "scipy", "arviz")


def escaped(text: str) -> str:
    """Return a text for HTML: without markup and control characters."""
    return html.escape(printable(text))


def html_page(title: str, lead: str, parts: Sequence[str], seed: int | None) -> str:
    """Return a page: title, lead, parts that are HTML already, then date, seed (if random numbers were used) and versions."""
    versions = [
        f"made on {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        *([] if seed is None else [f"seed {seed}"]),
    ]
    versions += [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    versions += [f"{package} {number}" for package, number in installed_versions(_PACKAGES).items()]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escaped(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n'
        f'<p class="lead">{escaped(lead)}</p>\n{body}\n<h2>Versions{"" if seed is None else " and seed"}</h2>\n'
        f"{preformatted(chr(10).join(versions))}\n</body>\n</html>\n"
    )


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed."""
    versions = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def html_paragraphs(lines: Sequence[str]) -> str:
    """Return one paragraph per line."""
    return "\n".join(f"<p>{escaped(line)}</p>" for line in lines)


def html_rows(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that scrolls sideways if it is too wide."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escaped(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>\n<thead>{line(header, "th")}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def html_figure(caption: str, picture: Path | Any) -> str:
    """Return a figure with its alternative text: of a PNG file, or of a matplotlib figure, which is closed."""
    if isinstance(picture, Path):
        data = picture.read_bytes()
    else:
        stream = io.BytesIO()
        picture.savefig(stream, format="png", dpi=110)
        figure_tools().close(picture)
        data = stream.getvalue()
    text = escaped(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>'


def preformatted(text: str) -> str:
    """Return text in a fixed-width font."""
    return f"<pre>{escaped(text)}</pre>"
