"""`ppl-bandit report LOG.csv`: which arm leads, by how much, how certain that is, from a table and without Python.

`ppl-bandit import LOG.csv` records the rows of a table in a journal, to continue them as an experiment.
"""

import argparse
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.inputs.data_frames import context_columns, contexts_from_columns
from ppl_bandit.inputs.tables import Table, read_plays
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.model_files import ModelFile, bundled_models, load_model
from ppl_bandit.live.bandit import Bandit

_LARGEST_DISPERSION = 1.5  # of the variance over that of a program; its intervals are 18% too narrow there, or too wide
_LEAST_SALES = 5  # of one amount on an arm, after which that amount is taken for known


class TableProgram(NamedTuple):
    """A program that learns a table.

    Attributes:
        file: that it comes from.
        source: its text; of a ready program, with the numbers of this table.
        rewards: (N,), what the program observes of each row.
        words: which program it is and why, in one line.
    """

    file: Path
    source: str
    rewards: np.ndarray
    words: str


def choose_program(table: Table, kind: str | None = None) -> TableProgram:
    """Choose the program for a table's outcome.

    Args:
        kind: binary, counts, positive or real; None finds it.

    Raises:
        ValueError: if the outcomes are not of the given kind.
    """
    reward, code = table.reward, np.array([table.arms.index(name) for name in table.arm])
    # `--value` of a price and a sale says what a sale is worth; `--kind binary` says that it is always the same.
    is_known = table.has_fixed_amounts or kind == "binary"
    worth = _worth(reward, code, len(table.arms), 1 if is_known else _LEAST_SALES)
    found, why = _kind(reward, code, table.arms, worth)
    if kind is not None and kind != found:
        is_possible = {
            "binary": worth is not None,
            "counts": bool(((reward >= 0) & (reward == reward.round())).all()),
            "positive": bool((reward > 0).all()),
            "real": True,
        }
        if not is_possible[kind]:
            raise ValueError(f"--kind {kind} does not fit: {why}; leave --kind out, or use real")
        found, why = kind, f"--kind says so, although {why}"
    centre, scale = float(reward.mean()), float(reward.std()) or 1.0
    settings: dict[str, Any] = {"num_arms": len(table.arms)}
    if found == "binary":
        assert worth is not None
        settings["worth"] = worth.tolist()
        rewards = (reward != 0).astype(float)
    else:
        rewards = reward
    if table.entries:
        name = "binary_by_context" if found == "binary" else "real_by_context"
        settings["columns"] = {
            entry: [float(f"{values.mean():.4g}"), float(f"{values.std() or 1.0:.4g}")]
            for entry, values in table.entries.items()
        }
    else:
        name = found
    if name.startswith("real"):
        settings["centre, scale"] = (float(f"{centre:.4g}"), float(f"{scale:.4g}"))
    elif name in ("counts", "positive"):
        settings["centre"] = float(f"{centre or 1.0:.4g}")
    file = bundled_models()["bernoulli"].parent / "tables" / f"{name}.py"
    return TableProgram(file, _with_settings(file.read_text(), settings), rewards, f"{_WORDS[name]}, because {why}")


_WORDS = {
    "binary": "a success rate for each arm",
    "binary_by_context": "a logistic regression for each arm",
    "counts": "a Poisson mean for each arm",
    "positive": "a mean for each arm with Gamma outcomes",
    "real": "a mean and a spread for each arm",
    "real_by_context": "a linear regression for each arm",
}


_WORTH = "  # of a success on each arm, such as its price"  # the line of the ready programs that says what a success is worth


def _worth(reward: np.ndarray, code: np.ndarray, num_arms: int, least: int) -> np.ndarray | None:
    """Return what a success of each arm is worth, if each arm's outcomes are 0 and one amount; else None.

    Args:
        least: how often an arm must have its amount, unless it is 1 or all arms have the same: one sale tells what that sale
            was worth, and nothing about the next.
    """
    amounts = [np.unique(reward[(code == arm) & (reward != 0)], return_counts=True) for arm in range(num_arms)]
    if any(values.size > 1 or (values <= 0).any() for values, _ in amounts):
        return None
    single = {float(values[0]) for values, _ in amounts if values.size} or {1.0}
    counts = np.array([number.sum() for _, number in amounts])
    if single == {1.0} or (len(single) == 1 and (counts > 0).sum() > 1 and counts.sum() >= least):
        return np.full(num_arms, single.pop())
    return np.array([values[0] for values, _ in amounts]) if counts.min() >= least else None


