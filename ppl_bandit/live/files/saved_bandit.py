"""A saved bandit: a copy of its journal in one SQLite file, with a checkpoint that holds the example context.

A loaded bandit continues from a copy of the file in memory; the file stays as it is.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ppl_bandit.journal.checkpoints import make_checkpoint
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.identity import arguments_from_identity
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import read_header, record_identity
from ppl_bandit.journal.stores.memory import MemoryStore
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.journal.stores.sqlite import SqliteBackend
from ppl_bandit.journal.stores.store import JournalError
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
