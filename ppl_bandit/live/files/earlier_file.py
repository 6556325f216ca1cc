"""Files of saved bandits that version 0.1 wrote, archives of settings, posterior, history and decisions; read for a release."""

import os
import stat
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.journal.checkpoints import restore_learner
from ppl_bandit.journal.events import ARMS, CHECKPOINT, ERASED, IMPORTED, LOOKED, Event, new_event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import (
    arguments_from_identity,
    experiment_identity,
    identity_differences,
    library_versions,
)
from ppl_bandit.journal.projection import Projection, learning_in_part, refit
from ppl_bandit.live.files.saved_bandit import build_context
from ppl_bandit.posterior.history import History
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.archive import read_archive

_FORMAT, _VERSION = "ppl_bandit.live.bandit", 3


def is_earlier_file(path: str | PathLike) -> bool:
    """Return whether a file is an archive.

    Raises:
        ValueError: if it is not a regular file.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: it is not a regular file")
    with open(path, "rb") as file:
        return file.read(2) == b"PK"


class EarlierFile(NamedTuple):
    """The contents of a file."""

    header: dict[str, Any]
    trees: dict[str, list[Any] | None]

    @classmethod
    def read(cls, path: str | PathLike) -> "EarlierFile":
        """Read a file.

        Raises:
            ValueError: if it is not a saved bandit, or was altered.
        """
        try:
            header, trees = read_archive(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)} is not a saved bandit: {error}") from None
        if header.get("format") != _FORMAT:
            raise ValueError(f"{os.fspath(path)} is not a saved bandit: its format is {header.get('format')!r}")
        if header["version"] != _VERSION:
            raise ValueError(
                f"{os.fspath(path)} has version {header['version']}: load it with the release that saved it"
            )
        return cls(header, trees)

    def arguments(self, context: Any, engine: Any, selector: Any) -> dict[str, Any]:
        """Return the arguments of the saved bandit; those that are not None replace the saved ones."""
        structure = self.header["context_form"]
        if context is None and structure is not None:
            context = build_context(structure, iter(self.trees["context"] or []))
        return {"context": context} | arguments_from_identity(self.header["identity"], engine, selector)

    def restore(self, experiment: Experiment, allow_changed: bool) -> None:
        """Continue the saved experiment in a new one, built with `arguments`.

        Raises:
            ValueError: if the program or a setting differs from the saved ones.
        """
        header, projection = self.header, experiment.projection
        may_fall_back = header["identity"]["engine"]["may_fall_back"]
        task = projection.task._replace(may_fall_back=may_fall_back)
        given = experiment_identity(task, projection.prior.engine, experiment.burn_in)
        differences = identity_differences(header["identity"], given)
        if differences and not allow_changed:
            hint = (
                ""
                if header["versions"] == library_versions()
                else f" (it was saved with {header['versions']}, this process has {library_versions()})"
            )
            raise ValueError(
                f"the bandit was saved with other settings: {'; '.join(differences)}{hint}. Pass the same program, engine= and "
                "selector=, or allow_changed=True to learn all rewards again"
            )
        history = _build_history(task.model, self.trees["history"])
        projection = projection._replace(
            task=task,
            position=header["position"],
            history=history,
            num_played=np.asarray(header["num_played"], np.int64),
            retired=frozenset(header["retired"]),
            look=header.get("look"),
        )
        history.num_completed = header.get("num_completed", 0)
        projection = learning_in_part(projection) if header.get("is_partial") else projection
        learner = refit(projection, history)[0] if differences else self._learner(projection)
        last = experiment.store.append(experiment.name, _stream(header, history))[-1].position
        experiment.restore(projection._replace(learner=learner, position=last), header["next_number"])

    def _learner(self, projection: Projection) -> Learner:
        try:
            return restore_learner(projection, self.header, self.trees)
        except ValueError:  # the file of a release whose states have another layout: all its rewards are in the file
            return refit(projection, projection.history)[0]


def _stream(header: dict[str, Any], history: History) -> list[Event]:
    """Return a stream with the events of a file at their positions.

    A file has the events of decisions alone: the rows at other positions were imported, and all else of the stream is in its
    end: the arms, and the last look.
    """
    recorded = {fields[0]: Event(*fields) for fields in header["decisions"]}
    (arms, rewards, contexts), positions = history.rows(), history.positions()
    events = []
    for position in range(1, header["position"] + 1):
        event, own = recorded.get(position), slice(*np.searchsorted(positions, [position, position + 1]))
        if event is not None and ERASED in event.body:  # its personal part is not in the file
            event.body.pop("personal", None)
        elif event is None and own.start < own.stop:
            leaves = None if contexts is None else jax.tree.leaves(contexts)
            imported = jax.tree.map(lambda leaf, own=own: leaf[own], (arms, rewards, leaves))
            event = new_event(IMPORTED, dict(zip(("arms", "rewards", "contexts"), imported, strict=True)))
        events.append(event or new_event(CHECKPOINT, {"contents": ""}))
    if header.get("look") is not None:
        events.append(new_event(LOOKED, header["look"]))
    names = header["identity"]["arms"]
    return [*events, new_event(ARMS, {"arms": names, "retired": header["retired"]})]


def _build_history(model: RewardModel, leaves: list[Any] | None) -> History:
    history = History(model.outcomes)
    if not leaves or not leaves[0].size:
        return history
    row: Any = np.zeros(0)
    structure: Any = jax.tree.structure((row, dict.fromkeys(model.outcomes, row), model.context, row))
    return history.extended(structure.unflatten(leaves))
