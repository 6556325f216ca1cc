"""Room for the rows that a live bandit will learn: looked after now and then, so that most steps do not ask for it.

An engine that keeps its data has room for so many rows; a state with more has another shape, and is compiled for anew. That is
done ahead, once a state is an eighth full: most experiments end before, and those that do not have seven times as many steps to
come as there were, while it compiles.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

__all__ = ["Room", "look"]

_AHEAD = 7  # rows to come for each that was, when the next room is prepared
_EVERY = 8  # a look for each that many rows, of an eighth of them: what it costs is shared by them
_MOST_DOUBLINGS = 24  # of a capacity, in search of the next


class Room(NamedTuple):
    """What the last look at a state found.

    Attributes:
        form: the shapes of its arrays.
        is_growth_prepared: whether the state that has more room is compiled, or being compiled.
        num_sure: rows in all up to which it has room for certain.
        next_look: rows in all at which to look again.
    """

    form: tuple[tuple[int, ...], ...] = ()
    is_growth_prepared: bool = False
    num_sure: int = 0
    next_look: int = 0

    def has(self, num_rows: int) -> bool:
        """Tell whether there is room for certain for so many rows in all."""
        return num_rows <= self.num_sure

    def is_sure(self, num_rows: int) -> bool:
        """Tell whether a state that has learnt so many rows need not be looked at."""
        return num_rows < self.next_look and self.has(num_rows)


def look(reserve: Callable[[Any, int], Any], room: Room, state: Any, num_rows: int) -> tuple[Room, Any]:
    """Look at the room of a state.

    Args:
        reserve: the engine's.
        room: what the last look found.
        num_rows: how many rows the state has learnt.

    Returns:
        What is found, and the state with more room, if it is time to compile for it.
    """
    form, grown = _form(state), None
    is_prepared = room.is_growth_prepared and form == room.form
    if not is_prepared and _form(reserve(state, _AHEAD * num_rows)) != form:
        larger = (reserve(state, 1 << power) for power in range(_MOST_DOUBLINGS))
        grown = next((other for other in larger if _form(other) != form), None)
        is_prepared = True
    if num_rows < room.next_look and form == room.form:  # there is little room left, and it is asked for at every step
        return room._replace(is_growth_prepared=is_prepared), grown
    more = num_rows // _EVERY + 1
    is_roomy = _form(reserve(state, more)) == form
    return Room(form, is_prepared, num_rows + more if is_roomy else num_rows, num_rows + more), grown


def _form(state: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(np.shape(leaf) for leaf in jax.tree.leaves(state))
