"""Readings of a program that run it once for each shape of their arguments, and repeat what it computed from then on.

A recording is the jaxpr of a run: the same operations, without the program and without NumPyro. So what was recorded can be
traced again - for data that have grown, say - in any thread, while other threads run programs of their own.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax

from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, evaluate_jaxpr

__all__ = ["Forms", "Recordings", "listing", "recorded"]

# By the name of a reading: the shapes and types of all arguments that it was recorded for.
Forms: TypeAlias = dict[str, list[tuple[Any, ...]]]


class Recordings:
    """Readings that were made recordable while it was listening, by name; the last one of each name."""

    def __init__(self) -> None:
        self._readings: dict[str, _Recorded] = {}

    def add(self, reading: "_Recorded") -> None:
        """Note a reading."""
        self._readings[reading.name] = reading

    def forms(self) -> Forms:
        """Return the arguments that each was recorded for."""
        return {name: reading.forms() for name, reading in self._readings.items()}

    def record(self, forms: Mapping[str, Sequence[tuple[Any, ...]]]) -> None:
        """Run the program once for each of these arguments, unless that was done; readings of other names are passed over."""
        for name, every in forms.items():
            for form in every if name in self._readings else ():
                self._readings[name].find(form)


_LISTENING = contextvars.ContextVar[Recordings | None]("listening", default=None)


@contextlib.contextmanager
def listing() -> Iterator[Recordings]:
    """List the readings that are made recordable inside."""
    found = Recordings()
    token = _LISTENING.set(found)
    try:
        yield found
    finally:
        _LISTENING.reset(token)


def recorded(function: Callable) -> Callable:
    """Return a pure function of arrays as one that is run once per shape of its arguments, and repeated after that.

    It must not close over arrays that are being traced: they would be in the recording.
    """
    reading, listener = _Recorded(function), _LISTENING.get()
    if listener is not None:
        listener.add(reading)
    return reading


class _Recorded:
    """A function with all that was recorded of it."""

    def __init__(self, function: Callable):
        self._function = function
        self._known: dict[Any, tuple[tuple[Any, ...], ClosedJaxpr, Any]] = {}

    @property
    def name(self) -> str:
        return f"{self._function.__module__}.{self._function.__qualname__}"

    def __call__(self, *args: Any) -> Any:
        closed, returned = self.find(args)
        return jax.tree.unflatten(returned, evaluate_jaxpr(closed, *jax.tree.leaves(args)))

    def find(self, args: tuple[Any, ...]) -> tuple[ClosedJaxpr, Any]:
        """Return the recording for arguments, or for their shapes and types, and the structure of what it returns."""
        form = jax.tree.map(_form_of, args)
        leaves, treedef = jax.tree.flatten(form)
        arrays = tuple((leaf.shape, leaf.dtype, leaf.weak_type) for leaf in leaves)
        place = treedef, arrays, jax.dtypes.canonicalize_dtype(float)
        if place not in self._known:
            closed, shapes = jax.make_jaxpr(self._function, return_shape=True)(*args)
            self._known[place] = form, closed, jax.tree.structure(shapes)
        return self._known[place][1:]

    def forms(self) -> list[tuple[Any, ...]]:
        return [form for form, *_ in self._known.values()]


def _form_of(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
