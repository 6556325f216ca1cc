"""All rows that a live bandit has learnt from, in order."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

__all__ = ["History"]

_BLOCK = 256  # pieces that are joined into one


class History:
    """Rows of (arms, {outcome: rewards}, contexts), kept in pieces as they came and joined when read.

    Each row also has the position of the event that brought it, by which it can be found again.
    """

    def __init__(self, outcomes: tuple[str, ...]):
        self._outcomes = outcomes
        self._blocks: list[Any] = []
        self._pieces: list[Any] = []
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def append(
        self, arms: np.ndarray, rewards: dict[str, np.ndarray], contexts: Any, positions: np.ndarray | None = None
    ) -> None:
        """Add rows; without positions they cannot be found again."""
        positions = np.zeros(arms.size, np.int64) if positions is None else positions
        self._pieces.append((arms, rewards, contexts, positions))
        self._num_rows += arms.size
        if len(self._pieces) >= _BLOCK:
            self._blocks, self._pieces = [*self._blocks, _joined(self._pieces)], []
        if len(self._blocks) >= _BLOCK:
            self._blocks = [_joined(self._blocks)]

    def rows(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
        """Return all rows, joined; contexts are None where there are no rows."""
        return self._whole()[:3]

    def positions(self) -> np.ndarray:
        """Return the position of the event that brought each row."""
        return self._whole()[3]

    def edited(self, rewards: Mapping[int, Mapping[str, float] | None]) -> "History":
        """Return another history, with the rows at some positions given other rewards, or, for None, left out."""
        arms, values, contexts, positions = self._whole()
        values = {name: column.copy() for name, column in values.items()}
        is_kept = np.ones(arms.size, bool)
        for position, reward in rewards.items():
            row = int(np.searchsorted(positions, position))
            if reward is None:
                is_kept[row] = False
                continue
            for name, value in reward.items():
                values[name][row] = value
        kept = jax.tree.map(lambda leaf: leaf[is_kept], (arms, values, contexts, positions))
        other = History(self._outcomes)
        if is_kept.any():
            other.append(*kept)
        return other

    def _whole(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any, np.ndarray]:
        pieces = [*self._blocks, *self._pieces]
        if not pieces:
            return np.zeros(0, int), {name: np.zeros(0) for name in self._outcomes}, None, np.zeros(0, np.int64)
        if len(pieces) > 1:
            self._blocks, self._pieces = [_joined(pieces)], []
            return self._blocks[0]
        return pieces[0]


def _joined(pieces: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
