"""Progress of a long computation, as lines on the standard error."""

import math
import sys
import time
from collections.abc import Callable, Sequence

from ppl_bandit.display.terminal import printable

_SECONDS_BETWEEN_LINES = {True: 2.0, False: 20.0}  # on a terminal, and elsewhere


def progress_reporter(
    name: str, total: int, unit: str, more: str = "", seconds: Sequence[float] | None = None
) -> Callable[[int], None]:
    """Return a function of the number of units that have finished since its last call; it writes what is done and left.

    Args:
        name: of the computation.
        total: number of units.
        unit: in the plural.
        more: what follows the time that is left.
        seconds: that the units take on two idle cores, one after another, which a line says at once; later lines scale them
            with the time so far. None if the units take equally long.
    """
    name = printable(name)
    each = [1.0] * total if seconds is None else list(seconds)
    done, begun, last = 0, time.monotonic(), -math.inf
    if seconds is not None:
        sys.stderr.write(f"{name}: about {sum(each):.0f} s on two idle cores{more}\n")

    def advance(num: int) -> None:
        nonlocal done, last
        done, now = min(done + num, total), time.monotonic()
        if now - last > _SECONDS_BETWEEN_LINES[sys.stderr.isatty()] or done == total:
            last, left = now, (now - begun) * sum(each[done:]) / sum(each[:done])
            sys.stderr.write(f"{name}: {done} of {total} {unit}, about {left:.0f} s left{more}\n")

    return advance
