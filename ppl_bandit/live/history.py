"""All rows that a live bandit has learnt from, in order."""

from typing import Any

import jax
import numpy as np

__all__ = ["History"]


class History:
    """Rows of (arms, {outcome: rewards}, contexts), kept in pieces as they came and joined when read."""

    def __init__(self, outcomes: tuple[str, ...]):
        self._outcomes = outcomes
        self._pieces: list[tuple[np.ndarray, dict[str, np.ndarray], Any]] = []
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def append(self, arms: np.ndarray, rewards: dict[str, np.ndarray], contexts: Any) -> None:
        """Add rows."""
        self._pieces.append((arms, rewards, contexts))
        self._num_rows += arms.size

    def rows(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
        """Return all rows, joined; contexts are None where there are no rows."""
        if not self._pieces:
            return np.zeros(0, int), {name: np.zeros(0) for name in self._outcomes}, None
        if len(self._pieces) > 1:
            self._pieces = [jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._pieces)]
        return self._pieces[0]
