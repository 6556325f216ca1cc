"""Index ranges and limits: which positions a program reads, and which values of its context keep them inside an axis.

JAX reads the nearest entry where an index is out of range, and counts negative ones from the end, without a word. Here the
indices of a jaxpr are evaluated at several contexts. An index that is an affine function of the context's entries gives a
limit. So does one that is an increasing function of one entry, such as a rounding or a division by a constant: the range of
that entry is found by bisection. Any other function, such as one that clips its argument or takes it modulo the size, gives
none.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import DATA, Domain, fold_in_numpy, interpret, is_known
from ppl_bandit.program.jaxpr.primitives import starts
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, clips_indices, scan_parts

_MAX_ENTRIES = 64
_MAX_TURNS = 64  # of a loop that is followed turn by turn
_NUM_PROBES = 3
_BASE, _FAR = 10, 10_000
_NUM_HALVINGS = 60

Indices = list[tuple[np.ndarray, int]]  # the elements of every index, and the size of its axis


class IndexLimit(NamedTuple):
    """Entries of the context that index an axis: an affine function of them must lie in [0, size).

    Attributes:
        terms: (leaf, entry of the flat leaf, coefficient) of every entry that the index depends on.
        lowest, highest: constants of the affine function, for the arms with the lowest and the highest index.
        size: of the axis.
        has_lower: whether a negative index is refused too; not if the program treats negative values itself.
        inside: for an index that is not affine, the least and the greatest value of the one entry that it depends on.
    """

    terms: tuple[tuple[int, int, int], ...]
    lowest: int
    highest: int
    size: int
    has_lower: bool
    inside: tuple[float, float] | None = None


class _Entry(NamedTuple):
    """An entry of the context: its leaf, its place in the flat leaf, and the numbers that are tried."""

    leaf: int
    place: int
    example: float
    base: int
    far: int
    is_real: bool
    is_signed: bool


def index_ranges(closed: ClosedJaxpr, args: Sequence[Any]) -> list[tuple[int, int, int]]:
    """Return lowest and highest value of every index that the known inputs of a jaxpr determine, and the size of its axis.

    Args:
        args: arrays, and `DATA` for those that are not known.
    """
    return [(int(own.min()), int(own.max()), size) for own, size in _indices(closed, args, with_clipped=True)]


def sizes_indexed_by(closed: ClosedJaxpr, args: Sequence[Any], number: int) -> set[int]:
    """Return the sizes of the axes of unknown arrays that one argument, an array of integers, indexes as it is.

    Args:
        args: arrays, and `DATA` for those that are not known.
        number: the argument.
    """

    def axes(argument: np.ndarray) -> list[int]:
        given = [*args[:number], argument, *args[number + 1 :]]
        found = _indices(closed, given, with_known_operands=False)
        return [size if np.array_equal(own, argument) else 0 for own, size in found]

    own = np.asarray(args[number])
    forwards, backwards = axes(own), axes(own[::-1].copy())
    return {size for size, again in zip(forwards, backwards, strict=False) if size and size == again}


def find_index_limits(closed: ClosedJaxpr, args: Sequence[Any], span: range) -> tuple[IndexLimit, ...]:
    """Return the limits on the context of a traced program.

    Args:
        args: the inputs of the jaxpr: arrays, and `DATA` for those that are not known.
        span: the numbers of the inputs that are leaves of the context, with one row per arm.
    """
    entries = [entry for leaf, number in enumerate(span) for entry in _entries(leaf, np.asarray(args[number]))]
    if not entries:
        return ()
    base = np.array([entry.base for entry in entries], float)
    drawn = [[entry.base, max(entry.far, entry.base + 1)] for entry in entries]
    large = np.array([np.random.default_rng(seed).integers(*np.array(drawn).T) for seed in range(_NUM_PROBES)], float)

    def indices_at(point: np.ndarray) -> Indices:
        return _indices(closed, _with_context(args, span, point))

    at_base = indices_at(base)
    leaves = {leaf: [entry.leaf == leaf for entry in entries] for leaf in {entry.leaf for entry in entries}}
    indexing = [leaf for leaf, own in leaves.items() if _differ(indices_at(np.where(own, large[0], base)), at_base)]
    active = np.array([number for number, entry in enumerate(entries) if entry.leaf in indexing], int)
    if not active.size or active.size > _MAX_ENTRIES:
        return ()
    own = np.eye(len(entries))[active]
    points = np.stack([base, *(base + own), *np.where(own, large[0], base), *large, np.full(len(entries), -1.0)])
    found = [indices_at(point) for point in points]
    if any([values.shape for values, _ in at] != [values.shape for values, _ in at_base] for at in found):
        return ()
    limits: list[IndexLimit] = []
    for number, (_, size) in enumerate(at_base):
        values = np.stack([at[number][0] for at in found])  # (points, elements)
        steps, alone = np.split(values[1:][: 2 * active.size] - values[0], 2)  # (active, elements) each
        predicted = values[0] + (points - base)[:, active] @ steps
        is_real = np.array([entries[e].is_real for e in active])
        is_affine = np.all(values[:-1] == predicted[:-1], axis=0) & steps.any(axis=0)
        # A real number may be scaled before it is truncated, which integers do not show.
        is_affine &= (steps[is_real] == 0).all(axis=0) | ((steps != 0).sum(axis=0) > 1)
        for slopes in np.unique(steps[:, is_affine], axis=1).T:
            same = is_affine & (steps == slopes[:, None]).all(axis=0)
            constants = values[0, same] - base[active] @ slopes
            is_plain = np.array_equal(
                values[-1, same], np.where(predicted[-1] < 0, predicted[-1] + size, predicted[-1])[same]
            )
            terms = [(*entries[e][:2], int(slope)) for e, slope in zip(active, slopes, strict=True) if slope]
            limits.append(IndexLimit(tuple(terms), int(constants.min()), int(constants.max()), size, is_plain))
        for e, changes in zip(active, alone, strict=True):
            same = ~is_affine & (changes != 0) & ((alone != 0).sum(axis=0) == 1)
            if same.any():

                def ends(x: float, e: int = e, number: int = number, same: np.ndarray = same) -> np.ndarray:
                    own = indices_at(np.where(np.arange(len(entries)) == e, x, base))[number][0][same]
                    return np.array([own.min(), own.max()])

                inside = _range_inside(ends, entries[e], size)
                if inside is not None:
                    limits.append(IndexLimit(((*entries[e][:2], 1),), 0, 0, size, inside[0] > -np.inf, inside))
    return tuple(dict.fromkeys(limits))


def first_outside(limit: IndexLimit, leaves: Sequence[np.ndarray]) -> tuple[int, str] | None:
    """Return the first row whose index is outside the limit, and what it reads; None if all are inside.

    Args:
        leaves: of the context, each (rows, entries).
    """
    is_outside = np.asarray(outside_rows(limit, leaves))
    if not is_outside.any():
        return None
    row = int(np.argmax(is_outside))
    if limit.inside is not None:
        low, high = limit.inside
        return (
            row,
            f"beyond the ends of an axis with {limit.size} entries, which values from {low:.6g} to {high:.6g} do not",
        )
    total = _sum_of_terms(limit, leaves)[row]
    index = int(total + (limit.highest if total + limit.highest >= limit.size else limit.lowest))
    return row, f"the entry {index} of an axis with {limit.size} entries, 0 to {limit.size - 1}"


def outside_rows(limit: IndexLimit, leaves: Sequence[Any]) -> Any:
    """Return whether the index of each row is outside the limit.

    Args:
        leaves: of the context, each (rows, entries); NumPy arrays, or JAX arrays under `jit`.
    """
    if limit.inside is not None:
        leaf, entry, _ = limit.terms[0]
        low, high = limit.inside
        return (leaves[leaf][:, entry] < low) | (leaves[leaf][:, entry] > high)
    total = _sum_of_terms(limit, leaves)
    is_outside = total + limit.highest >= limit.size
    return is_outside | (total + limit.lowest < 0) if limit.has_lower else is_outside


def _sum_of_terms(limit: IndexLimit, leaves: Sequence[Any]) -> Any:
    total: Any = 0.0
    for leaf, entry, coefficient in limit.terms:
        given = leaves[leaf][:, entry]
        whole = np.trunc(given) if isinstance(given, np.ndarray) else jnp.trunc(given.astype(float))
        total = total + coefficient * whole
    return total


def _entries(leaf: int, rows: np.ndarray) -> Iterator[_Entry]:
    far = _FAR if rows.dtype.kind == "f" else min(_FAR, int(rows.dtype.kind == "b" or np.iinfo(rows.dtype).max))
    for place, example in enumerate(rows[0].ravel()):
        yield _Entry(leaf, place, example, min(_BASE, far), far, rows.dtype.kind == "f", rows.dtype.kind in "if")


def _differ(first: Indices, second: Indices) -> bool:
    return len(first) != len(second) or any(
        not np.array_equal(a, b) for (a, _), (b, _) in zip(first, second, strict=True)
    )


def _range_inside(ends: Callable[[float], np.ndarray], entry: _Entry, size: int) -> tuple[float, float] | None:
    """Return the least and the greatest value of an entry that keeps an index inside its axis.

    The least one is -inf if the program treats negative values itself. None if the index is not an increasing function of the
    entry that leaves the axis above.

    Args:
        ends: value of the entry -> the lowest and the highest index.
    """
    start = next((x for x in (float(entry.example), 0.0) if 0 <= ends(x)[0] and ends(x)[1] < size), None)
    if start is None:
        return None
    at_start = ends(start)

    def is_inside(x: float) -> bool:
        at_x = ends(x)
        return bool(np.all((at_x - at_start) * np.sign(x - start) >= 0) and 0 <= at_x[0] and at_x[1] < size)

    def last_inside(sign: float) -> float:
        step = 1e-6 * max(1.0, abs(start)) if entry.is_real else 1.0
        while is_inside(start + sign * step):
            step *= 2.0
        near, far = start, start + sign * step
        for _ in range(_NUM_HALVINGS):
            middle = 0.5 * (near + far) if entry.is_real else float(round(0.5 * (near + far)))
            if middle in (near, far):
                break
            near, far = (middle, far) if is_inside(middle) else (near, middle)
        return round(near, 9) if is_inside(round(near, 9)) else near  # not 1e-15 in place of 0

    path = np.array([at_start, *(ends(round(start + part * (entry.far - start))) for part in (0.03, 0.2, 0.6, 1.0))])
    if path[-1, 1] < size or np.any(np.diff(path, axis=0) < 0):
        return None
    lowest = ends(-float(entry.far))
    is_bounded = entry.is_signed and lowest[0] < 0 and lowest[1] < size
    return last_inside(-1.0) if is_bounded else -np.inf, last_inside(1.0)


def _with_context(args: Sequence[Any], span: range, point: np.ndarray) -> list[Any]:
    """Return the inputs of a jaxpr with the entries of the context in place, the same in all rows."""
    given, start = list(args), 0
    for number in span:
        like = args[number]
        own = point[start : start + like[0].size].astype(float if like.dtype.kind == "f" else int)
        given[number] = np.broadcast_to(own.reshape(like.shape[1:]), like.shape).astype(like.dtype)
        start += own.size
    return given


def _indices(
    closed: ClosedJaxpr, args: Sequence[Any], *, with_clipped: bool = False, with_known_operands: bool = True
) -> Indices:
    """Return the elements of every index that the known inputs determine, and the size of its axis.

    Args:
        with_clipped: whether indices count that the program asks JAX to clip.
        with_known_operands: whether indices into arrays of known numbers count.
    """
    found: Indices = []

    def note(eqn: Any, values: list[Any]) -> None:
        name = eqn.primitive.name
        known = values[1:2] if name == "gather" else values[1:]
        if name not in ("gather", "dynamic_slice") or not all(map(is_known, known)):
            return
        if is_known(values[0]) and not with_known_operands:
            return
        for first, last in starts(eqn, values):
            if np.size(first) and (with_clipped or not clips_indices(eqn)):
                found.append((np.asarray(first, float).ravel(), last + 1))

    def apply(eqn: Any, values: list[Any], callers: tuple[Any, ...]) -> list[Any]:
        note(eqn, values)
        if eqn.primitive.name != "scan" or eqn.params["length"] > _MAX_TURNS:
            return [DATA] * len(eqn.outvars)
        body, consts, num_consts, num_carry = scan_parts(eqn)
        carry, series = values[num_consts:][:num_carry], values[num_consts + num_carry :]
        turns = range(eqn.params["length"])
        for turn in reversed(turns) if eqn.params["reverse"] else turns:
            now = [value[turn] if is_known(value) else DATA for value in series]
            carry = interpret(domain, body, consts, [*values[:num_consts], *carry, *now], (eqn, *callers))
            carry = carry[:num_carry]
        return [*carry, *[DATA] * (len(eqn.outvars) - num_carry)]

    def fold(eqn: Any, values: list[Any]) -> Sequence[Any]:
        note(eqn, values)
        return fold_in_numpy(eqn, values)

    domain = Domain(apply, is_known, fold)
    with jax.ensure_compile_time_eval():
        interpret(domain, closed.jaxpr, closed.consts, args)
    return found
