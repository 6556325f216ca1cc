"""What a traced program says about itself: which inputs an output depends on, which indices it reads.

Both questions are asked of the jaxpr, before anything runs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from ppl_bandit.runtime.jax_adapter import Jaxpr, Literal, apply_primitive, called_jaxpr

__all__ = ["UNKNOWN", "ArmIndex", "dependencies", "evaluate", "read_indices"]

UNKNOWN = object()  # a value that is not fixed before the program runs


class ArmIndex(NamedTuple):
    """One indexing operation whose indices are known.

    Attributes:
        lowest, highest: range of the indices, over all axes that are indexed.
        size: smallest number of entries among the axes that are indexed.
    """

    lowest: Array
    highest: Array
    size: int


def evaluate(
    jaxpr: Jaxpr, consts: Iterable[Any], args: Sequence[Any], step: Callable[[Any, list[Any]], Sequence[Any]]
) -> list[Any]:
    """Go through a jaxpr with values of any kind; `step` turns an equation and its inputs into its outputs."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, step(eqn, [read(atom) for atom in eqn.invars]), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def dependencies(jaxpr: Jaxpr, inputs: Sequence[frozenset]) -> list[frozenset]:
    """Return, for each output of a jaxpr, the union of the labels of the inputs that reach it.

    Args:
        inputs: a set of labels for each input variable.
    """
    env: dict[Any, frozenset] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> frozenset:
        return frozenset() if isinstance(atom, Literal) else env.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        labels = [read(atom) for atom in eqn.invars]
        inner = called_jaxpr(eqn)
        if inner is not None:
            outs = dependencies(inner[0], labels)
        else:
            outs = [frozenset().union(*labels)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, outs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def read_indices(jaxpr: Jaxpr, consts: Iterable[Any], args: Sequence[Any]) -> list[ArmIndex]:
    """Return the range of every index that is known from those arguments which are not `UNKNOWN`."""
    found: list[ArmIndex] = []
    _walk(jaxpr, consts, args, found)
    return found


def _walk(jaxpr: Jaxpr, consts: Iterable[Any], args: Sequence[Any], found: list[ArmIndex]) -> list[Any]:
    def step(eqn: Any, values: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name == "gather" and values[1] is not UNKNOWN:
            found.extend(_gathered(eqn, values[1]))
        inner = called_jaxpr(eqn)
        if inner is not None:
            return _walk(inner[0], inner[1], values, found)
        if any(value is UNKNOWN for value in values) or eqn.effects:
            return [UNKNOWN] * len(eqn.outvars)
        return apply_primitive(eqn, values)

    return evaluate(jaxpr, consts, args, step)


def _gathered(eqn: Any, indices: Array) -> Iterator[ArmIndex]:
    axes = eqn.params["dimension_numbers"].start_index_map
    shape, window = eqn.invars[0].aval.shape, eqn.params["slice_sizes"]
    if not axes or 0 in jnp.shape(indices):
        return
    for position, axis in enumerate(axes):
        along = indices[..., position]
        yield ArmIndex(jnp.min(along), jnp.max(along), shape[axis] - window[axis] + 1)
