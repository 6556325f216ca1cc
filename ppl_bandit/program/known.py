"""Programs that were read before, in this process or another: what validation found is not looked for again."""

from collections.abc import Callable
from typing import Any

import jax

from ppl_bandit.numerics.keeping import keep, kept, newest, place
from ppl_bandit.program import means
from ppl_bandit.program.fingerprints import close_fingerprint, code_fingerprint

__all__ = ["find_facts", "fingerprint_of", "keep_facts"]


def find_facts(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> tuple[str | None, Any]:
    """Return a program's close fingerprint, where one like it was read before, and its facts, if it was itself."""
    where = _place_of(program, num_arms, context, outcomes)
    if where is None or newest(where) is None:
        return None, None
    fingerprint = fingerprint_of(program, num_arms, context, outcomes)
    facts = None if fingerprint is None else kept(where + fingerprint)
    if facts is None:
        return fingerprint, None
    mean_way = None if facts.mean_way is None else means.WAYS[facts.mean_way]
    return fingerprint, facts._replace(context=context, mean_way=mean_way, fingerprint=fingerprint)


def keep_facts(program: Callable, num_arms: int, facts: Any, fingerprint: str) -> None:
    """Let a program's facts be found."""
    where = _place_of(program, num_arms, facts.context, facts.outcomes)
    if where is not None:
        mean_way = None if facts.mean_way is None else means.WAYS.index(facts.mean_way)
        keep(where + fingerprint, facts._replace(context=None, mean_way=mean_way))


def fingerprint_of(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> str | None:
    """Return a program's close fingerprint; None also for one that is not what it should be, which validation says."""
    try:
        return close_fingerprint(program, num_arms, context, outcomes)
    except Exception:
        return None


def _place_of(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> str | None:
    form = str(jax.tree.structure(context))
    return place("facts", code_fingerprint(program), int(num_arms), outcomes, form)
