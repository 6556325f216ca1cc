"""Artefacts: what was found about a program, in one file for later processes, next to JAX's compiled functions.

An artefact only saves time: whatever is odd about its file is a miss. It holds named results, each of JSON values and bytes,
never pickles. It is read only if folder and file belong to the user and nobody else can write to them. Its name and all that
the name is made of are stored inside it, so a file that was renamed or was made from something else is not used.
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
from typing import Any

import jax
import numpy as np

from ppl_bandit.runtime.archive import make_private, read_archive, refusal, write_archive
from ppl_bandit.runtime.cpu_threads import num_cores
from ppl_bandit.runtime.xla_options import compilation_cache, is_cache_off

# Parts of the names of JAX settings that change no result. Results are computed in float64 under any setting of x64.
_IGNORED_SETTINGS = ("cache", "dump", "log", "traceback", "profil", "pprint", "enable_x64")
_PACKAGES = ("jax", "jaxlib", "numpyro", "numpy")
_MAX_FILES, _MAX_RESULTS = 256, 12  # of the folder, and of a file; the oldest are dropped first


def folder() -> Path | None:
    """Return the folder of artefacts, inside JAX's compilation cache; None if either is off or not on a local disk."""
    parent = compilation_cache()
    return None if parent is None or is_cache_off() else parent / "warm_starts"


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


class Artefact:
    """Named results about a program under the settings of JAX at hand: under other settings nothing is found or stored.

    Args:
        fingerprint: returns the fingerprint of the program, or None if it cannot be identified: nothing is then found or
            stored. It is called once, when it is first needed.
    """

    def __init__(self, fingerprint: Callable[[], str | None]):
        self._fingerprint, self._settings = fingerprint, compiler_settings()

    @functools.cached_property
    def fingerprint(self) -> str | None:
        """The fingerprint of the program; None if it cannot be identified, or fails, which validation reports."""
        with contextlib.suppress(Exception):
            return self._fingerprint()
        return None

    @functools.cached_property
    def inputs(self) -> list[Any]:
        """All that results depend on, as JSON values: the program, this library, JAX, NumPyro, their settings, the machine."""
        machine = [num_cores(), platform.platform(), platform.python_version()]
        devices = [str(device.device_kind) for device in jax.devices()]
        inputs = [self.fingerprint, _library_digest(), [*map(version, _PACKAGES)], machine, devices, self._settings]
        return json.loads(json.dumps(inputs))

    @functools.cached_property
    def name(self) -> str:
        """The name of the file."""
        return hashlib.sha256(json.dumps(self.inputs).encode()).hexdigest()

    @property
    def is_current(self) -> bool:
        """Whether the program can be identified, and JAX has the settings that it had when the program was read."""
        return self._settings == compiler_settings() and self.fingerprint is not None

    def load(self, name: str) -> tuple[Any, list[bytes]] | None:
        """Return the JSON values and the bytes of a result; None if there is none that is valid."""
        where = folder()
        return None if where is None or not self.is_current else self._read(where).get(name)

    def save(self, new: Mapping[str, tuple[Any, Sequence[bytes]]]) -> None:
        """Store results of JSON values and bytes beside the others; the file changes at once or not at all."""
        where = folder()
        if where is None or not self.is_current or not make_private(where):
            return
        results = {**{name: found for name, found in self._read(where).items() if name not in new}, **new}
        kept = list(results)[-_MAX_RESULTS:]
        header = {"name": self.name, "inputs": self.inputs, "results": [[name, results[name][0]] for name in kept]}
        trees = {str(i): [np.frombuffer(part, np.uint8) for part in results[name][1]] for i, name in enumerate(kept)}
        with contextlib.suppress(OSError):
            draft = where / f"{self.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp"
            try:
                with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    file.write(write_archive(header, trees))
                draft.replace(where / self.name)
            finally:
                draft.unlink(missing_ok=True)
            for oldest in sorted(where.iterdir(), key=lambda path: path.stat().st_mtime)[:-_MAX_FILES]:
                oldest.unlink(missing_ok=True)

    def _read(self, where: Path) -> dict[str, tuple[Any, list[bytes]]]:
        """Return the results of the file; none if it is missing, damaged, or may be somebody else's."""
        with contextlib.suppress(Exception):  # whatever is odd about it: it only saves time
            header, trees = read_archive(_read_own_file(where, self.name))
            if (header["name"], header["inputs"]) == (self.name, self.inputs):
                parts = ([array.tobytes() for array in trees[str(i)] or []] for i in range(len(header["results"])))
                return {name: (values, own) for (name, values), own in zip(header["results"], parts, strict=True)}
        return {}


@functools.cache
def _library_digest() -> str:
    """Return a digest of this library's source: its version does not change while it is developed."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _read_own_file(where: Path, name: str) -> bytes:
    """Read a file of the folder.

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
