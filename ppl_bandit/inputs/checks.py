"""Check what a caller hands to a live bandit, and turn it into arrays.

Every error names the argument, what was given, what was expected and what to do instead; nothing here changes any state.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ppl_bandit.inputs.numbers import as_numbers, check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.types import Engine, Selector

__all__ = ["Arms", "check_contexts", "check_engine", "check_rewards", "check_selector", "count_rows"]


class Arms:
    """The arms by name, or by number where they have none."""

    def __init__(self, num_arms: int | None, names: Sequence[Any] | None):
        if names is None:
            if num_arms is None:
                raise ValueError("give num_arms=, or arms= with a name for each arm")
            self.names: list[Any] = list(range(check_count(num_arms, "num_arms")))
            return
        if isinstance(names, str | bytes | set | frozenset | Mapping) or not hasattr(names, "__len__"):
            raise ValueError(
                f"arms must be names in an order, got {names!r} ({type(names).__name__}); pass a list in the program's order"
            )
        self.names = list(names)
        if not self.names or len({str(name) for name in self.names}) < len(self.names):
            raise ValueError(f"arms must be one or more different names, got {self.names!r}")
        if any(not isinstance(name, str) for name in self.names):
            raise ValueError(f"arms must be strings, got {self.names!r}; leave arms out to number the arms 0, 1, ...")
        if num_arms is not None and check_count(num_arms, "num_arms") != len(self.names):
            raise ValueError(
                f"num_arms={num_arms} but arms names {len(self.names)} arms; leave num_arms out or make them agree"
            )

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def _everything(self) -> np.ndarray:
        mask = np.ones(len(self), bool)
        mask.flags.writeable = False
        return mask

    def index(self, arm: Any, argument: str = "arm") -> int:
        """Return an arm's index."""
        if isinstance(arm, np.generic):
            arm = arm.item()
        if isinstance(arm, bool) or not isinstance(arm, str | int) or arm not in self.names:
            shown = self.names if len(self) <= 12 else [*self.names[:5], "...", self.names[-1]]
            raise ValueError(f"{argument}={arm!r} is not an arm of this bandit; the arms are {shown}")
        return self.names.index(arm)

    def indices(self, arms: Any, argument: str = "arms") -> np.ndarray:
        """Return the indices of a sequence of arms."""
        if isinstance(arms, str | bytes | set | frozenset | Mapping) or not hasattr(arms, "__len__"):
            raise ValueError(f"{argument} must be a sequence of arms, got {arms!r}; pass a list or an array")
        if isinstance(arms, np.ma.MaskedArray) and np.ma.is_masked(arms):
            raise ValueError(
                f"{argument} is a masked array with masked entries; leave out the rows whose arm is not known"
            )
        values = np.asarray(arms)
        if isinstance(self.names[0], int) and values.ndim == 1 and values.dtype.kind in "iu":
            wrong = (values < 0) | (values >= len(self))
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise ValueError(
                    f"{argument}[{row}]={values[row]} is not an arm of this bandit; the arms are 0 to {len(self) - 1}"
                )
            return values.astype(np.int64)
        return np.array([self.index(arm, f"{argument}[{row}]") for row, arm in enumerate(arms)], np.int64)

    def mask(self, allowed: Any) -> np.ndarray:
        """Return which arms are allowed: all, or those of a mask of length A, or those of a list of arms."""
        if allowed is None:
            return self._everything
        if isinstance(allowed, str | bytes | Mapping) or not hasattr(allowed, "__len__"):
            raise ValueError(f"allowed must be a list of arms or a mask of booleans, got {allowed!r}")
        values = np.asarray(list(allowed) if isinstance(allowed, set | frozenset) else allowed)
        if values.dtype == bool:
            if values.shape != (len(self),):
                raise ValueError(f"allowed has shape {values.shape}; a mask needs one entry per arm, ({len(self)},)")
            mask = values
        else:
            indices = self.indices(list(allowed), "allowed")
            if np.unique(indices).size < indices.size:
                meant = [bool(index) for index in indices] if set(indices) <= {0, 1} else "one boolean per arm"
                raise ValueError(
                    f"allowed={allowed!r} names an arm twice: give each arm once, or, if a mask was meant, booleans: {meant}"
                )
            mask = np.zeros(len(self), bool)
            mask[indices] = True
        if not mask.any():
            raise ValueError("allowed excludes every arm: allow at least one")
        return mask


def count_rows(model: RewardModel, contexts: Any) -> int:
    """Return the length of the contexts' leading axis, arrays or lists alike; 0 where there is none."""
    try:
        treedef: Any = jax.tree.structure(model.context)
        leaves = treedef.flatten_up_to(contexts)
    except (ValueError, TypeError):
        leaves = jax.tree.leaves(contexts)  # of another structure, as their check will say
    return len(leaves[0]) if leaves and hasattr(leaves[0], "__len__") and np.ndim(leaves[0]) else 0


