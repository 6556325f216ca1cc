"""How many cores there are to work on."""

import os

__all__ = ["num_cores"]


def num_cores() -> int:
    """Count the cores that this process may use, which can be fewer than there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
