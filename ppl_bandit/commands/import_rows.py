"""`ppl-bandit import LOG.csv`: record the rows of a table in a journal, to continue them as an experiment."""

import argparse

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.report import learn_table, read_arguments, table_program
from ppl_bandit.journal.journal import Journal


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
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
