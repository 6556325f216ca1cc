"""What is evaluated: an arm, a difference of two arms, a fixed policy, or a policy that depends on the context.

Every target is one or two components, each with the probabilities that it plays the arms with in every logged decision.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.types import Selector, UnknownArm

__all__ = ["Component", "contrast_words", "resolve_target"]


class Component(NamedTuple):
    """One policy whose mean reward is estimated.

    Attributes:
        label: in words.
        probs: (T, A), probability that it plays each arm in each logged decision.
        arm: index of the arm that it always plays; None for any other policy.
    """

    label: str
    probs: np.ndarray
    arm: int | None = None


def resolve_target(
    log: LoggedDecisions, target: Any, probs_of: Callable[[Any], np.ndarray] | None = None
) -> list[Component]:
    """Return the components of a target: one, or two for a difference, the second of which is subtracted.

    Args:
        target: an arm; a pair of arms (first minus second); {arm: probability}; a function of a context that returns the
            probabilities of all arms, as a dict or in the order of the arms; or a selector.
        probs_of: selector -> (T, A), its probabilities on the logged path; None without a model.

    Raises:
        ValueError: for an unknown arm, or probabilities that are none.
    """
    if isinstance(target, Mapping):
        return [Component(_policy_words(target), np.broadcast_to(_fixed(log, target), (log.arm.size, len(log.names))))]
    if isinstance(target, tuple | list) and target not in log.names:
        if len(target) != 2 or target[0] == target[1]:
            raise ValueError(f"target is {target!r}, expected a pair of two different arms (first minus second)")
        return [_arm(log, target[0]), _arm(log, target[1])]
    if isinstance(target, Selector):
        if probs_of is None:
            raise ValueError("target is a selector: give model=, whose posterior it decides from")
        return [Component(f"{target} on the logged path", probs_of(target))]
    if callable(target):
        return [Component(getattr(target, "__name__", "policy"), _by_context(log, target))]
    return [_arm(log, target)]


def contrast_words(components: list[Component]) -> str:
    """Name what is estimated."""
    return " minus ".join(component.label for component in components)


def _arm(log: LoggedDecisions, name: Any) -> Component:
    if name not in log.names:
        raise UnknownArm(f"target names the arm {name!r}, expected one of {list(log.names)}")
    index = log.names.index(name)
    probs = np.zeros(len(log.names))
    probs[index] = 1.0
    return Component(str(name), np.broadcast_to(probs, (log.arm.size, len(log.names))), index)


def _policy_words(target: Mapping[Any, float]) -> str:
    shown = ", ".join(f"{name}: {float(prob):.3g}" for name, prob in list(target.items())[:4])
    return f"policy {{{shown}{', ...' if len(target) > 4 else ''}}}"


def _fixed(log: LoggedDecisions, target: Mapping[Any, float]) -> np.ndarray:
    unknown = [name for name in target if name not in log.names]
    if unknown:
        raise UnknownArm(f"target names the arms {unknown}, expected some of {list(log.names)}")
    probs = np.array([float(target.get(name, 0.0)) for name in log.names])
    return _checked(probs[None], "target")[0]


def _by_context(log: LoggedDecisions, policy: Callable[[Any], Any]) -> np.ndarray:
    if log.contexts is None:
        raise ValueError("target is a function of the context, but the log has no contexts; give {arm: probability}")
    found = []
    for row in range(log.arm.size):
        answer = policy(jax.tree.map(lambda leaf, row=row: leaf[row], log.contexts))
        found.append([answer.get(name, 0.0) for name in log.names] if isinstance(answer, Mapping) else answer)
    probs = np.asarray(found, float)
    if probs.shape != (log.arm.size, len(log.names)):
        raise ValueError(f"target returned {probs.shape[1:]} numbers, expected one for each of {len(log.names)} arms")
    return _checked(probs, "target")


def _checked(probs: np.ndarray, name: str) -> np.ndarray:
    wrong = np.flatnonzero((probs < 0).any(1) | ~(np.abs(probs.sum(1) - 1.0) < 1e-6))
    if wrong.size:
        raise ValueError(f"{name} gives {probs[wrong[0]].tolist()}, expected probabilities that add up to 1")
    return probs / probs.sum(1, keepdims=True)
