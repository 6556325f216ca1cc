"""A race of selectors over worlds: who is clearly behind, and the table of how all fared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ppl_bandit.types import Selector

__all__ = ["Lane", "Standing", "Tuned", "finish", "in_proportion", "is_settled", "still_racing"]

_BEHIND = 2.5  # standard errors of the difference to the leader: who is behind by more is dropped
_NO_RIVAL = 2.0  # who is behind by more will not be chosen, and is not waited for
_NUM_RESAMPLES = 200
_HARDEST = 0.1


class Lane(NamedTuple):
    """What a candidate has played so far: worlds 0, 1, 2, ..., each judged by one truth or by several.

    Attributes:
        regret, is_stuck: (worlds, truths).
    """

    name: str
    selector: Selector
    regret: np.ndarray
    is_stuck: np.ndarray

    def extended(self, regret: np.ndarray, is_stuck: np.ndarray) -> "Lane":
        """Return the lane with further worlds."""
        return self._replace(
            regret=np.concatenate([self.regret, regret]), is_stuck=np.concatenate([self.is_stuck, is_stuck])
        )


class Standing(NamedTuple):
    """How a candidate fared, in cumulative expected regret over the horizon.

    Attributes:
        name: of the candidate.
        num_worlds: how many worlds it played before it was dropped, or in all.
        mean, error: over worlds, with the standard error.
        high, highest: 95th and 99th percentile, over worlds and the truths that each was judged by.
        stuck: share of worlds in which every step of the last quarter had regret.
        hardest: mean over the tenth of its worlds that cost the candidates most on average.
        behind, behind_error: the criterion less the winner's, on the worlds that both played, with its standard error.
    """

    name: str
    num_worlds: int
    mean: float
    error: float
    high: float
    highest: float
    stuck: float
    hardest: float
    behind: float
    behind_error: float


@dataclass(frozen=True)
class Tuned:
    """The answer of `tune`.

    Attributes:
        selector: the chosen candidate (see `finish`), ready for `Bandit(selector=...)`.
        name: its name.
        standings: all candidates, the chosen one first.
        criterion: "mean" or the quantile that was compared.
        horizon: decisions in an experiment.
        seconds: what the answer cost.
        regret: {name: (worlds,)}, every candidate's regret in every world that it played, on average over the truths that it
            was judged by (`ppl_bandit.simulation.hindsight`).
        scales: how many times as wide as the prior the worlds were. With several, the standings are in proportion to the best
            candidate of each (`in_proportion`); `regret` is not.
        scale_of: (worlds,), which of `scales` each world had.
    """

    selector: Selector
    name: str
    standings: tuple[Standing, ...]
    criterion: str | float
    horizon: int
    seconds: float
    regret: Mapping[str, np.ndarray] = field(repr=False)
    scales: tuple[float, ...] = (1.0,)
    scale_of: np.ndarray | None = field(default=None, repr=False)

    @property
    def code(self) -> str:
        """The expression that makes the selector."""
        return f"selectors.{self.selector}"

    @property
    def heaviest(self) -> float:
        """The largest share that a single world has in the winner's summed regret; large where the prior's tails are heavy.

        With several scales, in the sum of regrets in proportion to their scale's.
        """
        regret = self.regret[self.name]
        parts = [part for part in self._at_each_scale(regret) if part.size]
        return max(float(part.max() / max(part.sum(), np.finfo(float).tiny)) for part in parts) / len(parts)

    def __str__(self) -> str:
        """Write the standings as a Markdown table."""
        is_doubted = len(self.scales) > 1
        each = [f"regret at {scale:.3g} of the prior's scale" for scale in self.scales] if is_doubted else []
        heads = ["selector", "worlds", "in proportion to the best" if is_doubted else "Bayes regret", *each]
        heads += ["95th percentile", "99th percentile", "stuck", "hardest tenth", "behind"]
        lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
        for s in self.standings:
            behind = "" if s.name == self.name else f"{s.behind:+.2f} +- {s.behind_error:.2f}"
            cells = [s.name, str(s.num_worlds), f"{s.mean:.2f} +- {s.error:.2f}"]
            cells += [f"{mean:.2f} +- {error:.2f}" for mean, error in self.at_each_scale(s.name)] if is_doubted else []
            cells += [f"{s.high:.1f}", f"{s.highest:.1f}", f"{100 * s.stuck:.1f}%", f"{s.hardest:.1f}", behind]
            lines.append("| " + " | ".join(cells) + " |")
        return "\n".join(lines)

    def at_each_scale(self, name: str) -> list[tuple[float, float]]:
        """Return a candidate's mean regret, with its standard error, in the worlds of each of `scales`."""
        parts = self._at_each_scale(self.regret[name])
        return [(float(part.mean()) if part.size else float("nan"), _standard_error(part)) for part in parts]

    def _at_each_scale(self, regret: np.ndarray) -> list[np.ndarray]:
        which = np.zeros(regret.size, int) if self.scale_of is None else self.scale_of[: regret.size]
        return [regret[which == number] for number in range(len(self.scales))]


