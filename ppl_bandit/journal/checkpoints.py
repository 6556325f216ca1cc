"""Checkpoints: posteriors stored beside the stream, so that opening an experiment reads only the events since the last.

A checkpoint is a cache of the stream. It is used only if an event announces its digest, the last event that it has learnt has
the digest that it had then, and it was written by the same experiment with the same library versions.
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit import engines
from ppl_bandit.journal.events import CHECKPOINT, Event, new_event
from ppl_bandit.journal.experiment import Experiment, rows_until
from ppl_bandit.journal.identity import library_versions
from ppl_bandit.journal.projection import Projection, learning_in_part
from ppl_bandit.journal.stores.appending import decode
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.store import DamagedEvent, JournalError
from ppl_bandit.posterior.learning import Learner, draw, start
from ppl_bandit.posterior.task import History, learning_model
from ppl_bandit.runtime.archive import read_archive, write_archive
from ppl_bandit.types import Interaction

_NUM_COMPARED = 20  # draws
_TOLERANCE = 1e-6  # rounding on another processor, relative to the largest draw of an entry


class StoredPosterior(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        announced: position of the event that announces it.
        header: JSON values.
        trees: leaves of the arrays, by name.
    """

    announced: int
    header: dict[str, Any]
    trees: dict[str, list[Any] | None]

    @property
    def position(self) -> int:
        """The position of the last event that it has learnt, by its own account."""
        return int(self.header["position"])


def save_checkpoint(experiment: Experiment) -> None:
    """Store the current posterior; an error of the database is ignored, because the stream holds the same information."""
    try:
        experiment.store.write_checkpoint(experiment.name, *make_checkpoint(experiment, experiment.projection))
    except JournalError:
        pass


def make_checkpoint(
    experiment: Experiment,
    projection: Projection,
    fields: Mapping[str, Any] | None = None,
    trees: Mapping[str, Any] | None = None,
) -> tuple[Event, bytes]:
    """Return the event that announces a checkpoint of a projection, and its contents.

    An event announces the digest of its contents, which hold the position and the digest of the last event that it has learnt,
    and the number of rows. So the chain of digests covers it.

    Args:
        fields: JSON values to store with it.
        trees: pytrees of arrays to store with it.
    """
    learner, history = projection.learner, projection.history
    header = {
        "engine": learner.engine.explanation.engine,
        "has_warned": learner.has_warned,
        "doubts": learner.doubts,
        "num_doubted": learner.num_doubted,
        "num_refreshes": learner.num_refreshes,
        "state_form": _state_form(learner.state),
        **_stream_header(projection),
        "is_partial": projection.task.is_partial,
        "stamp": _stamp(experiment.identity or {}, len(projection.task.arms)),
        "position": projection.position,
        "head": experiment.store.digest_at(experiment.name, projection.position),
        "next_number": experiment.num_decisions,
        "settled_until": experiment.settled_until,
    }
    contents = write_archive(
        header | dict(fields or {}), {"state": learner.state, "examples": learner.examples, **(trees or {})}
    )
    body = {"position": projection.position, "num_rows": len(history), "contents": _digest(contents)}
    return new_event(CHECKPOINT, body), contents


def load_checkpoint(
    store: SqlStore, name: str, identity: Mapping[str, Any], projection: Projection, least: int
) -> tuple[Projection, int, int] | None:
    """Return the newest checkpoint of this experiment and these versions that fits the stream; None if there is none.

    Args:
        projection: the state before the first event.
        least: the position that it must have learnt.

    Returns:
        The state at the checkpoint, whose history is read from the stream if it is needed, the next decision's number, and the
        position up to which no decision was overdue.
    """
    for stored in announced_checkpoints(store, name):
        header, position = stored.header, stored.position
        try:
            digest = header["head"]
            if header["stamp"] != _stamp(identity, len(projection.task.arms)) or position < least:
                continue
            if not 0 < position < stored.announced or digest != store.digest_at(name, position):
                continue
            history = History(
                projection.task.model.outcomes,
                header["num_rows"],
                functools.cache(functools.partial(rows_until, store, name, position, projection)),
            )
            history.num_completed = header["num_completed"]
            after = learning_in_part(projection) if header["is_partial"] else projection
            after = after._replace(
                position=position,
                learner=restore_learner(projection, header, stored.trees),
                history=history,
                num_played=np.asarray(header["num_played"], np.int64),
                retired=frozenset(header["retired"]),
                is_paused=header.get("is_paused", False),
                look=header["look"],
                num_late=header.get("num_late", 0),
                digest=digest,
            )
            return after, header["next_number"], header.get("settled_until", 0)
        except (ValueError, KeyError, TypeError, DamagedEvent):
            continue
    return None


def announced_checkpoints(store: SqlStore, name: str) -> Iterator[StoredPosterior]:
    """Yield the stored posteriors, newest first.

    Contents that cannot be read, or are not those that an event announces, are left out.
    """
    for at, contents, announced in store.checkpoints(name):
        try:
            if announced is not None and decode(announced)["contents"] == _digest(contents):
                found = StoredPosterior(at, *read_archive(contents))
                if isinstance(found.header["position"], int):
                    yield found
        except (ValueError, KeyError, TypeError, DamagedEvent):
            continue


def checkpoint_difference(projection: Projection, stored: StoredPosterior) -> str | None:
    """Return how a stored posterior differs from the replayed one at its position, in words; empty if they agree.

    Both are compared by draws with the same random numbers. A posterior that does not fit the engine is not compared, and the
    result is None: opening an experiment does not read it.
    """
    if stored.position != projection.position:
        return f"the stored posterior is said to be that of position {stored.position}, which is inside a call"
    for name, replayed in _stream_header(projection).items():
        if stored.header.get(name) != replayed:
            return f"the stored {name} is {stored.header.get(name)}, the replayed one is {replayed}"
    try:
        learner = restore_learner(projection, stored.header, stored.trees)
        drawn = draw(learner, _NUM_COMPARED)
    except (ValueError, KeyError, TypeError):
        return None
    for site, replayed in draw(projection.learner, _NUM_COMPARED).items():
        gap = np.max(np.abs(drawn[site] - replayed), axis=0, initial=0.0)
        if not np.all(gap <= _TOLERANCE * np.max(np.abs(replayed), axis=0, initial=0.0)):
            return f"draws of {site!r} from the stored and from the replayed posterior differ by {np.max(gap):.2g}"
    return ""


def _stream_header(projection: Projection) -> dict[str, Any]:
    """Return what a projection holds beside its learner, as JSON values; its stream determines them."""
    return {
        "num_rows": len(projection.history),
        "num_completed": projection.history.num_completed,
        "num_played": projection.num_played.tolist(),
        "retired": sorted(projection.retired),
        "is_paused": projection.is_paused,
        "look": None if projection.look is None else dict(projection.look),
        "num_late": projection.num_late,
    }


def restore_learner(
    projection: Projection, header: Mapping[str, Any], trees: Mapping[str, list[Any] | None]
) -> Learner:
    """Return a learner that was stored.

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


def _digest(contents: bytes) -> str:
    return hashlib.sha256(contents).hexdigest()
