"""Warm starts: the proof and the compiled functions of a bandit, for later bandits of the same task.

Bandits of one process share them. A later process finds on disk what validation and proof found and the traced functions of the
first decision and update; JAX's own cache holds the compiled code. The key covers everything that a start depends on: the
program (by its fingerprint), the engine, the selector and the number of draws. If one of these cannot be identified with
certainty, nothing is reused.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ppl_bandit import engines
from ppl_bandit.engines.deferred import deferred_engine, engine_facts
from ppl_bandit.posterior.compiled_functions import CompiledFunctions
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.cached_facts import fingerprint_or_none
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.disk_cache import CacheKey, is_plain
from ppl_bandit.runtime.exported_functions import ExportedFunction, import_exported
from ppl_bandit.selectors.selector_contract import selector_key
from ppl_bandit.types import Engine

__all__ = ["MAX_STARTS", "find_start", "forget_starts", "load_start", "share_start", "start_key", "store_start"]

# `svi` is not among them: its guide is a Python object.
_FACTORIES = frozenset(engines.__all__) - {"svi"}
MAX_STARTS = 8  # as many as `compiled_functions` keeps; the least recently used is dropped first


class Start(NamedTuple):
    """A proved engine and its compiled functions; `program` is kept, because its identity is a part of the key."""

    program: Callable
    engine: Engine
    run: CompiledFunctions


_STARTS: dict[Any, Start] = {}
_LOCK = threading.Lock()


def start_key(task: Task, factory: Callable, is_model_new: bool = False) -> str | None:
    """Return what a start depends on besides the program, as text; None if it cannot be identified.

    That is also so if a variable that the program reads has changed since the model was built.

    Args:
        is_model_new: whether the model was built just now.
    """
    model, engine, selector = task.model, _engine_key(factory), selector_key(task.selector)
    if engine is None or selector is None or task.is_partial or model.program_fingerprint is None:
        return None
    if not is_model_new:
        now = fingerprint_or_none(model.program, model.num_arms, model.context, model.outcomes)
        if now != model.program_fingerprint:
            return None
    return repr((engine, selector, task.num_samples, task.draws, disk_cache.compiler_settings()))


def find_start(task: Task, key: str | None) -> Start | None:
    """Return the start of an earlier bandit of this process; None if there is none."""
    with _LOCK:
        found = None if key is None else _STARTS.pop(_place(task, key), None)
        if found is not None:
            _STARTS[_place(task, key)] = found  # the most recently used is last
        return found


def share_start(task: Task, key: str | None, engine: Engine, run: CompiledFunctions) -> None:
    """Share a start with later bandits of this process; without effect if the key is None."""
    if key is None:
        return
    with _LOCK:
        _STARTS[_place(task, key)] = Start(task.model.program, engine, run)
        while len(_STARTS) > MAX_STARTS:
            del _STARTS[next(iter(_STARTS))]


def forget_starts() -> None:
    """Share nothing that was started before: the next bandit starts as the first one of a process does."""
    with _LOCK:
        _STARTS.clear()


def store_start(key: str, model: RewardModel, where: CacheKey, engine: Engine, run: CompiledFunctions) -> None:
    """Store a start on disk, once its functions are compiled and if all of them were exported."""
    run.wait()
    functions = {name: function.exported for name, function in run.first_functions()}
    exported = [own for own in functions.values() if own is not None]
    if len(exported) == len(functions):
        described = dict(zip(functions, [own[1:] for own in exported], strict=True))
        model.save_result(f"start {key}", [engine_facts(engine), described], [own.program for own in exported], where)


def load_start(key: str | None, model: RewardModel) -> tuple[dict[str, Any], dict[str, ExportedFunction]] | None:
    """Return the facts and the exported functions of a stored start; None if there is none, or anything about it is odd."""
    found = None if key is None else model.load_result(f"start {key}")
    if found is None:
        return None
    with contextlib.suppress(Exception), jax.enable_x64(True):
        (facts, described), programs = found
        pairs = zip(described.items(), programs, strict=True)
        functions = {name: ExportedFunction(program, *own) for (name, own), program in pairs}
        for function in functions.values():
            import_exported(function)
        deferred_engine(facts, lambda: None)  # type: ignore[arg-type, return-value]
        return facts, functions
    return None


def _place(task: Task, key: str | None) -> Any:
    """Return where a start is kept in this process; the folder is a part, as a start is stored in each that is used."""
    return id(task.model.program), task.model.program_fingerprint, key, disk_cache.folder()


def _engine_key(factory: Any) -> str | None:
    """Return the name and the settings of one of this library's factories; None for any other."""
    settings: Mapping[str, Any] = {}
    if isinstance(factory, functools.partial) and not factory.args:
        factory, settings = factory.func, factory.keywords
    name = getattr(factory, "__name__", None)
    is_own = name in _FACTORIES and factory is getattr(engines, name)
    return f"{name}{sorted(settings.items())}" if is_own and all(map(is_plain, settings.values())) else None
