"""Facts about programs in the disk cache, so that a program is not validated and proved again in every process."""

from collections.abc import Callable
from typing import Any

import jax

from ppl_bandit.program.fingerprints import code_fingerprint, program_fingerprint
from ppl_bandit.program.jaxpr.index_limits import IndexLimit
from ppl_bandit.program.model import means
from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.disk_cache import CacheEntry, cache_entry

__all__ = ["fingerprint_or_none", "load_validation", "program_entry", "save_validation"]

_VALIDATION = "validation"


def program_entry(
    program: Callable,
    num_arms: int,
    context: Any,
    outcomes: tuple[str, ...],
    *inputs: Any,
    fingerprint: Callable[[], str | None] | None = None,
) -> CacheEntry | None:
    """Return the cache key of a result about a program; None if the cache is off.

    Args:
        inputs: which result it is, and what else it depends on, as JSON values.
        fingerprint: returns the program's fingerprint; it is computed if not given.
    """
    given = program, num_arms, context, outcomes
    structure = str(jax.tree.structure(context))
    key = *inputs, code_fingerprint(program), int(num_arms), list(outcomes), structure
    return cache_entry(fingerprint or (lambda: fingerprint_or_none(*given)), *key)


def fingerprint_or_none(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> str | None:
    """Return a program's fingerprint; None also if the program fails, which validation reports."""
    try:
        return program_fingerprint(program, num_arms, context, outcomes)
    except Exception:
        return None


def save_validation(program: Callable, num_arms: int, facts: Any, fingerprint: str | None) -> None:
    """Store what validation found.

    Args:
        facts: `validation.ProgramFacts`.
        fingerprint: the program's fingerprint; None stores nothing.
    """
    given = program, num_arms, facts.context, facts.outcomes
    values = facts._asdict() | {
        "context": None,
        "mean_method": None if facts.mean_method is None else means.MEAN_METHODS.index(facts.mean_method),
        "largest_integers": [int(number) for number in jax.tree.leaves(facts.largest_integers)],
        "fingerprint": fingerprint,
    }
    disk_cache.save(program_entry(*given, _VALIDATION, fingerprint=lambda: fingerprint), values)


def load_validation(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> dict[str, Any] | None:
    """Return what an earlier validation found, as arguments of `validation.ProgramFacts`; None if nothing is stored."""
    found = disk_cache.load(program_entry(program, num_arms, context, outcomes, _VALIDATION))
    if found is None:
        return None
    values = _with_tuples(found[0])
    mean_method = values["mean_method"]
    return values | {
        "context": context,
        "mean_method": None if mean_method is None else means.MEAN_METHODS[mean_method],
        "largest_integers": jax.tree.unflatten(jax.tree.structure(context), values["largest_integers"]),
        "index_limits": tuple(IndexLimit(*limit) for limit in values["index_limits"]),
    }


def _with_tuples(value: Any) -> Any:
    """Return a JSON value with tuples in place of lists."""
    if isinstance(value, dict):
        return {name: _with_tuples(item) for name, item in value.items()}
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