def check_contexts(model: RewardModel, contexts: Any, num_rows: int | None, argument: str) -> Any:
    """Return contexts as arrays of the example's structure, shape and kind of number.

    Args:
        num_rows: length of the leading axis; None for one context without a leading axis.
    """
    if model.context is None:
        if contexts is not None:
            raise ValueError(f"{argument} was given, but the program takes arm alone: leave it out")
        return None
    if contexts is None:
        raise ValueError(f"{argument} is missing: the program takes a context like {_shown(model.context)}")
    if num_rows is None and type(contexts) is np.ndarray and type(model.context) is np.ndarray:
        is_same = contexts.shape == model.context.shape and contexts.dtype == np.float64 == model.context.dtype
        if is_same and math.isfinite(contexts.sum()):  # the common case, several times as fast
            return contexts.copy()
    treedef: Any = jax.tree.structure(model.context)
    expected = jax.tree.leaves(model.context)
    try:
        leaves = treedef.flatten_up_to(contexts)  # lists of numbers may stand where the example has arrays
    except (ValueError, TypeError):
        raise ValueError(f"{argument} has the structure {_shown(contexts)}, expected {_shown(model.context)}") from None
    lead = () if num_rows is None else (num_rows,)
    arrays: list[np.ndarray] = []
    for leaf, example in zip(leaves, expected, strict=True):
        try:
            array = np.asarray(leaf)
        except ValueError:
            raise ValueError(
                f"{argument} holds {leaf!r} where an array of shape {(*lead, *example.shape)} belongs"
            ) from None
        if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
            raise ValueError(f"{argument} is a masked array with masked entries; leave out those rows, or fill them in")
        if array.shape != (*lead, *example.shape):
            rows = "" if num_rows is None else f" ({num_rows} rows)"
            raise ValueError(f"{argument} has shape {array.shape}, expected {(*lead, *example.shape)}{rows}")
        if array.dtype.kind not in _ACCEPTED[example.dtype.kind]:
            raise ValueError(
                f"{argument} has dtype {array.dtype}, expected {example.dtype} as in the example context; convert it first"
            )
        if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
            where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
            raise ValueError(f"{argument} holds {array[where]} at {where}: every entry must be finite")
        if array.dtype.kind in "iu":
            as_numbers(array, argument)
        kind = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[example.dtype.kind]
        arrays.append(array.astype(kind))  # a copy: what a caller does to its own array later changes nothing
    return jax.tree.unflatten(treedef, arrays)


_ACCEPTED = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}


def _shown(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}", tree))


def check_rewards(
    model: RewardModel, rewards: Any, num_rows: int | None, argument: str, *, is_partial: bool = False
) -> dict[str, np.ndarray]:
    """Return {outcome: (N,)} of finite numbers; whether a program can produce them is checked when they are absorbed.

    Args:
        is_partial: whether some of the outcomes are enough.
    """
    is_plain = num_rows is None and type(rewards) in (int, float)  # the common case, several times as fast
    if is_plain and len(model.outcomes) == 1 and abs(rewards) <= 2**53:
        return {model.outcomes[0]: np.array([rewards], np.float64)}
    if isinstance(rewards, Mapping):
        missing, unknown = set(model.outcomes) - set(rewards), set(rewards) - set(model.outcomes)
        if unknown or (missing and not is_partial) or not rewards:
            raise ValueError(f"{argument} has outcomes {sorted(map(str, rewards))}, expected {sorted(model.outcomes)}")
        given = {name: rewards[name] for name in model.outcomes if name in rewards}
    elif len(model.outcomes) > 1:
        raise ValueError(
            f"{argument} must be a dict with a value for each of the outcomes {list(model.outcomes)}, got {rewards!r}"
        )
    else:
        given = {model.outcomes[0]: rewards}
    checked = {}
    for name, value in given.items():
        if num_rows is None and type(value) in (int, float) and math.isfinite(value) and abs(value) <= 2**53:
            checked[name] = np.array([value], np.float64)
            continue
        what = argument if len(model.outcomes) == 1 else f"{argument}[{name!r}]"
        numbers = as_numbers(value, what)
        array = numbers.astype(np.float64)
        shape = () if num_rows is None else (num_rows,)
        if array.shape != shape:
            raise ValueError(f"{what} has shape {array.shape}, expected {shape}: one number per row")
        if not np.all(np.isfinite(array)):
            row = "" if num_rows is None else f" in row {int(np.flatnonzero(~np.isfinite(array))[0])}"
            raise ValueError(
                f"{what} is {array[~np.isfinite(array)][0] if array.ndim else array}{row}: a reward must be finite; "
                "leave out decisions whose reward is unknown"
            )
        if model.outcome_kinds[name] == "i" and array.size and np.abs(array).max() > 2**53:
            raise ValueError(
                f"{what} holds {np.abs(array).max():g}: counts beyond 2**53 are not exact; use larger units"
            )
        checked[name] = np.atleast_1d(array)
    return checked


def check_engine(engine: Any) -> None:
    """Check that an engine is given as what builds it.

    Raises:
        ValueError: for its name, for an engine that was built already, and for anything else that cannot be called.
    """
    if isinstance(engine, str):
        raise ValueError(f"engine is the text {engine!r}: pass the factory itself, as in engine=engines.{engine}")
    if isinstance(engine, Engine):
        name = engine.explanation.engine
        raise ValueError(
            f"engine was built already: pass its factory, as in engine=engines.{name}, which the bandit calls"
        )
    if engine is not None and not callable(engine):
        raise ValueError(f"engine must be a factory such as engines.nuts, got {engine!r}")


def check_selector(selector: Any) -> Selector:
    """Return a selector.

    Raises:
        ValueError: for its name, for a factory that was not called, and for anything else that cannot be called.
    """
    if isinstance(selector, str):
        raise ValueError(
            f"selector is the text {selector!r}: pass the selector itself, as in selector=selectors.{selector}()"
        )
    return as_selector(selector)
