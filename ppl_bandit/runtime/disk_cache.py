"""Results that outlive a process: files beside jax's compiled programs, one for each name.

They only save time. What cannot be read is computed again, and what cannot be written is not kept.
"""

import contextlib
import functools
import hashlib
import os
import pickle
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.runtime.xla_options import is_cache_off

__all__ = ["folder", "keep", "kept", "latest", "place"]

# Settings of jax that change no result; what is kept was computed in double precision, whatever the caller's is.
_SILENT = ("cache", "dump", "log", "traceback", "profil", "pprint", "enable_x64")
_PACKAGES = ("jax", "jaxlib", "numpyro", "numpy")
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


def place(*facts: Any) -> str | None:
    """Return how the names begin under which results that follow from these facts are kept; None where nothing is.

    They follow from this library, jax, NumPyro and their settings as well.
    """
    if folder() is None:
        return None
    # Some settings are a thread's own.
    settings = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    all_facts = [
        *(*facts, _own_code(), num_cores(), platform.platform(), platform.python_version()),
        _versions(),
        [str(device.device_kind) for device in jax.devices()],
        os.environ.get("XLA_FLAGS"),
        [(name, str(value)) for name, value in sorted(settings.items()) if not any(map(name.__contains__, _SILENT))],
    ]
    return hashlib.sha256(repr(all_facts).encode()).hexdigest()[:32] + "-"


@functools.cache
def _versions() -> list[str]:
    return [version(name) for name in _PACKAGES]


@functools.cache
def _own_code() -> str:
    """Return a digest of this library: its version stays the same while somebody works on it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kept(name: str) -> Any:
    """Return what was kept under a name; None if there is nothing, or nothing whole."""
    where = folder()
    if where is None:
        return None
    try:
        if hasattr(os, "getuid") and (where / name).stat().st_uid not in (os.getuid(), 0):
            return None  # reading it runs what it says
        contents = (where / name).read_bytes()
        digest, body = contents[:_DIGEST_SIZE], contents[_DIGEST_SIZE:]
        if hashlib.sha256(body).digest() != digest:
            return None
        found = pickle.loads(body)
    except Exception:  # a class that is no more, a disk that fails: whatever it is, the result can be computed
        return None
    with contextlib.suppress(OSError):
        os.utime(where / name)  # the last use, by which files grow old
    return found


def latest(prefix: str) -> str | None:
    """Return the name of what was used last of all that is kept under names that begin so; None if nothing is."""
    where = folder()
    if where is None:
        return None
    ages = dict[str, float]()
    for file in where.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):  # another process may have let it go
            ages[file.name] = file.stat().st_mtime
    return max(ages, key=lambda name: ages[name], default=None)


def keep(name: str, result: Any) -> None:
    """Keep a result under a name: all of it or nothing, whoever else writes it."""
    where = folder()
    if where is None:
        return
    try:
        body = pickle.dumps(result)
    except Exception:  # a class that only this process knows
        return
    with contextlib.suppress(OSError):
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = where / f"{name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
        try:
            draft.write_bytes(hashlib.sha256(body).digest() + body)
            draft.replace(where / name)
        finally:
            draft.unlink(missing_ok=True)
        _forget_oldest(where)


def _forget_oldest(where: Path) -> None:
    files = [(file.stat().st_mtime, file) for file in where.iterdir()]
    for _, file in sorted(files)[:-_MAX_FILES]:
        file.unlink(missing_ok=True)
