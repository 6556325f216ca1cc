"""Engines that are built when one of their functions is first called.

After a warm start the first decision and update run exported functions, so the engine's proof is not needed for them.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from ppl_bandit.types import Capabilities, Engine, Explanation


def engine_facts(engine: Engine) -> dict[str, Any]:
    """Return what `deferred_engine` needs to know of an engine, as JSON values; no text that describes a program."""
    capabilities = engine.capabilities._asdict()
    return {
        "engine": engine.explanation.engine,
        "is_exact": engine.explanation.is_exact,
        "settings": dict(engine.settings),
        "capabilities": [name for name, own in capabilities.items() if own is not None],
    }


def deferred_engine(facts: Mapping[str, Any], build: Callable[[], Engine]) -> Engine:
    """Return an engine that is built when one of its functions, or the text of its explanation, is first needed.

    Args:
        facts: the `engine_facts` of what `build` returns.
        build: builds the engine.
    """
    built = _once(build)

    def later(find: Callable[[Engine], Any], name: str) -> Callable:
        return lambda *args: getattr(find(built()), name)(*args)

    init, update, sample = (later(lambda engine: engine, name) for name in ("init", "update", "sample"))
    optional = {name: later(lambda engine: engine.capabilities, name) for name in facts["capabilities"]}
    explanation = deferred_explanation(facts["engine"], facts["is_exact"], lambda: built().explanation)
    return Engine(init, update, sample, explanation, facts["settings"], Capabilities(**optional))


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
    reason = property(lambda self: self.explain().reason)  # type: ignore[assignment]
    sites = property(lambda self: self.explain().sites)  # type: ignore[assignment]
    report = property(lambda self: self.explain().report)  # type: ignore[assignment]

    def _replace(self, **fields: Any) -> Explanation:  # type: ignore[override]
        return self.explain()._replace(**fields)


def _once(build: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function that builds something on its first call, in float64, as a live bandit builds its engines."""
    lock, found = threading.Lock(), list[Any]()

    def in_float64() -> Any:
        with jax.enable_x64(True):
            return build()

    def built() -> Any:
        with lock:
            if not found:
                # In another thread: the caller may be inside a trace, which must not record what building computes.
                with ThreadPoolExecutor(1) as pool:
                    found.append(pool.submit(in_float64).result())
            return found[0]

    return built
