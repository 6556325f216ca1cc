"""From events to rows: contexts, and the rows that an event brings."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.journal.events import CORRECTED, IMPORTED, REWARDED, Event
from ppl_bandit.posterior.learning import Rows
from ppl_bandit.program.model.reward_model import RewardModel

__all__ = ["context_from_json", "joined_rows", "rows_of"]

_KINDS = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}


def context_from_json(model: RewardModel, leaves: Sequence[Any] | None) -> Any:
    """Return a context, or many, given its leaves: arrays, or lists where they were written and read again."""
    if leaves is None:
        return None
    examples, structure = jax.tree.flatten(model.context)
    arrays: list[Any] = [
        np.asarray(leaf, _KINDS[np.asarray(e).dtype.kind]) for leaf, e in zip(leaves, examples, strict=True)
    ]
    return jax.tree.unflatten(structure, arrays)


def rows_of(model: RewardModel, event: Event) -> Rows | None:
    """Return the rows that an event adds to the history, or None."""
    body = event.body
    if event.kind == IMPORTED:
        rewards = {name: np.asarray(values, np.float64) for name, values in body["rewards"].items()}
        return Rows(np.asarray(body["arms"], np.int64), rewards, context_from_json(model, body["contexts"]))
    if not event.settles or event.kind not in (REWARDED, CORRECTED) or body.get("of") is not None:
        return None
    context = context_from_json(model, body["context"])
    contexts = None if context is None else jax.tree.map(lambda leaf: leaf[None], context)
    rewards = {name: np.array([body["reward"][name]], np.float64) for name in model.outcomes}
    return Rows(np.array([event.arm], np.int64), rewards, contexts)


def joined_rows(pieces: Sequence[Rows]) -> Rows:
    """Join rows, in order."""
    return (
        pieces[0]
        if len(pieces) == 1
        else Rows(*jax.tree.map(lambda *leaves: np.concatenate(leaves), *map(tuple, pieces)))
    )
