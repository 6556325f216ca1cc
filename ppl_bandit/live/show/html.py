"""A live bandit as a notebook shows it: the arms in one table, and why they may be trusted."""

from html import escape

from ppl_bandit.live.show.overview import Overview
from ppl_bandit.types import Explanation

__all__ = ["as_html"]

_CELL = "padding:3px 12px;text-align:right;white-space:nowrap"


def as_html(name: str, explanation: Explanation, found: Overview, num_pending: int, selector: str) -> str:
    """Return a table of the arms with a heading and a footing, as HTML without scripts or outside files.

    Args:
        name: of the program.
        num_pending: decisions that still wait for their reward.
        selector: who decides, as it would be written.
    """
    headings = ("arm", "rewards", "expected reward", "95% interval", "P(best)", "expected loss")
    head = "".join(f'<th style="{_CELL}">{heading}</th>' for heading in headings)
    body = "".join(_row(found, index) for index in range(len(found.arms)))
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


def _row(found: Overview, index: int) -> str:
    share = float(found.best_prob[index])
    bar = (
        f'<span style="display:inline-block;width:{60 * share:.0f}px;height:9px;background:#0072B2;margin-right:6px"></span>'
        f"{share:.3f}"
    )
    cells = (
        f"{int(found.num_rewards[index])}",
        f"{found.mean[index]:.4g}",
        f"[{found.low[index]:.4g}, {found.high[index]:.4g}]",
        bar,
        f"{found.loss[index]:.3g}",
    )
    name = f'<td style="{_CELL};text-align:left">{escape(str(found.arms[index]))}</td>'
    return f"<tr>{name}{''.join(f'<td style={chr(34)}{_CELL}{chr(34)}>{cell}</td>' for cell in cells)}</tr>"
