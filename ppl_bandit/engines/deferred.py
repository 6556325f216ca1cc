"""Engines that are built when one of their functions is first called.

After a warm start the first decision and update run exported functions, so the engine's proof is not needed for them.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ppl_bandit.types import Capabilities, Engine, Explanation

__all__ = ["deferred_engine", "deferred_explanation", "engine_facts"]

_REQUIRED = ("init", "update", "sample")


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Return what `deferred_engine` needs to know of an engine, as JSON values; no text that describes a program."""
    capabilities = engine.capabilities
    optional = [name for name in Capabilities._fields if callable(getattr(capabilities, name))]
    return {
        "engine": engine.explanation.engine,
        "is_exact": engine.explanation.is_exact,
        "settings": dict(engine.settings),
        "functions": optional,
        "is_traceable_without_program": capabilities.is_traceable_without_program,
    }


def deferred_engine(facts: Mapping[str, Any], build: Callable[[], Engine]) -> Engine:
    """Return an engine that is built when one of its functions, or the text of its explanation, is first needed.

    Args:
        facts: the `engine_facts` of what `build` returns.
        build: builds the engine.
    """
    built = _once(build)

    def required(name: str) -> Callable:
        return lambda *args: getattr(built(), name)(*args)

    def optional(name: str) -> Callable:
        return lambda *args: getattr(built().capabilities, name)(*args)

    capabilities = Capabilities(
        **{name: optional(name) for name in facts["functions"]},
        is_traceable_without_program=facts["is_traceable_without_program"],
    )
    explanation = deferred_explanation(facts["engine"], facts["is_exact"], lambda: built().explanation)
    init, update, sample = map(required, _REQUIRED)
    return Engine(init, update, sample, explanation, facts["settings"], capabilities)


def deferred_explanation(engine: str, is_exact: bool, explain: Callable[[], Explanation]) -> Explanation:
    """Return an explanation whose reason, sites and report are made when one of them is first read.

    Args:
        explain: returns the whole explanation.
    """
    explanation = _DeferredExplanation(engine, is_exact, "", {})
    explanation.explain = _once(explain)
    return explanation


class _DeferredExplanation(Explanation):
    explain: Callable[[], Explanation]

    @property
    def reason(self) -> str:  # type: ignore[override]
        return self.explain().reason

    @property
    def sites(self) -> Mapping[str, str]:  # type: ignore[override]
        return self.explain().sites

    @property
    def report(self) -> str:  # type: ignore[override]
        return self.explain().report

    def _replace(self, **fields: Any) -> Explanation:  # type: ignore[override]
        return self.explain()._replace(**fields)


def _once(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that builds something on its first call, in float64."""
    lock = threading.Lock()

    def in_float64() -> Any:
        with jax.enable_x64(True):  # a live bandit builds its engines in float64
            return build()

    @functools.cache
    def built() -> Any:
        # In another thread: the caller may be inside a trace, which must not record what building computes.
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(in_float64).result()

    def locked() -> Any:
        with lock:
            return built()

    return locked
