"""Functions of a program that are traced once for each form of their arguments and replayed as jaxprs afterwards.

Replaying a jaxpr runs neither the NumPyro program nor NumPyro. So a recorded function can be traced again, for example for a
larger buffer of data, in any thread, while other threads run programs.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from ppl_bandit.runtime.exported_functions import form_from_json, form_of, form_to_json
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, evaluate_jaxpr

__all__ = ["Recordings", "collect_recordings", "recorded"]


class Recordings:
    """Recorded functions by name; of two functions with one name the later one."""

    def __init__(self) -> None:
        self.functions: dict[str, _Recorded] = {}

    def to_json(self) -> dict[str, list[Any]]:
        """Return, for each function, the forms of the arguments that it was recorded for, as JSON values."""
        return {name: [form_to_json(list(form)) for form in own.forms()] for name, own in self.functions.items()}

    def record(self, stored: Mapping[str, Sequence[Any]]) -> None:
        """Record functions for the forms that `to_json` returned, in this process or another."""
        for name, forms in stored.items():
            for form in forms if name in self.functions else ():
                self.functions[name].find(tuple(form_from_json(form)))


_COLLECTING = contextvars.ContextVar[Recordings | None]("collecting", default=None)


@contextlib.contextmanager
def collect_recordings() -> Iterator[Recordings]:
    """Collect the functions that `recorded` creates inside the context."""
    recordings = Recordings()
    token = _COLLECTING.set(recordings)
    try:
        yield recordings
    finally:
        _COLLECTING.reset(token)


def recorded(function: Callable) -> Callable:
    """Return a pure function of arrays as one that is traced once per form of its arguments and replayed afterwards.

    The function must not close over traced arrays: they would become part of the jaxpr.
    """
    recording, collecting = _Recorded(function), _COLLECTING.get()
    if collecting is not None:
        collecting.functions[f"{function.__module__}.{function.__qualname__}"] = recording
    return recording


class _Recorded:
    """A function with its jaxprs by the form of the arguments and the precision."""

    def __init__(self, function: Callable):
        self._function = function
        self._jaxprs: dict[Any, tuple[tuple[Any, ...], ClosedJaxpr, Any]] = {}

    def __call__(self, *args: Any) -> Any:
        closed, treedef = self.find(args)
        return jax.tree.unflatten(treedef, evaluate_jaxpr(closed, *jax.tree.leaves(args)))

    def find(self, args: tuple[Any, ...]) -> tuple[ClosedJaxpr, Any]:
        """Return the jaxpr for arguments, or for a form of them, and the structure of the result."""
        form = form_of(args)
        leaves, treedef = jax.tree.flatten(form)
        arrays = tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves)
        key = treedef, arrays, jax.dtypes.canonicalize_dtype(float)
        if key not in self._jaxprs:
            closed, result = jax.make_jaxpr(self._function, return_shape=True)(*args)
            self._jaxprs[key] = form, closed, jax.tree.structure(result)
        return self._jaxprs[key][1:]

    def forms(self) -> list[tuple[Any, ...]]:
        return [form for form, *_ in self._jaxprs.values()]
