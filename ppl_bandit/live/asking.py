"""Decisions that may be asked for again, for a unit or with the id of a request, and calls of `update` that may be repeated."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.projection import Projection
from ppl_bandit.journal.repeats import Ask, Known, check_unit, find_known
from ppl_bandit.journal.stores.store import Key, KeyTaken
from ppl_bandit.types import RequestIdReused


def asks_of(
    units: Sequence[str | None] | None,
    request_ids: Sequence[str | None] | None,
    num_rows: int,
    contexts: Any,
    allowed: Any,
    names: tuple[str, str] = ("units", "request_ids"),
) -> list[Ask]:
    """Return what is asked for each row; empty if no row has a unit or the id of a request.

    Args:
        contexts: with a leading axis, or None.
        allowed: as the caller gave it.
        names: of the first two arguments, for messages.

    Raises:
        ValueError: if there is not one entry for each row, or one is not a text of at most 256 bytes.
    """
    columns = []
    for values, name in zip((units, request_ids), names, strict=True):
        values = [None] * num_rows if values is None else values
        if isinstance(values, str) or not hasattr(values, "__len__") or len(values) != num_rows:
            raise ValueError(
                f"{name} must have one entry for each of {num_rows} decisions, None for none, got {values!r}"
            )
        columns.append([check_unit(value, name) for value in values])
    if not any(value is not None for column in columns for value in column):
        return []
    leaves, mask = jax.tree.leaves(contexts), plain(allowed)
    rows = zip(*columns, strict=True)
    return [
        Ask(
            unit,
            request,
            None if request is None else [unit, mask, [np.asarray(leaf[row]).tolist() for leaf in leaves]],
        )
        for row, (unit, request) in enumerate(rows)
    ]


def decide_asked(
    experiment: Experiment,
    projection: Projection,
    allowed: np.ndarray,
    contexts: Any,
    asks: Sequence[Ask],
    unit_window: float | None,
    refuse: Callable[[Projection, int], None],
    *,
    is_batch: bool = False,
    num_places: int | None = None,
) -> tuple[Projection, list[list[Event]]]:
    """Return the events of each row's decisions, recorded now or before, and the projection of the new ones.

    Args:
        contexts: with a leading axis in a batch; one context otherwise.
        refuse: raises if so many new decisions may not be made.
        num_places: of the slate that is asked for; None for one decision in each row.
    """
    while True:
        knowns = find_known(experiment.store, experiment.name, asks, projection, allowed, unit_window)
        leader, leaders = _leaders(asks, knowns)
        keys = [key for known in knowns if known.events is not None for key in known.keys]
        events = {row: known.events for row, known in enumerate(knowns) if known.events is not None}
        try:
            if leaders:
                num = len(leaders) if num_places is None else check_size(projection, allowed, num_places)
                refuse(projection, num)
                merged = [_merged(row, leader, knowns) for row in leaders]
                merged[0] = merged[0]._replace(keys=[*merged[0].keys, *keys])
                index, units = np.array(leaders), [asks[row].unit for row in leaders]
                own = jax.tree.map(lambda leaf, index=index: leaf[index], contexts) if is_batch else contexts
                is_slate = num_places is not None
                given = projection, allowed, own, num if is_batch or is_slate else None, merged, units
                made = experiment.decide(*given, is_slate=is_slate)
                events |= (
                    {leaders[0]: made} if is_slate else {row: [one] for row, one in zip(leaders, made, strict=True)}
                )
            elif keys:
                experiment.store.append(experiment.name, [], keys=list({key.name: key for key in keys}.values()))
        except KeyTaken:
            projection = experiment.catch_up()
            continue
        return projection, [events[leader.get(row, row)] for row in range(len(asks))]


def plain(value: Any) -> Any:
    """Return an argument as JSON values that are equal for equal arguments."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return float(value)
    if isinstance(value, Mapping):
        return dict(sorted((str(key), plain(item)) for key, item in value.items()))
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple | range):
        return [plain(item) for item in value]
    return getattr(value, "id", None) or [plain(one.id) for one in getattr(value, "decisions", ())] or repr(value)


def _leaders(asks: Sequence[Ask], knowns: Sequence[Known]) -> tuple[dict[int, int], list[int]]:
    """Return which row decides for each row that needs a decision, and the rows that decide.

    Raises:
        RequestIdReused: if rows with the same id of a request have other arguments.
    """
    leader: dict[int, int] = {}
    by_name: dict[str, int] = {}
    for row, (ask, known) in enumerate(zip(asks, knowns, strict=True)):
        if known.events is not None:
            continue
        first = next((by_name[name] for name in ask.names if name in by_name), row)
        for other in range(row):
            if (
                ask.request is not None
                and asks[other].request == ask.request
                and asks[other].arguments != ask.arguments
            ):
                raise RequestIdReused(
                    f"request_ids has {ask.request!r} in the rows {other} and {row} with other arguments"
                )
        leader[row] = first
        by_name |= dict.fromkeys(ask.names, first)
    return leader, [row for row, first in leader.items() if row == first]


def _merged(row: int, leader: Mapping[int, int], knowns: Sequence[Known]) -> Known:
    """Return what is known of a row that decides, with the keys of the rows that it decides for."""
    keys: dict[str, Key] = {}
    for other, first in leader.items():
        if first == row:
            keys = {key.name: key for key in knowns[other].keys} | keys
    return knowns[row]._replace(keys=list(keys.values()))


_MAX_SLATES = 2000  # that `place_propensities` adds up: one compiled decision each


def check_size(projection: Projection, allowed: np.ndarray, size: Any) -> int:
    """Return the number of places of a slate.

    Raises:
        ValueError: if it is not a count, or there are fewer arms to play.
    """
    size, num_playable = check_count(size, "size"), _num_playable(projection, allowed)
    if size > num_playable:
        raise ValueError(
            f"size={size} places need as many distinct arms, but {num_playable} may be played: allow more arms, or ask for a "
            f"slate of at most {num_playable}"
        )
    return size


def place_propensities(
    experiment: Experiment, projection: Projection, allowed: np.ndarray, context: Any, size: Any
) -> np.ndarray:
    """Return the probability of each arm in each place of the next slate, (size, A): a sum over the places before.

    Raises:
        ValueError: if there are too many slates to add up.
    """
    size = check_size(projection, allowed, size)
    num_slates = math.perm(_num_playable(projection, allowed), size - 1)
    if num_slates > _MAX_SLATES:
        raise ValueError(
            f"size={size} of {int(allowed.sum())} arms needs a sum over {num_slates} slates, the limit is {_MAX_SLATES}: allow "
            "fewer arms, or read the probabilities of one slate, select(size=...).propensities"
        )
    found = np.zeros((size, allowed.size))
    slates: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(size):
        longer: dict[tuple[int, ...], float] = {}
        for chosen, prob in slates.items():
            probs = prob * experiment.next_propensities(projection, allowed, context, chosen)
            found[place] += probs
            longer |= {(*chosen, int(arm)): float(probs[arm]) for arm in np.flatnonzero(probs)}
        slates = longer
    return found


def _num_playable(projection: Projection, allowed: np.ndarray) -> int:
    return int(allowed.sum()) - sum(bool(allowed[arm]) for arm in projection.retired)
