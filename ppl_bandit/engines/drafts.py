"""Engines that are still being proved, for whoever has use for the seconds that a proof is compiled and run for.

How an engine will decide is known before it is: it follows from the families of its latents. A listener may trace a first
decision meanwhile, and what it returns is called as soon as there is such an engine.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias

from ppl_bandit.types import Draws, Key, Marginals

__all__ = ["Draft", "announce", "listening"]


class Draft(NamedTuple):
    """What an engine will decide with, if it comes to be.

    Attributes:
        sample, marginals: the engine's own.
        state: the shapes and types of its state.
    """

    sample: Callable[[Key, Any, int], Draws]
    marginals: Callable[[Any, Any], Marginals | None]
    state: Any


Listener: TypeAlias = Callable[[Draft], Callable[[], None]]
_LISTENER: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a listener hear of the engines that are being proved inside of this context."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def announce(draft: Draft) -> Callable[[], None]:
    """Tell whoever listens, and return what to call once the engine is proved."""
    listener = _LISTENER.get()
    return (lambda: None) if listener is None else listener(draft)
