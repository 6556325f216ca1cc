"""Calls that may be repeated: by the id of a request, or because a unit has a standing decision.

A key is the digest of such an id. The table of keys says which decisions it stands for, and is written in the transaction that
records them: of two calls with one key, the later one is refused and reads what the other has recorded.
"""

import functools
import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.inputs.numbers import check_text
from ppl_bandit.journal.events import DECIDED, DISCARDED_STATUS, Event, fold_decision, new_ids
from ppl_bandit.journal.projection import Projection
from ppl_bandit.journal.stores.appending import encode, unit_key
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import Key
from ppl_bandit.posterior.learning import decide
from ppl_bandit.types import RequestIdReused, Selection

_MAX_BYTES = 256


class Ask(NamedTuple):
    """What a caller gives for one decision, so that it may be asked for again.

    Attributes:
        unit: that the decision is for, or None.
        request: id of the request, or None.
        arguments: of the call, as JSON values.
    """

    unit: str | None
    request: str | None
    arguments: Any = None

    @property
    def names(self) -> list[str]:
        """The keys of the request and of the unit, as far as they are given."""
        found = [] if self.request is None else [request_key("select", self.request)]
        return found if self.unit is None else [*found, unit_key(self.unit)]


class Known(NamedTuple):
    """What is recorded for an ask.

    Attributes:
        events: of its decisions, each with its first event first; None if a new decision is needed.
        keys: to record with the decision, or now.
        replaces: which decision of the unit does not stand any more, and why; None if there is none.
    """

    events: list[Event] | None
    keys: list[Key]
    replaces: dict[str, str] | None = None


class Repeat(NamedTuple):
    """A call of `update` that may be repeated.

    Attributes:
        request: id of the request.
        arguments: of the call, as JSON values.
    """

    request: str
    arguments: Any

    @property
    def name(self) -> str:
        """The name of its key."""
        return request_key("update", self.request)

    def is_recorded(self, found: Mapping[str, Key]) -> bool:
        """Return whether the request was recorded before.

        Raises:
            RequestIdReused: if it had other arguments.
        """
        if self.name not in found:
            return False
        check_repeat(found[self.name], "update", self.request, self.arguments)
        return True

    def key(self, events: Sequence[Event]) -> Key:
        """Return the key to record with a call, given events of its decisions; a unit of theirs owns it."""
        unit = events[0].body.get("unit") if events else None
        return new_key(self.name, None, None if unit is None else unit_key(unit), self.arguments)


def check_unit(value: Any, argument: str) -> str | None:
    """Return a unit or the id of a request.

    Raises:
        ValueError: for anything but a text of at most 256 bytes.
    """
    if value is None:
        return None
    num_bytes = len(check_text(value, argument).encode())
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"{argument} has {num_bytes} bytes in UTF-8, the limit is {_MAX_BYTES}: pass a digest of it")
    return value


def request_key(call: str, request: str) -> str:
    """Return the key of a request; `call` is the method that it asks for."""
    return f"{call}:{hashlib.sha256(request.encode()).hexdigest()}"


def check_repeat(key: Key, call: str, request: str, arguments: Any) -> None:
    """Compare the arguments of a call with those of the earlier call of the same request.

    Raises:
        RequestIdReused: if they differ.
    """
    salt = key.arguments.partition(":")[0]
    if key.arguments != _salted(salt, arguments):
        raise RequestIdReused(
            f"request_id={request!r} was given to {call} with other arguments: give every request an id of its own, and repeat "
            "a request with the arguments that it had"
        )


def new_key(name: str, expected: Key | None, owner: str | None, arguments: Any) -> Key:
    """Return the key of a request or a unit, to be recorded in place of the one that was found."""
    salted = "" if arguments is None else _salted(os.urandom(8).hex(), arguments)
    return Key(name, "", owner, salted, None if expected is None else expected.value)


def find_known(
    store: SqlStore,
    experiment: str,
    asks: Sequence[Ask],
    projection: Projection,
    allowed: np.ndarray,
    unit_window: float | None,
) -> list[Known]:
    """Return what is recorded for each ask.

    Args:
        allowed: mask of the arms that may be played.
        unit_window: seconds that the decision of a unit stands; None: for ever.

    Raises:
        RequestIdReused: for an earlier request with the same id and other arguments.
    """
    found = store.keys(experiment, [name for ask in asks for name in ask.names])
    events = store.find(experiment, [one for key in found.values() for one in key.value.split(",") if one])
    knowns = []
    for ask in asks:
        owner = None if ask.unit is None else unit_key(ask.unit)
        keys: list[Key] = []
        if ask.request is not None:
            name = request_key("select", ask.request)
            earlier = found.get(name)
            if earlier is not None and all(one in events for one in earlier.value.split(",")):
                check_repeat(earlier, "select", ask.request, ask.arguments)
                knowns.append(Known([events[one][0] for one in earlier.value.split(",")], []))
                continue
            keys.append(new_key(name, earlier, owner, ask.arguments))
        replaces = None
        if owner is not None:
            standing = found.get(owner)
            own = None if standing is None else events.get(standing.value)
            why = "" if own is None else _why_not_standing(own, projection, allowed, unit_window)
            if own is not None and not why:
                knowns.append(Known(own[:1], [key._replace(value=str(own[0].decision)) for key in keys]))
                continue
            replaces = {"decision": str(own[0].decision), "why": why} if own is not None else None
            keys.append(new_key(owner, standing, owner, None))
        knowns.append(Known(None, keys, replaces))
    return knowns


