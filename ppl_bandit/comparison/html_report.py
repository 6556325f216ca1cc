"""HTML reports of comparisons and rankings: one self-contained file, without scripts, with inlined figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ppl_bandit.comparison.results import QUANTILES, Comparison, EngineResult, Ranking, StreamPoint, largest_error
from ppl_bandit.comparison.tables import TextTable, answer, conclusion, ranking_table, tables, verdict
from ppl_bandit.display.figure_style import escaped, html_figure, html_page, html_paragraphs, html_rows, preformatted
from ppl_bandit.display.terminal import to_plain

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


_OF_REFERENCE = (
    "name",
    "is_exact",
    "is_trusted",
    "description",
    "best_arm_probs",
    "num_candidates",
    "propensities",
)


def comparison_records(result: Comparison) -> dict[str, Any]:
    """Return everything that a comparison measured; values that are not finite become None."""
    reference, floor = result.reference, result.reference.floor
    distances = {"best_arm_probs_distance": floor.best_arm_probs, "other_arm_prob": floor.other_arm_prob}
    records = {
        "program": result.name,
        "num_rows": len(result.data.arm),
        "arms": [str(arm) for arm in result.arms],
        "num_samples": result.num_samples,
        "seed": result.seed,
        "answer": answer(result),
        "selector": result.selector,
        "has_compilation_cache": result.is_cached,
        "reference": {name: getattr(reference, name) for name in _OF_REFERENCE} | {"floor": distances},
        "refused": result.refused,
        "is_complete": result.is_complete,
        "engines": {label: _engine_record(result, engine) for label, engine in result.engines.items()},
        "stream": [_stream_record(point) for point in result.stream],
    }
    return to_plain(records)


def ranking_records(ranking: Ranking) -> dict[str, Any]:
    """Return the scores of a ranking; values that are not finite become None."""
    return to_plain({"num_rows": ranking.num_rows, "seed": ranking.seed, "ranking": ranking.scores})


def _engine_record(result: Comparison, engine: EngineResult) -> dict[str, Any]:
    errors, floor = engine.latents, result.reference.floor
    measured = {
        "mean_error": errors.mean,
        "sd_error": errors.sd,
        "wasserstein": errors.wasserstein,
        "wasserstein_floor": floor.wasserstein,
        "kolmogorov": errors.kolmogorov,
        "kolmogorov_floor": floor.kolmogorov,
    }
    return {
        "seconds_cold": engine.seconds_cold,
        "seconds_warm": engine.seconds_warm,
        "info": engine.info,
        "decisions": engine.decisions,
        "latents": [
            {
                "latent": name,
                **{what: {"value": value[k], "error": error[k]} for what, (value, error) in measured.items()},
                "quantile_errors": {f"{q:g}": errors.quantiles.value[i, k] for i, q in enumerate(QUANTILES)},
                "ess": engine.ess[k],
                "r_hat": engine.r_hat[k],
            }
            for k, name in enumerate(result.labels)
        ],
    }


def _stream_record(point: StreamPoint) -> dict[str, Any]:
    floor = point.reference.floor
    return {
        "num_rows": point.num_rows,
        "floor": {
            "wasserstein": largest_error(floor.wasserstein.value),
            "best_arm_probs_distance": floor.best_arm_probs.value,
            "other_arm_prob": floor.other_arm_prob.value,
        },
        "engines": {
            label: {
                "mean_error": largest_error(latents.mean.value),
                "sd_error": largest_error(latents.sd.value),
                "wasserstein": largest_error(latents.wasserstein.value),
                "best_arm_probs_distance": decisions.best_arm_probs_distance.value,
                "num_candidates": decisions.num_candidates.value,
                "other_arm_prob": decisions.other_arm_prob.value,
            }
            for label, (latents, decisions) in point.engines.items()
        },
    }
