"""Posteriors kept beside the stream, so that opening an experiment need not learn from its first reward on.

A checkpoint is a copy, never the truth: it is used only if the experiment, the versions and its own digest are as when it was
kept, and whoever doubts it replays the stream.
"""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ppl_bandit import engines
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import versions
from ppl_bandit.journal.lessons import Standing
from ppl_bandit.journal.stores.contract import JournalError, Store
from ppl_bandit.posterior.learning import Learner, start
from ppl_bandit.runtime.archive import pack, unpack
from ppl_bandit.types import Interaction

__all__ = ["keep", "kept", "learner_like"]


def keep(experiment: Experiment) -> None:
    """Keep what was learnt so far; a journal that cannot take it is no reason to fail, for nothing depends on it."""
    standing, num_rows = experiment.standing, len(experiment.history)
    learner = standing.learner
    header = {
        "stamp": _stamp(experiment.identity or {}, len(standing.task.arms)),
        "engine": learner.engine.explanation.engine,
        "has_warned": learner.has_warned,
        "doubts": learner.doubts,
        "num_doubted": learner.num_doubted,
        "num_refreshes": learner.num_refreshes,
        "num_rows": num_rows,
    }
    trees = {"state": learner.state, "examples": learner.examples}
    try:
        experiment.store.keep_checkpoint(experiment.name, standing.position, pack(header, trees))
    except JournalError:
        pass


def kept(store: Store, name: str, identity: Mapping[str, Any], standing: Standing) -> tuple[int, Learner] | None:
    """Return the position of the last checkpoint and what had been learnt there; None if there is none that fits."""
    found = store.checkpoint(name)
    if found is None:
        return None
    try:
        header, trees = unpack(found[1])
        if header.get("stamp") != _stamp(identity, len(standing.task.arms)):
            return None
        return found[0], learner_like(standing, header, trees)
    except ValueError:
        return None


def learner_like(standing: Standing, header: Mapping[str, Any], trees: Mapping[str, list[Any] | None]) -> Learner:
    """Return a learner of an engine with a state as it was kept.

    Args:
        header: the engine's name, and what its user knows and may ask of its evidence.
        trees: the leaves of the state, and of the examples that the engine was sought for.

    Raises:
        ValueError: if the state does not fit the engine.
    """
    fresh, model, leaves, engine = standing.prior, standing.task.model, trees["state"] or [], header["engine"]
    if fresh.engine.explanation.engine != engine:  # the bandit had moved on to another
        factory = getattr(engines, engine, None)
        if factory is None:
            raise ValueError(f"the posterior was kept by the engine {engine!r}, which is not known")
        examples = None
        if trees.get("examples"):
            row: Any = np.zeros(0)
            form: Any = jax.tree.structure(Interaction(row, dict.fromkeys(model.outcomes, row), model.context))
            examples = form.unflatten(trees["examples"])
            factory = functools.partial(factory, examples=examples)
        fresh = start(standing.task, factory)._replace(examples=examples)
    structure: Any = jax.tree.structure(fresh.state)
    if structure.num_leaves != len(leaves):
        raise ValueError("the posterior that was kept does not fit this program and engine")
    return fresh._replace(
        held=fresh.run.hold(jax.tree.unflatten(structure, leaves)),
        has_warned=header["has_warned"],
        doubts=header.get("doubts", ""),
        num_doubted=header.get("num_doubted", 0),
        num_refreshes=header.get("num_refreshes", 0),
    )


def _stamp(identity: Mapping[str, Any], num_arms: int) -> str:
    text = json.dumps([identity, versions(), num_arms], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
