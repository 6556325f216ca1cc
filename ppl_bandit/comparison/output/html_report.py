"""HTML reports of comparisons and rankings: one self-contained file, without scripts, with inlined figures."""

from collections.abc import Mapping
from pathlib import Path

from ppl_bandit.comparison.measurement.results import Comparison, Ranking
from ppl_bandit.comparison.output.conclusions import answer, verdict
from ppl_bandit.comparison.output.tables import TextTable, conclusion, ranking_table, tables
from ppl_bandit.display.html_pages import escaped, html_figure, html_page, html_paragraphs, html_rows, preformatted

_CAPTIONS = {
    "answer": "Expected reward of each arm, and the probability that it is best, by engine",
    "densities": "Marginal posterior density of each latent, engines over the reference",
    "forest": "Intervals of each latent, by engine",
    "best_arms": "Probability that each arm is best, by engine",
    "costs": "Error of each engine against the time it takes",
    "predictive": "Posterior predictive check, arm by arm",
    "stream": "Errors of each engine as the rows grow",
}


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
    parts = [f'<p class="answer">{escaped(answer(result))}</p>']
    parts += [html_figure(_CAPTIONS["answer"], figures["answer"])] if "answer" in figures else []
    parts += [
        "<h2>Would another engine have made a different decision?</h2>",
        html_paragraphs(verdict(result).splitlines()),
    ]
    parts += [html_paragraphs([f"{label} was not run: {why}"]) for label, why in result.refused.items()]
    parts += [_table(table) for table in tables(result)]
    parts.append("<h2>Figures</h2>")
    parts += [html_figure(_CAPTIONS.get(name, name), path) for name, path in figures.items() if name != "answer"]
    explanations = {result.reference.name: result.reference.explanation}
    explanations |= {label: engine.explanation for label, engine in result.engines.items()}
    for label, explanation in explanations.items():
        parts += [f"<h2>Engine {escaped(label)}</h2>", preformatted(str(explanation))]
    parts += ["<h2>The program</h2>", preformatted(source)]
    return html_page(f"Engines compared: {result.name}", lead, parts, result.seed)


def ranking_report(ranking: Ranking, sources: Mapping[str, str]) -> str:
    """Return the HTML of a ranking.

    Args:
        sources: {name: text of the program}.
    """
    parts = [html_paragraphs(conclusion(ranking)), _table(ranking_table(ranking))]
    explanations = {score.name: score.explanation for score in ranking.scores}
    for name, source in sources.items():
        parts += [f"<h2>{escaped(name)}</h2>", preformatted(source), preformatted(explanations[name])]
    return html_page("Models ranked", f"{ranking.num_rows} rows, seed {ranking.seed}.", parts, ranking.seed)


def _table(table: TextTable) -> str:
    note = f'<p class="note">{escaped(table.note)}</p>\n' if table.note else ""
    return f"<h2>{escaped(table.title)}</h2>\n{note}{html_rows(table.header, table.rows)}"
