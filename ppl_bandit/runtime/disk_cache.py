"""Results that later processes use again: one file for each program, next to JAX's compiled functions.

The cache only saves time: a file that cannot be read is a miss. It holds named results, each of JSON values and bytes, never
pickles. It is read only if folder and file belong to the user and nobody else can write to them. Its name and all inputs of its
key are stored inside it, so a file that was renamed or was made from other inputs is not used.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.runtime.archive import read_archive, write_archive
from ppl_bandit.runtime.cpu_threads import num_cores
from ppl_bandit.runtime.private_folders import make_private, refusal
from ppl_bandit.runtime.xla_options import compilation_cache, is_cache_off

__all__ = ["CacheKey", "cache_key", "compiler_settings", "folder", "is_plain", "load", "save"]

# Parts of the names of JAX settings that change no result. Cached results are computed in float64 under any setting of x64.
_IGNORED_SETTINGS = ("cache", "dump", "log", "traceback", "profil", "pprint", "enable_x64")
_PACKAGES = ("jax", "jaxlib", "numpyro", "numpy")
_MAX_FILES, _MAX_RESULTS = 256, 12  # of the folder, and of a file; the oldest are dropped first


class CacheKey(NamedTuple):
    """The key of a file: its name, and what it was made from as JSON values."""

    name: str
    inputs: list[Any]


def folder() -> Path | None:
    """Return the folder of the cache, inside JAX's compilation cache; None if either is off or not on a local disk."""
    parent = compilation_cache()
    return None if parent is None or is_cache_off() else parent / "warm_starts"


def cache_key(fingerprint: Callable[[], str | None], *inputs: Any) -> CacheKey | None:
    """Return the key of a file; None if the cache is off, or without a fingerprint.

    This library's code, JAX, NumPyro, their settings and the machine are part of every key.

    Args:
        fingerprint: called only if the cache is on.
        inputs: what the results depend on besides, as JSON values.
    """
    own = None if folder() is None else fingerprint()
    if own is None:
        return None
    environment = [
        _library_digest(),
        [version(name) for name in _PACKAGES],
        [num_cores(), platform.platform(), platform.python_version()],
        [str(device.device_kind) for device in jax.devices()],
        *compiler_settings(),
    ]
    text = json.dumps([own, *inputs, environment])
    return CacheKey(hashlib.sha256(text.encode()).hexdigest(), json.loads(text))


def compiler_settings() -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Return the settings of XLA and JAX that results depend on, and that can change within a process."""
    # `jax.config.values` lacks settings that are local to a thread.
    settings = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    relevant = [name for name in sorted(settings) if not any(map(name.__contains__, _IGNORED_SETTINGS))]
    return os.environ.get("XLA_FLAGS"), tuple((name, str(settings[name])) for name in relevant)


def is_plain(value: Any) -> bool:
    """Return whether a value is identified by its text: a number, text or None, or a list of these."""
    is_sequence = isinstance(value, tuple | list)
    return all(map(is_plain, value)) if is_sequence else value is None or type(value) in (bool, int, float, str)


@functools.cache
def _library_digest() -> str:
    """Return a digest of this library's source: its version does not change while it is developed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(key: CacheKey | None, name: str) -> tuple[Any, list[bytes]] | None:
    """Return the JSON values and the bytes of a result; None if there is none that is valid."""
    where = folder()
    return None if key is None or where is None else _read(where, key).get(name)


def save(key: CacheKey | None, new: Mapping[str, tuple[Any, Sequence[bytes]]]) -> None:
    """Store results of JSON values and bytes beside the others of their key; the file changes at once or not at all."""
    where = folder()
    if where is None or key is None or not make_private(where):
        return
    results = {**{name: found for name, found in _read(where, key).items() if name not in new}, **new}
    kept = list(results)[-_MAX_RESULTS:]
    header = {"name": key.name, "inputs": key.inputs, "results": [[kind, results[kind][0]] for kind in kept]}
    trees = {str(i): [np.frombuffer(part, np.uint8) for part in results[kind][1]] for i, kind in enumerate(kept)}
    with contextlib.suppress(OSError):
        draft = where / f"{key.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(write_archive(header, trees))
            draft.replace(where / key.name)
        finally:
            draft.unlink(missing_ok=True)
        files = sorted(where.iterdir(), key=lambda path: path.stat().st_mtime)
        for oldest in files[:-_MAX_FILES]:
            oldest.unlink(missing_ok=True)


def _read(where: Path, key: CacheKey) -> dict[str, tuple[Any, list[bytes]]]:
    """Return the results of a file; none if it is missing, damaged, or may be somebody else's."""
    with contextlib.suppress(Exception):  # whatever is odd about it: it only saves time
        header, trees = read_archive(_read_own_file(where, key.name))
        if [header["name"], header["inputs"]] == list(key):
            parts = ([array.tobytes() for array in trees[str(i)] or []] for i in range(len(header["results"])))
            return {name: (values, own) for (name, values), own in zip(header["results"], parts, strict=True)}
    return {}


def _read_own_file(where: Path, name: str) -> bytes:
    """Read a file of the cache.

    Raises:
        OSError: if there is none, or somebody else may have written it.
    """
    no_follow = getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(where / name, os.O_RDONLY | no_follow), "rb") as file:
        found = os.fstat(file.fileno())
        is_others = hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022)
        if is_others or not stat.S_ISREG(found.st_mode) or where.is_symlink() or refusal(where):
            raise PermissionError(f"{name} may have been written by somebody else")
        return file.read()
