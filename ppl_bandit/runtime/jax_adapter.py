"""The equations of a jaxpr, and of all jaxprs inside of it."""

from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

__all__ = ["all_equations"]


def all_equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Go through the equations of a jaxpr and of all jaxprs inside of it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for leaf in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda leaf: isinstance(leaf, Jaxpr | ClosedJaxpr)
        ):
            if isinstance(leaf, Jaxpr | ClosedJaxpr):
                yield from all_equations(leaf.jaxpr if isinstance(leaf, ClosedJaxpr) else leaf)