def in_proportion(lanes: Mapping[str, Lane], scale_of: np.ndarray) -> dict[str, Lane]:
    """Divide each regret by the least mean regret of any candidate in the worlds of the same scale.

    Worlds of a wide prior cost more than those of a narrow one, and would decide alone.

    Args:
        scale_of: (worlds,), which scale each world has.
    """
    count = max(len(lane.regret) for lane in lanes.values())
    whole = [lane.regret.mean(axis=1) for lane in lanes.values() if len(lane.regret) == count]
    unit = np.ones(count)
    for number in np.unique(scale_of[:count]):
        is_own = scale_of[:count] == number
        means = [regret[is_own].mean() for regret in whole]
        least = min((mean for mean in means if np.isfinite(mean) and mean > 0), default=1.0)
        unit[is_own] = least
    return {name: lane._replace(regret=lane.regret / unit[: len(lane.regret), None]) for name, lane in lanes.items()}


def still_racing(lanes: list[Lane], criterion: str | float) -> list[str]:
    """Return the names of those that are not clearly behind the leader, on the worlds that all of them played."""
    leader = _leader(lanes, criterion)
    kept = []
    for lane in lanes:
        behind, error = _behind(lane.regret, leader.regret, criterion)
        if lane is leader or behind <= _BEHIND * error:
            kept.append(lane.name)
    return kept


def is_settled(lanes: list[Lane], criterion: str | float, tolerance: float) -> bool:
    """Tell whether the leader's lead over all that may yet be chosen is known to a small part of its regret."""
    leader = _leader(lanes, criterion)
    close = tolerance * _value(leader.regret, criterion)
    found = [_behind(lane.regret, leader.regret, criterion) for lane in lanes if lane is not leader]
    return all(behind > _NO_RIVAL * error or error <= close for behind, error in found)


def finish(
    lanes: Mapping[str, Lane],
    criterion: str | float,
    horizon: int,
    seconds: float,
    scales: tuple[float, ...] = (1.0,),
    scale_of: np.ndarray | None = None,
) -> Tuned:
    """Rank the candidates and choose the best, of those that played every world.

    By mean regret, an index with `learning` is chosen wherever it is no more than two standard errors behind the leader: how
    much it explores follows from what the rewards of an arm have said, and least from the scale of the prior, which these
    worlds take for granted and the experiment to come may not. Otherwise, of all within a standard error of the leader, the one
    with the lowest 99th percentile is chosen. Too little exploration shows in a few worlds that cost very much: worlds that a
    finite race sees too few of, so that means flatter the rash.
    """
    regret = {lane.name: lane.regret.mean(axis=1) for lane in lanes.values()}
    if scale_of is not None:
        lanes = in_proportion(lanes, scale_of)
    num_worlds = max(len(lane.regret) for lane in lanes.values())
    whole = [lane for lane in lanes.values() if len(lane.regret) == num_worlds]
    leader = _leader(whole, criterion)
    level = [lane for lane in whole if lane is leader or _is_level(lane, leader, criterion)]
    best = min(level, key=lambda lane: (-_learning(lane, criterion), float(np.quantile(lane.regret, 0.99))))
    standings = [_standing(lane, best, list(lanes.values()), criterion) for lane in lanes.values()]
    standings.sort(key=lambda s: (s.name != best.name, s.num_worlds < num_worlds, s.behind))
    return Tuned(best.selector, best.name, tuple(standings), criterion, horizon, seconds, regret, scales, scale_of)


def _leader(lanes: list[Lane], criterion: str | float) -> Lane:
    return min(lanes, key=lambda lane: _value(lane.regret, criterion))


def _is_level(lane: Lane, leader: Lane, criterion: str | float) -> bool:
    behind, error = _behind(lane.regret, leader.regret, criterion)
    return behind <= (_NO_RIVAL if _learning(lane, criterion) else 1.0) * error


def _learning(lane: Lane, criterion: str | float) -> float:
    """Return what makes a candidate the choice among equals; who asked for a quantile asked for that alone."""
    return float(lane.selector.settings.get("learning", 0.0)) if criterion == "mean" else 0.0


def _standing(lane: Lane, best: Lane, lanes: list[Lane], criterion: str | float) -> Standing:
    regret, count = lane.regret.mean(axis=1), len(lane.regret)
    difficulty = np.mean([other.regret[:count].mean(axis=1) for other in lanes if len(other.regret) >= count], axis=0)
    hardest = np.argsort(-difficulty)[: max(1, int(np.ceil(_HARDEST * count)))]
    return Standing(
        lane.name,
        count,
        float(regret.mean()),
        _standard_error(regret),
        float(np.quantile(lane.regret, 0.95)),
        float(np.quantile(lane.regret, 0.99)),
        float(lane.is_stuck.mean()),
        float(regret[hardest].mean()),
        *_behind(lane.regret, best.regret[:count], criterion),
    )


def _value(regret: np.ndarray, criterion: str | float) -> float:
    value = float(regret.mean() if isinstance(criterion, str) else np.quantile(regret, criterion))
    return value if np.isfinite(value) else float("inf")  # a prior may draw a world beyond all numbers


def _behind(regret: np.ndarray, other: np.ndarray, criterion: str | float) -> tuple[float, float]:
    """Return the difference of the criterion on the same worlds, and its standard error (by resampling for a quantile)."""
    difference = _value(regret, criterion) - _value(other, criterion)
    if isinstance(criterion, str):  # "mean"
        return difference, _standard_error((regret - other).mean(axis=1))
    rows = np.random.default_rng(0).integers(0, len(regret), (_NUM_RESAMPLES, len(regret)))
    resampled = [np.quantile(regret[chosen], criterion) - np.quantile(other[chosen], criterion) for chosen in rows]
    return difference, float(np.std(resampled))


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")
