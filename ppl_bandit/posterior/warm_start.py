"""Warm starts of live bandits: the cache key of a start, and the conversion of an engine to a `WarmStart` and back.

The key covers everything that a start depends on: the program (by its fingerprint), the engine, the selector and the number of
draws. If one of these cannot be identified with certainty, nothing is cached.
"""

import functools
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import jax
import numpy as np

from ppl_bandit import engines, selectors
from ppl_bandit.engines.deferred import deferred_engine, engine_facts
from ppl_bandit.posterior.compiled_functions import CompiledFunctions
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.cached_facts import fingerprint_or_none
from ppl_bandit.program.model.recorded_readings import Recordings
from ppl_bandit.runtime.disk_cache import CacheEntry
from ppl_bandit.runtime.exported_functions import WarmStart, can_export, save_warm_start
from ppl_bandit.types import Engine, Selector

__all__ = ["engine_key", "restore_engine", "restore_functions", "save_start", "start_entry", "start_inputs"]

# Factories whose engines take seconds to prove or to trace.
_FACTORIES = {
    engines.choose: "choose",
    engines.conjugate: "conjugate",
    engines.collapsed: "collapsed",
    engines.reweight: "reweight",
    engines.laplace: "laplace",
    engines.nuts: "nuts",
    engines.kalman: "kalman",
    engines.collapsed_kalman: "collapsed_kalman",
    engines.particle_filter: "particle_filter",
}


def start_inputs(task: Task, factory: Callable) -> tuple[Any, ...] | None:
    """Return what a start depends on besides the program; None if it cannot be identified.

    That is also so if a variable that the program reads has changed since the model was first used.
    """
    model, engine, selector = task.model, engine_key(factory), _selector_key(task.selector)
    if engine is None or selector is None or task.is_partial or model.program_fingerprint is None:
        return None
    now = fingerprint_or_none(model.program, model.num_arms, model.context, model.outcomes)
    return (engine, selector, task.num_samples, task.draws) if now == model.program_fingerprint else None


def start_entry(task: Task, inputs: tuple[Any, ...] | None) -> CacheEntry | None:
    """Return the key of a start in the disk cache, given its `start_inputs`; None if it cannot be cached."""
    return None if inputs is None or not can_export() else task.model.cache_entry("start", *inputs)


def save_start(
    entry: CacheEntry | None, task: Task, engine: Engine, run: CompiledFunctions, recordings: Recordings
) -> None:
    """Store a start whose first functions were exported; nothing if one of them could not be."""
    functions = {name: dict(function.exported) for name, function in run.first_functions()}
    if not all(functions.values()):
        return
    grows = engine.capabilities.reserve is not None
    try:
        facts = {**engine_facts(engine), "recordings": recordings.to_json() if grows else {}}
    except TypeError:  # a context with pytree nodes that cannot be stored
        return
    save_warm_start(entry, WarmStart(facts, functions))
    task.model.save_validation()


def restore_engine(start: WarmStart, build: Callable[[], Engine]) -> Engine:
    """Return the engine of a warm start.

    An engine that stores rows is built at once: that takes little time, and its functions are traced again when it grows.
    """
    return build() if "reserve" in start.facts["functions"] else deferred_engine(start.facts, build)


def restore_functions(start: WarmStart, run: CompiledFunctions, recordings: Recordings) -> None:
    """Give exported functions to the compiled functions, and record what the engine reads from the program.

    Args:
        recordings: the recorded functions of the engine and of `run`.
    """
    recordings.record(start.facts["recordings"])
    for name, function in run.first_functions():
        function.exported.update(start.functions.get(name, {}))


def engine_key(factory: Any) -> str | None:
    """Return the name and the settings of one of this library's factories; None for any other."""
    settings: Mapping[str, Any] = {}
    if isinstance(factory, functools.partial) and not factory.args:
        factory, settings = factory.func, factory.keywords
    name = next((name for known, name in _FACTORIES.items() if factory is known), None)
    is_plain = name is not None and all(map(_is_plain, settings.values()))
    return f"{name}{sorted(settings.items())}" if is_plain else None


def _selector_key(selector: Selector) -> str | None:
    """Return a selector as text; None unless it equals what its factory makes from its settings.

    `dataclasses.replace` can give a selector other functions under the same name and settings.
    """
    factory = getattr(selectors, selector.name, None) if selector.name in selectors.__all__ else None
    if factory is None or not all(map(_is_plain_setting, selector.settings.values())):
        return None
    try:
        made = factory(**selector.settings)
    except (TypeError, ValueError):
        return None
    return str(selector) if _is_same(selector, made) else None


def _is_same(one: Any, other: Any, compared: frozenset = frozenset()) -> bool:
    """Return whether two values compute the same: equal plain values, or functions with equal code and closures.

    Args:
        compared: identities of the pairs that contain these values; a pair that contains itself adds no difference.
    """
    pair = id(one), id(other)
    if one is other or pair in compared:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray | jax.Array):
        return one.dtype == other.dtype and np.array_equal(one, other)
    ours, theirs = _parts(one), _parts(other)
    if ours is None or theirs is None:
        return _is_plain(one) and one == other
    inside = compared | {pair}
    return len(ours) == len(theirs) and all(_is_same(*both, inside) for both in zip(ours, theirs, strict=True))


def _parts(value: Any) -> list[Any] | None:
    """Return what a function or a container consists of; None for any other value."""
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Selector):
        return list(vars(value).values())
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, list | tuple):
        return list(value)
    return [value.__wrapped__] if hasattr(value, "__wrapped__") else None  # a jitted function


def _is_plain_setting(value: Any) -> bool:
    return _selector_key(value) is not None if isinstance(value, Selector) else _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
