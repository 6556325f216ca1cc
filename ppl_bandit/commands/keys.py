"""`ppl-bandit keys`: make, list and revoke the keys of a service."""

import argparse

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.files.keys import KeyFile


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Run an action; `create` prints the key as the last word of the output, once."""
    file = KeyFile(arguments.file)
    if arguments.action == "create":
        record, key = file.create(arguments.role, arguments.experiment or ())
        opens = ", ".join(record.experiments) or "all experiments"
        show(f"The key {record.id} has the role {record.role} for {opens}. It is shown this once: {key}")
        return {**record._asdict(), "key": key}, 0
    if arguments.action == "revoke":
        record = file.revoke(arguments.id)
        show(f"The key {record.id} with the role {record.role} opens nothing any more; a running service refuses it.")
        return record._asdict(), 0
    records = file.records()
    for record in records:
        show(f"{record.id}  {record.role:<6}  {', '.join(record.experiments) or 'all experiments'}  {record.created}")
    return [record._asdict() for record in records], 0
