"""The events of decisions: choose arms at a projection, with the random numbers of a stream."""

import functools
import hashlib
import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.journal.events import DECIDED, Event, new_ids
from ppl_bandit.journal.projection import Projection
from ppl_bandit.posterior.deciding import decide
from ppl_bandit.types import Selection


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
