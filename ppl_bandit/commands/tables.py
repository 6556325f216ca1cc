"""A bandit that has learnt the rows of a table, by a ready program or by one of the user's own."""

import argparse
import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.commands.model_files import ModelFile, bundled_models, load_model
from ppl_bandit.inputs.data_frames import context_columns, contexts_from_columns
from ppl_bandit.inputs.tables import Table, read_plays
from ppl_bandit.live.bandit import Bandit

_LARGEST_DISPERSION = 1.5  # variance over mean of counts, within arms; Poisson intervals are 18% too narrow there


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
    worth = _worth(reward, code, len(table.arms))
    found, why = _kind(reward, code, worth)
    if kind is not None and kind != found:
        is_possible = {
            "binary": worth is not None,
            "counts": bool(((reward >= 0) & (reward == reward.round())).all()),
            "positive": bool((reward > 0).all()),
            "real": True,
        }
        if not is_possible[kind]:
            raise ValueError(f"--kind {kind} does not fit: {why}; leave --kind out, or use real")
        found, why = kind, "as --kind says"
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


def _worth(reward: np.ndarray, code: np.ndarray, num_arms: int) -> np.ndarray | None:
    """Return what a success of each arm is worth, if each arm's outcomes are 0 and one amount; else None."""
    amounts = [np.unique(reward[(code == arm) & (reward != 0)]) for arm in range(num_arms)]
    if all(own.size <= 1 and (own > 0).all() for own in amounts):
        single = {float(own[0]) for own in amounts if own.size} or {1.0}
        if all(own.size for own in amounts) or len(single) == 1:
            rest = next(iter(single))
            return np.array([own[0] if own.size else rest for own in amounts])
    return None


def _kind(reward: np.ndarray, code: np.ndarray, worth: np.ndarray | None) -> tuple[str, str]:
    """Return the kind of outcome, and why."""
    if worth is not None and ((reward == 0).any() or (worth == 1).all()):
        is_plain = (worth == 1).all()
        return "binary", "every reward is 0 or 1" if is_plain else "every reward is 0 or one amount of its arm"
    if ((reward >= 0) & (reward == reward.round())).all() and reward.any():
        means = np.bincount(code, reward) / np.bincount(code)
        within = float(np.square(reward - means[code]).mean() / reward.mean())
        if within <= _LARGEST_DISPERSION:
            return "counts", f"the rewards are counts (their variance is {within:.2g} of their mean)"
        return "real", f"the rewards vary more than Poisson counts (their variance is {within:.2g} of their mean)"
    if (reward > 0).all():
        return "positive", "every reward is positive"
    zeros = float((reward == 0).mean())
    return "real", f"{zeros:.0%} of the rewards are 0" if zeros > 0.2 else "the rewards are real numbers"


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
        words = f"{file.path}, as --model says"
        yield file, TableProgram(file.path, file.path.read_text(), table.reward, words)
        return
    ready = choose_program(table, kind)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "program.py" if save is None else save
        if save is not None and save.exists():
            raise ValueError(f"{save} exists already: give another name to --save-model")
        path.write_text(ready.source)
        is_success = not np.array_equal(ready.rewards, table.reward)
        remedy = (
            f"to change it, write it with --save-model model.py (from {ready.file}), and give --model model.py"
            if save is None
            else f"written to {save}: change it, and give it with --model"
        ) + ("; it observes successes: with --model, --reward must be a column of 0 and 1" if is_success else "")
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
