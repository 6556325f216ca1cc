"""`ppl-bandit evaluate`: what may be concluded from a journal or a table; verdict first, then table, then diagnostics."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import find_experiment, make_selectors
from ppl_bandit.display.figure_style import (
    escaped,
    figure_tools,
    html_figure,
    html_page,
    html_paragraphs,
    html_rows,
    preformatted,
)
from ppl_bandit.display.terminal import safe_frame
from ppl_bandit.evaluation.evaluate import evaluate, evaluate_arms, logged_decisions
from ppl_bandit.evaluation.evaluation import Evaluation, percent
from ppl_bandit.evaluation.rejection import ProgramComparison, compare_programs
from ppl_bandit.inputs.data_frames import context_columns
from ppl_bandit.inputs.tables import read_plays
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.model_files import ModelFile, find_program, load_model
from ppl_bandit.journal.open_experiment import read_header
from ppl_bandit.program.model.reward_model import RewardModel

_MOST_NAMED = 6  # arms in a sentence
_MOST_DRAWN = 40  # arms in a figure, and in a printed table
_NOT_IN_JSON = ("sequence_kind", "estimates", "cautions", "is_normal")  # of an `Evaluation`; said in other entries


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Evaluate a target, and write `table.csv`, `sequence.csv` and `evaluation.png`; or compare two programs."""
    is_table, needs_program = (
        Path(arguments.log).suffix.lower() in (".csv", ".tsv"),
        arguments.selector or arguments.against,
    )
    if is_table and arguments.model is None and needs_program:
        option = "--selector" if arguments.selector else "--against"
        raise ValueError(f"{option} needs the program: give --model path/to/file.py, or file.py:function")
    if is_table:
        return _evaluate_table(arguments, show)
    for option in ("arm-column", "arms", "reward", "value", "propensity"):
        if getattr(arguments, option.replace("-", "_")) is not None:
            raise ValueError(f"--{option} names a column of a table, but {arguments.log} is a journal")
    with Journal(arguments.log, read_only=True) as journal:
        name = find_experiment(journal, arguments.name)
        header = read_header(journal.store, name)
        names = header.names
        if arguments.model is None and needs_program:
            arguments.model = find_program(header, arguments.log, "evaluate")
            progress(f"program: {arguments.model}, as the journal says; --model names another")
        settings = {"level": arguments.level, "name": name, "outcome": arguments.outcome}
        return _evaluate(arguments, journal, names, journal.store.last_position(name), settings, show)


