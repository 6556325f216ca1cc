"""The figure of an evaluation: the estimators side by side, and the confidence sequence over the decisions."""

from typing import TYPE_CHECKING, Any

from ppl_bandit.display.figure_style import figure_tools

if TYPE_CHECKING:
    import pandas

__all__ = ["plot_evaluation"]

_CHOSEN, _OTHER = "#0072B2", "#999999"


def plot_evaluation(
    table: "pandas.DataFrame", sequence: "pandas.DataFrame", label: str, caption: str, level: float, chosen: str
) -> Any:
    """Return a figure with two panels.

    Args:
        table: the estimators, from `Evaluation.table`.
        sequence: the confidence sequence.
        label: what was estimated.
        caption: below the panels.
        level: of the intervals.
        chosen: the estimator to highlight; empty where the interval is refused.
    """
    plt = figure_tools()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for place, (name, row) in enumerate(table[::-1].iterrows()):
        margin = row["upper"] - row["estimate"]
        colour = _CHOSEN if name == chosen else _OTHER
        left.errorbar(row["estimate"], place, xerr=margin, fmt="o", color=colour, capsize=3)
    left.set_yticks(range(len(table)), list(table.index[::-1]))
    left.set_title(f"estimators, {level:.0%} intervals" + ("" if chosen else " (refused)"))
    right.plot(sequence.index, sequence["estimate"], color=_CHOSEN)
    right.fill_between(sequence.index, sequence["lower"], sequence["upper"], color=_CHOSEN, alpha=0.2)
    right.set_xscale("log")
    right.set_xlabel("decisions")
    right.set_title(f"confidence sequence, valid at every decision ({level:.0%})")
    is_difference = " minus " in label
    if is_difference:
        left.axvline(0.0, color="black", linewidth=0.8, linestyle=":")
        right.axhline(0.0, color="black", linewidth=0.8, linestyle=":")
    unit = "difference of mean rewards" if is_difference else "mean reward"
    left.set_xlabel(unit)
    right.set_ylabel(unit)
    figure.suptitle(label)
    figure.supxlabel(caption, fontsize=8)
    return figure
