"""The keywords of a program: `num_arms`, and, if its latents move, `previous` and `elapsed`.

`previous` are the latents one step before, and `elapsed` is the time since then.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from ppl_bandit.types import InvalidProgram

KEYWORDS = ("previous", "elapsed")


def takes(program: Callable, keyword: str) -> bool:
    """Return whether a program takes a keyword."""
    return keyword in _parameters(program)


def bind_num_arms(program: Callable, num_arms: Any) -> Callable:
    """Return a program for a number of arms; one that does not take `num_arms` is returned unchanged."""
    if not takes(program, "num_arms"):
        return program
    kept = _kept(id(program), repr(num_arms))
    if not kept or kept[0] is not program:
        bound = functools.partial(program, num_arms=num_arms)
        bound.__name__ = getattr(program, "__name__", "program")  # type: ignore[attr-defined]  # messages quote it
        kept[:] = program, bound
    return kept[1]


@functools.lru_cache(maxsize=8)
def _kept(*key: Any) -> list[Callable]:
    """Return the place of a program and of the same with a number of arms: one object, so that bandits share a start."""
    return []


def has_clock(program: Callable, context: Any) -> bool:
    """Return whether `elapsed` is the difference of `context["time"]` between two steps; otherwise every step takes 1."""
    return takes(program, "elapsed") and isinstance(context, Mapping) and "time" in context


def check_keywords(program: Callable) -> None:
    """Check how a program takes `previous` and `elapsed`.

    Raises:
        InvalidProgram: if one of them can be taken for another argument or has no default.
    """
    for name in KEYWORDS:
        parameter = _parameters(program).get(name)
        if parameter is None:
            continue
        default = "previous=None" if name == "previous" else "elapsed=1.0"
        is_right = parameter.default is None if name == "previous" else isinstance(parameter.default, int | float)
        if parameter.kind is not parameter.KEYWORD_ONLY or not is_right:
            raise InvalidProgram(
                f"the program takes `{parameter}`, expected a keyword with a default: write it after a star, as in "
                f"`def program(arm, *, {default})`"
            )
    if takes(program, "elapsed") and not takes(program, "previous"):
        raise InvalidProgram(
            "the program takes `elapsed` but not `previous`: time has an effect only on latents that move, so add the keyword "
            "`previous=None`, or leave `elapsed` out"
        )


def _parameters(program: Callable) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(program).parameters
    except (TypeError, ValueError):  # a builtin or an unusual callable
        return {}
