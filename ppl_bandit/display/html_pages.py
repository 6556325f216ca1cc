"""HTML pages of reports: one self-contained file, without scripts, with inlined figures, and with the versions that made it."""

import base64
import contextlib
import datetime
import html
import importlib.metadata
import io
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.display.terminal import printable

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
figure img { background: #fff; }
@media (prefers-color-scheme: dark) {
  body { color: #e4e4e4; background: #16181c; } p.lead, p.note { color: #aaa; } pre { background: #22252b; }
  th, td { border-bottom-color: #3a3d44; } a { color: #7ab8e8; }
}
""".strip()

_PACKAGES = ("ppl_bandit", "numpyro", "jax", "jaxlib", "numpy", "scipy", "arviz")


def escaped(text: str) -> str:
    """Return a text for HTML: without markup and control characters."""
    return html.escape(printable(text))


def html_page(title: str, lead: str, parts: Sequence[str], seed: int) -> str:
    """Return a page: title, lead, parts that are HTML already, then date, seed and versions."""
    versions = [f"made on {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC", f"seed {seed}"]
    versions += [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    versions += [f"{package} {number}" for package, number in installed_versions(_PACKAGES).items()]
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escaped(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{escaped(title)}</h1>\n'
        f'<p class="lead">{escaped(lead)}</p>\n{body}\n<h2>Versions and seed</h2>\n'
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
