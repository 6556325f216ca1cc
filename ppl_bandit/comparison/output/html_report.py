"""HTML reports of comparisons and rankings: one self-contained file, without scripts, with inlined figures."""

import base64
import html
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

from ppl_bandit.comparison.measurement.results import Comparison, Ranking
from ppl_bandit.comparison.output.conclusions import answer, verdict
from ppl_bandit.comparison.output.tables import TextTable, conclusion, ranking_table, tables

__all__ = ["comparison_report", "ranking_report"]

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
""".strip()

_CAPTIONS = {
    "answer": "Expected reward of each arm, and the probability that it is best, by engine",
    "densities": "Marginal posterior density of each latent, engines over the reference",
    "forest": "Intervals of each latent, by engine",
    "best_arms": "Probability that each arm is best, by engine",
    "costs": "Error of each engine against the time it takes",
    "predictive": "Posterior predictive check, arm by arm",
    "stream": "Errors of each engine as the rows grow",
}

_PACKAGES = ("ppl_bandit", "numpyro", "jax", "jaxlib", "numpy", "scipy", "arviz")


def comparison_report(result: Comparison, figures: Mapping[str, Path], source: str) -> str:
    """Return the HTML of a comparison.

    Args:
        figures: {name: PNG file}.
        source: the text of the program.
    """
    lead = (
        f"{len(result.data.arm)} rows, {len(result.arms)} arms, M = {result.num_samples} draws a run, seed {result.seed}. "
        f"Reference: {result.reference.description}."
    )
    parts = [f'<p class="answer">{html.escape(answer(result))}</p>']
    parts += [_figure(_CAPTIONS["answer"], figures["answer"])] if "answer" in figures else []
    parts += [
        "<h2>Would another engine have made a different decision?</h2>",
        _paragraphs(verdict(result).splitlines()),
    ]
    parts += [_paragraphs([f"{label} was not run: {why}"]) for label, why in result.refused.items()]
    parts += [_table(table) for table in tables(result)]
    parts.append("<h2>Figures</h2>")
    parts += [_figure(_CAPTIONS.get(name, name), path) for name, path in figures.items() if name != "answer"]
    explanations = {result.reference.name: result.reference.explanation}
    explanations |= {label: engine.explanation for label, engine in result.engines.items()}
    for label, explanation in explanations.items():
        parts += [f"<h2>Engine {html.escape(label)}</h2>", _pre(str(explanation))]
    parts += ["<h2>The program</h2>", _pre(source)]
    return _page(f"Engines compared: {result.name}", lead, parts, result.seed)


def ranking_report(ranking: Ranking, explanations: Mapping[str, str], sources: Mapping[str, str]) -> str:
    """Return the HTML of a ranking.

    Args:
        explanations: {name: explanation of the program's posterior}.
        sources: {name: text of the program}.
    """
    parts = [_paragraphs(conclusion(ranking)), _table(ranking_table(ranking))]
    for name, source in sources.items():
        parts += [f"<h2>{html.escape(name)}</h2>", _pre(source), _pre(explanations[name])]
    return _page("Models ranked", f"{ranking.num_rows} rows, seed {ranking.seed}.", parts, ranking.seed)


def _page(title: str, lead: str, parts: Sequence[str], seed: int) -> str:
    versions = [f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    body = "\n".join(parts)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{html.escape(title)}</h1>\n'
        f'<p class="lead">{html.escape(lead)}</p>\n{body}\n<h2>Versions and seed</h2>\n'
        f"{_pre(chr(10).join([*versions, f'seed {seed}']))}\n</body>\n</html>\n"
    )


def _paragraphs(lines: Sequence[str]) -> str:
    return "\n".join(f"<p>{html.escape(line)}</p>" for line in lines)


def _table(table: TextTable) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join(line(row, "td") for row in table.rows)
    note = f'<p class="note">{html.escape(table.note)}</p>\n' if table.note else ""
    return (
        f'<h2>{html.escape(table.title)}</h2>\n{note}<div class="wide"><table>\n<thead>{line(table.header, "th")}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _figure(caption: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/png;base64,{data}"></figure>'


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>"
