"""What a bandit needs to start, handed from one process to the next: the proof of its engine, its first programs traced.

It is found by a digest of everything that it follows from: what the program computes, the task, the engine, this library, jax,
NumPyro and their settings. Where any of these cannot be told for sure, nothing is taken over and nothing left. The compiled
code itself is in jax's own cache.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ppl_bandit import engines
from ppl_bandit.engines.deferred import EngineFacts, deferred, facts_of
from ppl_bandit.posterior.compiled_functions import QUICKLY, Compiled, Finish, Form
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.recorded_readings import Forms, Recordings
from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.exported_functions import Portable, can_export
from ppl_bandit.runtime.packed_state import Joining
from ppl_bandit.types import Engine, Selector

__all__ = ["Start", "leave", "words_of"]

# Those whose engines take seconds to prove, or to trace; what others need is traced again.
_FACTORIES = {
    engines.choose: "choose",
    engines.conjugate: "conjugate",
    engines.collapsed: "collapsed",
    engines.reweight: "reweight",
    engines.laplace: "laplace",
    engines.nuts: "nuts",
}


class Start(NamedTuple):
    """What one process leaves for the next.

    Attributes:
        portables: by name of the compiled function.
        forms: as in `Compiled.finish`.
        readings: of an engine whose state grows, what of the program was recorded: it is traced again for more room, at a time
            when the program cannot be run.
    """

    facts: EngineFacts
    portables: dict[str, dict[str, Portable]]
    forms: dict[int, Form]
    readings: Forms

    def engine(self, build: Callable[[], Engine]) -> Engine:
        """Return the engine; one that had to be proved is built when something else than the first programs is asked of it."""
        return build() if self._grows else deferred(self.facts, build)

    def give_to(self, run: Compiled, recordings: Recordings) -> None:
        """Let compiled functions take over what was traced.

        Args:
            recordings: all that engine and functions read the program by.
        """
        if self._grows:
            recordings.record(self.readings)
        for name, portables in self.portables.items():
            getattr(run, name).portables.update(portables)
        joining = None if self._grows else Joining(self.forms[0].state)
        for num_rows, form in self.forms.items():
            run.finish[num_rows] = Finish(form, joining)

    @property
    def _grows(self) -> bool:
        return "reserve" in self.facts.functions


def words_of(selector: Selector, num_samples: int, draws: bool, factory: Callable) -> tuple[Any, ...] | None:
    """Return what a start follows from beside the program; None where none is handed on."""
    if disk_cache.folder() is None or not can_export():
        return None
    engine, chooser = _engine_words(factory), _selector_words(selector)
    if engine is None or chooser is None:
        return None
    return "start", engine, chooser, num_samples, draws


def leave(words: tuple[Any, ...], task: Task, engine: Engine, run: Compiled, recordings: Recordings) -> None:
    """Leave a start to the processes to come, if all of it can be written down, once `run` is prepared."""
    parts = {"init": run.init, "select": run.select, "learn": run.learn, "learn_quickly": run.learn_quickly}
    portables = {name: dict(part.portables) for name, part in parts.items() if part is not None}
    if all(portables.values()):
        forms = {num_rows: run.finish[num_rows].form for num_rows in (0, 1, QUICKLY) if num_rows in run.finish}
        readings = recordings.forms() if engine.capabilities.reserve is not None else {}
        task.model.keep(Start(facts_of(engine), portables, forms, readings), *words)


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