def _kind(reward: np.ndarray, code: np.ndarray, arms: Sequence[str], worth: np.ndarray | None) -> tuple[str, str]:
    """Return the kind of outcome, and why."""
    if worth is not None and ((reward == 0).any() or (worth == 1).all()):
        is_plain = (worth == 1).all()
        return "binary", "every reward is 0 or 1" if is_plain else "every reward is 0 or one amount of its arm"
    if ((reward >= 0) & (reward == reward.round())).all() and reward.any():
        found, arm = _dispersion(reward, code, lambda mean: mean, lambda mean: 1 / mean)
        where = "" if arm is None else f" on arm {arms[arm]}"
        words = f"(their variance is {found:.2g} of their mean{where})"
        if np.isnan(found):
            return "real", "no arm has enough rows to tell how they vary"
        if arm is None and _fits(found):
            return "counts", f"the rewards are counts {words}"
        return "real", f"the rewards vary {'more' if found > 1 else 'less'} than Poisson counts {words}"
    if (reward > 0).all():
        # The shape of Gamma outcomes, from the mean of log(mean of the arm / reward); within 1.5% of the most likely one.
        means = np.bincount(code, reward) / np.maximum(np.bincount(code), 1)
        s = max(float(np.log(means[code] / reward).mean()), 1e-12)
        shape = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
        found, arm = _dispersion(reward, code, lambda mean: mean**2 / shape, lambda mean: 6 / shape + 0 * mean)
        if arm is None and _fits(found):
            return "positive", "every reward is positive"
        if np.isnan(found):
            return "real", "no arm has enough rows to tell how they vary"
        where = "" if arm is None else f": arm {arms[arm]} differs"
        return "real", f"the rewards are positive, but do not vary as Gamma outcomes of one shape do{where}"
    zeros = float((reward == 0).mean())
    return "real", f"{zeros:.0%} of the rewards are 0" if zeros > 0.2 else "the rewards are real numbers"


def _fits(dispersion: float) -> bool:
    return 1 / _LARGEST_DISPERSION <= dispersion <= _LARGEST_DISPERSION


def _dispersion(
    reward: np.ndarray,
    code: np.ndarray,
    variance: Callable[[np.ndarray], np.ndarray],
    excess: Callable[[np.ndarray], np.ndarray],
) -> tuple[float, int | None]:
    """Return the variance of the rewards over that of a program, and None if no arm differs; else an arm's, and its index.

    An arm differs if its value is too far from 1 by more than two standard errors. nan if no arm has two rows.

    Args:
        variance, excess: mean of an arm -> the program's variance, and its excess kurtosis.
    """
    num, total = np.bincount(code), np.bincount(code, reward)
    arms = np.flatnonzero((num > 1) & (total > 0))  # rewards that are all 0 fit any mean near 0
    if not arms.size:
        return np.nan, None
    means = total / np.maximum(num, 1)
    squares = np.bincount(code, np.square(reward - means[code]))[arms] / variance(means[arms])
    each, error = squares / (num[arms] - 1), 2 * np.sqrt((2 + excess(means[arms])) / num[arms])
    limit = np.clip(1.0, each - error, each + error)  # the nearest to 1 that it may be
    worst = int(np.abs(np.log(np.maximum(limit, 1e-12))).argmax())
    if not _fits(limit[worst]):
        return float(each[worst]), int(arms[worst])
    return float(squares.sum() / (num[arms] - 1).sum()), None


def _with_settings(source: str, settings: dict[str, Any]) -> str:
    """Return a program's text with other values in the lines that set its numbers."""
    for name, value in settings.items():
        written = ", ".join(map(repr, value)) if isinstance(value, tuple) else json.dumps(value, ensure_ascii=False)
        found = re.search(rf"^{re.escape(name)} = .*?(?P<comment>  #.*)?$", source, re.MULTILINE)
        assert found is not None, name
        source = f"{source[: found.start()]}{name} = {written}{found['comment'] or ''}{source[found.end() :]}"
    return source


def read_arguments(arguments: argparse.Namespace) -> Table:
    """Read the table that the arguments name."""
    if arguments.value is not None and arguments.reward is not None:
        raise ValueError("--value and --reward both say what a row earned: give one of them")
    return read_plays(
        arguments.table,
        arm=arguments.arm,
        reward=arguments.reward,
        value=arguments.value,
        propensity=arguments.propensity,
        context=arguments.context,
        arms=arguments.arms,
    )


