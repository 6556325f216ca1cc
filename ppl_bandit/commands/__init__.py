"""The command line: one file per command."""

from collections.abc import Callable
from typing import Any

ShowLine = Callable[[str], None]
CommandResult = tuple[Any, int]  # the result for `to_plain`, and the exit status
