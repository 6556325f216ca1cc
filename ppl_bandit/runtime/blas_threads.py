"""Factorize matrices on one thread: the library that does it for jax, on a CPU, would take all cores for a matrix of 100 rows.

Its threads wait for each other without letting go of their cores. Where anything else runs on one of them, a factorization of a
fifth of a millisecond took 80; and the cores of a bandit have other things to do, decisions of other threads among them.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import scipy.linalg  # noqa: F401 - jax calls what it brings, and would load it later
import threadpoolctl

__all__ = ["on_one_thread", "one_thread"]

_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")  # who sets one of these has decided

_LOCK = threading.Lock()
_num_inside = 0  # calls that want one thread just now
_before: list[int] = []  # threads of each library, to go back to


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Let linear algebra run on one thread, unless the environment says on how many."""
    global _num_inside, _before
    with _LOCK:
        if _num_inside == 0:
            _before = [library.num_threads for library in _libraries()]
            _set([1] * len(_before))
        _num_inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _num_inside -= 1
            if _num_inside == 0:
                _set(_before)


def on_one_thread(function: Callable) -> Callable:
    """Return a function whose linear algebra runs on one thread."""

    @functools.wraps(function, updated=())
    def call(*args: Any) -> Any:
        with one_thread():
            return function(*args)

    return call


def _set(numbers: list[int]) -> None:
    for library, number in zip(_libraries(), numbers, strict=True):
        library.set_num_threads(number)


@functools.cache
def _libraries() -> list[Any]:
    """Return the libraries that jax may call: SciPy's own, where it has one, else all that are loaded."""
    if any(name in os.environ for name in _VARIABLES):
        return []
    found = threadpoolctl.ThreadpoolController().select(user_api="blas").lib_controllers
    own = [library for library in found if "scipy.libs" in (library.filepath or "")]
    return own or found
