"""Functions of a program that are traced once for each form of their arguments and replayed as jaxprs afterwards.

Replaying a jaxpr runs neither the NumPyro program nor NumPyro. So what was recorded can be traced again in any thread, while
other threads run programs.
"""

from collections.abc import Callable
from typing import Any

import jax

from ppl_bandit.runtime.jax_adapter import ClosedJaxpr, evaluate_jaxpr

__all__ = ["recorded"]


def recorded(function: Callable) -> Callable:
    """Return a pure function of arrays as one that is traced once per form of its arguments and replayed afterwards.

    The function must not close over traced arrays: they would become part of the jaxpr.
    """
    jaxprs: dict[Any, tuple[ClosedJaxpr, Any]] = {}

    def replay(*args: Any) -> Any:
        leaves, treedef = jax.tree.flatten(args)
        forms = [jax.typeof(leaf) for leaf in leaves]
        arrays = tuple((form.shape, form.dtype, form.weak_type) for form in forms)
        key = treedef, arrays, jax.dtypes.canonicalize_dtype(float)
        if key not in jaxprs:
            shapes = [jax.ShapeDtypeStruct(form.shape, form.dtype, weak_type=form.weak_type) for form in forms]
            closed, result = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(treedef, shapes))
            jaxprs[key] = closed, jax.tree.structure(result)
        closed, result_tree = jaxprs[key]
        return jax.tree.unflatten(result_tree, evaluate_jaxpr(closed, *leaves))

    return replay
