"""Files of bandits: `save` copies a journal; files of version 0.1 are read.

A loaded bandit continues from a copy of the file in memory; the file stays as it is.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.journal.checkpoints import make_checkpoint, restore_learner
from ppl_bandit.journal.events import ARMS, CHECKPOINT, ERASED, IMPORTED, LOOKED, Event, new_event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import (
    arguments_from_identity,
    experiment_identity,
    identity_differences,
    library_versions,
)
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import read_header, record_identity
from ppl_bandit.journal.projection import Projection, learning_in_part, refit
from ppl_bandit.journal.stores.memory import MemoryStore
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import History, Rows
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.archive import read_archive


class SavedBandit(NamedTuple):
    """A copy of a file in memory, and the arguments of the bandit that continues from it."""

    journal: Journal
    name: str
    arguments: dict[str, Any]


def save_bandit(path: str | PathLike, experiment: Experiment) -> None:
    """Write an experiment to a file; an existing file is replaced as a whole and keeps its permissions.

    A new file can be read by its owner only, like a new journal.

    Raises:
        ValueError: if the path is not a regular file, or a journal that is open.
    """
    target = Path(checked_path(path)).resolve()  # a symbolic link stays, and its target is replaced
    mode = 0o600
    if target.exists():
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{os.fspath(path)} is not a regular file: give the path of a saved bandit, or a new path")
    if Path(f"{target}-wal").exists():
        raise ValueError(f"{os.fspath(path)} is a journal that a process has open: give another path")
    record_identity(experiment)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp") as folder:
        copy = Path(folder) / target.name
        store = SqlStore(SqliteBackend(copy))
        try:
            with experiment.fold_lock:
                experiment.store.copy_to(store, experiment.name, experiment.stream)
                projection = experiment.projection
            context = projection.task.model.context
            checkpoint = make_checkpoint(experiment, projection, {"form": _context_form(context)}, {"context": context})
            store.write_checkpoint(experiment.name, *checkpoint)
        finally:
            store.close()
        os.chmod(copy, stat.S_IMODE(mode))
        os.replace(copy, target)
    handle = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(handle)  # makes the new directory entry durable
    finally:
        os.close(handle)


def read_bandit(path: str | PathLike, context: Any, engine: Any, selector: Any) -> SavedBandit:
    """Read a file into memory, and check all of it; arguments that are not None replace the saved ones.

    Raises:
        ValueError: if it is not a saved bandit, or was altered.
    """
    store = MemoryStore()
    try:
        with Journal(Path(path), read_only=True) as source:
            names = source.experiments()
            if len(names) != 1:
                raise JournalError(f"it has the experiments {names}: open it with Bandit(..., journal=, name=)")
            source.store.copy_to(store, names[0])
        store.check(names[0], since=None)
        header = read_header(store, names[0])
    except JournalError as error:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: {error}") from None
    for _, contents, _ in store.checkpoints(names[0]) if context is None else ():
        fields, trees = read_archive(contents)
        if fields.get("form") is not None:
            context = build_context(fields["form"], iter(trees["context"] or []))
            break
    arguments = {"context": context} | arguments_from_identity(header.identity, engine, selector)
    return SavedBandit(Journal.of(store, os.fspath(path)), names[0], arguments)


def build_context(form: Any, leaves: Iterator[Any]) -> Any:
    """Return the pytree with a form from `_context_form` and these leaves."""
    if form == "leaf":
        return next(leaves)
    (kind, inner), *_ = form.items()
    if kind == "dict":
        return {key: build_context(value, leaves) for key, value in inner.items()}
    items = [build_context(value, leaves) for value in inner]
    return tuple(items) if kind == "tuple" else items


def checked_path(path: Any) -> str | PathLike:
    """Return a path; refuse what is none, and an empty one."""
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise ValueError(f"path must be the path of a file, got {path!r}")
    return path


def _context_form(tree: Any) -> Any:
    """Return the structure of a pytree of dicts, lists and tuples as JSON values; None for other containers."""
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        inner: Any = {key: _context_form(tree[key]) for key in sorted(tree)}
        return None if None in inner.values() else {"dict": inner}
    if type(tree) in (list, tuple):
        inner = [_context_form(item) for item in tree]
        return None if None in inner else {type(tree).__name__: inner}
    return "leaf" if hasattr(tree, "dtype") else None


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
    arms, rewards, contexts, _, positions = history.rows()
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
    structure: Any = jax.tree.structure(Rows(row, dict.fromkeys(model.outcomes, row), model.context, positions=row))
    return history.extended(structure.unflatten(leaves))
