"""Checkpoints: posteriors stored beside the stream, so that opening an experiment need not learn all rewards again.

A checkpoint is a cache of the stream. It is used only if its digest is right, and it was written by the same experiment with
the same library versions.
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
from ppl_bandit.journal.identity import library_versions
from ppl_bandit.journal.projection import Projection, learning_in_part
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.posterior.learning import Learner, start
from ppl_bandit.posterior.partial_rows import learning_model
from ppl_bandit.runtime.archive import read_archive, write_archive
from ppl_bandit.types import Interaction

__all__ = ["learner_header", "learner_trees", "load_checkpoint", "restore_learner", "save_checkpoint"]


def save_checkpoint(experiment: Experiment, store: SqlStore) -> None:
    """Store the current posterior; an error of the database is ignored, because the stream holds the same information."""
    projection = experiment.projection
    learner = projection.learner
    header = learner_header(learner) | {
        "is_partial": projection.task.is_partial,
        "stamp": _stamp(experiment.identity or {}, len(projection.task.arms)),
        "num_rows": len(projection.history),
    }
    try:
        store.write_checkpoint(experiment.name, projection.position, write_archive(header, learner_trees(learner)))
    except JournalError:
        pass


def load_checkpoint(
    store: SqlStore, name: str, identity: Mapping[str, Any], projection: Projection
) -> tuple[int, Learner] | None:
    """Return the last checkpoint's position and posterior; None if there is none for this experiment and these versions."""
    found = store.checkpoint(name)
    if found is None:
        return None
    try:
        header, trees = read_archive(found[1])
        if header.get("stamp") != _stamp(identity, len(projection.task.arms)):
            return None
        return found[0], restore_learner(projection, header, trees)
    except ValueError:
        return None


def learner_header(learner: Learner) -> dict[str, Any]:
    """Return the fields of a learner that are JSON values."""
    return {
        "engine": learner.engine.explanation.engine,
        "has_warned": learner.has_warned,
        "doubts": learner.doubts,
        "num_doubted": learner.num_doubted,
        "num_refreshes": learner.num_refreshes,
        "state_form": _state_form(learner.state),
    }


def learner_trees(learner: Learner) -> dict[str, Any]:
    """Return the fields of a learner that are pytrees of arrays."""
    return {"state": learner.state, "examples": learner.examples}


def restore_learner(
    projection: Projection, header: Mapping[str, Any], trees: Mapping[str, list[Any] | None]
) -> Learner:
    """Return the learner whose `learner_header` and `learner_trees` were stored.

    Args:
        projection: its prior has the engine that the bandit was built with.

    Raises:
        ValueError: if the state does not fit the engine, or has the layout of another release.
    """
    projection = learning_in_part(projection) if header.get("is_partial") else projection
    model = learning_model(projection.task)
    fresh, leaves, engine = projection.prior, trees["state"] or [], header["engine"]
    if fresh.engine.explanation.engine != engine:  # the bandit had fallen back to another engine
        factory = getattr(engines, engine, None)
        if factory is None:
            raise ValueError(f"the posterior was stored by the engine {engine!r}, which this release does not have")
        examples = None
        if trees.get("examples"):
            row: Any = np.zeros(0)
            form: Any = jax.tree.structure(Interaction(row, dict.fromkeys(model.outcomes, row), model.context))
            examples = form.unflatten(trees["examples"])
            factory = functools.partial(factory, examples=examples)
        fresh = start(projection.task, factory)._replace(examples=examples)
    structure: Any = jax.tree.structure(fresh.state)
    if structure.num_leaves != len(leaves) or header.get("state_form") != _state_form(fresh.state):
        raise ValueError("the stored posterior does not fit this program and engine")
    return fresh.with_state(jax.tree.unflatten(structure, leaves))._replace(
        has_warned=header["has_warned"],
        doubts=header.get("doubts", ""),
        num_doubted=header.get("num_doubted", 0),
        num_refreshes=header.get("num_refreshes", 0),
    )


def _state_form(state: Any) -> str:
    """Return the structure of a state with the dtype and rank of its arrays; their sizes may grow with the data."""
    leaves: list[Any] = jax.tree.leaves(state)
    return f"{jax.tree.structure(state)} {[(str(leaf.dtype), np.ndim(leaf)) for leaf in leaves]}"


def _stamp(identity: Mapping[str, Any], num_arms: int) -> str:
    text = json.dumps([identity, library_versions(), num_arms], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
