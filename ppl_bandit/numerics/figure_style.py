"""What all figures share: colours and dashes, a title above, what was run below, and a backend without a screen."""

import itertools
import os
import sys
from collections.abc import Iterator
from os import PathLike
from typing import Any

__all__ = ["figure_tools", "save_figure", "styles"]

# Told apart in black and white by their dashes, in colour by hues that colour-blind readers can separate.
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
    """Yield colours and dashes without end: seven of which no two agree in either, and 49 of which none is another."""
    for number in itertools.count():
        turn, place = divmod(number, len(_COLOURS))
        yield _COLOURS[place], _DASHES[(place + turn) % len(_DASHES)]


def save_figure(figure: Any, title: str, caption: str, path: str | PathLike) -> None:
    """Say above a figure what it shows and below it what was run, write it, and let it go."""
    figure.suptitle(title)
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=110)
    figure_tools().close(figure)
