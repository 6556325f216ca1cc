"""Results that outlive a process: files beside jax's compiled programs, one for each name.

They only save time. What cannot be read is computed again, and what cannot be written is not kept.
"""

import contextlib
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

import jax

from ppl_bandit.numerics.defaults import is_cache_off

__all__ = ["folder", "keep", "kept", "newest"]

_MAX_FILES = 256  # the oldest go first
_DIGEST_SIZE = 32


def folder() -> Path | None:
    """Return where results are kept: in the folder of jax's compiled programs.

    None where jax keeps none, or not on a disk, and under `PPL_BANDIT_CACHE=off`.
    """
    settings: Any = jax.config
    given = settings.jax_compilation_cache_dir
    if is_cache_off() or not given or "://" in given or not settings.jax_enable_compilation_cache:
        return None
    return Path(given) / "starts"


def kept(name: str) -> Any:
    """Return what was kept under a name; None if there is nothing, or nothing whole."""
    place = folder()
    if place is None:
        return None
    try:
        contents = (place / name).read_bytes()
        digest, body = contents[:_DIGEST_SIZE], contents[_DIGEST_SIZE:]
        if hashlib.sha256(body).digest() != digest:
            return None
        found = pickle.loads(body)
    except Exception:  # a class that is no more, a disk that fails: whatever it is, the result can be computed
        return None
    with contextlib.suppress(OSError):
        os.utime(place / name)  # the last use, by which files grow old
    return found


def newest(prefix: str) -> str | None:
    """Return the name, of those that begin so, under which something was last kept or found."""
    place = folder()
    files = [] if place is None or not place.is_dir() else list(place.glob(f"{prefix}*"))
    try:
        times = {file.name: file.stat().st_mtime for file in files if not file.name.endswith(".tmp")}
    except OSError:  # another process was quicker
        return None
    return max(times, key=times.__getitem__, default=None)


def keep(name: str, result: Any) -> None:
    """Keep a result under a name: all of it or nothing, whoever else writes it."""
    place = folder()
    if place is None:
        return
    body = pickle.dumps(result)
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place / f"{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        try:
            draft.write_bytes(hashlib.sha256(body).digest() + body)
            draft.replace(place / name)
        finally:
            draft.unlink(missing_ok=True)
        _forget_oldest(place)


def _forget_oldest(place: Path) -> None:
    files = [(file.stat().st_mtime, file) for file in place.iterdir()]
    for _, file in sorted(files)[:-_MAX_FILES]:
        file.unlink(missing_ok=True)
