"""`ppl-bandit compare`: names become engines and rows, results become files."""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ppl_bandit.commands.model_files import ModelFile, ModelFileError, load_model
from ppl_bandit.commands.words import ENGINES, SELECTORS, check_words
from ppl_bandit.comparison.measuring.models import rank_models
from ppl_bandit.comparison.measuring.posteriors import compare
from ppl_bandit.comparison.measuring.results import Score
from ppl_bandit.comparison.measuring.simulated import simulate_rows
from ppl_bandit.comparison.showing.figures import draw_figures
from ppl_bandit.comparison.showing.records import records
from ppl_bandit.comparison.showing.report import comparison_report, ranking_report
from ppl_bandit.inputs.data_files import read_data, write_data
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["CompareOptions", "compare_from_arguments"]


class CompareOptions(NamedTuple):
    """What the command line asked for.

    Attributes:
        data: a CSV file; None simulates rows.
        num_rows: how many to simulate.
        play: the selector that plays simulated rows, by name; None plays the arms in turn.
        engines: names of the engines, in order.
        arms: names of the arms, in the program's order; None numbers them.
        out: folder for what is written.
        num_samples: posterior draws of each run.
        seed: of all random numbers.
        has_report: whether to write an HTML report.
    """

    data: Path | None
    num_rows: int
    play: str | None
    engines: list[str]
    arms: list[str] | None
    out: Path
    num_samples: int
    seed: int
    has_report: bool


def compare_from_arguments(
    arguments: argparse.Namespace, say: Callable[[str], None], progress: Callable[[str], None]
) -> bool:
    """Run `ppl-bandit compare`; return whether it came to its end, and was not interrupted.

    Args:
        say: told the results.
        progress: told one line as each engine or model is done.

    Raises:
        ValueError: for a mistake of the caller's: a model, a file or an option that cannot be used.
    """
    options = CompareOptions(
        arguments.data,
        arguments.simulate,
        arguments.play,
        list(ENGINES) if arguments.engines is None else _words(arguments.engines),
        None if arguments.arms is None else _words(arguments.arms),
        arguments.out,
        arguments.samples,
        arguments.seed,
        arguments.report,
    )
    if len(arguments.models) > 1 and arguments.engines is not None:
        raise ValueError(
            f"--engines compares engines on one model, and {len(arguments.models)} models were given, which are ranked "
            "instead: leave it out, or give one model"
        )
    run = _rank if len(arguments.models) > 1 else _compare
    words, found, files = run(arguments.models, options, progress)
    if arguments.json:
        say(json.dumps({**found, "files": [str(path) for path in files]}, indent=2))
    else:
        say(words)
        say("\n" + "\n".join(f"wrote {path}" for path in files))
    return bool(found.get("is_complete", True))  # a ranking has no such end


def _compare(
    specs: list[str], options: CompareOptions, progress: Callable[[str], None]
) -> tuple[str, dict[str, Any], list[Path]]:
    check_words(options.engines or [""], ENGINES, "--engines")
    (file,) = [load_model(spec) for spec in specs]
    model = _read(file)
    data = _rows(file, model, options)
    result = compare(
        model,
        data,
        {name: ENGINES[name] for name in options.engines},
        num_samples=options.num_samples,
        arms=options.arms,
        seed=options.seed,
        name=file.name,
        say=progress,
    )
    found = records(result)
    options.out.mkdir(parents=True, exist_ok=True)
    files = [options.out / "comparison.json", options.out / "data.csv"]
    files[0].write_text(json.dumps(found, indent=2) + "\n")
    write_data(files[1], model, result.data, result.arms)
    figures = draw_figures(result, options.out)
    files += figures.values()
    if options.has_report:
        files.append(options.out / "report.html")
        files[-1].write_text(comparison_report(result, figures, file.path.read_text()), encoding="utf-8")
    return str(result), found, files


def _rank(
    specs: list[str], options: CompareOptions, progress: Callable[[str], None]
) -> tuple[str, dict[str, Any], list[Path]]:
    files = [load_model(spec) for spec in specs]
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        names = [str(file.path) for file in files]
    models = {name: _read(file) for name, file in zip(names, files, strict=True)}
    if options.data is None:
        rows = _rows(files[0], models[names[0]], options)
        data = {
            name: rows if model.context is not None else rows._replace(context=None) for name, model in models.items()
        }
    else:
        data = {name: read_data(options.data, model, options.arms) for name, model in models.items()}
    ranking = rank_models(models, data, num_samples=2 * options.num_samples, seed=options.seed, say=progress)
    found = {"num_rows": ranking.num_rows, "seed": ranking.seed, "ranking": [_plain(score) for score in ranking.scores]}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "ranking.json"
    path.write_text(json.dumps(found, indent=2) + "\n")
    written = [path]
    if options.has_report:
        written.append(options.out / "report.html")
        sources = {name: file.path.read_text() for name, file in zip(names, files, strict=True)}
        explanations = {score.name: score.explanation for score in ranking.scores}
        written[-1].write_text(ranking_report(ranking, explanations, sources), encoding="utf-8")
    return str(ranking), found, written


def _plain(score: Score) -> dict[str, Any]:
    """Return a score for JSON, which has no nan."""
    return {
        name: None if isinstance(value, float) and math.isnan(value) else value
        for name, value in score._asdict().items()
    }


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _read(file: ModelFile) -> RewardModel:
    return RewardModel(file.program, file.num_arms, file.context, file.outcomes)


def _rows(file: ModelFile, model: RewardModel, options: CompareOptions) -> Interaction:
    """Read the rows, or simulate them."""
    if options.data is not None:
        return read_data(options.data, model, options.arms)
    if file.truth is None:
        raise ModelFileError(
            f"{file.path} gives no `truth` to simulate from: add a line such as `truth = {{site: value}}`, or give rows of "
            "your own with --data FILE.csv"
        )
    check_words([] if options.play is None else [options.play], SELECTORS, "--play")
    selector = None if options.play is None else SELECTORS[options.play][1]()
    return simulate_rows(
        model, file.truth, options.num_rows, contexts=file.contexts, selector=selector, seed=options.seed
    )
