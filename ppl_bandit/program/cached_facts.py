"""What validation found about a program, as JSON values for its artefact: it is not validated again in every process."""

import contextlib
from typing import Any

import jax

from ppl_bandit.program.jaxpr.index_limits import IndexLimit
from ppl_bandit.program.model import means

VALIDATION = "validation"


def facts_to_json(facts: Any) -> dict[str, Any]:
    """Return `validation.ProgramFacts` as JSON values, without the context and the artefact."""
    method = facts.mean_method
    values = facts._asdict() | {
        "mean_method": None if method is None else means.MEAN_METHODS.index(method),
        "largest_integers": [int(number) for number in jax.tree.leaves(facts.largest_integers)],
    }
    return {name: value for name, value in values.items() if name not in ("context", "artefact")}


def facts_from_json(values: Any, context: Any) -> dict[str, Any] | None:
    """Undo `facts_to_json`: return arguments of `validation.ProgramFacts`; None if the values are odd."""
    with contextlib.suppress(Exception):
        values = _with_tuples(values)
        method = values["mean_method"]
        return values | {
            "context": context,
            "mean_method": None if method is None else means.MEAN_METHODS[method],
            "largest_integers": jax.tree.unflatten(jax.tree.structure(context), values["largest_integers"]),
            "index_limits": tuple(IndexLimit(*limit) for limit in values["index_limits"]),
        }
    return None


def _with_tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
