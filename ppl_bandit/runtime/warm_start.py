"""Warm starts: what one process proved and traced, stored for the next one.

A warm start holds facts about an engine, as JSON values, and the exported functions of its first decision and first update.
JAX's own cache holds the compiled code. `posterior.warm_start` converts engines to and from these facts.
"""

from typing import Any, NamedTuple

import jax

from ppl_bandit.runtime import disk_cache
from ppl_bandit.runtime.disk_cache import CacheEntry
from ppl_bandit.runtime.exported_functions import ExportedFunction, form_from_json

__all__ = ["WarmStart", "load_warm_start", "save_warm_start"]


class WarmStart(NamedTuple):
    """What a process stores for later processes.

    Attributes:
        facts: JSON values.
        functions: {name of the function: {JSON form of the arguments: exported function}}.
    """

    facts: dict[str, Any]
    functions: dict[str, dict[str, ExportedFunction]]


def save_warm_start(entry: CacheEntry | None, start: WarmStart) -> None:
    """Store a warm start; without effect if the cache is off."""
    exported = [(name, form, own) for name, by_form in start.functions.items() for form, own in by_form.items()]
    described = [[name, form, own.output, own.is_limited, own.options] for name, form, own in exported]
    disk_cache.save(entry, {"facts": start.facts, "functions": described}, [own.program for _, _, own in exported])


def load_warm_start(entry: CacheEntry | None) -> WarmStart | None:
    """Return the warm start that was stored under a key; None if there is none."""
    found = disk_cache.load(entry)
    if found is None:
        return None
    values, programs = found
    functions: dict[str, dict[str, ExportedFunction]] = {}
    for (name, form, output, is_limited, options), program in zip(values["functions"], programs, strict=True):
        try:
            with jax.enable_x64(True):
                form_from_json(output)
        except ValueError:  # a class of the state is not imported
            return None
        functions.setdefault(name, {})[form] = ExportedFunction(program, output, is_limited, options)
    return WarmStart(values["facts"], functions)
