"""Arms that are added to a running experiment or retired from it: the checks, and the lists of arms after the change."""

from collections.abc import Callable
from typing import Any

from ppl_bandit.inputs.arms import Arms
from ppl_bandit.journal.projection import Projection
from ppl_bandit.program.keywords import takes


def arms_with(projection: Projection, program: Callable, name: str | None) -> tuple[Any, list[Any], frozenset[int]]:
    """Return the added arm, all arms and the retired ones, after an arm is added or brought back.

    Args:
        program: as the user wrote it, with or without the keyword `num_arms`.
        name: of the arm; None if the arms are numbered.

    Raises:
        ValueError: if the name does not fit the others, or the program or a design fixes the arms.
    """
    names, retired = list(projection.task.arms.names), projection.retired
    if name in names and names.index(name) in retired:
        return name, names, retired - {names.index(name)}
    if (name is None) != isinstance(names[0], int):
        raise ValueError(f"name is {name!r}, but the arms are {names}: give a name if and only if the arms have names")
    if name is not None:
        Arms(None, [*names, name])  # raises unless it is a new name
    if projection.task.design is not None:
        raise ValueError("the experiment has a design, whose arms are fixed: start a new experiment with the new arm")
    if not takes(program, "num_arms"):
        raise ValueError(
            "the program has a fixed number of arms: let it take num_arms, as in `def model(arm, *, num_arms): "
            'with numpyro.plate("arms", num_arms): ...`, and give each new arm its own latents'
        )
    added = len(names) if name is None else name
    return added, [*names, added], retired


def retired_with(projection: Projection, arm: Any) -> frozenset[int]:
    """Return the retired arms after one more is retired.

    Raises:
        ValueError: if it is the last arm that is played.
    """
    retired = projection.retired | {projection.task.arms.index(arm)}
    if len(retired) == len(projection.task.arms):
        raise ValueError(f"arm={arm!r} is the last one that is played: add another arm before retiring it")
    return retired
