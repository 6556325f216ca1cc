"""The data of an evaluation: decisions in the order in which they were made, with their propensities and rewards."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.evaluation.log_checks import check_repeated_rows, order_doubts, propensity_doubts
from ppl_bandit.inputs.data_frames import cell_number, check_columns, column_cells

_PROPENSITY_COLUMN = re.compile(r"propensity_(.+)")
_SUM_TOLERANCE = 1e-6  # of propensities that were written with a few digits


class LoggedDecisions(NamedTuple):
    """Rewarded decisions, T rows in the order of decisions.

    Attributes:
        names: the arms.
        arm: (T,), index of the arm that was played.
        reward: (T,), what is evaluated; of several outcomes the first, until another one is chosen.
        propensity: (T,), probability with which that arm was played; in (0, 1].
        propensities: (T, A), probability of every arm; None where only that of the played arm was recorded.
        contexts: a pytree whose leaves have a leading axis T, or None; as the decisions had them.
        outcomes: {outcome: (T,)} of a program with several outcomes; None where the reward is the only one.
        num_unrewarded: decisions without a reward, which are left out.
        num_without_propensity: rewards of plays that were decided elsewhere, which are left out.
        learnt_contexts: contexts with the entries that came with the rewards; None where there are no such entries. The model
            learns from them, but what it expects before a decision may not depend on them.
        doubts: why no interval can be trusted, in words.
        cautions: what a reader of the answer has to know, in words.
        num_late: rewards that came after their decisions had expired; they count as corrections.
    """

    names: tuple[Any, ...]
    arm: np.ndarray
    reward: np.ndarray
    propensity: np.ndarray
    propensities: np.ndarray | None = None
    contexts: Any = None
    outcomes: dict[str, np.ndarray] | None = None
    num_unrewarded: int = 0
    num_without_propensity: int = 0
    learnt_contexts: Any = None
    doubts: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()
    num_late: int = 0


def decisions_from_frame(
    frame: Any, names: Sequence[Any] | None = None, contexts: Any = None, num_arms: int | None = None
) -> LoggedDecisions:
    """Read a DataFrame with the columns arm, reward and propensity, a row per decision, in the order of decisions.

    A row with an empty reward counts as unrewarded, one with an empty propensity as decided elsewhere. Columns
    `propensity_<arm>`, one for every arm, give the probabilities of all arms.

    Args:
        names: the arms; None takes those that occur, in rows or in names of columns, sorted.
        contexts: of all rows, with a leading axis; None for none.
        num_arms: of a model; arms that are whole numbers below it are then its indices.

    Raises:
        ValueError: for a missing column, an unknown arm, a propensity outside (0, 1], or a log with copies of its rows.
    """
    check_columns(frame, ["arm", "reward", "propensity"], "log")
    check_repeated_rows({str(column): frame[column] for column in frame.columns})
    columns = [str(column) for column in frame.columns]
    played = np.asarray(frame["arm"])
    unnamed = np.flatnonzero([cell is None for cell in column_cells(frame, "arm")])
    if unnamed.size:
        raise ValueError(f"log: row {unnamed[0]} has no arm: fill in the cell, or remove the row")
    known = _arm_names(played, columns, num_arms) if names is None else _given_names(names)
    index = {name: position for position, name in enumerate(known)}
    unknown = next((row for row, name in enumerate(played.tolist()) if name not in index), None)
    if unknown is not None:
        raise ValueError(f"log: row {unknown} has the arm {played[unknown]!r}, expected one of {list(known)}")
    arm = np.fromiter((index[name] for name in played.tolist()), np.int64, len(played))
    reward, propensity = _numbers(frame, "reward"), _numbers(frame, "propensity")
    _check_probabilities(propensity, "propensity")
    if (propensity == 0).any():
        raise ValueError(
            f"log: row {int(np.argmax(propensity == 0))} has the propensity 0, but its arm was played: give the probability "
            "that it was played with, or leave the cell empty if it is not known"
        )
    every = _all_propensities(frame, columns, known, arm, propensity)
    has_reward, has_propensity = ~np.isnan(reward), ~np.isnan(propensity)
    keep = has_reward & has_propensity
    if np.isinf(reward).any():
        raise ValueError(f"log: row {int(np.argmax(np.isinf(reward)))} has an infinite reward")

    doubts = [] if every is not None else propensity_doubts(propensity[has_propensity], arm[has_propensity], len(known))

    def rows(leaf: Any) -> Any:
        return None if leaf is None else np.asarray(leaf)[keep]

    import jax

    return LoggedDecisions(
        known,
        arm[keep],
        reward[keep],
        propensity[keep],
        rows(every),
        jax.tree.map(rows, contexts),
        None,
        int((~has_reward & has_propensity).sum()),
        int((~has_propensity).sum()),
        doubts=tuple(doubts),
        cautions=tuple(order_doubts({str(column): frame[column] for column in frame.columns})),
    )


def _numbers(frame: Any, column: str) -> np.ndarray:
    """Return a column of numbers, nan where a cell is empty."""
    values = np.asarray(frame[column])
    if values.dtype.kind in "biuf":
        return values.astype(float)
    cells = enumerate(column_cells(frame, column))
    where = f"log: column {column!r}, row"
    return np.array([np.nan if cell is None else cell_number(cell, "f", f"{where} {row}") for row, cell in cells])


def _given_names(names: Any) -> tuple[Any, ...]:
    if isinstance(names, str | bytes | set | frozenset | Mapping) or not hasattr(names, "__len__"):
        raise ValueError(
            f"arms must be a sequence of names, got {names!r}: pass a list, in the order of the model's arms"
        )
    if len(set(names)) < len(names):
        raise ValueError(f"arms must be different names, got {names!r}")
    return tuple(names)


def _arm_names(played: np.ndarray, columns: Sequence[str], num_arms: int | None) -> tuple[Any, ...]:
    found = set(played.tolist())
    shown = {str(name) for name in found}
    is_numbered = all(isinstance(name, int) for name in found)
    if is_numbered and num_arms is not None and found <= set(range(num_arms)):
        return tuple(range(num_arms))
    for match in map(_PROPENSITY_COLUMN.fullmatch, columns):
        if match and match[1] not in shown:
            found.add(int(match[1]) if is_numbered and match[1].isdigit() else match[1])
    return tuple(sorted(found) if all(isinstance(name, int) for name in found) else sorted(found, key=str))


def _all_propensities(
    frame: Any, columns: Sequence[str], names: tuple[Any, ...], arm: np.ndarray, propensity: np.ndarray
) -> np.ndarray | None:
    given = {match[1]: column for column in columns if (match := _PROPENSITY_COLUMN.fullmatch(column))}
    if not given:
        return None
    lacking = [name for name in names if str(name) not in given]
    if lacking:
        raise ValueError(f"log has columns propensity_<arm>, but none for {lacking}: give one for every arm, or none")
    every = np.stack([_numbers(frame, given[str(name)]) for name in names], axis=1)
    for position, name in enumerate(names):
        _check_probabilities(every[:, position], f"propensity_{name}")
    with np.errstate(invalid="ignore"):
        off = np.abs(np.nansum(every, axis=1) - 1.0) > _SUM_TOLERANCE * len(names)
        other = np.abs(every[np.arange(arm.size), arm] - propensity) > _SUM_TOLERANCE
    wrong = np.flatnonzero((off | other) & ~np.isnan(propensity))
    if wrong.size:
        raise ValueError(
            f"log: row {wrong[0]} has propensities {every[wrong[0]].tolist()} of all arms and {propensity[wrong[0]]:g} of the "
            "played one: they must add up to 1 and agree"
        )
    return every


def _check_probabilities(values: np.ndarray, name: str) -> None:
    wrong = np.flatnonzero((values < 0) | (values > 1))
    if wrong.size:
        raise ValueError(f"log: row {wrong[0]} has {name}={values[wrong[0]]:g}, expected a probability in [0, 1]")
