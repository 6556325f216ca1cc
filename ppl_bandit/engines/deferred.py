"""An engine that is known before it is built: what it says of itself, now, and what it does, when it is first asked to."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax

from ppl_bandit.types import Capabilities, Engine, Explanation

__all__ = ["EngineFacts", "deferred", "facts_of"]

_REQUIRED = ("init", "update", "sample")
_FLAG = "is_traceable_without_program"
_OPTIONAL = tuple(name for name in Capabilities._fields if name != _FLAG)


class EngineFacts(NamedTuple):
    """What an engine says of itself.

    Attributes:
        functions: the names of the optional functions that it has.
    """

    explanation: Explanation
    settings: dict[str, Any]
    functions: tuple[str, ...]
    is_traceable_without_program: bool


def facts_of(engine: Engine) -> EngineFacts:
    """Return what an engine says of itself."""
    functions = tuple(name for name in _OPTIONAL if getattr(engine.capabilities, name) is not None)
    own = engine.explanation
    explanation = own._replace(sites=dict(own.sites))
    return EngineFacts(explanation, dict(engine.settings), functions, engine.capabilities.is_traceable_without_program)


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

    def required(name: str) -> Callable:
        return lambda *args: getattr(built(), name)(*args)

    def optional(name: str) -> Callable:
        return lambda *args: getattr(built().capabilities, name)(*args)

    capabilities = Capabilities(
        **{name: optional(name) for name in facts.functions},  # type: ignore[arg-type]
        is_traceable_without_program=facts.is_traceable_without_program,
    )
    init, update, sample = map(required, _REQUIRED)
    return Engine(init, update, sample, facts.explanation, facts.settings, capabilities)
