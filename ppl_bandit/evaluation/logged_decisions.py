"""The data of an evaluation: decisions in the order in which they were made, with their propensities and rewards."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.inputs.data_frames import cell_number, check_columns, column_cells

_ID_COLUMNS = ("decision", "decision_id", "request_id")
_TIME_COLUMNS = ("decided", "decided_at", "time", "timestamp", "datetime", "date", "step")
_MOST_COPIES = 20
_ROWS_OF_BLOCK = 24  # that two blocks share before it is asked whether one is a copy
_MOST_LAGS = 3  # distances between a block and its copy that are looked at
_CHANCE_OF_BLOCK = 1e-9  # that a log has any two equal blocks as long, with the frequencies of their rows
_MOST_BY_CHANCE, _FEWEST_COPIES = 0.05, 5  # a posterior may come back to where it was, and the propensity with it
_FEWEST_ROWS = 20  # different ones, before a coincidence is out of the question
_LARGEST_DEVIATION = 4.0  # standard errors
_FEWEST_ERRORS = 3.0  # standard errors by which rewards depend on propensities if means vary; more for many arms
_FEWEST_EXPECTED = 10.0  # plays of the rarer arm, for the normal law of a deviation
_RARER_PROBS = np.array([0.0, 0.02, 0.1, 0.2, 0.3, 0.4, 0.5])  # groups of rows whose deviations are added up
_TOLERANCE = 1e-6
_MOSTLY = 0.8  # of the rows


def check_repeated_rows(columns: Mapping[str, Any], what: str = "log") -> None:
    """Refuse a log that has decisions more than once: every copy would count as an observation of its own.

    Rows are copies if an id occurs twice; if the whole log is several copies of one log, one after another, row by row or
    in any order; or if whole rows are equal although one of their columns is a real number that hardly ever repeats.

    Args:
        columns: of the log, {name: (T, ...)}.

    Raises:
        ValueError: naming two equal rows, and what to do.
    """
    given = {name: _as_column(values) for name, values in columns.items()}
    for name in _ID_COLUMNS:
        if name in given:
            row, first = _first_copy(_codes([given[name]]))
            if row:
                raise ValueError(
                    f"{what}: rows {first} and {row} have the same {name!r}, {given[name][row]!r}: every decision may stand "
                    "in one row only; drop the copies"
                )
    # The number of a row, which tools write beside it, tells nothing about the row.
    own = [values for name, values in given.items() if name in _ID_COLUMNS or not _is_row_number(values)]
    codes = _codes(own or list(given.values()))
    num_rows, num_kinds = codes.size, int(codes.max(initial=-1)) + 1
    remedy = "drop the copies; if they are decisions of their own, add a column 'decision' with the id of each"
    copies = _num_copies(codes, num_kinds)
    if copies > 1:
        raise ValueError(f"{what}: its {num_rows} rows are {copies} copies of {num_rows // copies} rows: {remedy}")
    untold = [values for values in own if not _takes_turns(values)]
    start, copied, length = _copied_block(codes, _codes(untold) if untold else codes)
    if length:
        raise ValueError(
            f"{what}: the {length} rows from row {copied} are copies of those from row {start}, in the same order: {remedy}"
        )
    row, first = _first_copy(codes)
    kept = np.unique(codes, return_index=True)[1]
    reals = [values[kept] for values in own if values.dtype.kind == "f"]
    num = num_rows - num_kinds
    is_many = num > max(_MOST_BY_CHANCE * num_rows, _FEWEST_COPIES)
    if is_many and num_kinds >= _FEWEST_ROWS and any(_is_hardly_repeated(values) for values in reals):
        raise ValueError(f"{what}: {num} rows are copies of other rows, such as row {row} of row {first}: {remedy}")


def order_doubts(columns: Mapping[str, Any]) -> list[str]:
    """Return that rows are not in the order of the time in one of their columns, in words; empty if they are.

    Args:
        columns: of the log, {name: (T, ...)}.
    """
    import pandas

    for name, values in columns.items():
        if name.lower() not in _TIME_COLUMNS or np.ndim(values) != 1:
            continue
        times = pandas.Series(np.asarray(values))
        if times.dtype.kind not in "iufM":
            times = pandas.to_datetime(times, errors="coerce", utc=True, format="mixed")
        known = times.dropna().to_numpy()
        earlier = np.flatnonzero(known[1:] < known[:-1])
        if earlier.size:
            return [
                f"in {earlier.size} of {times.size} rows {name!r} is earlier than in the row before, so that they are not in "
                "the order of the decisions. Intervals of an adaptive log need that order: sort the rows by it"
            ]
    return []


def propensity_doubts(propensity: np.ndarray, arm: np.ndarray, num_arms: int) -> list[str]:
    """Return why recorded propensities of played arms are not those of the decisions, in words; empty if nothing shows it.

    The mean of 1 / e_t(A_t) is the number of arms with a positive probability. With two arms the probability of the other one,
    and so the variance of every term, is known too. Arms whose probability never changes have probabilities that add up to 1.
    """
    if propensity.size < 2:
        return []
    remedy = "the recorded propensities are not those of the decisions"
    inverse = 1.0 / propensity
    mean, error = float(inverse.mean()), float(inverse.std()) / math.sqrt(inverse.size)
    if mean - num_arms > _LARGEST_DEVIATION * max(error, _TOLERANCE):
        return [
            f"the mean of 1 / propensity is {mean:.4g}, but must be at most {num_arms}, the number of arms: {remedy}"
        ]
    pairs = Counter(zip(arm.tolist(), propensity.round(9).tolist(), strict=True))
    if len(pairs) == len({own for own, _ in pairs}) and min(pairs.values()) >= _FEWEST_EXPECTED:  # they never change
        total = sum(prob for _, prob in pairs)
        # An arm that was never played may have the rest, if that is small.
        if total > 1.0 + _TOLERANCE * len(pairs) or propensity.size * math.log(max(total, 1e-300)) < math.log(1e-6):
            return [f"the propensities of the {len(pairs)} arms add up to {total:.4g} and not to 1: {remedy}"]
    if num_arms != 2:
        return []
    is_random = propensity < 1.0
    probs = propensity[is_random]
    rarer, variances = np.minimum(probs, 1.0 - probs), 1.0 / (probs * (1.0 - probs)) - 4.0
    for low, high in zip(_RARER_PROBS[:-1], _RARER_PROBS[1:], strict=True):
        own = (rarer > low) & (rarer <= high)  # the same group, whichever of the two arms is played
        if rarer[own].sum() < _FEWEST_EXPECTED:
            continue
        deviation = float(np.sum(1.0 / probs[own] - 2.0))
        if abs(deviation) > _LARGEST_DEVIATION * math.sqrt(float(variances[own].sum())) + _TOLERANCE * own.sum():
            return [
                f"with propensities of {low:g} to {high:g} for the rarer arm, the mean of 1 / propensity is "
                f"{2.0 + deviation / own.sum():.3g} and not 2: {remedy}"
            ]
    return []


def _as_column(values: Any) -> np.ndarray:
    found = np.asarray(values)
    if found.ndim > 1:  # one code for each row of an array
        found = _codes([found.reshape(found.shape[0], -1)[:, i] for i in range(int(np.prod(found.shape[1:])))])
    return np.array([repr(value) for value in found]) if found.dtype.kind == "O" else found


def _is_row_number(values: np.ndarray) -> bool:
    return values.dtype.kind in "iu" and values.size > 1 and bool((np.diff(values) == 1).all())


def _codes(columns: list[np.ndarray]) -> np.ndarray:
    """Return a whole number for each row, equal for equal rows."""
    import pandas

    codes = np.zeros(len(columns[0]) if columns else 0, np.int64)
    for values in columns:
        own, kinds = pandas.factorize(values, use_na_sentinel=False)
        codes = pandas.factorize(codes * (len(kinds) + 1) + own)[0]
    return codes


def _first_copy(codes: np.ndarray) -> tuple[int, int]:
    """Return the first row that is equal to an earlier one, and that one; (0, 0) if all differ."""
    kinds, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    copies = np.flatnonzero(first[inverse] < np.arange(codes.size)) if kinds.size < codes.size else np.zeros(0, int)
    return (int(copies[0]), int(first[inverse[copies[0]]])) if copies.size else (0, 0)


def _num_copies(codes: np.ndarray, num_kinds: int) -> int:
    """Return how many copies of one log the rows are: 1 if they are not copies."""
    num_rows = codes.size
    for copies in range(min(_MOST_COPIES, num_rows // _FEWEST_ROWS), 1, -1):
        if num_rows % copies or num_kinds < 3:
            continue
        part = num_rows // copies
        is_repeated = (codes[part:] == codes[:-part]).all() and not _has_period(codes[:part])
        if is_repeated or (codes.reshape(part, copies) == codes[::copies, None]).all():
            return copies
    counts = np.bincount(codes) if num_rows else np.ones(1, int)
    return int(np.gcd.reduce(counts)) if num_kinds >= _FEWEST_ROWS else 1


def _takes_turns(values: np.ndarray) -> bool:
    """Return whether a value mostly tells the next one, as where arms take turns: equal orders are then no coincidence."""
    codes = _codes([values])
    counts = np.bincount(codes)
    if codes.size < _FEWEST_ROWS * max(1, counts.size):
        return False
    pairs, nums = np.unique(np.stack([codes[:-1], codes[1:]]), axis=1, return_counts=True)
    likeliest = np.zeros(counts.size)
    np.maximum.at(likeliest, pairs[0], nums)
    return counts.max() < _MOSTLY * codes.size <= likeliest.sum()


def _copied_block(codes: np.ndarray, untold: np.ndarray) -> tuple[int, int, int]:
    """Return the first row of a block, that of its copy, and the number of rows; (0, 0, 0) if there is none.

    Two blocks of n rows are equal by chance with probability exp(-n H), where H is the entropy of the block's rows. Blocks that
    repeat a few rows are a pattern.

    Args:
        untold: (N,), codes of the rows without columns whose order tells their values.
    """
    import pandas

    num_windows = codes.size - _ROWS_OF_BLOCK + 1
    if num_windows < 2:
        return 0, 0, 0
    windows = np.lib.stride_tricks.sliding_window_view(codes, _ROWS_OF_BLOCK)
    factors = np.random.default_rng(0).integers(1, 2**62, _ROWS_OF_BLOCK)
    hashed = pandas.Series(windows @ factors)  # modulo 2^64
    lags = (np.arange(num_windows) - pandas.Series(np.arange(num_windows)).groupby(hashed).shift()).dropna()
    for lag in lags.astype(int).value_counts().index[:_MOST_LAGS]:
        is_same = np.concatenate([[False], codes[lag:] == codes[:-lag], [False]])
        ends = np.flatnonzero(np.diff(is_same.astype(int)))
        starts, lengths = ends[::2], np.diff(ends)[::2]
        longest = int(np.argmax(lengths))
        start, length = int(starts[longest]), int(lengths[longest])
        block = codes[start : start + length]
        shares = np.unique(untold[start : start + length], return_counts=True)[1] / length
        information = -length * float(np.sum(shares * np.log(shares)))
        is_chance = information < 2.0 * math.log(codes.size) - math.log(_CHANCE_OF_BLOCK)
        if lag >= _FEWEST_ROWS and not is_chance and not _has_period(block):
            return start, start + int(lag), min(length, int(lag))
    return 0, 0, 0


def _has_period(codes: np.ndarray) -> bool:
    """Return whether the rows repeat a few rows: a pattern that somebody wrote down, not a copy of a log."""
    return any((codes[period:] == codes[:-period]).all() for period in range(1, min(_FEWEST_ROWS, codes.size)))


def _is_hardly_repeated(values: np.ndarray) -> bool:
    known = values[~np.isnan(values)]
    return known.size >= _FEWEST_ROWS and (known % 1 != 0).any() and np.unique(known).size >= 0.95 * known.size


_PROPENSITY_COLUMN = re.compile(r"propensity_(.+)")
_SUM_TOLERANCE = 1e-6  # of propensities that were written with a few digits


class LoggedDecisions(NamedTuple):
    """Rewarded decisions, T rows in the order of decisions.

    Attributes:
        names: the arms.
        arm: (T,), index of the arm that was played.
        reward: (T,), what is evaluated; of several outcomes the first, until another one is chosen.
        propensity: (T,), probability with which that arm was played; in (0, 1].
        propensities: (T, A), probability of every arm, nan for the other arms of a row where only that of the played arm is
            known; None if that is all rows.
        contexts: a pytree whose leaves have a leading axis T, or None; as the decisions had them.
        outcomes: {outcome: (T,)} of a program with several outcomes; None where the reward is the only one.
        num_unrewarded: decisions without a reward, which are left out.
        num_without_propensity: rewards of plays that were decided elsewhere, which are left out.
        learnt_contexts: contexts with the entries that came with the rewards; None where there are no such entries. The model
            learns from them, but what it expects before a decision may not depend on them.
        doubts: why no interval can be trusted, in words.
        cautions: what a reader of the answer has to know, in words.
        num_late: rewards that came after their decisions had expired; they count as corrections.
        num_shown: those without a propensity that are of an arm which another system showed in place of the decision's.
        num_erased: decisions that are left out because their contexts were erased.
        is_varying: whether an arm's mean reward differs between decisions, by contexts, also ones that are not known here, or
            with time; None if that is not known.
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
    num_shown: int = 0
    num_erased: int = 0
    is_varying: bool | None = None


def has_varying_means(log: LoggedDecisions) -> bool:
    """Return whether an arm's mean differs between decisions: as far as it is known, else whether it goes with its propensity.

    It does where both depend on a context or on time; where the mean is constant it does not, also under adaptive collection.
    A false alarm costs width alone.
    """
    if log.contexts is not None or log.is_varying is not None:
        return log.contexts is not None or bool(log.is_varying)
    num = np.bincount(log.arm)

    def from_mean(values: np.ndarray) -> np.ndarray:
        mean = (np.bincount(log.arm, values) / np.maximum(num, 1))[log.arm]
        return np.where(np.isclose(values, mean, rtol=1e-9, atol=0.0), 0.0, values - mean)

    products = from_mean(log.reward) * from_mean(1.0 / log.propensity)
    squares = (_FEWEST_ERRORS**2 + 2.0 * math.log(max(num.size, 1))) * np.bincount(log.arm, products**2)
    return bool((np.bincount(log.arm, products) ** 2 > squares).any())


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
