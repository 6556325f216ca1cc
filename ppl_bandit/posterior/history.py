"""All rows that a live bandit has learnt, in order, as an immutable value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

_BLOCK = 256  # number of parts that are joined into one


class RowEdit(NamedTuple):
    """A change of a learnt row.

    Attributes:
        reward: {outcome: new value}.
        context: leaves of the new context; None keeps the old one.
        arm: the arm that was shown; None keeps the old one.
    """

    reward: Mapping[str, float]
    context: Sequence[Any] | None = None
    arm: int | None = None


class History:
    """Rows of (arms, {outcome: rewards}, contexts), each with the position of its event in the journal.

    Rows are stored in parts as they were added, and joined when they are read. An outcome that is not learnt yet is nan.

    Args:
        num_rows: number of the rows before those that are added.
        load: returns these rows; called when they are first read.

    Attributes:
        num_completed: number of updates that learnt more outcomes of a row.
    """

    def __init__(self, outcomes: tuple[str, ...], num_rows: int = 0, load: Callable[[], "History"] | None = None):
        self._outcomes = outcomes
        self._load = load  # histories that extend this one share it, and it loads once
        # Joined blocks, a list of later parts, and the number of these parts that belong to this history: histories that
        # extend it share the list.
        self._parts: tuple[tuple[Any, ...], list[Any], int] = ((), [], 0)
        self.num_rows = num_rows
        self.num_completed = 0

    def __len__(self) -> int:
        return self.num_rows

    def extended(self, *parts: tuple[np.ndarray, dict[str, np.ndarray], Any, np.ndarray]) -> "History":
        """Return a history with more rows.

        Args:
            parts: (arms, rewards, contexts, positions) of some rows each; rows with position 0 cannot be edited.
        """
        blocks, pieces, num_pieces = self._parts
        if len(pieces) > num_pieces:  # another history extends this one
            pieces = pieces[:num_pieces]
        pieces.extend(parts)
        if len(pieces) >= _BLOCK:
            blocks, pieces = (*blocks, _joined(pieces)), []
        if len(blocks) >= _BLOCK:
            blocks = (_joined(blocks),)
        longer = History(self._outcomes, self.num_rows + sum(part[0].size for part in parts), self._load)
        longer._parts = blocks, pieces, len(pieces)
        longer.num_completed = self.num_completed
        return longer

    def with_rows(self, rows: Sequence[tuple[int, Any]], positions: Sequence[int]) -> "History":
        """Return a history with more rows, each given with the index of its event in `positions`."""
        parts = [(*own[:3], np.array([positions[index]] * own.arms.size)) for index, own in rows]
        return self.extended(*parts) if parts else self

    def rows(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
        """Return all rows; contexts are None if there are no rows."""
        return self._whole()[:3]

    def positions(self) -> np.ndarray:
        """Return the position of each row's event."""
        return self._whole()[3]

    def edited(self, edits: Mapping[int, RowEdit | None], num_completed: int = 0) -> "History":
        """Return a history with changes at some positions; None removes a row.

        Args:
            num_completed: how many of the changes are more outcomes of a row.
        """
        arms, values, contexts, positions = self._whole()
        values = {name: column.copy() for name, column in values.items()}
        is_kept = np.ones(arms.size, bool)
        if any(edit is not None and edit.context is not None for edit in edits.values()):
            contexts = jax.tree.map(np.copy, contexts)
        for position, edit in edits.items():
            row = int(np.searchsorted(positions, position))
            if row == positions.size or positions[row] != position:  # the row of a unit that was erased
                continue
            if edit is None:
                is_kept[row] = False
                continue
            if edit.arm is not None and edit.arm != arms[row]:
                arms = arms.copy()
                arms[row] = edit.arm
            for name, value in edit.reward.items():
                values[name][row] = value
            for leaf, value in zip(jax.tree.leaves(contexts), edit.context or (), strict=False):
                leaf[row] = value
        kept = jax.tree.map(lambda leaf: leaf[is_kept], (arms, values, contexts, positions))
        other = History(self._outcomes)
        other.num_completed = self.num_completed + num_completed
        return other.extended(kept) if is_kept.any() else other

    def _whole(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any, np.ndarray]:
        blocks, pieces, num_pieces = self._parts
        parts = [*blocks, *pieces[:num_pieces]]
        if len(parts) > 1:
            parts = [_joined(parts)]
            self._parts = (parts[0],), [], 0  # the same rows
        earlier = None if self._load is None else self._load()._whole()
        if earlier is not None and earlier[0].size:
            parts = [_joined([earlier, *parts])]
        if not parts:
            return np.zeros(0, int), {name: np.zeros(0) for name in self._outcomes}, None, np.zeros(0, np.int64)
        return parts[0]


def _joined(pieces: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
