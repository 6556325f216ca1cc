"""The figure of an evaluation: the estimators side by side, and the confidence sequence over the decisions."""

from typing import Any

from ppl_bandit.evaluation.evaluation import Evaluation
from ppl_bandit.numerics.figure_style import figure_tools

__all__ = ["plot_evaluation"]


def plot_evaluation(found: Evaluation) -> Any:
    """Return a figure with two panels."""
    plt = figure_tools()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    table = found.table()[::-1]
    places = range(len(table))
    errors = [table["estimate"] - table["lower"], table["upper"] - table["estimate"]]
    chosen = "dr_stabilised" if "dr_stabilised" in table.index else "dr"
    for place, name in zip(places, table.index, strict=True):
        colour = "#0072B2" if name == chosen and not found.is_refused else "#999999"
        own = [[errors[0].iloc[place]], [errors[1].iloc[place]]]
        left.errorbar(table["estimate"].iloc[place], place, xerr=own, fmt="o", color=colour, capsize=3)
    left.set_yticks(list(places), list(table.index))
    left.set_title(f"estimators, {found.level:.0%} intervals" + (" (refused)" if found.is_refused else ""))
    sequence = found.sequence
    right.plot(sequence.index, sequence["estimate"], color="#0072B2", label="estimate")
    right.fill_between(
        sequence.index, sequence["lower"], sequence["upper"], color="#0072B2", alpha=0.2, label="sequence"
    )
    if " minus " in found.label:
        for axes, line in ((left, left.axvline), (right, right.axhline)):
            del axes
            line(0.0, color="black", linewidth=0.8, linestyle=":")
    right.set_xscale("log")
    right.set_xlabel("decisions")
    right.set_title(f"confidence sequence, valid at every decision ({found.level:.0%})")
    left.set_xlabel("mean reward" if " minus " not in found.label else "difference of mean rewards")
    right.set_ylabel("mean reward" if " minus " not in found.label else "difference")
    figure.suptitle(found.label)
    size = found.diagnostics["effective_sample_size"]
    figure.supxlabel(
        f"{found.diagnostics['num_decisions']:.0f} decisions, effective sample size {size:.0f}", fontsize=8
    )
    return figure
