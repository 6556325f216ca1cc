"""Figures of a bandit, and the pages that show it in a notebook."""

from typing import Any

import numpy as np

from ppl_bandit.display.figure_style import density_grid, escaped, figure_tools, kernel_density, reward_label, styles
from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.live.overview import ORDERS, Overview
from ppl_bandit.types import Explanation, Selector, without_details

NUM_LEADING = 15  # arms that get a row of their own; the others share one
_MAX_DENSITIES = 6  # arms whose densities can be told apart
_BLUE, _GREY = "#0072B2", "0.6"


def posterior_kind(about: Explanation) -> str:
    """Return "exact", "exact given ..." or "approximate (...)"."""
    if about.is_exact:
        return "exact"
    # `engines.choose` puts the reasons why it refused other engines first.
    own = about.reason.rpartition("; so ")[2]
    return own.partition(":")[0] if own.startswith("exact given") else f"approximate ({about.engine})"


def plot_bandit(found: Overview, played: np.ndarray, title: str, caption: str, unit: str = "") -> Any:
    """Return a figure; the caller shows or saves it.

    Args:
        played: index of the arm of every learnt reward, in order.
        unit: of the expected reward.
    """
    where = f", {found.where}" if found.where else ""
    label = f"{reward_label(unit)}{where}"
    draw = _draw_densities if len(found.arms) <= _MAX_DENSITIES else _draw_forest
    figure = draw(found, played, label)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(caption, fontsize=8, alpha=0.65)
    return figure


def _draw_densities(found: Overview, played: np.ndarray, label: str) -> Any:
    figure, (left, right) = figure_tools().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    steps = np.arange(1, played.size + 1)
    for index, (arm, (colour, dash)) in enumerate(zip(map(shown_name, found.arms), styles(), strict=False)):
        grid, density = _density(found, index)
        left.plot(grid, density, color=colour, linestyle=dash, label=f"{arm} (P(best) {found.best_prob[index]:.2f})")
        left.fill_between(grid, density, color=colour, alpha=0.12, linewidth=0)
        if played.size:
            marker = "o" if played.size == 1 else None  # a line through one point is invisible
            shares = np.cumsum(played == index) / steps
            right.plot(steps, shares, color=colour, linestyle=dash, label=str(arm), linewidth=1.3, marker=marker)
    left.set(title="posterior density", xlabel=label, ylabel="density")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8)
    right.set(title="share of plays", xlabel="rewarded plays so far", ylabel="share of plays", ylim=(-0.03, 1.03))
    if not played.size:
        right.text(0.5, 0.5, "no reward yet", ha="center", transform=right.transAxes)
    return figure


def _draw_forest(found: Overview, played: np.ndarray, label: str) -> Any:
    order = found.leaders
    leading, others = order[:NUM_LEADING], order[NUM_LEADING:]
    if others.size == 1:
        leading, others = order, order[:0]
    names = [str(shown_name(found.arms[index])) for index in leading]
    rows = np.arange(len(leading) + bool(others.size))
    share = np.bincount(played, minlength=len(found.arms)) / max(played.size, 1)
    figure, axes = figure_tools().subplots(
        1, 3, figsize=(11, 0.27 * rows.size + 1.7), width_ratios=(3, 1, 1), sharey=True, layout="constrained"
    )
    axes[0].hlines(rows[: leading.size], found.low[leading], found.high[leading], color=_BLUE, linewidth=2.2)
    axes[0].plot(found.mean[leading], rows[: leading.size], "o", color=axes[0].title.get_color(), markersize=4.5)
    if others.size:
        names.append(f"{others.size} others")
        axes[0].hlines(rows[-1], found.low[others].min(), found.high[others].max(), color=_GREY, linewidth=2.2)
        axes[0].plot(found.mean[others], np.full(others.size, rows[-1]), "|", color=_GREY, markersize=7)
    for axis, values, heading in ((axes[1], found.best_prob, "P(best)"), (axes[2], share, "share of plays")):
        widths = [*values[leading], *([values[others].sum()] if others.size else [])]
        axis.barh(rows, widths, height=0.62, color=[_BLUE] * leading.size + [_GREY] * bool(others.size))
        for row, width in zip(rows, widths, strict=True):
            axis.annotate(f"{width:.2f}", (width, row), (3, 0), textcoords="offset points", va="center", fontsize=7.5)
        axis.set(xlabel=heading, xlim=(0.0, 1.3 * max(*widths, 0.1)))
    axes[0].set(xlabel=f"{label}\nposterior mean and central 95% interval", yticks=rows, ylim=(rows[-1] + 0.6, -0.6))
    axes[0].set_yticklabels([name if len(name) <= 28 else f"{name[:27]}..." for name in names], fontsize=8.5)
    axes[0].grid(axis="x", alpha=0.3)
    axes[0].set_axisbelow(True)
    for axis in axes[1:]:
        axis.tick_params(left=False)
    if not played.size:
        axes[2].text(0.5, 0.5, "no reward yet", ha="center", rotation=90, va="center", transform=axes[2].transAxes)
    return figure


