"""A bandit in a file: one archive, versioned, replaced whole or not at all."""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ppl_bandit.runtime.archive import pack, unpack

__all__ = ["context_form", "context_like", "read", "write"]

_FORMAT, _VERSION = "ppl_bandit.live.bandit", 3


def write(path: str | PathLike, header: Mapping[str, Any], trees: Mapping[str, Any]) -> None:
    """Write a file and wait until it is on the disk; an existing one keeps its permissions.

    Raises:
        ValueError: if the path is something other than a regular file.
    """
    target = Path(path).resolve()  # a link stays a link
    mode = None
    if target.exists():
        mode = target.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ValueError(f"{os.fspath(path)} is not a regular file: give the path of a file, new or saved before")
    contents = pack({**header, "format": _FORMAT, "version": _VERSION}, trees)
    with _unnamed(target) as (handle, give_name):
        os.fchmod(handle, _default_mode() if mode is None else stat.S_IMODE(mode))
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(contents)
        os.fsync(handle)
        give_name()
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too
    finally:
        os.close(folder)


def read(path: str | PathLike) -> tuple[dict[str, Any], dict[str, list[Any] | None]]:
    """Return the header and the leaves of the trees of a file.

    Raises:
        ValueError: if the file is not a saved bandit, was altered, or is of another version.
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: it is not a regular file")
    try:
        header, trees = unpack(Path(path).read_bytes())
    except ValueError as error:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: {error}") from None
    if header.get("format") != _FORMAT:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: its format is {header.get('format')!r}")
    if header["version"] != _VERSION:
        advice = "upgrade ppl_bandit" if header["version"] > _VERSION else "load it with the release that saved it"
        raise ValueError(f"{os.fspath(path)} has version {header['version']}, this release reads {_VERSION}: {advice}")
    return header, trees


def context_form(tree: Any) -> Any:
    """Describe a pytree of dicts, lists and tuples in JSON; None if it holds anything else."""
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        inner: Any = {key: context_form(tree[key]) for key in sorted(tree)}
        return None if None in inner.values() else {"dict": inner}
    if type(tree) in (list, tuple):
        inner = [context_form(item) for item in tree]
        return None if None in inner else {type(tree).__name__: inner}
    return "leaf" if hasattr(tree, "dtype") else None


def context_like(form: Any, leaves: Iterator[Any]) -> Any:
    """Return the pytree that `context_form` described, with these leaves."""
    if form == "leaf":
        return next(leaves)
    (kind, inner), *_ = form.items()
    if kind == "dict":
        return {key: context_like(value, leaves) for key, value in inner.items()}
    items = [context_like(value, leaves) for value in inner]
    return tuple(items) if kind == "tuple" else items


@contextlib.contextmanager
def _unnamed(target: Path) -> Iterator[tuple[int, Any]]:
    """Open a file beside the target that has no name until it takes over the target's, where the system can do that.

    A process that is killed while it writes then leaves nothing behind.
    """
    try:
        handle, name = os.open(target.parent, os.O_TMPFILE | os.O_WRONLY, 0o600), None
    except (AttributeError, OSError):
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")

    def give_name() -> None:
        nonlocal name
        if name is None:
            name = f"{target.parent}/.{target.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
            # Only with a descriptor of the folder does Python follow the link to the file without a name.
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.link(f"/proc/self/fd/{handle}", os.path.basename(name), dst_dir_fd=folder, follow_symlinks=True)
            finally:
                os.close(folder)
        os.replace(name, target)
        name = None

    try:
        yield handle, give_name
    finally:
        os.close(handle)
        if name is not None:
            Path(name).unlink(missing_ok=True)


def _default_mode() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask
