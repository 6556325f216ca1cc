"""A bandit that has learnt the rows of a table, by a ready program or by one of the user's own."""

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bandit.commands.model_files import ModelFile, load_model
from ppl_bandit.commands.ready_programs import TableProgram, choose_program
from ppl_bandit.inputs.data_frames import context_columns, contexts_from_columns
from ppl_bandit.inputs.tables import Table, read_plays
from ppl_bandit.live.bandit import Bandit


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