def _density(found: Overview, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return points of an arm's density, which starts and ends at 0."""
    if found.quantiles is None:
        assert found.draws is not None
        return _smoothed(found.draws[:, index])
    values = found.quantiles[:, index]
    steps = np.diff(values)
    if np.any(steps <= 0):  # all mass in one point, up to rounding
        return np.array([values[0], values[0]]), np.array([0.0, 1.0])
    heights = np.diff(ORDERS) / steps
    return np.concatenate([values[:1], 0.5 * (values[1:] + values[:-1]), values[-1:]]), np.pad(heights, 1)


def _smoothed(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a kernel density estimate, reflected at 0 and 1 where all draws are on one side."""
    low, high = draws.min(), draws.max()
    if high <= low:
        return np.array([low, low]), np.array([0.0, 1.0])
    bounds = 0.0 if low >= 0 else -np.inf, 1.0 if 0 <= low and high <= 1 else np.inf
    grid = density_grid(draws, bounds)
    return np.concatenate([grid[:1], grid, grid[-1:]]), np.pad(kernel_density(draws, grid, bounds), 1)


_CELL = "padding:3px 12px;text-align:right;white-space:nowrap"
_MAX_ROWS = 20  # arms that are listed in their own order; of more, the leading ones and one row for the others


def explanation_text(
    explanation: Explanation,
    found: Overview,
    selector: Selector,
    log_evidence: tuple[float, float] | None = None,
    doubts: str = "",
    note: str = "",
    details: bool = False,
) -> str:
    """Return the verdict on the posterior, the arms so far and the selector, and then the engine's certificate.

    Args:
        selector: of the decisions.
        log_evidence: of the program so far, with its standard error, if the engine estimates it.
        doubts: why the draws cannot be trusted; empty if they can.
        details: whether to show the lines with measures and with what was tried.
        note: remarks on the program and on context entries that are known only with the reward; empty for none.
    """
    verdict, _, certificate = (str(explanation) if details else explanation.summary).partition("\n")
    kept = certificate.strip("\n").splitlines()
    num_rewards = int(found.num_rewards.sum())
    lines = [verdict, "", f"  learnt from {num_rewards} rewards; decisions by {selector.name}; {found.source}"]
    if doubts:
        lines.append(f"  NOT TRUSTED, use these numbers with caution: {doubts if details else without_details(doubts)}")
    if log_evidence is not None:
        lines.append(
            "  to compare programs on the same rewards, the larger is better: log evidence "
            f"{log_evidence[0]:.2f} (standard error {log_evidence[1]:.2f})"
        )
    if found.num_contexts:
        if found.num_contexts == 1:
            where = f"at the {'context of one reward' if num_rewards else 'example context'}"
        else:
            where = f"averaged over the contexts of {found.num_contexts} of these rewards"
        lines.append(f"  expected rewards and P(best) are {where}")
    if note:
        lines.append(f"  {note}")
    lines += arms_text(found)
    if found.is_median.any():
        lines.append(
            "    medians, because one draw makes up most of an average: the posterior mean of this expected reward may not "
            "exist; maximise a quantity that has a mean, such as the mean of the logarithm"
        )
    if selector.is_deterministic:
        lines.append(f"  {evaluation_note(selector)}")
    return printable("\n".join([*lines, *(["", *kept] if kept else [])]))


def arms_text(found: Overview) -> list[str]:
    """Return the table of the arms as lines of at most 80 columns, for names of at most 20 characters."""
    shown, others = shown_arms(found)
    names = [str(shown_name(found.arms[index])) for index in shown] + ([f"{others.size} others"] if others.size else [])
    width = max(5, *map(len, names))
    lines = [f"    {'arm':<{width}}  rewards  expected reward [95% interval]    P(best)  loss"]
    for name, index in zip(names, shown, strict=False):
        centre = f"{'median ' if found.is_median[index] else ''}{found.mean[index]:.4g}"
        interval = f"{centre} [{found.low[index]:.4g}, {found.high[index]:.4g}]"
        loss = "-" if np.isnan(found.loss[index]) else f"{found.loss[index]:.2g}"
        lines.append(
            f"    {name:<{width}}  {found.num_rewards[index]:7d}  {interval:<32}  {found.best_prob[index]:7.3f}  {loss}"
        )
    if others.size:
        interval = f"at most {found.mean[others].max():.4g}"
        share, count = found.best_prob[others].sum(), found.num_rewards[others].sum()
        lines.append(f"    {names[-1]:<{width}}  {count:7d}  {interval:<32}  {share:7.3f}")
    return lines


def shown_arms(found: Overview) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the arms that get a row of their own, and of the others."""
    if len(found.arms) <= _MAX_ROWS:
        return np.arange(len(found.arms)), np.arange(0)
    return found.leaders[:NUM_LEADING], found.leaders[NUM_LEADING:]


def evaluation_note(selector: Selector) -> str:
    """Return why a log of a deterministic selector's decisions cannot be evaluated, and the remedy, in one line."""
    return (
        f"evaluation: decisions of {selector.name} are deterministic, so that their log cannot tell about other arms; "
        f"selectors.with_floor({selector.name}(...), 0.05) makes `evaluate` possible"
    )


def bandit_html(name: str, explanation: Explanation, found: Overview, num_pending: int, selector: str) -> str:
    """Return the arms as an HTML table with a heading and a footer, without scripts or external files.

    Args:
        name: of the program.
        num_pending: number of decisions with a pending reward.
        selector: the call that makes it, as text.
    """
    verdict = explanation.report.partition("\n")[0].partition(": ")[2] or explanation.reason
    averaged = f"; {found.where}" if found.where else ""
    return (
        '<div style="font-family:sans-serif;font-size:13px;max-width:60em">'
        f"<p><b>Bandit</b> on <code>{escaped(name)}</code>: {escaped(verdict)}</p>{html_table(found)}"
        f'<p style="opacity:.75">{int(found.num_rewards.sum())} rewards learnt, {num_pending} decisions pending; decisions by '
        f"<code>{escaped(selector)}</code>; {found.source}{averaged}. "
        f"{escaped(explanation.reason[0].upper() + explanation.reason[1:])}.</p></div>"
    )


def html_table(found: Overview) -> str:
    """Return the arms as an HTML table."""
    headings = ("arm", "rewards", "expected reward", "95% interval", "P(best)", "expected loss")
    head = "".join(f'<th style="{_CELL}">{heading}</th>' for heading in headings)
    shown, others = shown_arms(found)
    body = "".join(_html_row(found, index) for index in shown)
    if others.size:
        body += f'<tr><td style="{_CELL};text-align:left" colspan="6">and {others.size} other arms with smaller means</td></tr>'
    return f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _html_row(found: Overview, index: int) -> str:
    share = float(found.best_prob[index])
    bar = f'<span style="display:inline-block;width:{60 * share:.0f}px;height:9px;background:#0072B2;margin-right:6px"></span>'
    cells = (
        f"{int(found.num_rewards[index])}",
        f"{found.mean[index]:.4g}",
        f"[{found.low[index]:.4g}, {found.high[index]:.4g}]",
        f"{bar}{share:.3f}",
        f"{found.loss[index]:.3g}",
    )
    name = f'<td style="{_CELL};text-align:left">{escaped(str(shown_name(found.arms[index])))}</td>'
    return f"<tr>{name}{''.join(f'<td style={chr(34)}{_CELL}{chr(34)}>{cell}</td>' for cell in cells)}</tr>"
