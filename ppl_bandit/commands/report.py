"""`ppl-bandit report LOG.csv`: which arm leads, by how much, how certain that is, from a table and without Python."""

import argparse
from dataclasses import replace

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.tables import learn_table, read_arguments, table_program


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Learn a table and report; the answer comes first, then the program and what was read."""
    table = read_arguments(arguments)
    with table_program(table, arguments.model, arguments.kind, arguments.save_model) as (file, program):
        bandit = learn_table(table, file, program.rewards)
        report = replace(bandit.report(more=arguments.more), title=f"{arguments.table.name}: {len(table.arm):,} rows")
        result = report.to_dict() | {"program": program.words, "table": table.words}
        if arguments.html is not None:
            report.to_html(arguments.html)
    # A table's rows all have their reward.
    show("\n".join(line for line in report.text.splitlines() if not line.startswith("Pending:")))
    show(f"Program: {program.words}.")
    show(f"Table: {table.words}.")
    if arguments.html is not None:
        result["html"] = str(arguments.html)
        show(f"Page: {arguments.html}.")
    return result, 0
