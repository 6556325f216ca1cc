"""Starts that the bandits of one process share: an engine and its compiled functions, for the same program and settings.

A second bandit of a program then starts without a proof and without compiling. The program is identified by its function object
and by its fingerprint, which is computed at every start: a changed closure or global variable gives another key.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from ppl_bandit.posterior.compiled_functions import CompiledFunctions
from ppl_bandit.posterior.task import Task
from ppl_bandit.runtime import disk_cache
from ppl_bandit.types import Engine

__all__ = ["MAX_STARTS", "find_shared", "forget_starts", "share", "shared_key"]

MAX_STARTS = 8  # as many as `compiled_functions` keeps; the least recently used is dropped first


class SharedStart(NamedTuple):
    """An engine and its compiled functions; `program` is kept, because its identity is a part of the key."""

    program: Callable
    engine: Engine
    run: CompiledFunctions


_STARTS: dict[Any, SharedStart] = {}
_LOCK = threading.Lock()


def shared_key(task: Task, inputs: tuple[Any, ...] | None) -> Any:
    """Return the key of a start in this process, given its `start_inputs`; None if it cannot be shared.

    The folder of the disk cache is a part of it: a start is stored in each folder that is used.
    """
    if inputs is None:
        return None
    where = disk_cache.compiler_settings(), disk_cache.folder()
    return id(task.model.program), task.model.program_fingerprint, inputs, *where


def find_shared(key: Any) -> SharedStart | None:
    """Return the start with a key; None if there is none."""
    with _LOCK:
        found = _STARTS.pop(key, None)
        if found is not None:
            _STARTS[key] = found  # the most recently used is last
        return found


def share(key: Any, program: Callable, engine: Engine, run: CompiledFunctions) -> None:
    """Share a start with later bandits; without effect if the key is None."""
    if key is None:
        return
    with _LOCK:
        _STARTS[key] = SharedStart(program, engine, run)
        while len(_STARTS) > MAX_STARTS:
            del _STARTS[next(iter(_STARTS))]


def forget_starts() -> None:
    """Share nothing that was started before: the next bandit starts as the first one of a process does."""
    with _LOCK:
        _STARTS.clear()
