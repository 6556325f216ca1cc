"""Entry point of `ppl-bandit`: run a command and turn errors into messages and exit codes.

Each command is a module of this package with a function `execute(arguments, show, progress) -> (result, status)`. `show`
prints a line of the result (nothing with --json), `progress` prints a line on the standard error, and the result is printed
as JSON with --json (`to_plain`).

Exit status: 0 for success; 1 if `journal` found damage or a decision that differs; 2 for invalid input (a program, a file,
an argument); 130 after Ctrl-C or the loss of an executor, with what has finished; 141 if the reader of the output closed it
(`ppl-bandit ... | head`).
"""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ppl_bandit.commands.parser import make_parser
from ppl_bandit.display.terminal import printable, to_plain

_INTERRUPTED = 130  # 128 + SIGINT
_CLOSED_PIPE = 141  # 128 + SIGPIPE
_PLAIN_WARNING = warnings.formatwarning


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    warnings.formatwarning = _format_warning
    arguments = make_parser().parse_args(argv)
    show: Callable[[str], None] = (lambda line: None) if arguments.json else _print
    try:
        module = {"import": "report"}.get(arguments.command, arguments.command)  # both read a table
        command = importlib.import_module(f"ppl_bandit.commands.{module}")
        result, status = command.execute(arguments, show, _print_progress)
        if arguments.json:
            print(json.dumps(to_plain(result), indent=2))
        sys.stdout.flush()
    except KeyboardInterrupt:
        _print_progress(f"ppl-bandit {arguments.command}: interrupted before any result was complete")
        status = _INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it an open file, so that it prints no traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _CLOSED_PIPE
    except (ValueError, OSError, RuntimeError) as error:
        if not _is_user_error(error):
            raise
        _print_progress(f"ppl-bandit {arguments.command}: {error}")
        return 2
    if status == _INTERRUPTED:  # do not wait for computations in other threads, which cannot be stopped
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _is_user_error(error: Exception) -> bool:
    if isinstance(error, ValueError | OSError):
        return True
    from ppl_bandit.journal.stores.store import JournalError
    from ppl_bandit.simulation.executors import ExecutorLost, WorkerFailed

    return isinstance(error, JournalError | ExecutorLost | WorkerFailed)


def _print(line: str) -> None:
    print(printable(line), flush=True)


def _print_progress(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _format_warning(*arguments: Any, **more: Any) -> str:
    return printable(_PLAIN_WARNING(*arguments, **more))


if __name__ == "__main__":
    sys.exit(main())
