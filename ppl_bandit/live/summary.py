"""What `Bandit.explain` says beyond the engine's own account: the arms so far, and how the next one is chosen."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ppl_bandit.types import Explanation, Selector

__all__ = ["describe"]


def describe(
    explanation: Explanation,
    arms: Sequence[Any],
    played: np.ndarray,
    table: np.ndarray | None,
    selector: Selector,
    log_evidence: tuple[float, float] | None = None,
) -> str:
    """Return the whole account of a live bandit.

    Args:
        played: index of the arm of every reward learnt.
        table: (M, A) draws of expected rewards; None where they depend on a context.
        log_evidence: of the program so far and its standard error, from an engine that adds it up.
    """
    lines = [str(explanation), "", f"  learnt from {played.size} rewards; decisions by {selector.name}"]
    if log_evidence is not None:
        lines.append(
            f"  log evidence of the program so far: {log_evidence[0]:.2f} (standard error {log_evidence[1]:.2f}); compare it "
            "with another program's on the same rewards"
        )
    counts = np.bincount(played, minlength=len(arms))
    width = max(5, *(len(str(arm)) for arm in arms))
    if table is None:
        lines += [f"    {str(arm):<{width}}  {count} rewards" for arm, count in zip(arms, counts, strict=True)]
        return "\n".join(lines)
    wins = table == table.max(axis=1, keepdims=True)
    shares = (wins / wins.sum(axis=1, keepdims=True)).mean(axis=0)
    low, median, high = np.quantile(table, [0.025, 0.5, 0.975], axis=0)
    # The largest of M draws of a quantity with a mean is a small part of their sum.
    spread = np.abs(table - median)
    is_infinite = (spread.max(axis=0) > 0.5 * spread.sum(axis=0)) & (table.shape[0] >= 100)
    lines.append(
        f"    {'arm':<{width}}  rewards  expected reward [95% interval]      P(best)   ({table.shape[0]} draws)"
    )
    middles = np.where(is_infinite, median, table.mean(axis=0))
    for row in zip(arms, counts, middles, is_infinite, low, high, shares, strict=True):
        arm, count, middle, is_median, lower, upper, share = row
        interval = f"{'median ' if is_median else ''}{middle:.4g} [{lower:.4g}, {upper:.4g}]"
        lines.append(f"    {str(arm):<{width}}  {count:7d}  {interval:<34}  {share:7.3f}")
    if is_infinite.any():
        lines.append(
            "    medians, because one draw makes up most of an average: this expected reward has no expectation to speak of; "
            "maximise what has one, such as the mean of the logarithm"
        )
    return "\n".join(lines)
