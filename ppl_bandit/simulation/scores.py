"""How selectors fared in simulated runs: regret with its error and its tail, beside Thompson sampling's."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import xarray

__all__ = ["Score", "pairwise", "scores", "table"]


class Score(NamedTuple):
    """How a selector fared, in cumulative expected regret after the last step.

    Attributes:
        mean, error: over realizations, with the standard error.
        median, tail, high: the median, the 95th and the 99th percentile.
        stuck: share of realizations in which every step of the last quarter had regret.
        relative, relative_error: mean relative to Thompson sampling's less 1, on the same realizations; nan without it.
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


def scores(found: "xarray.Dataset") -> list[Score]:
    """Score each selector of a summary dataset."""
    finals = {str(name): np.asarray(found.final_regret.sel(selector=name), float) for name in found.selector.values}
    thompson = finals.get("Thompson")
    scored = []
    for name, final in finals.items():
        relative, relative_error = np.nan, np.nan
        if thompson is not None and thompson.mean() > 0:
            relative = final.mean() / thompson.mean() - 1.0
            # The delta method on paired realizations: the residual of one mean against the other.
            residual = final - (1.0 + relative) * thompson
            relative_error = _standard_error(residual) / thompson.mean()
        stuck = float(found.is_stuck.sel(selector=name).mean())
        median, tail, high = (float(value) for value in np.quantile(final, (0.5, 0.95, 0.99)))
        scored.append(
            Score(
                name, float(final.mean()), _standard_error(final), median, tail, high, stuck, relative, relative_error
            )
        )
    return scored


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(values.size)) if values.size > 1 else float("nan")


def table(scored: list[Score]) -> str:
    """Return the scores as a Markdown table."""
    lines = [
        "| selector | mean regret | median | 95th percentile | 99th percentile | stuck | relative to Thompson |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for s in scored:
        relative = "" if np.isnan(s.relative) else f"{100 * s.relative:+.1f}% +- {100 * s.relative_error:.1f}%"
        lines.append(
            f"| {s.selector} | {s.mean:.3f} +- {s.error:.3f} | {s.median:.2f} | {s.tail:.2f} | {s.high:.2f} | "
            f"{100 * s.stuck:.2f}% | {relative} |"
        )
    return "\n".join(lines)


def pairwise(found: "xarray.Dataset") -> str:
    """Return, as a Markdown table, the mean regret of each row's selector less each column's, on the same realizations.

    Each entry has its standard error: the realizations share their random numbers, so that it is smaller than the errors of
    the two means would suggest.
    """
    names = [str(name) for name in found.selector.values]
    finals = {name: np.asarray(found.final_regret.sel(selector=name), float) for name in names}
    lines = ["| regret, row less column | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for row in names:
        entries = []
        for column in names:
            difference = finals[row] - finals[column]
            entries.append("" if row == column else f"{difference.mean():+.2f} +- {_standard_error(difference):.2f}")
        lines.append(f"| {row} | " + " | ".join(entries) + " |")
    return "\n".join(lines)
