"""Successive elimination of selectors on simulated worlds: which candidates remain, and which one is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ppl_bandit.display.text_tables import markdown_table
from ppl_bandit.simulation.scores import standard_error
from ppl_bandit.types import Selector

__all__ = [
    "CandidateRegret",
    "CandidateScore",
    "Tuned",
    "are_differences_known",
    "choose_candidate",
    "relative_to_best",
    "remaining_candidates",
]

_ELIMINATE = 2.5  # a candidate is eliminated if it is behind the leader by more standard errors of the difference
_UNLIKELY = 2.0  # a candidate that is behind by more standard errors will not be chosen
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
        num_worlds: number of worlds simulated, fewer if it was eliminated.
        mean, error: mean over worlds and its standard error.
        high, highest: 95th and 99th percentile, over worlds and the truths by which each was judged.
        stuck: share of worlds in which every step of the last quarter had regret.
        hardest: mean over the tenth of its worlds with the highest regret, averaged over the candidates.
        behind, behind_error: the criterion minus the chosen candidate's, on the same worlds, with its standard error.
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
    """Result of `tune`.

    Attributes:
        selector: the chosen candidate (see `choose_candidate`), ready for `Bandit(selector=...)`.
        name: its name.
        standings: scores of all candidates, the chosen one first.
        criterion: "mean", or the quantile that was compared.
        horizon: decisions in an experiment.
        seconds: duration of the simulations.
        regret: {name: (worlds,)}, every candidate's regret in every world that it played, averaged over the truths by which
            it was judged (`ppl_bandit.simulation.posterior_regret`).
        scales: factors by which the worlds were wider than the prior. With several, the standings are relative to the best
            candidate of each scale (`relative_to_best`); `regret` is not.
        scale_of: (worlds,), index into `scales` of each world.
    """

    selector: Selector
    name: str
    standings: tuple[CandidateScore, ...]
    criterion: str | float
    horizon: int
    seconds: float
    regret: Mapping[str, np.ndarray] = field(repr=False)
    scales: tuple[float, ...] = (1.0,)
    scale_of: np.ndarray | None = field(default=None, repr=False)

    @property
    def code(self) -> str:
        """Python expression that creates the selector."""
        return f"selectors.{self.selector}"

    @property
    def heaviest(self) -> float:
        """Largest share of one world in the summed regret of the chosen candidate; large if the prior has heavy tails.

        With several scales, regrets are divided by the sum of their scale first.
        """
        regret = self.regret[self.name]
        parts = [part for part in self._split_by_scale(regret) if part.size]
        return max(float(part.max() / max(part.sum(), np.finfo(float).tiny)) for part in parts) / len(parts)

    def __str__(self) -> str:
        """Return the standings as a Markdown table."""
        is_doubted = len(self.scales) > 1
        each = [f"regret at {scale:.3g} of the prior's scale" for scale in self.scales] if is_doubted else []
        heads = ["selector", "worlds", "relative to the best" if is_doubted else "Bayes regret", *each]
        heads += ["95th percentile", "99th percentile", "stuck", "hardest tenth", "behind"]
        rows = []
        for s in self.standings:
            behind = "" if s.name == self.name else f"{s.behind:+.2f} +- {s.behind_error:.2f}"
            cells = [s.name, str(s.num_worlds), f"{s.mean:.2f} +- {s.error:.2f}"]
            cells += [f"{mean:.2f} +- {error:.2f}" for mean, error in self.at_each_scale(s.name)] if is_doubted else []
            cells += [f"{s.high:.1f}", f"{s.highest:.1f}", f"{100 * s.stuck:.1f}%", f"{s.hardest:.1f}", behind]
            rows.append(cells)
        return markdown_table(heads, rows)

    def at_each_scale(self, name: str) -> list[tuple[float, float]]:
        """Return a candidate's mean regret and its standard error in the worlds of each of `scales`."""
        parts = self._split_by_scale(self.regret[name])
        return [(float(part.mean()) if part.size else float("nan"), standard_error(part)) for part in parts]

    def _split_by_scale(self, regret: np.ndarray) -> list[np.ndarray]:
        which = np.zeros(regret.size, int) if self.scale_of is None else self.scale_of[: regret.size]
        return [regret[which == number] for number in range(len(self.scales))]


