"""The file of a saved bandit: one archive with a version, replaced atomically."""

import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ppl_bandit.runtime.archive import read_archive, write_archive

__all__ = ["build_context", "context_structure", "read_archive_file", "write_archive_file"]

_FORMAT, _VERSION = "ppl_bandit.live.bandit", 3


def write_archive_file(path: str | PathLike, header: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
    """Write a file and flush it to disk; an existing file is replaced as a whole and keeps its permissions.

    A new file can be read by its owner only, like a new journal.

    Raises:
        ValueError: if the path is not a regular file.
    """
    target = Path(_checked_path(path)).resolve()  # a symbolic link stays, and its target is replaced
    mode = 0o600
    if target.exists():
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{os.fspath(path)} is not a regular file: give the path of a saved bandit, or a new path")
    contents = write_archive({**header, "format": _FORMAT, "version": _VERSION}, trees)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, stat.S_IMODE(mode))
            file.write(contents)
            file.flush()
            os.fsync(handle)
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new directory entry durable
    finally:
        os.close(folder)


def read_archive_file(path: str | PathLike) -> tuple[dict[str, Any], dict[str, list[Any] | None]]:
    """Return the header and the leaves of each tree.

    Raises:
        ValueError: if the file is not a saved bandit, was altered, or has another version.
    """
    if not stat.S_ISREG(os.stat(_checked_path(path)).st_mode):
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: it is not a regular file")
    try:
        header, trees = read_archive(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: {error}") from None
    if header.get("format") != _FORMAT:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: its format is {header.get('format')!r}")
    if header["version"] != _VERSION:
        advice = "upgrade ppl_bandit" if header["version"] > _VERSION else "load it with the release that saved it"
        raise ValueError(f"{os.fspath(path)} has version {header['version']}, this release reads {_VERSION}: {advice}")
    return header, trees


def _checked_path(path: Any) -> str | PathLike:
    if not isinstance(path, str | PathLike) or not os.fspath(path):
        raise ValueError(f"path must be the path of a file, got {path!r}")
    return path


def context_structure(tree: Any) -> Any:
    """Return the structure of a pytree of dicts, lists and tuples as JSON values; None for other containers."""
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        inner: Any = {key: context_structure(tree[key]) for key in sorted(tree)}
        return None if None in inner.values() else {"dict": inner}
    if type(tree) in (list, tuple):
        inner = [context_structure(item) for item in tree]
        return None if None in inner else {type(tree).__name__: inner}
    return "leaf" if hasattr(tree, "dtype") else None


def build_context(structure: Any, leaves: Iterator[Any]) -> Any:
    """Return the pytree with a structure from `context_structure` and these leaves."""
    if structure == "leaf":
        return next(leaves)
    (kind, inner), *_ = structure.items()
    if kind == "dict":
        return {key: build_context(value, leaves) for key, value in inner.items()}
    items = [build_context(value, leaves) for value in inner]
    return tuple(items) if kind == "tuple" else items