def _evaluate_table(arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    columns = {
        "arm": arguments.arm_column,
        "reward": arguments.reward,
        "value": arguments.value,
        "propensity": arguments.propensity,
        "arms": arguments.arms,
    }
    model = None if arguments.model is None else load_model(arguments.model).reward_model()
    table = read_plays(arguments.log, **columns, context=() if model is None else list(context_columns(model)))
    if table.propensity is None:
        raise ValueError(
            f"{arguments.log} has no column of probabilities: name the column with the probability of the arm that was played, "
            "--propensity COLUMN, or say --propensity equal if every arm had the same; "
            f"`ppl-bandit report {arguments.log}` needs none"
        )
    log = logged_decisions(table.frame(), model, arms=table.arms)
    return _evaluate(arguments, log, table.arms, len(table.arm), {"level": arguments.level}, show)


def _evaluate(
    arguments: argparse.Namespace,
    log: Any,
    names: Sequence[Any],
    horizon: int,
    settings: dict[str, Any],
    show: ShowLine,
) -> CommandResult:
    files = [load_model(spec) for spec in (arguments.model, arguments.against) if spec is not None]
    models = [_with_arms(file, len(names)) for file in files]
    if arguments.against is not None:
        first, second = (str(file.path) if files[0].name == files[1].name else file.name for file in files)
        if arguments.html is not None:
            raise ValueError("--html writes the page of one evaluation: leave out --against")
        compared = compare_programs(log, {first: models[0], second: models[1]}, **settings)
        return _show_comparison(compared, arguments.out, show), 0
    settings["model"] = models[0] if models else None
    settings["bounds"] = None if arguments.bounds is None else tuple(arguments.bounds)
    if not (arguments.arm or arguments.contrast or arguments.selector):
        return _show_arms(log, names, settings, arguments, show), 0
    found = evaluate(log, _target(arguments, names, horizon), **settings)
    return _show_evaluation(found, arguments, show), 0


def _show_arms(
    log: Any, names: Sequence[Any], settings: dict[str, Any], arguments: argparse.Namespace, show: ShowLine
) -> dict[str, Any]:
    """Show what every arm earns, with intervals that hold for all arms at once."""
    level, table = settings["level"], evaluate_arms(log, **settings)
    found = {str(name): row for name, row in zip(names, table.itertuples(), strict=True)}
    order = sorted(found, key=lambda name: -found[name].estimate)
    best = found[order[0]]
    near = [name for name in order[1:] if not found[name].upper < best.lower]
    if best.is_refused:
        verdict = best.verdict
    elif near:
        others = ", ".join(near[:_MOST_NAMED]) + (
            f" and {len(near) - _MOST_NAMED} others" if len(near) > _MOST_NAMED else ""
        )
        verdict = f"{order[0]} has the largest estimate, but the data do not separate it from {others}."
    else:
        verdict = f"{order[0]} earns more than every other arm."
    show(f"{verdict}\n")
    rows = [(name, f"{found[name].estimate:.4g}", _arm_interval(name, found[name])) for name in order]
    width = max(map(len, order))
    for name, estimate, interval in rows[:_MOST_DRAWN]:
        show(f"  {name:<{width}}  {estimate:>9}  {interval}")
    if len(rows) > _MOST_DRAWN:
        show(f"  and {len(rows) - _MOST_DRAWN} arms with smaller estimates, in table.csv")
    together = f"The {percent(level)} intervals hold for all arms at once, also if the arms were chosen adaptively"
    show(f"\n{together}; `--contrast ARM OTHER` says more about two of them.")
    parts = [html_rows(("arm", "mean reward", "interval"), rows), html_paragraphs([f"{together}."])]
    _write(arguments, safe_frame(table), "arm", _plot_arms(found, order, level), verdict, parts, show)
    show(f"wrote table.csv and evaluation.png to {arguments.out}")
    arms = {
        name: {"estimate": one.estimate, "interval": (one.lower, one.upper), "is_refused": one.is_refused}
        for name, one in found.items()
    }
    return {"verdict": verdict, "level": level, "arms": arms}


def _arm_interval(name: str, one: Any) -> str:
    if not one.is_refused:
        return f"[{one.lower:.4g}, {one.upper:.4g}]"
    reason = one.verdict.splitlines()[0].removeprefix(f"No interval for {name}: ").rstrip(".")
    return f"no interval: {reason.replace(f'the rewards of {name} ', 'the rewards ').removeprefix(f'{name} ')}"


def _target(arguments: argparse.Namespace, names: Any, horizon: int) -> Any:
    if arguments.selector is not None:
        return next(iter(make_selectors([arguments.selector], horizon, "--selector").values()))
    known = {str(name): name for name in names}
    given = [arguments.arm] if arguments.arm is not None else arguments.contrast
    for arm in given:
        if arm not in known:
            option = "--arm" if arguments.arm is not None else "--contrast"
            raise ValueError(f"{option} names the arm {arm!r}, expected one of {', '.join(known)}")
    return known[given[0]] if len(given) == 1 else (known[given[0]], known[given[1]])


def _with_arms(file: ModelFile, num_arms: int) -> RewardModel:
    if file.num_arms != num_arms:
        raise ValueError(f"{file.path} has {file.num_arms} arms, but the experiment has {num_arms}")
    return file.reward_model()


def _digits(frame: Any) -> str:
    return frame.to_string(float_format=lambda value: f"{value:.4g}")


def _plot_arms(found: dict[str, Any], order: list[str], level: float) -> Any:
    """Return a figure: the mean reward of each arm with its interval, the largest at the top; of many arms, the first ones."""
    shown = order[:_MOST_DRAWN]
    figure, axis = figure_tools().subplots(figsize=(8, 1.2 + 0.3 * len(shown)), layout="constrained")
    for place, name in enumerate(shown):
        one = found[name]
        colour = "0.6" if one.is_refused else "#0072B2"
        if not one.is_refused:
            axis.hlines(place, one.lower, one.upper, color=colour, linewidth=2.2)
        axis.plot(one.estimate, place, "o", color=colour, markersize=5)
    axis.set_yticks(range(len(shown)), [name if len(name) <= 28 else f"{name[:27]}..." for name in shown])
    axis.set(ylim=(len(shown) - 0.5, -0.5), xlabel="mean reward")
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    left_out = (
        f"; {len(order) - len(shown)} arms with smaller estimates are left out" if len(shown) < len(order) else ""
    )
    refused = "; grey: no interval" if any(found[name].is_refused for name in shown) else ""
    figure.suptitle("What every arm earns", fontsize=11)
    figure.supxlabel(
        f"{percent(level)} intervals, which hold for all arms at once{refused}{left_out}", fontsize=8, alpha=0.65
    )
    return figure


def _write(
    arguments: argparse.Namespace, table: Any, index: str, figure: Any, verdict: str, parts: list[str], show: ShowLine
) -> None:
    """Write `table.csv` and `evaluation.png`, and the page if one is wanted."""
    out, (answer, *lines) = arguments.out, verdict.splitlines()
    out.mkdir(parents=True, exist_ok=True)
    table.to_csv(out / "table.csv", index_label=index)
    figure.savefig(out / "evaluation.png", dpi=150)
    if arguments.html is not None:
        first = [f'<p class="answer">{escaped(answer)}</p>', html_paragraphs(lines), html_figure(answer, figure)]
        title = f"{Path(arguments.log).name}: what may be concluded"
        arguments.html.write_text(html_page(title, "", [*first, *parts], None), encoding="utf-8")
        show(f"Page: {arguments.html}.")
    figure_tools().close(figure)


def _show_evaluation(found: Evaluation, arguments: argparse.Namespace, show: ShowLine) -> dict[str, Any]:
    table, out = found.table(), arguments.out
    verdict = found.verdict
    notes = [f"{name.replace('_', ' ')}: {value:.4g}" for name, value in found.diagnostics.items()]
    show("\n".join([f"{verdict}\n\n{_digits(table)}\n", *notes]))
    if found.posterior is not None:
        show(f"the model's own {percent(found.level)} interval: {found.posterior[0]:.4g} to {found.posterior[1]:.4g}")
    show(f"confidence sequence: {found.sequence_kind}")
    cells = [
        (str(name), *(f"{value:.4g}" if value == value else "-" for value in row))
        for name, row in zip(table.index, table.to_numpy(), strict=True)
    ]
    about = html_paragraphs([f"Confidence sequence: {found.sequence_kind}."])
    parts = [html_rows(("estimator", *table.columns), cells), about, preformatted("\n".join(notes))]
    _write(arguments, safe_frame(table), "estimator", found.plot(), verdict, parts, show)
    found.sequence.to_csv(out / "sequence.csv")
    show(f"wrote table.csv, sequence.csv and evaluation.png to {out}")
    last = found.sequence.iloc[-1]
    sequence = {"lower": float(last["lower"]), "upper": float(last["upper"]), "kind": found.sequence_kind}
    more = {"sequence": sequence, "table": table.to_dict("index"), "out": str(out)}
    return {name: value for name, value in found._asdict().items() if name not in _NOT_IN_JSON} | more


def _show_comparison(found: ProgramComparison, out: Path, show: ShowLine) -> dict[str, Any]:
    table = found.table()
    show(f"{found.verdict}\n\n{_digits(table)}\n")
    show(f"width of the doubly robust interval of each arm:\n{_digits(found.widths)}")
    out.mkdir(parents=True, exist_ok=True)
    safe_frame(table).to_csv(out / "table.csv", index_label="program")
    show(f"wrote table.csv to {out}")
    return {
        "verdict": found.verdict,
        "difference": found.difference,
        "table": table.to_dict("index"),
        "widths": found.widths.to_dict(),
        "out": str(out),
    }
