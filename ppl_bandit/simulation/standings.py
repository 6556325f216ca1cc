"""Standings of selectors that played the same simulated worlds: paired differences, and which one is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppl_bandit.display.terminal import markdown_table
from ppl_bandit.types import Selector

if TYPE_CHECKING:
    import xarray


class SelectorScore(NamedTuple):
    """Statistics of a selector's cumulative expected regret after the last step.

    Attributes:
        mean, error: mean over realizations and its standard error.
        median, tail, high: the median, the 95th and the 99th percentile.
        stuck: share of realizations in which every step of the last quarter had regret.
        relative, relative_error: mean divided by Thompson sampling's, less 1, on the same realizations; nan without it.
    """

    selector: str
    mean: float
    error: float
    median: float
    tail: float
    high: float
    stuck: float
    relative: float
    relative_error: float


def score_selectors(runs: "xarray.Dataset") -> list[SelectorScore]:
    """Score each selector of a summary dataset."""
    finals = _final_regrets(runs)
    thompson = finals.get("Thompson")
    scores = []
    for name, final in finals.items():
        relative, relative_error = np.nan, np.nan
        if thompson is not None and thompson.mean() > 0:
            relative = final.mean() / thompson.mean() - 1.0
            # Delta method for a ratio of paired means.
            residual = final - (1.0 + relative) * thompson
            relative_error = standard_error(residual) / thompson.mean()
        stuck = float(runs.is_stuck.sel(selector=name).mean())
        median, tail, high = (float(value) for value in np.quantile(final, (0.5, 0.95, 0.99)))
        mean, error = float(final.mean()), standard_error(final)
        scores.append(SelectorScore(name, mean, error, median, tail, high, stuck, relative, relative_error))
    return scores


def score_table(scores: list[SelectorScore]) -> str:
    """Return the scores as a Markdown table."""
    header = (
        "selector",
        "mean regret",
        "median",
        "95th percentile",
        "99th percentile",
        "stuck",
        "relative to Thompson",
    )
    rows = []
    for s in scores:
        relative = "" if np.isnan(s.relative) else f"{100 * s.relative:+.1f}% +- {100 * s.relative_error:.1f}%"
        quantiles = f"{s.median:.2f}", f"{s.tail:.2f}", f"{s.high:.2f}"
        rows.append([s.selector, f"{s.mean:.3f} +- {s.error:.3f}", *quantiles, f"{100 * s.stuck:.2f}%", relative])
    return markdown_table(header, rows)


def pairwise_table(runs: "xarray.Dataset") -> str:
    """Return a Markdown table of paired differences: the row's mean regret minus the column's, with standard errors.

    The realizations share their random numbers, so a difference has a smaller standard error than the two means suggest.
    """
    finals = _final_regrets(runs)

    def entry(row: str, column: str) -> str:
        gap = finals[row] - finals[column]
        return "" if row == column else f"{gap.mean():+.2f} +- {standard_error(gap):.2f}"

    rows = [[row, *(entry(row, column) for column in finals)] for row in finals]
    return markdown_table(["regret, row less column", *finals], rows)


def standard_error(values: np.ndarray) -> float:
    """Return the standard error of a mean; nan for a single value."""
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")


def _final_regrets(runs: "xarray.Dataset") -> dict[str, np.ndarray]:
    return {str(name): np.asarray(runs.final_regret.sel(selector=name), float) for name in runs.selector.values}


_EQUAL_IF_LEARNING = 2.0  # standard errors by which an index with `learning` may be behind the leader
_NUM_RESAMPLES = 200
_HARDEST = 0.1


class CandidateRegret(NamedTuple):
    """Regret of a candidate in worlds 0, 1, 2, ..., each judged by one truth or by several.

    Attributes:
        regret, is_stuck: (worlds, truths).
    """

    name: str
    selector: Selector
    regret: np.ndarray
    is_stuck: np.ndarray


class CandidateScore(NamedTuple):
    """Statistics of a candidate's cumulative expected regret over the horizon.

    Attributes:
        name: name of the candidate.
        mean, error: mean over worlds and its standard error.
        high, highest: 95th and 99th percentile, over worlds and the truths by which each was judged.
        stuck: share of worlds in which every step of the last quarter had regret.
        hardest: mean over the tenth of the worlds with the highest regret, averaged over the candidates.
        behind, behind_error: the criterion minus the chosen candidate's, on the same worlds, with its standard error.
    """

    name: str
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
    """Result of `tune`.

    Attributes:
        selector: the chosen candidate (see `choose_candidate`), ready for `Bandit(selector=...)`.
        name: its name.
        standings: scores of all candidates, the chosen one first.
        criterion: "mean", or the quantile that was compared.
        horizon: decisions in an experiment.
        seconds: duration of the simulations.
        regret: {name: (worlds,)}, every candidate's regret in every world, averaged over the truths by which it was judged
            (`ppl_bandit.simulation.tune`).
        is_complete: whether all candidates have played.
    """

    selector: Selector
    name: str
    standings: tuple[CandidateScore, ...]
    criterion: str | float
    horizon: int
    seconds: float
    regret: Mapping[str, np.ndarray] = field(repr=False)
    is_complete: bool = True

    @property
    def num_worlds(self) -> int:
        """Number of worlds that every candidate played."""
        return len(self.regret[self.name])

    @property
    def code(self) -> str:
        """Python expression that creates the selector."""
        return f"selectors.{self.selector}"

    @property
    def heaviest(self) -> float:
        """Largest share of one world in the summed regret of the chosen candidate; large if the prior has heavy tails."""
        regret = self.regret[self.name]
        return float(regret.max() / max(regret.sum(), np.finfo(float).tiny))

    def __str__(self) -> str:
        """Return the standings as a Markdown table."""
        heads = ["selector", "Bayes regret", "95th percentile", "99th percentile", "stuck", "hardest tenth", "behind"]
        rows = []
        for s in self.standings:
            behind = "" if s.name == self.name else f"{s.behind:+.2f} +- {s.behind_error:.2f}"
            cells = [s.name, f"{s.mean:.2f} +- {s.error:.2f}"]
            cells += [f"{s.high:.1f}", f"{s.highest:.1f}", f"{100 * s.stuck:.1f}%", f"{s.hardest:.1f}", behind]
            rows.append(cells)
        return markdown_table(heads, rows)


def choose_candidate(
    candidates: Mapping[str, CandidateRegret], criterion: str | float, horizon: int, seconds: float
) -> Tuned:
    """Rank candidates that played the same worlds and choose one.

    If the criterion is the mean, an index with `learning` is chosen if it is at most two standard errors behind the leader:
    its exploration depends on the rewards seen and little on the scale of the prior, which may be wrong in the experiment.
    Otherwise, of all candidates within one standard error of the leader, the one with the lowest 99th percentile is chosen.
    Too little exploration costs very much in a few worlds, which a finite simulation rarely sees, so means favour it.
    """
    every = list(candidates.values())
    leader = min(every, key=lambda candidate: _value(candidate.regret, criterion))

    def is_equal(candidate: CandidateRegret) -> bool:
        behind, error = _behind(candidate.regret, leader.regret, criterion)
        return behind <= (_EQUAL_IF_LEARNING if _learning(candidate, criterion) else 1.0) * error

    equals = [candidate for candidate in every if candidate is leader or is_equal(candidate)]
    best = min(
        equals, key=lambda candidate: (-_learning(candidate, criterion), float(np.quantile(candidate.regret, 0.99)))
    )
    difficulty = np.mean([candidate.regret.mean(axis=1) for candidate in every], axis=0)
    hardest = np.argsort(-difficulty)[: max(1, int(np.ceil(_HARDEST * difficulty.size)))]
    standings = [_score(candidate, best, hardest, criterion) for candidate in every]
    standings.sort(key=lambda s: (s.name != best.name, s.behind))
    regret = {candidate.name: candidate.regret.mean(axis=1) for candidate in every}
    return Tuned(best.selector, best.name, tuple(standings), criterion, horizon, seconds, regret)


def _learning(candidate: CandidateRegret, criterion: str | float) -> float:
    """Return the learning of a candidate, which decides between equals; 0 if the criterion is a quantile."""
    return float(candidate.selector.settings.get("learning", 0.0)) if criterion == "mean" else 0.0


def _score(
    candidate: CandidateRegret, best: CandidateRegret, hardest: np.ndarray, criterion: str | float
) -> CandidateScore:
    regret = candidate.regret.mean(axis=1)
    return CandidateScore(
        candidate.name,
        float(regret.mean()),
        standard_error(regret),
        float(np.quantile(candidate.regret, 0.95)),
        float(np.quantile(candidate.regret, 0.99)),
        float(candidate.is_stuck.mean()),
        float(regret[hardest].mean()),
        *_behind(candidate.regret, best.regret, criterion),
    )


def _value(regret: np.ndarray, criterion: str | float) -> float:
    value = float(regret.mean() if isinstance(criterion, str) else np.quantile(regret, criterion))
    return value if np.isfinite(value) else float("inf")  # a prior may draw a world with an infinite regret


def _behind(regret: np.ndarray, other: np.ndarray, criterion: str | float) -> tuple[float, float]:
    """Return the difference of the criterion on the same worlds, and its standard error (a bootstrap for a quantile)."""
    difference = _value(regret, criterion) - _value(other, criterion)
    if isinstance(criterion, str):  # "mean"
        return difference, standard_error((regret - other).mean(axis=1))
    rows = np.random.default_rng(0).integers(0, len(regret), (_NUM_RESAMPLES, len(regret)))
    resampled = [np.quantile(regret[chosen], criterion) - np.quantile(other[chosen], criterion) for chosen in rows]
    return difference, float(np.std(resampled))
