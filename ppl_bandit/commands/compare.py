"""`ppl-bandit compare`: compare engines on one model, or rank several models, and write the results."""

import argparse
import json
from pathlib import Path
from typing import Any

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import ENGINES, MOVING_ENGINES, SELECTORS, check_names
from ppl_bandit.comparison.engine_comparison import compare
from ppl_bandit.comparison.engine_runs import simulate_rows
from ppl_bandit.comparison.figures import draw_figures
from ppl_bandit.comparison.html_report import comparison_records, comparison_report, ranking_records, ranking_report
from ppl_bandit.comparison.model_ranking import rank_models
from ppl_bandit.inputs.data_files import read_data, write_data
from ppl_bandit.journal.model_files import ModelFile, ModelFileError, load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Compare or rank; the status is 130 if Ctrl-C ended a comparison early."""
    if len(arguments.models) > 1 and arguments.engines is not None:
        raise ValueError(
            f"--engines compares engines on one model, but {len(arguments.models)} models were given, which are ranked: "
            "leave --engines out, or give one model"
        )
    text, result, files = (_rank if len(arguments.models) > 1 else _compare)(arguments, progress)
    show(text)
    show("\n" + "\n".join(f"wrote {path}" for path in files))
    result["files"] = [str(path) for path in files]
    return result, 0 if result.get("is_complete", True) else 130


def _compare(arguments: argparse.Namespace, progress: ShowLine) -> tuple[str, dict[str, Any], list[Path]]:
    file, out = load_model(arguments.models[0]), arguments.out
    model = file.reward_model()
    factories = MOVING_ENGINES if model.moving_sites else ENGINES
    names = list(factories) if arguments.engines is None else arguments.engines
    check_names(names or [""], factories, "--engines")
    comparison = compare(
        model,
        _rows(file, model, arguments),
        {name: factories[name] for name in names},
        num_samples=arguments.samples,
        arms=arguments.arms,
        seed=arguments.seed,
        name=file.name,
        say=progress,
    )
    result = comparison_records(comparison)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / "comparison.json", out / "data.csv"]
    files[0].write_text(json.dumps(result, indent=2) + "\n")
    write_data(files[1], model, comparison.data, comparison.arms)
    figures = draw_figures(comparison, out)
    files += figures.values()
    if arguments.report:
        files.append(out / "report.html")
        files[-1].write_text(comparison_report(comparison, figures, file.path.read_text()), encoding="utf-8")
    return str(comparison), result, files


def _rank(arguments: argparse.Namespace, progress: ShowLine) -> tuple[str, dict[str, Any], list[Path]]:
    files, out = [load_model(spec) for spec in arguments.models], arguments.out
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file.path) for file in files]
    models = {name: file.reward_model() for name, file in zip(names, files, strict=True)}
    if arguments.data is None:
        rows = _rows(files[0], models[names[0]], arguments)
        data = {
            name: rows if model.context is not None else rows._replace(context=None) for name, model in models.items()
        }
    else:
        data = {name: read_data(arguments.data, model, arguments.arms) for name, model in models.items()}
    ranking = rank_models(models, data, num_samples=2 * arguments.samples, seed=arguments.seed, say=progress)
    result = ranking_records(ranking)
    out.mkdir(parents=True, exist_ok=True)
    written = [out / "ranking.json"]
    written[0].write_text(json.dumps(result, indent=2) + "\n")
    if arguments.report:
        written.append(out / "report.html")
        sources = {name: file.path.read_text() for name, file in zip(names, files, strict=True)}
        written[-1].write_text(ranking_report(ranking, sources), encoding="utf-8")
    return str(ranking), result, written


def _rows(file: ModelFile, model: RewardModel, arguments: argparse.Namespace) -> Interaction:
    """Read or simulate the rows."""
    if arguments.data is not None:
        return read_data(arguments.data, model, arguments.arms)
    if file.truth is None:
        raise ModelFileError(
            f"{file.path} has no `truth` to simulate from: add a line such as `truth = {{site: value}}`, or give your own "
            "rows with --data FILE.csv"
        )
    check_names([] if arguments.play is None else [arguments.play], SELECTORS, "--play")
    selector = None if arguments.play is None else SELECTORS[arguments.play][1]()
    return simulate_rows(
        model, file.truth, arguments.simulate, contexts=file.contexts, selector=selector, seed=arguments.seed
    )
