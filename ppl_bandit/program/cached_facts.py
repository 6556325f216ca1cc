"""What validation found about a program, in the disk cache: a program is not validated again in every process."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from ppl_bandit.program.fingerprints import code_fingerprint, program_fingerprint
from ppl_bandit.program.jaxpr.index_limits import IndexLimit
from ppl_bandit.program.model import means
from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.disk_cache import CacheKey, cache_key

__all__ = ["VALIDATION", "facts_to_json", "fingerprint_or_none", "load_facts", "program_key"]

VALIDATION = "validation"


def program_key(
    program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...], fingerprint: Callable[[], str | None]
) -> CacheKey | None:
    """Return the cache key of the results about a program; None if the cache is off or the program cannot be identified.

    Args:
        fingerprint: returns the program's fingerprint.
    """
    structure = str(jax.tree.structure(context))
    return cache_key(fingerprint, code_fingerprint(program), int(num_arms), list(outcomes), structure)


def fingerprint_or_none(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> str | None:
    """Return a program's fingerprint; None also if the program fails, which validation reports."""
    try:
        return program_fingerprint(program, num_arms, context, outcomes)
    except Exception:
        return None


def facts_to_json(facts: Any) -> dict[str, Any]:
    """Return `validation.ProgramFacts` as JSON values, without the context and the fingerprint: they are the key."""
    method = facts.mean_method
    values = facts._asdict() | {
        "mean_method": None if method is None else means.MEAN_METHODS.index(method),
        "largest_integers": [int(number) for number in jax.tree.leaves(facts.largest_integers)],
    }
    return {name: value for name, value in values.items() if name not in ("context", "fingerprint")}


def load_facts(key: CacheKey | None, context: Any) -> dict[str, Any] | None:
    """Return what `facts_to_json` stored, as arguments of `validation.ProgramFacts`; None if there is nothing valid."""
    found = disk_cache.load(key, VALIDATION)
    with contextlib.suppress(Exception):  # whatever it holds, it only saves time
        values = _with_tuples(found[0])  # type: ignore[index]
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
