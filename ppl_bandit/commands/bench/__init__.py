"""`ppl-bandit bench`: measure live steps, batches and start-up, and compare with NumPy loops."""

import argparse

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.bench.measure import markdown, run_bench

__all__ = ["execute"]


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Measure, and write `bench.json`, `bench.md` and `bench.png`."""
    cases, parts = arguments.cases.split(","), arguments.parts.split(",")
    found = run_bench(cases, parts, arguments.steps, arguments.samples, arguments.out, progress)
    show(f"{markdown(found)}\n\nwrote bench.json, bench.md and bench.png to {arguments.out}")
    return found, 0
