"""A race of selectors over worlds: who is clearly behind, and the table of how all fared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ppl_bandit.types import Selector

__all__ = ["Lane", "Standing", "Tuned", "finish", "still_racing"]

_BEHIND = 3.0  # standard errors of the difference to the leader
_NUM_RESAMPLES = 400
_HARDEST = 0.1


class Lane(NamedTuple):
    """What a candidate has played so far: worlds 0, 1, 2, ..."""

    name: str
    selector: Selector
    regret: np.ndarray = np.empty(0)
    is_stuck: np.ndarray = np.empty(0, bool)

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
        high, highest: 95th and 99th percentile over worlds.
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
        selector: the best candidate, ready for `Bandit(selector=...)`.
        name: its name.
        standings: all candidates, best first.
        criterion: "mean" or the quantile that was compared.
        horizon: decisions in an experiment.
        seconds: what the answer cost.
        regret: {name: (worlds,)}, every candidate's regret in every world that it played.
    """

    selector: Selector
    name: str
    standings: tuple[Standing, ...]
    criterion: str | float
    horizon: int
    seconds: float
    regret: Mapping[str, np.ndarray] = field(repr=False)

    @property
    def code(self) -> str:
        """The expression that makes the selector."""
        return f"selectors.{self.selector}"

    @property
    def heaviest(self) -> float:
        """The largest share that a single world has in the winner's summed regret; large where the prior's tails are heavy."""
        regret = self.regret[self.name]
        return float(regret.max() / max(regret.sum(), np.finfo(float).tiny))

    def __str__(self) -> str:
        """Write the standings as a Markdown table."""
        lines = [
            "| selector | worlds | Bayes regret | 95th percentile | 99th percentile | stuck | hardest tenth | behind the best |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for s in self.standings:
            behind = "" if s.name == self.name else f"{s.behind:+.2f} +- {s.behind_error:.2f}"
            lines.append(
                f"| {s.name} | {s.num_worlds} | {s.mean:.2f} +- {s.error:.2f} | {s.high:.1f} | {s.highest:.1f} | "
                f"{100 * s.stuck:.1f}% | {s.hardest:.1f} | {behind} |"
            )
        return "\n".join(lines)


def still_racing(lanes: list[Lane], criterion: str | float) -> list[str]:
    """Return the names of those that are not clearly behind the leader, on the worlds that all of them played."""
    values = [_value(lane.regret, criterion) for lane in lanes]
    leader = lanes[int(np.argmin(values))]
    kept = []
    for lane in lanes:
        behind, error = _behind(lane.regret, leader.regret, criterion)
        if lane is leader or behind <= _BEHIND * error:
            kept.append(lane.name)
    return kept


def finish(lanes: Mapping[str, Lane], criterion: str | float, horizon: int, seconds: float) -> Tuned:
    """Rank the candidates; the best is the best of those that played every world."""
    num_worlds = max(lane.regret.size for lane in lanes.values())
    whole = [lane for lane in lanes.values() if lane.regret.size == num_worlds]
    best = min(whole, key=lambda lane: _value(lane.regret, criterion))
    standings = [_standing(lane, best, list(lanes.values()), criterion) for lane in lanes.values()]
    standings.sort(key=lambda s: (s.name != best.name, s.num_worlds < num_worlds, s.behind))
    return Tuned(
        best.selector,
        best.name,
        tuple(standings),
        criterion,
        horizon,
        seconds,
        {lane.name: lane.regret for lane in lanes.values()},
    )


def _standing(lane: Lane, best: Lane, lanes: list[Lane], criterion: str | float) -> Standing:
    regret, count = lane.regret, lane.regret.size
    difficulty = np.mean([other.regret[:count] for other in lanes if other.regret.size >= count], axis=0)
    hardest = np.argsort(-difficulty)[: max(1, int(np.ceil(_HARDEST * count)))]
    return Standing(
        lane.name,
        count,
        float(regret.mean()),
        _standard_error(regret),
        float(np.quantile(regret, 0.95)),
        float(np.quantile(regret, 0.99)),
        float(lane.is_stuck.mean()),
        float(regret[hardest].mean()),
        *_behind(regret, best.regret[:count], criterion),
    )


def _value(regret: np.ndarray, criterion: str | float) -> float:
    return float(regret.mean() if criterion == "mean" else np.quantile(regret, criterion))


def _behind(regret: np.ndarray, other: np.ndarray, criterion: str | float) -> tuple[float, float]:
    """Return the difference of the criterion on the same worlds, and its standard error (by resampling for a quantile)."""
    difference = _value(regret, criterion) - _value(other, criterion)
    if criterion == "mean":
        return difference, _standard_error(regret - other)
    rows = np.random.default_rng(0).integers(0, regret.size, (_NUM_RESAMPLES, regret.size))
    resampled = np.quantile(regret[rows], criterion, axis=1) - np.quantile(other[rows], criterion, axis=1)
    return difference, float(resampled.std())


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")
