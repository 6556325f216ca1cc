"""Entries of the context that become known only with the reward, such as the days of follow-up.

`Bandit(..., late=("days",))` declares them. A decision is made at their example value; the reward of the decision brings the
value that is learnt.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.inputs.checks import check_leaf
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import InvalidContext


def check_late_names(model: RewardModel, late: Any) -> tuple[str, ...]:
    """Return the names of late entries.

    Raises:
        ValueError: unless they are keys of a context that is a dict, each with one array.
    """
    if not isinstance(late, str | list | tuple):
        raise ValueError(f"late must be a list or tuple of entries of the context, got {late!r}")
    names = (late,) if isinstance(late, str) else tuple(late)
    if not names:
        return ()
    keys = _array_keys(model)
    unknown = [name for name in names if name not in keys]
    if unknown or len(set(names)) < len(names):
        have = f"its keys with one array each are {keys}" if keys else "the context is not a dict of arrays"
        raise ValueError(
            f"late={names!r} must name different entries of the example context, but {have}: give a context such as "
            "context={'age': 40.0, 'days': 30.0} and late=('days',)"
        )
    return names


def late_numbers(model: RewardModel, late: Sequence[str]) -> dict[str, int]:
    """Return {late entry: number of its leaf in the context}."""
    keys = [path[0].key if path else None for path, _ in _leaves_with_paths(model)]
    return {name: keys.index(name) for name in late}


def fill_late(
    model: RewardModel, late: Sequence[str], contexts: Any, *, is_batch: bool = False, num_rows: int | None = None
) -> Any:
    """Return contexts with the example values of the late entries that they do not have.

    Args:
        is_batch: whether they have a leading axis.
        num_rows: its length if no entry is given.
    """
    if not late or not (contexts is None or isinstance(contexts, Mapping)):
        return contexts
    given, lead = contexts or {}, list[int]()
    if is_batch:
        lead = [len(value) for value in given.values() if hasattr(value, "__len__")][:1] or [num_rows or 0]
    absent = {name: np.asarray(model.context[name]) for name in late if name not in given}
    return dict(given) | {name: np.broadcast_to(value, (*lead, *value.shape)) for name, value in absent.items()}


def at_example_values(model: RewardModel, late: Sequence[str], contexts: Any) -> Any:
    """Return contexts with a leading axis in which the late entries have their example values, as a decision has them."""
    if not late or contexts is None:
        return contexts
    given = {name: value for name, value in contexts.items() if name not in late}
    return fill_late(model, late, given, is_batch=True, num_rows=len(jax.tree.leaves(contexts)[0]))


def check_late_values(
    model: RewardModel, late: Sequence[str], given: Any, num_rows: int | None, argument: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the late entries that come with a reward, and other entries, which must be those of the decision.

    Args:
        num_rows: length of the leading axis; None for one context without a leading axis.

    Raises:
        ValueError: for a context of a bandit without late entries, and for an unknown or wrong entry.
    """
    if given is None:
        return {}, {}
    if not late:
        raise InvalidContext(
            f"{argument} was given with a decision, which has its context already. An entry that is known only with the "
            "reward, such as the days of follow-up, must be declared: Bandit(..., context={'days': 30.0}, late=('days',)), "
            f"then update(decision, reward, context={{'days': 12.0}}). Otherwise leave {argument} out"
        )
    if not isinstance(given, Mapping) or not set(given) <= set(model.context):
        raise InvalidContext(
            f"{argument} must be a dict with the late entries {list(late)}, got {given!r}; the entries of the context are "
            f"{list(model.context)}"
        )
    lead = () if num_rows is None else (num_rows,)
    keys = _array_keys(model)
    checked = {
        name: check_leaf(value, np.asarray(model.context[name]), lead, argument, f"[{name!r}]")
        for name, value in given.items()
        if name in keys
    }
    own = {name: value for name, value in checked.items() if name in late}
    return own, {name: value for name, value in checked.items() if name not in late}


def late_note(model: RewardModel, late: Sequence[str]) -> str:
    """Return a sentence on the late entries and the values that decisions use; empty if there are none."""
    if not late:
        return ""
    shown = ", ".join(f"{name} = {np.asarray(model.context[name]).tolist()}" for name in late)
    return (
        f"known only with the reward: {', '.join(late)}; decisions and expected rewards use the example value ({shown})"
    )


def _leaves_with_paths(model: RewardModel) -> list[Any]:
    return jax.tree_util.tree_flatten_with_path(model.context)[0]


def _array_keys(model: RewardModel) -> list[str]:
    """Return the keys of a context that is a dict, each of which holds one array."""
    if not isinstance(model.context, Mapping):
        return []
    return [path[0].key for path, _ in _leaves_with_paths(model) if len(path) == 1]
