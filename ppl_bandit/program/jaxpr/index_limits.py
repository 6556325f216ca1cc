"""Index ranges and limits: which positions a program reads, and which values of its context keep them inside an axis.

JAX reads the nearest entry where an index is out of range, and counts negative ones from the end, without a word. Here the
indices of a jaxpr are evaluated at several contexts. An index that is an affine function of the context's entries gives a
limit. Any other function, such as one that clips its argument or takes it modulo the size, gives none.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.program.jaxpr.entry_reads import DATA, fold_in_numpy, is_known
from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.program.jaxpr.primitives import starts
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, clips_indices

__all__ = ["IndexLimit", "find_index_limits", "first_outside", "index_ranges"]

_MAX_ENTRIES = 64
_NUM_PROBES = 3
_BASE = 10


class IndexLimit(NamedTuple):
    """An index that is an affine function of entries of the context: it must lie in [0, size).

    Attributes:
        terms: (leaf, entry of the flat leaf, coefficient) of every entry that the index depends on.
        lowest, highest: constants of the affine function, for the arms with the lowest and the highest index.
        size: of the axis.
        has_lower: whether a negative index is refused too; not if the program treats negative values itself.
    """

    terms: tuple[tuple[int, int, int], ...]
    lowest: int
    highest: int
    size: int
    has_lower: bool


def index_ranges(closed: ClosedJaxpr, args: Sequence[Any], *, with_clipped: bool = True) -> list[tuple[int, int, int]]:
    """Return lowest and highest value of every index that the known inputs of a jaxpr determine, and the size of its axis.

    Args:
        args: arrays, and `DATA` for those that are not known.
        with_clipped: whether indices count that the program asks JAX to clip.
    """
    found: list[tuple[int, int, int]] = []

    def note(eqn: Any, values: list[Any]) -> None:
        name = eqn.primitive.name
        known = values[1:2] if name == "gather" else values[1:]
        if name not in ("gather", "dynamic_slice") or not all(map(is_known, known)):
            return
        for first, last in starts(eqn, values):
            if np.size(first) and (with_clipped or not clips_indices(eqn)):
                found.append((int(np.min(first)), int(np.max(first)), last + 1))

    def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        note(eqn, values)
        return [DATA] * len(eqn.outvars)

    def fold(eqn: Any, values: list[Any]) -> Sequence[Any]:
        note(eqn, values)
        return fold_in_numpy(eqn, values)

    with jax.ensure_compile_time_eval():
        interpret(Domain(apply, is_known, fold), closed.jaxpr, closed.consts, args)
    return found


def find_index_limits(closed: ClosedJaxpr, args: Sequence[Any], span: range) -> tuple[IndexLimit, ...]:
    """Return the limits on the context of a traced program.

    Args:
        args: the inputs of the jaxpr: arrays, and `DATA` for those that are not known.
        span: the numbers of the inputs that are leaves of the context, with one row per arm.
    """
    places = [(leaf, entry) for leaf in range(len(span)) for entry in range(args[span[leaf]][0].size)]
    if not places or len(places) > _MAX_ENTRIES:
        return ()
    num = len(places)
    base = np.full((1, num), _BASE)  # positive, so that no index of a usual program is negative
    large = np.random.default_rng(0).integers(_BASE, 10_000, (_NUM_PROBES, num))
    points = np.concatenate([base, base + np.eye(num, dtype=int), large, np.full((1, num), -1)])
    found = [index_ranges(closed, _with_context(args, span, point), with_clipped=False) for point in points]
    if any(len(own) != len(found[0]) for own in found):
        return ()
    limits = []
    for index, (_, _, size) in enumerate(found[0]):
        ends = np.array([own[index][:2] for own in found])  # (points, 2)
        slopes = ends[1 : num + 1] - ends[0]
        predicted = ends[0] + (points - base) @ slopes
        is_affine = np.array_equal(ends[:-1], predicted[:-1])
        if slopes.any() and is_affine and np.array_equal(slopes[:, 0], slopes[:, 1]):
            terms = tuple((*place, int(own)) for place, own in zip(places, slopes[:, 0], strict=True) if own)
            lowest, highest = map(int, ends[0] - base[0] @ slopes)
            is_plain = np.array_equal(ends[-1], np.where(predicted[-1] < 0, predicted[-1] + size, predicted[-1]))
            limits.append(IndexLimit(terms, lowest, highest, size, is_plain))
    return tuple(dict.fromkeys(limits))


def first_outside(limit: IndexLimit, leaves: Sequence[np.ndarray]) -> tuple[int, int] | None:
    """Return the first row whose index is outside the limit, and that index; None if all are inside.

    Args:
        leaves: of the context, each (rows, entries).
    """
    total = sum(coefficient * np.trunc(leaves[leaf][:, entry]) for leaf, entry, coefficient in limit.terms)
    is_outside = total + limit.highest >= limit.size
    if limit.has_lower:
        is_outside |= total + limit.lowest < 0
    if not is_outside.any():
        return None
    row = int(np.argmax(is_outside))
    return row, int(total[row] + (limit.highest if total[row] + limit.highest >= limit.size else limit.lowest))


def _with_context(args: Sequence[Any], span: range, point: np.ndarray) -> list[Any]:
    """Return the inputs of a jaxpr with the entries of the context in place, the same in all rows."""
    given, start = list(args), 0
    for number in span:
        like = args[number]
        own = point[start : start + like[0].size]
        given[number] = np.broadcast_to(own.reshape(like.shape[1:]), like.shape).astype(like.dtype)
        start += own.size
    return given
