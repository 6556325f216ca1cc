"""All rows that a live bandit has learnt from, in order."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

__all__ = ["History"]

_BLOCK = 256  # pieces that are joined into one


class History:
    """Rows of (arms, {outcome: rewards}, contexts), kept in pieces as they came and joined when read; a value.

    Each row also has the position of the event that brought it, by which it can be found again.
    """

    def __init__(self, outcomes: tuple[str, ...]):
        self._outcomes = outcomes
        # Joined pieces, and a list of single ones of which so many are this history's: longer ones share it.
        self._parts: tuple[tuple[Any, ...], list[Any], int] = ((), [], 0)
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def extended(
        self, arms: np.ndarray, rewards: dict[str, np.ndarray], contexts: Any, positions: np.ndarray | None = None
    ) -> "History":
        """Return a history with more rows; without positions they cannot be found again."""
        blocks, pieces, num_pieces = self._parts
        if len(pieces) > num_pieces:  # another history goes on from here, or would have if nothing had interrupted it
            pieces = pieces[:num_pieces]
        positions = np.zeros(arms.size, np.int64) if positions is None else positions
        pieces.append((arms, rewards, contexts, positions))
        if len(pieces) >= _BLOCK:
            blocks, pieces = (*blocks, _joined(pieces)), []
        if len(blocks) >= _BLOCK:
            blocks = (_joined(blocks),)
        longer = History(self._outcomes)
        longer._parts, longer._num_rows = (blocks, pieces, len(pieces)), self._num_rows + arms.size
        return longer

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
        return other.extended(*kept) if is_kept.any() else other

    def _whole(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any, np.ndarray]:
        blocks, pieces, num_pieces = self._parts
        parts = [*blocks, *pieces[:num_pieces]]
        if not parts:
            return np.zeros(0, int), {name: np.zeros(0) for name in self._outcomes}, None, np.zeros(0, np.int64)
        if len(parts) > 1:
            parts = [_joined(parts)]
            self._parts = (parts[0],), [], 0  # the same rows, joined once
        return parts[0]


def _joined(pieces: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
