"""Final regret of each selector: mean with its standard error, tail, and difference to Thompson sampling."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ppl_bandit.display.terminal import markdown_table

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
