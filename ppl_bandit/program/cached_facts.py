"""What was found about programs before, in this process or another, is not looked for again."""

from collections.abc import Callable
from typing import Any

import jax

from ppl_bandit.program.fingerprints import code_fingerprint, program_fingerprint
from ppl_bandit.program.model import means
from ppl_bandit.runtime.disk_cache import kept, latest, place

__all__ = ["find_facts", "fingerprint_of", "found_at", "place_of", "plain_facts"]

FACTS = "facts"  # what validation finds is kept under this


def place_of(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...], *words: Any) -> str | None:
    """Return how names begin under which results about programs written like this are kept; None where none are.

    Args:
        words: what the results are, and what else they follow from.
    """
    form = str(jax.tree.structure(context))
    return place(*words, code_fingerprint(program), int(num_arms), outcomes, form)


def found_at(where: str | None, fingerprint: Callable[[], str | None]) -> Any:
    """Return what is kept at a place about the program of a fingerprint; it is read only if anything like it is there."""
    if where is None or latest(where) is None:
        return None
    own = fingerprint()
    return None if own is None else kept(where + own)


def fingerprint_of(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> str | None:
    """Return a program's close fingerprint; None also for one that is not what it should be, which validation says."""
    try:
        return program_fingerprint(program, num_arms, context, outcomes)
    except Exception:
        return None


def find_facts(program: Callable, num_arms: int, context: Any, outcomes: tuple[str, ...]) -> Any:
    """Return what validation found about a program before, or None."""
    given = program, num_arms, context, outcomes
    facts = found_at(place_of(*given, FACTS), lambda: fingerprint_of(*given))
    if facts is None:
        return None
    mean_method = None if facts.mean_method is None else means.MEAN_METHODS[facts.mean_method]
    return facts._replace(context=context, mean_method=mean_method)


def plain_facts(facts: Any) -> Any:
    """Return facts as `find_facts` reads them: a way to a mean is one of a list, and known by its identity."""
    mean_method = None if facts.mean_method is None else means.MEAN_METHODS.index(facts.mean_method)
    return facts._replace(context=None, mean_method=mean_method)