@contextmanager
def table_program(
    table: Table, model: str | None, kind: str | None, save: Path | None = None
) -> Iterator[tuple[ModelFile, TableProgram]]:
    """Load the program that learns a table; its file is there until the end.

    Args:
        model: the user's own program; None chooses one by the kind of outcome.
        save: where to write the text of the chosen program; None for a temporary file.
    """
    if model is not None:
        if kind is not None:
            raise ValueError("--kind chooses a ready program, and --model names one of your own: give one of them")
        file = load_model(model)
        if file.num_arms != len(table.arms):
            raise ValueError(f"{file.path} has {file.num_arms} arms, but the table has {len(table.arms)}: set num_arms")
        if len(file.outcomes) > 1:
            raise ValueError(
                f"{file.path} has the outcomes {', '.join(file.outcomes)}; a table has one: load it in Python"
            )
        rewards, words = table.reward, f"{file.path}, as --model says"
        if _WORTH in file.path.read_text():  # a ready program that was saved
            worth = np.asarray(file.program.__globals__["worth"], float)
            amounts = worth[[table.arms.index(name) for name in table.arm]]
            if ((rewards == 0) | (rewards == amounts)).all() and not (amounts == 1).all():
                rewards = (rewards != 0).astype(float)
                words += "; rewards are read as successes that are worth its amounts"
        yield file, TableProgram(file.path, file.path.read_text(), rewards, words)
        return
    ready = choose_program(table, kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py" if save is None else save
        if save is not None and save.exists():
            raise ValueError(f"{save} exists already: give another name to --save-model")
        path.write_text(ready.source)
        remedy = (
            f"to change it, write it with --save-model model.py (from {ready.file}), and give --model model.py"
            if save is None
            else f"written to {save}: change it, and give it with --model"
        )
        file = load_model(path)
        file.program.__name__ = ready.file.stem  # in texts; every model file calls its program `model`
        yield file, ready._replace(words=f"{ready.words}; {remedy}")


def learn_table(table: Table, file: ModelFile, rewards: np.ndarray, **place: Any) -> Bandit:
    """Return a bandit that has learnt all rows; `place` is its journal and name."""
    bandit = Bandit(file.program, arms=table.arms, context=file.context, outcomes=file.outcomes, **place)
    lacking = [name for name in context_columns(bandit.model) if name not in table.entries]
    if lacking:
        raise ValueError(f"{file.path} needs the columns {', '.join(lacking)} of the context: name them with --context")
    contexts = contexts_from_columns(bandit.model, len(table.arm), lambda name, kind: table.entries[name])
    bandit.update_many(arms=table.arm, rewards=rewards, contexts=contexts, propensity=table.propensity)
    return bandit


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Learn a table and report; the answer comes first, then the program and what was read."""
    if arguments.command == "import":
        return _record(arguments, show)
    table = read_arguments(arguments)
    with table_program(table, arguments.model, arguments.kind, arguments.save_model) as (file, program):
        bandit = learn_table(table, file, program.rewards)
        report = bandit.report(more=arguments.more)
        # A table's rows all have their reward.
        lines = [line for line in report.text.splitlines() if not line.startswith("Pending:")]
        text = "\n".join([*lines, f"Program: {program.words}.", f"Table: {table.words}."])
        report = replace(report, title=f"{arguments.table.name}: {len(table.arm):,} rows", text=text)
        result = report.to_dict() | {"program": program.words, "table": table.words}
        if arguments.html is not None:
            report.to_html(arguments.html)
    show(text)
    if arguments.html is not None:
        result["html"] = str(arguments.html)
        show(f"Page: {arguments.html}.")
    return result, 0


def _record(arguments: argparse.Namespace, show: ShowLine) -> CommandResult:
    """Record the rows; an experiment that has some already is refused, because they would count twice."""
    if arguments.model is None:
        raise ValueError(
            f"import needs the program that continues the experiment: write one with `ppl-bandit report {arguments.table} "
            "--save-model model.py`, with the same columns, and give --model model.py"
        )
    table, name = read_arguments(arguments), arguments.name or "default"
    found = table_program(table, arguments.model, arguments.kind)
    with found as (file, program), Journal(arguments.journal) as journal:
        if name in journal.experiments():
            raise ValueError(
                f"{arguments.journal} has an experiment {name!r} already: give another --name, or add rows in Python with "
                "update_many"
            )
        learn_table(table, file, program.rewards, journal=journal, name=name).close()
    show(f"recorded {table.words}")
    show(f"in {arguments.journal} as the experiment {name!r}")
    return {"journal": arguments.journal, "name": name, "num_rows": len(table.arm), "table": table.words}, 0
