"""What a bandit needs to start, handed from one process to the next: the proof of its engine, its first programs traced.

It is found by a digest of everything that it follows from: what the program computes, the task, the engine, this library, jax,
NumPyro and their settings. Where any of these cannot be told for sure, nothing is taken over and nothing left. The compiled
code itself is in jax's own cache.
"""

import functools
import hashlib
import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

import ppl_bandit
from ppl_bandit import engines
from ppl_bandit.engines.deferred import EngineFacts, deferred, facts_of
from ppl_bandit.live.compiled import Compiled, Finish
from ppl_bandit.live.tasks import Task
from ppl_bandit.numerics.compilation import Ahead
from ppl_bandit.numerics.cores import num_cores
from ppl_bandit.numerics.keeping import folder, keep, kept, newest
from ppl_bandit.numerics.portable import Portable
from ppl_bandit.program.fingerprints import close_fingerprint, code_fingerprint
from ppl_bandit.types import Engine, Selector

__all__ = ["Start", "found_at", "leave_at", "name_at", "newest_at", "place_of"]

# Those that take seconds to prove and less to run; the others are built again.
_FACTORIES = {engines.choose: "choose", engines.conjugate: "conjugate", engines.collapsed: "collapsed"}
_SILENT = ("cache", "dump", "log", "traceback", "profil", "pprint")  # settings of jax that change no result
_PACKAGES = ("jax", "jaxlib", "numpyro", "numpy")


class Start(NamedTuple):
    """What one process leaves for the next."""

    facts: EngineFacts
    portables: dict[str, dict[str, Portable]]
    forms: dict[int, Any]

    def engine(self, build: Callable[[], Engine]) -> Engine:
        """Return the engine, which is built when something else than the first programs is asked of it."""
        return deferred(self.facts, build)

    def give_to(self, run: Compiled) -> None:
        """Let compiled functions take over what was traced."""
        for name, portables in self.portables.items():
            getattr(run, name).portables.update(portables)
        for num_rows, forms in self.forms.items():
            run.finish[num_rows] = Finish(*forms)


def place_of(task: Task, factory: Callable) -> str | None:
    """Return where starts on tasks like this are kept, by what can be told without running the program; None for nowhere."""
    engine, selector = _engine_words(factory), _selector_words(task.selector)
    if engine is None or selector is None or folder() is None:
        return None
    model = task.model
    # Some are a thread's own.
    settings = {name: getattr(jax.config, name, value) for name, value in jax.config.values.items()}
    facts = [
        *(code_fingerprint(model.program), model.num_arms, model.outcomes, str(jax.tree.structure(model.context))),
        *(engine, selector, task.num_samples, task.draws, _own_code(), num_cores(), platform.platform()),
        *(platform.python_version(), [version(name) for name in _PACKAGES], os.environ.get("XLA_FLAGS")),
        [str(device.device_kind) for device in jax.devices()],
        [(name, str(value)) for name, value in sorted(settings.items()) if not any(map(name.__contains__, _SILENT))],
    ]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]


def name_at(place: str, task: Task) -> str | None:
    """Return the name of a start on this very task, for which the program is read; None if it has none."""
    try:
        program = close_fingerprint(task.model)
    except Exception:  # what the program cannot be asked is no reason not to start
        return None
    return None if program is None else f"{place}-{program}"


def newest_at(place: str) -> str | None:
    """Return the name of the start that was used last at a place, most likely the one that is looked for."""
    return newest(f"{place}-")


def found_at(name: str) -> Start | None:
    """Return the start that was left under a name."""
    found = kept(name)
    return found if isinstance(found, Start) else None


def leave_at(name: str, engine: Engine, run: Compiled) -> None:
    """Leave a start to the processes to come, if all of it could be written down."""
    parts: dict[str, Ahead] = {"init": run.init, "select": run.select, "learn": run.learn}
    portables = {name: dict(part.portables) for name, part in parts.items()}
    if all(portables.values()):
        keep(name, Start(facts_of(engine), portables, {rows: run.finish[rows].forms for rows in (0, 1)}))


@functools.cache
def _own_code() -> str:
    """Return a digest of this library: its version stays the same while somebody works on it."""
    digest = hashlib.sha256()
    for path in sorted(Path(ppl_bandit.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _engine_words(factory: Any) -> str | None:
    given: Mapping[str, Any] = {}
    if isinstance(factory, functools.partial) and not factory.args:
        factory, given = factory.func, factory.keywords
    name = next((name for known, name in _FACTORIES.items() if factory is known), None)
    return f"{name}{sorted(given.items())}" if name is not None and all(map(_is_plain, given.values())) else None


def _selector_words(selector: Selector) -> str | None:
    """Write a selector of this library; None for another one, or one with settings that words do not tell."""
    if not selector.decide.__module__.startswith("ppl_bandit.selectors"):
        return None
    for value in selector.settings.values():
        if _selector_words(value) is None if isinstance(value, Selector) else not _is_plain(value):
            return None
    return str(selector)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
