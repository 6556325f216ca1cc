"""Results that are reused by later processes: one archive per result, next to JAX's compiled programs.

The cache only saves time: an entry that cannot be read is computed again. An entry holds JSON values and bytes, never pickles.
It is read only if the folder and the file belong to the user and nobody else can write to them. The entry's name and all
inputs of its key are stored inside the entry, so a file that was renamed or was made from other inputs is not used.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import stat
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.runtime.archive import read_archive, write_archive
from ppl_bandit.runtime.cpu_threads import num_cores
from ppl_bandit.runtime.xla_options import is_cache_off

__all__ = ["CacheEntry", "cache_entry", "compiler_settings", "folder", "load", "save"]

# Parts of the names of JAX settings that change no result. Cached results are computed in float64 under any setting of x64.
_IGNORED_SETTINGS = ("cache", "dump", "log", "traceback", "profil", "pprint", "enable_x64")
_PACKAGES = ("jax", "jaxlib", "numpyro", "numpy")
_MAX_FILES = 256  # the oldest are deleted first


class CacheEntry(NamedTuple):
    """The key of a cached result.

    Attributes:
        inputs: what the result depends on and can be computed quickly, as JSON values.
        fingerprint: returns the rest of the key, which takes longer; None if the result cannot be cached.
    """

    inputs: list[Any]
    fingerprint: Callable[[], str | None]

    @property
    def prefix(self) -> str:
        """Beginning of the entry's name, from the inputs."""
        return hashlib.sha256(json.dumps(self.inputs).encode()).hexdigest()[:32] + "-"


def folder() -> Path | None:
    """Return the folder of the cache, inside JAX's compilation cache; None if either is off or not on a local disk."""
    settings: Any = jax.config
    parent = settings.jax_compilation_cache_dir
    if is_cache_off() or not parent or "://" in parent or not settings.jax_enable_compilation_cache:
        return None
    return Path(parent) / "warm_starts"


def cache_entry(fingerprint: Callable[[], str | None], *inputs: Any) -> CacheEntry | None:
    """Return the key of a result; None if the cache is off.

    This library's code, JAX, NumPyro, their settings and the machine are part of every key.

    Args:
        inputs: JSON values.
    """
    if folder() is None:
        return None
    environment = [
        _library_digest(),
        [version(name) for name in _PACKAGES],
        [num_cores(), platform.platform(), platform.python_version()],
        [str(device.device_kind) for device in jax.devices()],
        *compiler_settings(),
    ]
    return CacheEntry(json.loads(json.dumps([*inputs, environment])), fingerprint)


def compiler_settings() -> tuple[str | None, tuple[tuple[str, str], ...]]:
    """Return the settings of XLA and JAX that results depend on, and that can change within a process."""
    # `jax.config.values` lacks settings that are local to a thread.
    settings = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    relevant = [name for name in sorted(settings) if not any(map(name.__contains__, _IGNORED_SETTINGS))]
    return os.environ.get("XLA_FLAGS"), tuple((name, str(settings[name])) for name in relevant)


@functools.cache
def _library_digest() -> str:
    """Return a digest of this library's source: its version does not change while it is developed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def load(entry: CacheEntry | None) -> tuple[Any, list[bytes]] | None:
    """Return the JSON values and the bytes of an entry; None if there is no valid one.

    The fingerprint is computed only if an entry with the same inputs exists.
    """
    where = folder()
    if entry is None or where is None:
        return None
    with contextlib.suppress(OSError, ValueError, KeyError):
        if not any(where.glob(f"{entry.prefix}*")):
            return None
        fingerprint = entry.fingerprint()
        if fingerprint is None:
            return None
        header, trees = read_archive(_read_own_file(where, entry.prefix + fingerprint))
        if [header["name"], header["inputs"]] == [entry.prefix + fingerprint, entry.inputs]:
            return header["values"], [array.tobytes() for array in trees["parts"] or []]
    return None


def save(entry: CacheEntry | None, values: Any, parts: Sequence[bytes] = ()) -> None:
    """Store JSON values and bytes; the file appears whole or not at all.

    Args:
        parts: binary parts, in the order in which `load` returns them.
    """
    where, fingerprint = folder(), None if entry is None else entry.fingerprint()
    if where is None or entry is None or fingerprint is None:
        return
    name = entry.prefix + fingerprint
    header = {"name": name, "inputs": entry.inputs, "values": values}
    contents = write_archive(header, {"parts": [np.frombuffer(part, np.uint8) for part in parts]})
    with contextlib.suppress(OSError):
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = where / f"{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        try:
            with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(contents)
            draft.replace(where / name)
        finally:
            draft.unlink(missing_ok=True)
        files = sorted(where.iterdir(), key=lambda path: path.stat().st_mtime)
        for oldest in files[:-_MAX_FILES]:
            oldest.unlink(missing_ok=True)


def _read_own_file(where: Path, name: str) -> bytes:
    """Read a file of the cache.

    Raises:
        OSError: if there is none, or somebody else may have written it.
    """
    no_follow = getattr(os, "O_NOFOLLOW", 0)
    with open(os.open(where / name, os.O_RDONLY | no_follow), "rb") as file:
        for found, is_kind in ((os.fstat(file.fileno()), stat.S_ISREG), (os.lstat(where), stat.S_ISDIR)):
            is_others = hasattr(os, "getuid") and (found.st_uid != os.getuid() or found.st_mode & 0o022)
            if is_others or not is_kind(found.st_mode):
                raise PermissionError(f"{name} may have been written by somebody else")
        return file.read()
