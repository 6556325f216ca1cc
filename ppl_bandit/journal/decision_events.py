"""Choose arms at a projection, and write the events that record the decisions."""

import functools
import hashlib
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.journal.events import DECIDED, Event, new_ids
from ppl_bandit.journal.projection import Projection
from ppl_bandit.posterior.deciding import decide_many, decide_once
from ppl_bandit.types import Selection

__all__ = ["choose_arms", "decision_events"]


def choose_arms(
    projection: Projection, lane: str, numbers: Sequence[int], contexts: Any, allowed: np.ndarray, *, is_batch: bool
) -> list[Selection]:
    """Choose the arms of some decisions; the result depends on the arguments alone.

    Args:
        lane: random number stream of the decisions; the empty one uses the experiment's seed.
        numbers: of the decisions.
        contexts: with a leading axis in a batch; one context otherwise.
    """
    task, learner = projection.task, projection.learner
    allocation = projection.allocation
    if lane:
        seed, device_seed = _lane_seed(task.seed, lane)
        task, learner = task._replace(seed=seed), learner._replace(seed=device_seed)
    if is_batch:
        chosen = decide_many(task, learner, np.array(numbers), contexts, allowed)
    else:
        chosen = [decide_once(task, learner, numbers[0], contexts, allowed)]
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
    chosen: list[Selection],
    first: int,
    lane: str,
    allowed: np.ndarray,
    contexts: Any,
    *,
    is_batch: bool,
) -> list[Event]:
    """Return the events of decisions that are numbered from `first`; other arguments as in `choose_arms`."""
    position, names, now = projection.position, projection.task.arms.names, time.time()
    leaves = None if contexts is None else jax.tree.leaves(contexts)
    for leaf in leaves or ():
        leaf.flags.writeable = False  # the event and the caller's Decision share it
    mask = allowed.tolist()
    recorded_mask = None if all(mask) else mask
    by_row: Iterable[Any] = zip(*leaves, strict=True) if is_batch and leaves else itertools.repeat(leaves or ())
    batch, *ids = new_ids(1 + len(chosen))
    events = []
    for row, (decision, selection, context) in enumerate(zip(ids, chosen, by_row, strict=False)):
        arm: Any = selection.arm
        body = {
            "absorbed": position,
            "name": names[arm],
            "best_arm_probs": selection.best_arm_probs,
            "num_candidates": selection.num_candidates,
            "propensities": selection.propensities,
        }
        if recorded_mask is not None:
            body["allowed"] = recorded_mask
        if leaves is not None:
            body["context"] = list(context)
        if is_batch:
            body["row"] = row
        events.append(Event(0, DECIDED, decision, batch, first + row, lane, arm, False, now, body))
    return events


@functools.lru_cache(maxsize=1024)
def _lane_seed(seed: int, lane: str) -> tuple[int, jax.Array]:
    number = int.from_bytes(hashlib.sha256(f"{seed}:{lane}".encode()).digest()[:7])
    with jax.enable_x64(True):
        return number, jnp.asarray(number)