def relative_to_best(candidates: Mapping[str, CandidateRegret], scale_of: np.ndarray) -> dict[str, CandidateRegret]:
    """Divide each regret by the lowest mean regret of any candidate in the worlds of the same scale.

    Without it, the worlds of the widest prior, which have the highest regret, would determine the choice.

    Args:
        scale_of: (worlds,), index of the scale of each world.
    """
    count = max(len(candidate.regret) for candidate in candidates.values())
    whole = [candidate.regret.mean(axis=1) for candidate in candidates.values() if len(candidate.regret) == count]
    unit = np.ones(count)
    for number in np.unique(scale_of[:count]):
        is_own = scale_of[:count] == number
        means = [regret[is_own].mean() for regret in whole]
        least = min((mean for mean in means if np.isfinite(mean) and mean > 0), default=1.0)
        unit[is_own] = least
    return {
        name: candidate._replace(regret=candidate.regret / unit[: len(candidate.regret), None])
        for name, candidate in candidates.items()
    }


def remaining_candidates(candidates: list[CandidateRegret], criterion: str | float) -> list[str]:
    """Return the names of the candidates that are not eliminated; all of them played the same worlds."""
    leader = _leader(candidates, criterion)
    kept = []
    for candidate in candidates:
        behind, error = _behind(candidate.regret, leader.regret, criterion)
        if candidate is leader or behind <= _ELIMINATE * error:
            kept.append(candidate.name)
    return kept


def are_differences_known(candidates: list[CandidateRegret], criterion: str | float, tolerance: float) -> bool:
    """Return whether the leader's lead has a standard error below `tolerance` times its regret.

    Candidates that will not be chosen do not count.
    """
    leader = _leader(candidates, criterion)
    close = tolerance * _value(leader.regret, criterion)
    found = [_behind(candidate.regret, leader.regret, criterion) for candidate in candidates if candidate is not leader]
    return all(behind > _UNLIKELY * error or error <= close for behind, error in found)


def choose_candidate(
    candidates: Mapping[str, CandidateRegret],
    criterion: str | float,
    horizon: int,
    seconds: float,
    scales: tuple[float, ...] = (1.0,),
    scale_of: np.ndarray | None = None,
) -> Tuned:
    """Rank the candidates and choose one of those that played every world.

    If the criterion is the mean, an index with `learning` is chosen if it is at most two standard errors behind the leader:
    its exploration depends on the rewards seen and little on the scale of the prior, which may be wrong in the experiment.
    Otherwise, of all candidates within one standard error of the leader, the one with the lowest 99th percentile is chosen.
    Too little exploration costs very much in a few worlds, which a finite simulation rarely sees, so means favour it.
    """
    regret = {candidate.name: candidate.regret.mean(axis=1) for candidate in candidates.values()}
    if scale_of is not None:
        candidates = relative_to_best(candidates, scale_of)
    num_worlds = max(len(candidate.regret) for candidate in candidates.values())
    whole = [candidate for candidate in candidates.values() if len(candidate.regret) == num_worlds]
    leader = _leader(whole, criterion)
    equals = [candidate for candidate in whole if candidate is leader or _is_equal(candidate, leader, criterion)]
    best = min(
        equals, key=lambda candidate: (-_learning(candidate, criterion), float(np.quantile(candidate.regret, 0.99)))
    )
    standings = [_score(candidate, best, list(candidates.values()), criterion) for candidate in candidates.values()]
    standings.sort(key=lambda s: (s.name != best.name, s.num_worlds < num_worlds, s.behind))
    return Tuned(best.selector, best.name, tuple(standings), criterion, horizon, seconds, regret, scales, scale_of)


def _leader(candidates: list[CandidateRegret], criterion: str | float) -> CandidateRegret:
    return min(candidates, key=lambda candidate: _value(candidate.regret, criterion))


def _is_equal(candidate: CandidateRegret, leader: CandidateRegret, criterion: str | float) -> bool:
    behind, error = _behind(candidate.regret, leader.regret, criterion)
    return behind <= (_UNLIKELY if _learning(candidate, criterion) else 1.0) * error


def _learning(candidate: CandidateRegret, criterion: str | float) -> float:
    """Return the learning of a candidate, which decides between equals; 0 if the criterion is a quantile."""
    return float(candidate.selector.settings.get("learning", 0.0)) if criterion == "mean" else 0.0


def _score(
    candidate: CandidateRegret, best: CandidateRegret, candidates: list[CandidateRegret], criterion: str | float
) -> CandidateScore:
    regret, count = candidate.regret.mean(axis=1), len(candidate.regret)
    difficulty = np.mean(
        [other.regret[:count].mean(axis=1) for other in candidates if len(other.regret) >= count], axis=0
    )
    hardest = np.argsort(-difficulty)[: max(1, int(np.ceil(_HARDEST * count)))]
    return CandidateScore(
        candidate.name,
        count,
        float(regret.mean()),
        standard_error(regret),
        float(np.quantile(candidate.regret, 0.95)),
        float(np.quantile(candidate.regret, 0.99)),
        float(candidate.is_stuck.mean()),
        float(regret[hardest].mean()),
        *_behind(candidate.regret, best.regret[:count], criterion),
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
