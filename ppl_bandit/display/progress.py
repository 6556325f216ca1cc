"""Progress of a long computation, as lines on the standard error."""

import math
import sys
import time
from collections.abc import Callable

from ppl_bandit.display.terminal import printable

__all__ = ["progress_reporter"]

_SECONDS_BETWEEN_LINES = {True: 2.0, False: 20.0}  # on a terminal, and elsewhere


def progress_reporter(name: str, total: int, unit: str, more: str = "") -> Callable[[int], None]:
    """Return a function of the number of units that have finished since its last call; it writes what is done and left.

    Args:
        name: of the computation.
        total: number of units.
        unit: in the plural.
        more: what follows the time that is left.
    """
    name = printable(name)
    done, begun, last = 0, time.monotonic(), -math.inf

    def advance(num: int) -> None:
        nonlocal done, last
        done, now = min(done + num, total), time.monotonic()
        if now - last > _SECONDS_BETWEEN_LINES[sys.stderr.isatty()] or done == total:
            last, left = now, (now - begun) * (total - done) / done
            sys.stderr.write(f"{name}: {done} of {total} {unit}, about {left:.0f} s left{more}\n")

    return advance
