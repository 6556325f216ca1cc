"""The arms of a bandit as text, for `Bandit.explain`, and as HTML, for notebooks."""

import numpy as np

from ppl_bandit.display.html_pages import escaped
from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.live.show.figures import NUM_LEADING
from ppl_bandit.live.show.overview import Overview
from ppl_bandit.types import DETAILS, Explanation, Selector

_CELL = "padding:3px 12px;text-align:right;white-space:nowrap"
_MAX_ROWS = 20  # arms that are listed in their own order; of more, the leading ones and one row for the others


def explanation_text(
    explanation: Explanation,
    found: Overview,
    selector: Selector,
    log_evidence: tuple[float, float] | None = None,
    doubts: str = "",
    late: str = "",
    details: bool = False,
) -> str:
    """Return the verdict on the posterior, the arms so far and the selector, and then the engine's certificate.

    Args:
        selector: of the decisions.
        log_evidence: of the program so far, with its standard error, if the engine estimates it.
        doubts: why the draws cannot be trusted; empty if they can.
        details: whether to show the lines with measures and with what was tried.
        late: a note on context entries that are known only with the reward; empty if there are none.
    """
    verdict, _, certificate = str(explanation).partition("\n")
    kept = [line for line in certificate.strip("\n").splitlines() if details or not line.startswith(DETAILS)]
    if len(kept) < len(certificate.strip("\n").splitlines()):
        kept.append("  `explain(details=True)` adds the measures, and what was tried")
    num_rewards = int(found.num_rewards.sum())
    lines = [verdict, "", f"  learnt from {num_rewards} rewards; decisions by {selector.name}; {found.source}"]
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
    if late:
        lines.append(f"  {late}")
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
