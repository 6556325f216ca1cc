"""Readings of a program that run it once for each shape of their arguments, and repeat what it computed from then on.

A recording is the jaxpr of a run: the same operations, without the program and without NumPyro. So what was recorded can be
traced again - for data that have grown, say - in any thread, while other threads run programs of their own.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

__all__ = ["recorded"]


def recorded(function: Callable) -> Callable:
    """Return a pure function of arrays as one that is run once per shape of its arguments, and repeated after that.

    It must not close over arrays that are being traced: they would be in the recording.
    """
    known: dict[Any, tuple[ClosedJaxpr, Any]] = {}

    def repeat(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        arrays = tuple((aval.shape, aval.dtype, aval.weak_type) for aval in map(jax.typeof, leaves))
        place = treedef, arrays, jax.dtypes.canonicalize_dtype(float)
        if place not in known:
            closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
            known[place] = closed, jax.tree.structure(shapes)
        closed, returned = known[place]
        return jax.tree.unflatten(returned, jaxpr_as_fun(closed)(*leaves))

    return repeat
