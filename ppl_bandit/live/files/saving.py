"""Save a bandit to one file and continue it from there, with an identity of its own."""

from os import PathLike
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.journal.checkpoints import learner_like
from ppl_bandit.journal.events import Event, decode, encode
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import differences, identity_of, versions
from ppl_bandit.journal.lessons import relearnt
from ppl_bandit.journal.opening import engine_from, selector_from
from ppl_bandit.journal.stores.memory import MemoryStore
from ppl_bandit.live.files import snapshot
from ppl_bandit.posterior.history import History

__all__ = ["Saved", "read", "save"]


class Saved(NamedTuple):
    """The contents of a file."""

    header: dict[str, Any]
    trees: dict[str, list[Any] | None]

    def arguments(self, context: Any, engine: Any, selector: Any) -> dict[str, Any]:
        """Return the arguments of the bandit that was saved, with those that were given in their place."""
        kept, identity = self.header, self.header["identity"]
        if context is None and kept["context_form"] is not None:
            context = snapshot.context_like(kept["context_form"], iter(self.trees["context"] or []))
        named = not isinstance(identity["arms"][0], int)
        return {
            "num_arms": None if named else len(identity["arms"]),
            "arms": identity["arms"] if named else None,
            "context": context,
            "outcomes": tuple(identity["outcomes"]),
            "engine": engine_from(identity["engine"]) if engine is None else engine,
            "selector": selector_from(identity["selector"]) if selector is None else selector,
            "num_samples": identity["num_samples"],
            "draws": identity["draws"],
            "seed": identity["seed"],
            "burn_in": identity["burn_in"],
        }

    def restore(self, experiment: Experiment, allow_changed: bool) -> None:
        """Give an experiment that was just begun everything that the file holds.

        Raises:
            ValueError: naming what differs from the bandit that was saved.
        """
        kept, standing = self.header, experiment.standing
        now = identity_of(standing.task, standing.prior.engine, experiment.burn_in)
        # Whether the user insists on the engine is the saved bandit's; a fallback may have happened since.
        now["engine"]["may_fall_back"] = kept["identity"]["engine"]["may_fall_back"]
        found = differences(kept["identity"], now)
        if found and not allow_changed:
            hint = (
                ""
                if kept["versions"] == versions()
                else f" (it was saved under {kept['versions']}, this is {versions()})"
            )
            raise ValueError(
                f"the bandit was saved otherwise: {'; '.join(found)}{hint}. Pass the same program, engine= and selector=, or "
                "allow_changed=True to learn all rewards again"
            )
        task = standing.task._replace(may_fall_back=kept["identity"]["engine"]["may_fall_back"])
        standing = standing._replace(task=task, retired=frozenset(kept["retired"]))
        experiment.standing = standing
        history = _history(standing.task.model, self.trees["history"])
        if found:
            learner = relearnt(standing, history)[0]
        else:
            learner = learner_like(standing, kept, self.trees)
        events = [Event(*facts) for facts in kept["decisions"]]
        experiment.store = MemoryStore(kept["position"], events)
        experiment.restore(history, learner, kept["position"], kept["next_number"], kept["num_played"])


def save(path: str | PathLike, experiment: Experiment) -> None:
    """Write an experiment to a file."""
    with experiment.learning:
        standing, history = experiment.standing, experiment.standing.history
        arms, rewards, contexts = history.rows()
        task, learner = standing.task, standing.learner
        header = {
            "identity": identity_of(task, standing.prior.engine, experiment.burn_in),
            "versions": versions(),
            "context_form": snapshot.context_form(task.model.context),
            "retired": sorted(standing.retired),
            "engine": learner.engine.explanation.engine,
            "has_warned": learner.has_warned,
            "doubts": learner.doubts,
            "num_doubted": learner.num_doubted,
            "num_refreshes": learner.num_refreshes,
            "position": standing.position,
            "next_number": experiment.num_decisions,
            "num_played": standing.num_played.tolist(),
            "decisions": [_plain(event) for events in experiment.store.decisions(experiment.name) for event in events],
        }
        trees = {
            "context": task.model.context,
            "state": learner.state,
            "examples": learner.examples,
            "history": (arms, rewards, contexts, history.positions()),
        }
    snapshot.write(path, header, trees)


def read(path: str | PathLike) -> Saved:
    """Read a file.

    Raises:
        ValueError: if it is not a saved bandit, or was altered.
    """
    return Saved(*snapshot.read(path))


def _history(model: Any, leaves: list[Any] | None) -> History:
    history = History(model.outcomes)
    if not leaves or not leaves[0].size:
        return history
    arms, *rest = leaves
    *rest, positions = rest
    rewards: dict[str, np.ndarray] = dict(zip(sorted(model.outcomes), rest, strict=False))  # a dict's leaves are sorted
    context_leaves = rest[len(model.outcomes) :]
    contexts = None
    if model.context is not None:
        contexts = jax.tree.unflatten(jax.tree.structure(model.context), context_leaves)
    return history.extended(arms, rewards, contexts, positions)


def _plain(event: Event) -> Event:
    """Return an event of JSON values alone."""
    return event._replace(body=decode(encode(event.body)))
