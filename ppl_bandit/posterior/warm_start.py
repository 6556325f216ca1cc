"""Warm starts: an engine and its compiled functions, for later bandits of the same task.

Bandits of one process share them. The artefact of a program gives a later process what proof and validation found and the
traced functions of the first decision and update; JAX's own cache holds the compiled code. The key covers everything that a
start depends on: the program (by its fingerprint), the engine, the selector and the number of draws. If one of these cannot be
identified with certainty, nothing is reused.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from ppl_bandit import engines
from ppl_bandit.engines.choose import deferred_engine, engine_facts
from ppl_bandit.posterior.compiled_functions import CompiledFunctions, compiled_functions
from ppl_bandit.posterior.task import Task, counting_engine, learning_model
from ppl_bandit.program.fingerprints import program_fingerprint
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime import artefact
from ppl_bandit.runtime.artefact import Artefact, is_plain
from ppl_bandit.runtime.compile_ahead import run_afterwards
from ppl_bandit.runtime.packed_state import ExportedFunction, import_exported
from ppl_bandit.selectors.selector_contract import selector_key
from ppl_bandit.types import Engine

# `svi` is not among them: its guide is a Python object.
_FACTORIES = frozenset(engines.__all__) - {"svi"}
MAX_STARTS = 8  # compiled functions take about 30 MB each; the least recently used are dropped first


class Start(NamedTuple):
    """An engine and its compiled functions.

    Attributes:
        task: of the bandit that started first.
        name: under which it is stored in the artefact of the program; None if it is not, or was read from there.
    """

    engine: Engine
    run: CompiledFunctions
    task: Task
    name: str | None = None


def find_start(task: Task, factory: Callable[[RewardModel], Engine], is_model_new: bool = False) -> Start:
    """Return the start of an earlier bandit of this process, or one from the artefact of the program, or a new one.

    Args:
        is_model_new: whether the task's model was built just now, so that no variable that its program reads has changed.

    Raises:
        ValueError: if the factory does not return an engine.
    """
    name = start_name(task, factory, is_model_new)
    if name is None:
        return _new_start(task, factory)
    # A start is stored in each folder that is used.
    kept = _kept(id(task.model.program), task.model.artefact.name, artefact.folder(), name)
    if not kept:
        stored = _stored_start(task, factory, name)
        kept.append(stored or _new_start(task, factory, name if artefact.folder() else None))
    return kept[0]


def start_name(task: Task, factory: Callable, is_model_new: bool = False) -> str | None:
    """Return what a start depends on besides the program; None if the task cannot be identified.

    That is also so if a variable that the program reads, or a setting of JAX, has changed since the model was built.
    """
    model, engine, selector = task.model, _engine_key(factory), selector_key(task.selector)
    if engine is None or selector is None or task.is_partial or not model.artefact.is_current:
        return None
    if not is_model_new:
        read = functools.partial(program_fingerprint, model.program, model.num_arms, model.context, model.outcomes)
        if Artefact(read).fingerprint != model.artefact.fingerprint:
            return None
    return f"start {(engine, selector, task.num_samples, task.draws)!r}"


def store_start(found: Start) -> None:
    """Store a start in the artefact of its program, once what was prepared is compiled, if all functions were exported."""
    if found.name is not None:
        run_afterwards(functools.partial(_store, found, found.task.model, found.name))


@functools.lru_cache(maxsize=MAX_STARTS)
def _kept(*key: Any) -> list[Start]:
    """Return the place of a start in this process."""
    return []


def _stored_start(task: Task, factory: Callable[[RewardModel], Engine], name: str) -> Start | None:
    stored = task.model.load_result(name)
    if stored is None:
        return None
    with contextlib.suppress(Exception), jax.enable_x64(True):  # whatever is odd about it: it only saves time
        (facts, described), programs = stored
        exported = {
            name: ExportedFunction(own, *described[name]) for name, own in zip(described, programs, strict=True)
        }
        for own in exported.values():
            import_exported(own)
        engine = deferred_engine(facts, functools.partial(_build_engine, task, factory))
        run = _compiled(task, engine, is_exported=False)
        for name, function in run.first_functions():
            function.exported = exported[name]
        return Start(engine, run, task)
    return None


def _new_start(task: Task, factory: Callable[[RewardModel], Engine], name: str | None = None) -> Start:
    with jax.enable_x64(True):
        engine = _build_engine(task, factory)
        return Start(engine, _compiled(task, engine, is_exported=name is not None), task, name)


def _build_engine(task: Task, factory: Callable[[RewardModel], Engine]) -> Engine:
    engine = counting_engine(task.model, factory) if task.is_partial else factory(task.model)
    if not isinstance(engine, Engine):
        raise ValueError(f"engine must be a factory that returns an Engine, it returned {type(engine).__name__}")
    return engine


def _compiled(task: Task, engine: Engine, is_exported: bool) -> CompiledFunctions:
    pure = engine._replace(explanation=None, settings=None)  # type: ignore[arg-type]
    given = task.model, learning_model(task), pure, task.selector, task.num_samples, task.draws
    return compiled_functions(*given, is_exported)


def _store(found: Start, model: RewardModel, name: str) -> None:
    # This runs in the background thread, behind what was prepared before: what is prepared since then waits for this thread.
    for _, function in found.run.first_functions():
        function.wait_for_calls()
    functions = {name: function.exported for name, function in found.run.first_functions()}
    exported = [own for own in functions.values() if own is not None]
    if len(exported) == len(functions) and model.load_result(name) is None:
        described = dict(zip(functions, [own[1:] for own in exported], strict=True))
        model.save_result(name, [engine_facts(found.engine), described], [own.program for own in exported])


def _engine_key(factory: Any) -> str | None:
    """Return the name and the settings of one of this library's factories; None for any other."""
    settings: Mapping[str, Any] = {}
    if isinstance(factory, functools.partial) and not factory.args:
        factory, settings = factory.func, factory.keywords
    name = getattr(factory, "__name__", None)
    is_own = name in _FACTORIES and factory is getattr(engines, name)
    return f"{name}{sorted(settings.items())}" if is_own and all(map(is_plain, settings.values())) else None
