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
    values = {
        "latent_shapes": {name: list(shape) for name, shape in facts.latent_shapes.items()},
        "outcome_kinds": dict(facts.outcome_kinds),
        "mean_method": None if facts.mean_method is None else means.MEAN_METHODS.index(facts.mean_method),
        "has_moving_support": bool(facts.has_moving_support),
        "outcome_groups": [list(group) for group in facts.outcome_groups],
        "largest_integers": [int(number) for number in jax.tree.leaves(facts.largest_integers)],
        "moving_sites": list(facts.moving_sites),
        "index_limits": [list(limit) for limit in facts.index_limits],
        "fingerprint": fingerprint,
    }
    disk_cache.save(program_entry(*given, _VALIDATION, fingerprint=lambda: fingerprint), values)


def load_validation(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> dict[str, Any] | None:
    """Return what an earlier validation found, as arguments of `validation.ProgramFacts`; None if nothing is stored."""
    found = disk_cache.load(program_entry(program, num_arms, context, outcomes, _VALIDATION))
    if found is None:
        return None
    values, _ = found
    mean_method = None if values["mean_method"] is None else means.MEAN_METHODS[values["mean_method"]]
    return {
        "outcomes": outcomes,
        "context": context,
        "latent_shapes": {name: tuple(shape) for name, shape in values["latent_shapes"].items()},
        "outcome_kinds": values["outcome_kinds"],
        "mean_method": mean_method,
        "has_moving_support": values["has_moving_support"],
        "outcome_groups": tuple(map(tuple, values["outcome_groups"])),
        "largest_integers": jax.tree.unflatten(jax.tree.structure(context), values["largest_integers"]),
        "moving_sites": tuple(values["moving_sites"]),
        "index_limits": tuple(
            IndexLimit(tuple(map(tuple, terms)), lowest, highest, size, has_lower, inside and tuple(inside))
            for terms, lowest, highest, size, has_lower, inside in values["index_limits"]
        ),
        "fingerprint": values["fingerprint"],
    }