def _why_not_standing(
    events: Sequence[Event], projection: Projection, allowed: np.ndarray, unit_window: float | None
) -> str:
    """Return why a unit's decision does not stand any more, in words; empty if it does."""
    record, arm = fold_decision(events), int(events[0].arm or 0)
    if arm in projection.retired:
        return "its arm was retired"
    if arm < allowed.size and not allowed[arm]:  # another process may have added it
        return "its arm is not allowed now"
    if record.status == DISCARDED_STATUS and not record.is_expired:
        return "it was discarded"
    if unit_window is not None and time.time() - events[0].time > unit_window:
        return "its unit_window is over"
    return ""


def _salted(salt: str, arguments: Any) -> str:
    return f"{salt}:{hashlib.sha256((salt + encode({'arguments': arguments})).encode()).hexdigest()}"


def choose_arms(
    projection: Projection, stream: str, numbers: Sequence[int], contexts: Any, allowed: np.ndarray, *, is_batch: bool
) -> list[Selection]:
    """Choose the arms of some decisions; the result depends on the arguments alone.

    Args:
        stream: random number stream of the decisions; the empty one uses the experiment's seed.
        numbers: of the decisions.
        contexts: with a leading axis in a batch; one context otherwise.
    """
    task, learner = projection.task, projection.learner
    allocation = None if task.design is None else projection.allocation
    if stream:
        seed, device_seed = _seed_of(task.seed, stream)
        task, learner = task._replace(seed=seed), learner._replace(seed=device_seed)
    chosen = decide(task, learner, numbers, contexts, allowed, is_batch=is_batch)
    return chosen if allocation is None else _randomize(chosen, allocation, allowed, task.seed, numbers)


def _randomize(
    chosen: list[Selection], allocation: Sequence[float], allowed: np.ndarray, seed: int, numbers: Sequence[int]
) -> list[Selection]:
    """Return decisions whose arms are drawn with given probabilities; P(best) stays as the posterior has it."""
    probs = np.where(allowed, allocation, 0.0)
    probs = np.where(allowed, 1.0, 0.0) if probs.sum() == 0.0 else probs
    probs /= probs.sum()
    probs.flags.writeable = False
    uniforms = [np.random.default_rng((seed, number)).random() for number in numbers]
    arms = np.searchsorted(np.cumsum(probs)[:-1], uniforms, side="right").tolist()
    fields: Any = [(arm, selection.best_arm_probs, 0, probs) for arm, selection in zip(arms, chosen, strict=True)]
    return list(map(Selection._make, fields))


def decision_events(
    projection: Projection,
    stream: str,
    numbers: Sequence[int],
    contexts: Any,
    allowed: np.ndarray,
    *,
    is_batch: bool,
    units: Sequence[str | None] = (),
    replaces: Sequence[Mapping[str, str] | None] = (),
) -> list[Event]:
    """Make decisions and return their events; other arguments as in `choose_arms`.

    Args:
        units: of the decisions; empty if none has one.
        replaces: the decisions of these units that do not stand any more, and why.
    """
    batch, *ids = new_ids(1 + len(numbers))
    chosen = choose_arms(projection, stream, numbers, contexts, allowed, is_batch=is_batch)
    position, names, now = projection.position, projection.task.arms.names, time.time()
    leaves = None if contexts is None else jax.tree.leaves(contexts)
    for leaf in leaves or ():
        leaf.flags.writeable = False  # the event and the caller's Decision share it
    mask = allowed.tolist()
    recorded_mask = None if all(mask) else mask
    by_row: Iterable[Any] = zip(*leaves, strict=True) if is_batch and leaves else itertools.repeat(leaves or ())
    events = []
    for row, (decision, number, selection, context) in enumerate(zip(ids, numbers, chosen, by_row, strict=False)):
        arm: Any = selection.arm
        body = {
            "absorbed": position,
            "name": names[arm],
            "best_arm_probs": selection.best_arm_probs,
            "num_candidates": selection.num_candidates,
            "propensities": selection.propensities,
        }
        if projection.digest:
            body["snapshot"] = projection.digest
        if recorded_mask is not None:
            body["allowed"] = recorded_mask
        if leaves is not None:
            body["context"] = list(context)
        if is_batch:
            body["row"] = row
        if units and units[row] is not None:
            body["unit"] = units[row]
            body["personal"] = ["unit"] if leaves is None else ["unit", "context"]
            if replaces[row] is not None:
                body["replaces"] = dict(replaces[row] or {})
        events.append(Event(0, DECIDED, decision, batch, number, stream, arm, False, now, body))
    return events


@functools.lru_cache(maxsize=1024)
def _seed_of(seed: int, stream: str) -> tuple[int, jax.Array]:
    number = int.from_bytes(hashlib.sha256(f"{seed}:{stream}".encode()).digest()[:7])
    with jax.enable_x64(True):
        return number, jnp.asarray(number)
