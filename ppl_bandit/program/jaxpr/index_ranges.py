"""Index ranges: which positions of an array a traced function reads, as far as some of its inputs determine them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.program.jaxpr.primitives import starts
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, apply_primitive

__all__ = ["UNKNOWN", "IndexRange", "index_ranges"]

UNKNOWN = object()  # a value that is not determined before the function runs


class IndexRange(NamedTuple):
    """The positions that one indexing operation reads along one axis.

    Attributes:
        size: number of valid positions: they lie in [0, size).
    """

    lowest: Array
    highest: Array
    size: int


def index_ranges(closed: ClosedJaxpr, args: Sequence[Any]) -> list[IndexRange]:
    """Return the range of every index that is determined by the arguments that are not `UNKNOWN`."""
    found: list[IndexRange] = []

    def note(eqn: Any, values: list[Any]) -> None:
        if eqn.primitive.name == "gather" and values[1] is not UNKNOWN and 0 not in jnp.shape(values[1]):
            found.extend(IndexRange(jnp.min(first), jnp.max(first), last + 1) for first, last in starts(eqn, values))

    def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        note(eqn, values)
        return [UNKNOWN] * len(eqn.outvars)

    def fold(eqn: Any, values: list[Any]) -> list[Any]:
        note(eqn, values)
        return apply_primitive(eqn, values)

    interpret(Domain(apply, lambda value: value is not UNKNOWN, fold), closed.jaxpr, closed.consts, args)
    return found
