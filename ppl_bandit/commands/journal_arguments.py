"""The arguments of `ppl-bandit journal`, apart from what it does: whoever asks for help need not wait for jax."""

import argparse
from pathlib import Path

__all__ = ["add_arguments"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command's arguments."""
    parser.add_argument("url", metavar="URL", help="path of a journal, sqlite:///path or postgresql://...")
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--name", default=None, help="the experiment (the only one, or 'default')")
    common.add_argument("--json", action="store_true", help="print JSON")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument(
        "--model", metavar="MODEL", help="the program: path/to/file.py, file.py:function, or a bundled model"
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser(
        "status", parents=[common, model], help="arms, counts, pending; with --model the posterior and P(best)"
    )
    show = actions.add_parser("show", parents=[common], help="all that is recorded about one decision")
    show.add_argument("id", metavar="ID", help="the decision's id")
    actions.add_parser("replay", parents=[common, model], help="derive every decision again (needs --model)")
    export = actions.add_parser("export", parents=[common], help="write a table: a row per decision")
    export.add_argument("--to", choices=("csv", "parquet", "netcdf"), required=True, help="the format")
    export.add_argument("--out", type=Path, help="the file (NAME.csv, .parquet or .nc)")
    pending = actions.add_parser("pending", parents=[common], help="decisions that wait for a reward")
    pending.add_argument("--older-than", type=float, metavar="SECONDS", help="only those that have waited longer")
