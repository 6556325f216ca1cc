"""An engine that is known before it is built: what it says of itself, now, and what it does, when it is first asked to."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from ppl_bandit.types import Engine, Explanation

__all__ = ["EngineFacts", "deferred", "facts_of"]

_FUNCTIONS = (
    "init",
    "update",
    "sample",
    "parameters",
    "reserve",
    "marginals",
    "infinite_means",
    "wider",
    "quick_update",
)


class EngineFacts(NamedTuple):
    """What an engine says of itself.

    Attributes:
        functions: the names of those that it has.
    """

    explanation: Explanation
    settings: dict[str, Any]
    functions: tuple[str, ...]
    is_recorded: bool


def facts_of(engine: Engine) -> EngineFacts:
    """Return what an engine says of itself."""
    functions = tuple(name for name in _FUNCTIONS if getattr(engine, name) is not None)
    own = engine.explanation
    explanation = own._replace(sites=dict(own.sites))
    return EngineFacts(explanation, dict(engine.settings), functions, engine.is_recorded)


def deferred(facts: EngineFacts, build: Callable[[], Engine]) -> Engine:
    """Return an engine of which all is known, and which is built when one of its functions is first called.

    Args:
        build: returns the engine that the facts are of.
    """
    lock, found = threading.Lock(), list[Engine]()

    def in_double_precision() -> Engine:
        with jax.enable_x64(True):  # as engines of a live bandit are built
            return build()

    def built() -> Engine:
        with lock:
            if not found:
                # In a thread of its own: this one may be in the middle of a trace, which building must not become part of.
                with ThreadPoolExecutor(1) as pool:
                    found.append(pool.submit(in_double_precision).result())
            return found[0]

    def late(name: str) -> Callable:
        return lambda *args: getattr(built(), name)(*args)

    functions: dict[str, Any] = {name: late(name) if name in facts.functions else None for name in _FUNCTIONS}
    return Engine(**functions, explanation=facts.explanation, settings=facts.settings, is_recorded=facts.is_recorded)
