"""Capacity of states that store rows: how many more rows fit, and the state with the next larger capacity.

A state with a larger capacity has other shapes, so its functions are compiled again. The live bandit compiles them in the
background, before the state is full.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

__all__ = ["check_capacity"]

_MAX_POWER = 24


def check_capacity(reserve: Callable[[Any, int], Any], state: Any) -> tuple[int, Any]:
    """Return a number of rows that certainly still fit into a state, and the state with the next larger capacity.

    Args:
        reserve: the engine's `Capabilities.reserve`.

    Returns:
        The number is at least half of the free capacity. The state is None if it did not grow for 2^24 more rows.
    """
    shapes = _shapes(state)
    for power in range(_MAX_POWER + 1):
        larger = reserve(state, 1 << power)
        if _shapes(larger) != shapes:
            return (1 << power) // 2, larger
    return 1 << _MAX_POWER, None


def _shapes(state: Any) -> list[tuple[int, ...]]:
    return [np.shape(leaf) for leaf in jax.tree.leaves(state)]
