"""`ppl-bandit design`: operating characteristics of a design, calibrated if asked for, with a report for a protocol."""

import argparse
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ppl_bandit import selectors
from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import executor_of, make_selectors
from ppl_bandit.display.figure_style import html_figure, html_page, html_paragraphs, html_rows
from ppl_bandit.display.terminal import safe_frame
from ppl_bandit.inputs.numbers import Arms
from ppl_bandit.journal.model_files import ModelFile, load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.trials import stopping
from ppl_bandit.trials.calibrate import calibrate
from ppl_bandit.trials.design import Design, design_settings
from ppl_bandit.trials.looks import endings
from ppl_bandit.trials.operating_characteristics import OperatingCharacteristics, operating_characteristics


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Simulate a design, and write `design.json`, `table.csv`, `design.png` and `report.html`."""
    file = load_model(arguments.model)
    model = file.reward_model()
    design = _design(arguments)
    design.control_index(Arms(model.num_arms, arguments.arms).names)
    scenarios = _scenarios(arguments, file, model)
    cost = f"{len(scenarios)} scenario(s) of {arguments.trials} trials, {design.last_rows} decisions each"
    with executor_of(arguments) as executor:
        if arguments.calibrate is not None:
            if "null" not in scenarios:
                raise ValueError("--calibrate needs the null: give --scenario null=V,V,..., one value per arm")
            progress(
                f"{file.name}: calibrating superiority to a type I error of {arguments.calibrate:g}, plus compilation"
            )
            started = time.perf_counter()
            design = calibrate(
                model,
                design,
                scenarios["null"],
                type_i_error=arguments.calibrate,
                seed=arguments.seed + 1,
                arms=arguments.arms,
                executor=executor,
                progress=not arguments.json,
            )
            fresh = design.calibration or {}
            progress(
                f"calibrated in {time.perf_counter() - started:.0f} s: {design.rule('superiority')}; type I error on fresh "
                f"seeds {fresh['type_i_error']:.4f} ± {fresh['type_i_error_se']:.4f}"
            )
        progress(f"{file.name}: {cost}, plus compilation")
        started = time.perf_counter()
        found = operating_characteristics(
            model,
            design,
            scenarios,
            num_trials=arguments.trials,
            seed=arguments.seed,
            arms=arguments.arms,
            executor=executor,
            progress=not arguments.json,
        )
        progress(f"simulated in {time.perf_counter() - started:.0f} s")
    return _show(found, design, file, arguments, show), 0 if found.is_complete else 130


def _show(
    found: OperatingCharacteristics,
    design: Design,
    file: ModelFile,
    arguments: argparse.Namespace,
    show: ShowLine,
) -> dict[str, Any]:
    table, out = found.table(), arguments.out
    show(design.describe())
    show("")
    shown = [name for name in (*endings(design), "control_kept") if name in table and (table[name] > 0).any()]
    for scenario, row in table.iterrows():
        parts = [
            f"{name.replace('_', ' ')} {row[name]:.4g} ± {row[f'{name}_se']:.2g}" for name in (*shown, "mean_rows")
        ]
        show(f"{scenario}: {', '.join(parts)}")
    out.mkdir(parents=True, exist_ok=True)
    (out / "design.json").write_text(json.dumps(design_settings(design), indent=2) + "\n")
    safe_frame(table).to_csv(out / "table.csv", index_label="scenario")
    found.plot().savefig(out / "design.png", dpi=150)
    (out / "report.html").write_text(_report(found, file.name, arguments.seed))
    show(f"wrote report.html, table.csv, design.png and design.json to {out}")
    return {"design": design_settings(design), "table": table.to_dict("index"), "out": str(out)}


def _report(found: OperatingCharacteristics, name: str, seed: int) -> str:
    """Return the HTML of a design's operating characteristics.

    Args:
        name: of the reward model.
        seed: of the simulation.
    """
    design = found.design
    table = found.table()
    columns = [column for column in table.columns if not column.endswith("_se")]
    rows = [[column.replace("_", " "), *(_cell(row, column) for _, row in table.iterrows())] for column in columns]
    num_trials = " and ".join(f"{num} ({scenario})" for scenario, num in found.num_trials.items())
    cut = "" if found.is_complete else ", interrupted before all had finished"
    lead = f"Simulated trials: {num_trials}{cut}; posterior: {found.method}. Values are given ± their standard error."
    parts = [
        "<h2>The design</h2>",
        html_paragraphs(design.describe().splitlines()),
        "<h2>Operating characteristics</h2>",
        html_rows(["", *map(str, table.index)], rows),
        html_figure(f"Operating characteristics of the design for {name}", found.plot()),
    ]
    return html_page(f"Design of an experiment: {name}", lead, parts, seed)


def _cell(row: Any, column: str) -> str:
    value, error = row[column], row.get(f"{column}_se")
    return f"{value:.4g}" if error is None or not error == error else f"{value:.4g} ± {error:.2g}"


def _design(arguments: argparse.Namespace) -> Design:
    rules = [parse_rule(text) for text in arguments.stop]
    if arguments.calibrate is not None and not any(rule.name == "superiority" for rule in rules):
        rules.append(stopping.superiority(0.99))  # the start of the search
    looks = parse_looks(arguments.looks)
    selector = selectors.fixed()
    if arguments.selector != "equal":
        selector = next(iter(make_selectors([arguments.selector], looks[-1], "--selector").values()))
    control, named = arguments.control, arguments.arms or []
    if control is not None and control not in named and control.isdecimal():
        control = int(control)
    if arguments.softening != 1.0:
        selector = selectors.softened(selector, arguments.softening)
    if (arguments.floor, arguments.cap) != (0.0, 1.0):
        selector = selectors.with_limits(selector, arguments.floor, arguments.cap)
    if arguments.control_share is not None:
        if control is None:
            raise ValueError("--control-share needs the arm that it is for: give --control")
        share = arguments.control_share
        place = control if isinstance(control, int) else named.index(control) if control in named else 0
        selector = selectors.with_control(
            selector, share if share == "sqrt" else _number(share, "--control-share"), place
        )
    return Design(
        looks,
        selector=selector,
        stopping=rules,
        control=control,
        allocation=arguments.allocation,
        lag=arguments.lag,
        burn_in=arguments.burn_in,
        max_rows=arguments.max_rows,
    )


def parse_looks(text: str) -> list[int]:
    """Return numbers of decisions from `100,200,300` or `100:300:100`, first, last and step."""
    try:
        parts = [int(part) for part in text.replace(":", ",").split(",")]
    except ValueError:
        raise ValueError(f"--looks must be numbers such as 100,200,300, or first:last:step, got {text!r}") from None
    if ":" not in text:
        return parts
    if len(parts) != 3 or parts[2] < 1:
        raise ValueError(f"--looks must be first:last:step, such as 300:2000:100, got {text!r}")
    return list(range(parts[0], parts[1] + 1, parts[2]))


def parse_rule(text: str) -> stopping.StoppingRule:
    """Return a stopping rule from `superiority:.99` or `equivalence:.9:.05`: the name and its numbers in order."""
    name, *values = text.split(":")
    known = set(stopping.__all__) - {"StoppingRule", "rule"}
    if name not in known:
        names = ", ".join(sorted(known))
        raise ValueError(f"--stop names the rule {name!r}, expected one of {names}")
    numbers: list[Any] = [_number(value, "--stop") for value in values]
    try:
        return getattr(stopping, name)(*numbers)
    except TypeError:
        raise ValueError(
            f"--stop {text!r} has {len(numbers)} numbers for {name}; such as superiority:.99 or equivalence:.9:.05"
        ) from None


def parse_scenario(text: str, model: RewardModel) -> tuple[str, Any]:
    """Return name and truth from `NAME=V,V,...` or `NAME=SITE:V,V;SITE:V`; `NAME=prior` draws worlds from the prior."""
    name, is_given, values = text.partition("=")
    if not is_given or not name:
        raise ValueError(f"--scenario must be NAME=V,V,... or NAME=SITE:V,V;SITE:V or NAME=prior, got {text!r}")
    if values == "prior":
        return name, "prior"
    sites = {site: numbers for site, _, numbers in (part.rpartition(":") for part in values.split(";"))}
    if "" in sites:
        if len(model.latent_shapes) != 1 or len(sites) != 1:
            raise ValueError(
                f"--scenario {text!r} names no site, but the program has {', '.join(model.latent_shapes)}: give "
                "NAME=SITE:V,V;SITE:V"
            )
        sites = {next(iter(model.latent_shapes)): sites[""]}
    unknown = set(sites) ^ set(model.latent_shapes)
    if unknown:
        raise ValueError(f"--scenario {text!r} must give the sites {', '.join(model.latent_shapes)}, each once")
    return name, {site: _values(own, model.latent_shapes[site], text) for site, own in sites.items()}


def _values(text: str, shape: tuple[int, ...], scenario: str) -> np.ndarray:
    numbers = np.array([_number(part, "--scenario") for part in text.split(",")])
    try:
        return np.broadcast_to(numbers, shape) if numbers.size == 1 else numbers.reshape(shape)
    except ValueError:
        raise ValueError(f"--scenario {scenario!r} has {numbers.size} values for a site of shape {shape}") from None


def _scenarios(arguments: argparse.Namespace, file: ModelFile, model: RewardModel) -> Mapping[str, Any]:
    if arguments.scenario:
        return dict(parse_scenario(text, model) for text in arguments.scenario)
    return ({} if file.truth is None else {"truth": file.truth}) | {"prior": "prior"}


def _number(text: str, option: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{option} has {text!r}, expected a number") from None
