"""The arms of a bandit as text, for `Bandit.explain`, and as HTML, for notebooks."""

from html import escape

from ppl_bandit.live.show.overview import Overview
from ppl_bandit.types import Explanation, Selector

__all__ = ["explanation_text", "html_table"]

_CELL = "padding:3px 12px;text-align:right;white-space:nowrap"


def explanation_text(
    explanation: Explanation,
    found: Overview,
    selector: Selector,
    log_evidence: tuple[float, float] | None = None,
    doubts: str = "",
) -> str:
    """Return the engine's report, the arms so far, and the selector.

    Args:
        selector: of the decisions.
        log_evidence: of the program so far, with its standard error, if the engine estimates it.
        doubts: why the draws cannot be trusted; empty if they can.
    """
    num_rewards = int(found.num_rewards.sum())
    lines = [str(explanation), "", f"  learnt from {num_rewards} rewards; decisions by {selector.name}"]
    if doubts:
        lines.append(f"  NOT TRUSTED, use these numbers with caution: {doubts}")
    if log_evidence is not None:
        lines.append(
            f"  log evidence of the program so far: {log_evidence[0]:.2f} (standard error {log_evidence[1]:.2f}); compare it "
            "with another program's on the same rewards"
        )
    if found.num_contexts:
        if found.num_contexts == 1:
            where = f"at the {'context of one reward' if num_rewards else 'example context'}"
        else:
            where = f"averaged over the contexts of {found.num_contexts} of these rewards"
        lines.append(f"  expected rewards and P(best) are {where}")
    width = max(5, *(len(str(arm)) for arm in found.arms))
    lines.append(
        f"    {'arm':<{width}}  rewards  expected reward [95% interval]      P(best)   ({found.draws.shape[0]} draws)"
    )
    for index, arm in enumerate(found.arms):
        centre = f"{'median ' if found.is_median[index] else ''}{found.mean[index]:.4g}"
        interval = f"{centre} [{found.low[index]:.4g}, {found.high[index]:.4g}]"
        count, share = found.num_rewards[index], found.best_prob[index]
        lines.append(f"    {str(arm):<{width}}  {count:7d}  {interval:<34}  {share:7.3f}")
    if found.is_median.any():
        lines.append(
            "    medians, because one draw makes up most of an average: the posterior mean of this expected reward may not "
            "exist; maximise a quantity that has a mean, such as the mean of the logarithm"
        )
    if selector.is_deterministic:
        lines.append(
            f"  evaluation: decisions of {selector.name} are deterministic; selectors.with_floor({selector.name}(...), 0.05) "
            "makes `evaluate` possible"
        )
    return "\n".join(lines)


def html_table(name: str, explanation: Explanation, found: Overview, num_pending: int, selector: str) -> str:
    """Return the arms as an HTML table with a heading and a footer, without scripts or external files.

    Args:
        name: of the program.
        num_pending: number of decisions with a pending reward.
        selector: the call that makes it, as text.
    """
    headings = ("arm", "rewards", "expected reward", "95% interval", "P(best)", "expected loss")
    head = "".join(f'<th style="{_CELL}">{heading}</th>' for heading in headings)
    body = "".join(_html_row(found, index) for index in range(len(found.arms)))
    verdict = explanation.report.partition("\n")[0].partition(": ")[2] or explanation.reason
    averaged = f"; {found.where}" if found.where else ""
    return (
        '<div style="font-family:sans-serif;font-size:13px;max-width:60em">'
        f"<p><b>Bandit</b> on <code>{escape(name)}</code>: {escape(verdict)}</p>"
        f'<table style="border-collapse:collapse"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        f'<p style="opacity:.75">{int(found.num_rewards.sum())} rewards learnt, {num_pending} decisions pending; decisions by '
        f"<code>{escape(selector)}</code>; {found.draws.shape[0]} posterior draws{averaged}. "
        f"{escape(explanation.reason[0].upper() + explanation.reason[1:])}.</p></div>"
    )


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
    name = f'<td style="{_CELL};text-align:left">{escape(str(found.arms[index]))}</td>'
    return f"<tr>{name}{''.join(f'<td style={chr(34)}{_CELL}{chr(34)}>{cell}</td>' for cell in cells)}</tr>"
