"""Style of all figures: colours and dashes, title, caption, and a matplotlib backend that needs no screen."""

import itertools
import os
import sys
from collections.abc import Iterator
from os import PathLike
from typing import Any

# Dashes differ in black and white; the hues are distinguishable for colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))


def figure_tools() -> Any:
    """Return matplotlib's pyplot, on a backend that needs no screen unless a notebook or the user has chosen another."""
    if "MPLBACKEND" not in os.environ and "matplotlib.pyplot" not in sys.modules:
        import matplotlib

        matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def styles() -> Iterator[tuple[str, Any]]:
    """Yield pairs of colour and dash without end; the first 7 differ in both, the first 49 in at least one."""
    for number in itertools.count():
        cycle, index = divmod(number, len(_COLOURS))
        yield _COLOURS[index], _DASHES[(index + cycle) % len(_DASHES)]


def reward_label(unit: str) -> str:
    """Return the label of an axis of expected rewards, in a unit that may be empty."""
    return f"expected reward{f' ({unit})' if unit else ''}"


def save_figure(figure: Any, title: str, caption: str, path: str | PathLike) -> None:
    """Add a title above and a caption below, write the figure to a file, and close it."""
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=110)
    figure_tools().close(figure)
