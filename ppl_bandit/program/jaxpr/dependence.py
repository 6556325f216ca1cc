"""Dependence analysis: which inputs of a traced function each output may depend on."""

from collections.abc import Sequence

from ppl_bandit.program.jaxpr.interpreter import Domain, interpret
from ppl_bandit.runtime.jax_adapter import ClosedJaxpr

__all__ = ["dependencies"]

_DOMAIN = Domain(
    apply=lambda eqn, labels, callers: [frozenset().union(*labels)] * len(eqn.outvars),
    is_constant=lambda labels: not labels,
    fold=lambda eqn, labels: [frozenset()] * len(eqn.outvars),
    lift=lambda constant: frozenset(),
)


def dependencies(closed: ClosedJaxpr, labels: Sequence[frozenset]) -> list[frozenset]:
    """Return, for each output of a jaxpr, the union of the labels of the inputs that reach it.

    Args:
        labels: a set of labels for each input.
    """
    return interpret(_DOMAIN, closed.jaxpr, closed.consts, labels)
