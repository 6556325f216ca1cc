"""The arms of a bandit: names, indices and masks."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ppl_bandit.inputs.numbers import check_count, check_text
from ppl_bandit.types import UnknownArm


class Arms:
    """The arms by name, or by number if they have no names."""

    def __init__(self, num_arms: int | None, names: Sequence[Any] | None):
        if names is None:
            if num_arms is None:
                raise ValueError("give num_arms=, or arms= with a name for each arm")
            self.names: list[Any] = list(range(check_count(num_arms, "num_arms")))
            return
        if isinstance(names, str | bytes | set | frozenset | Mapping) or not hasattr(names, "__len__"):
            raise ValueError(
                f"arms must be a sequence of names, got {names!r} ({type(names).__name__}); pass a list in the program's order"
            )
        self.names = list(names)
        if any(not isinstance(name, str) for name in self.names):
            raise ValueError(f"arms must be strings, got {self.names!r}; leave arms out to number the arms 0, 1, ...")
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"arms must be one or more different names, got {self.names!r}")
        for index, name in enumerate(self.names):
            check_text(name, f"arms[{index}]")
        if num_arms is not None and check_count(num_arms, "num_arms") != len(self.names):
            raise ValueError(
                f"arms has {len(self.names)} names, but the program has {num_arms} arms; make them agree: name each arm once"
            )

    def __len__(self) -> int:
        return len(self.names)

    @functools.cached_property
    def all_allowed(self) -> np.ndarray:
        """The mask that allows all arms."""
        mask = np.ones(len(self), bool)
        mask.flags.writeable = False
        return mask

    def index(self, arm: Any, argument: str = "arm") -> int:
        """Return an arm's index; raise `UnknownArm` if there is none of this name."""
        if isinstance(arm, np.generic):
            arm = arm.item()
        if isinstance(arm, bool) or not isinstance(arm, str | int) or arm not in self.names:
            shown = self.names if len(self) <= 12 else [*self.names[:5], "...", self.names[-1]]
            given = repr(arm) if len(repr(arm)) <= 80 else repr(arm)[:77] + "..."
            raise UnknownArm(f"{argument}={given} is not an arm of this bandit; the arms are {shown}")
        return self.names.index(arm)

    def indices(self, arms: Any, argument: str = "arms") -> np.ndarray:
        """Return the indices of a sequence of arms."""
        if isinstance(arms, str | bytes | set | frozenset | Mapping) or not hasattr(arms, "__len__"):
            raise ValueError(f"{argument} must be a sequence of arms, got {arms!r}; pass a list or an array")
        if isinstance(arms, np.ma.MaskedArray) and np.ma.is_masked(arms):
            raise ValueError(
                f"{argument} is a masked array with masked entries; remove the rows whose arm is not known"
            )
        try:
            values = np.asarray(arms)
        except ValueError:  # nested lists of different lengths
            raise ValueError(f"{argument} must be a sequence of arms, got {arms!r}; pass a list or an array") from None
        if isinstance(self.names[0], int) and values.ndim == 1 and values.dtype.kind in "iu":
            wrong = (values < 0) | (values >= len(self))
            if wrong.any():
                row = int(np.flatnonzero(wrong)[0])
                raise UnknownArm(
                    f"{argument}[{row}]={values[row]} is not an arm of this bandit; the arms are 0 to {len(self) - 1}"
                )
            return values.astype(np.int64)
        return np.array([self.index(arm, f"{argument}[{row}]") for row, arm in enumerate(arms)], np.int64)

    def mask(self, allowed: Any) -> np.ndarray:
        """Return a boolean mask (A,) from None (all arms), a mask, or a list of arms."""
        if allowed is None:
            return self.all_allowed
        if isinstance(allowed, str | bytes | Mapping) or not hasattr(allowed, "__len__"):
            raise ValueError(f"allowed must be a list of arms or a mask of booleans, got {allowed!r}")
        try:
            values = np.asarray(list(allowed) if isinstance(allowed, set | frozenset) else allowed)
        except ValueError:  # nested lists of different lengths
            raise ValueError(f"allowed must be a list of arms or a mask of booleans, got {allowed!r}") from None
        if values.dtype == bool:
            if values.shape != (len(self),):
                raise ValueError(f"allowed has shape {values.shape}; a mask needs one entry per arm, ({len(self)},)")
            mask = values
        else:
            indices = self.indices(list(allowed), "allowed")
            if np.unique(indices).size < indices.size:
                meant = [bool(index) for index in indices] if set(indices) <= {0, 1} else "one boolean per arm"
                raise ValueError(
                    f"allowed={allowed!r} names an arm twice: give each arm once, or, for a mask, booleans: {meant}"
                )
            mask = np.zeros(len(self), bool)
            mask[indices] = True
        if not mask.any():
            raise ValueError("allowed excludes every arm: allow at least one")
        return mask
