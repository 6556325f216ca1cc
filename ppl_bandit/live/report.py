"""The answer for a person who must decide: which arm leads, by how much, how certain that is, what more data would change."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ppl_bandit.display.figure_style import escaped, html_figure, html_page, html_paragraphs, html_rows
from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.journal.audit import KnowledgeAge
from ppl_bandit.live.lookahead import LossesAfter
from ppl_bandit.live.looks import RuleDistance
from ppl_bandit.live.overview import ByContext, Overview, Segment
from ppl_bandit.live.rendering import html_table, plot_bandit, posterior_kind
from ppl_bandit.live.reward_curves import RewardCurves, plot_profiles
from ppl_bandit.types import Explanation, without_details

_MOST_NAMED = 6  # arms in a sentence
_MOST_SEGMENTS = 4  # in a sentence
_NEGLIGIBLE = 1e-4  # of the expected reward: a loss that no decision is made on
_LEAST_WORTH = 0.02  # of today's loss: less is within the error of the loss after more decisions


@dataclass(frozen=True, eq=False)
class Report:
    """The state of an experiment in a few lines; `print(report)` shows them.

    Attributes:
        text: the lines.
        leader: the arm with the largest posterior mean.
        runner_up: the arm with the next largest; None if there is one arm.
        mean, interval: posterior mean of the leader's expected reward, and its central 95% interval.
        lead, lead_interval: how much more the leader earns than the runner-up, with the central 95% interval.
        best_prob: probability that the leader is the best arm of those that are not retired; over several contexts, that it is
            the best single arm.
        loss: expected loss of choosing the leader now, per decision: E[max_b theta_b - theta_leader]; over several contexts,
            against the best arm of each.
        loss_after: {n: the same after n more decisions}.
        num_rewards, num_pending: rewards learnt, and decisions that wait for one.
        num_late: rewards that came after their decisions had expired; they count as corrections.
        age: how old the posterior behind the decisions of deciders was; None if there are none.
        lead_shares: {arm: share of the contexts in which it leads}; None for fewer than two contexts.
        rules: what each stopping rule of the design would find now.
        segments: the leader for each value, group or half of an entry of the context; empty for fewer than two contexts.
        gain, gain_interval: how much more choosing the leader of each context earns per decision than the best single arm, and
            the central 95% interval; None likewise.
    """

    text: str
    leader: Any
    runner_up: Any
    mean: float
    interval: tuple[float, float]
    lead: float
    lead_interval: tuple[float, float]
    best_prob: float
    loss: float
    loss_after: Mapping[int, float]
    num_rewards: int
    num_pending: int
    overview: Overview = field(repr=False)
    played: np.ndarray = field(repr=False)
    title: str = field(repr=False)
    lead_shares: Mapping[Any, float] | None = None
    segments: tuple[Segment, ...] = ()
    gain: float | None = None
    gain_interval: tuple[float, float] | None = None
    rules: tuple[RuleDistance, ...] = ()
    profiles: Callable[[], list[RewardCurves]] = field(default=list, repr=False)
    seed: int = 0
    num_late: int = 0
    age: KnowledgeAge | None = None

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        names = ("text", "leader", "runner_up", "mean", "interval", "lead", "lead_interval", "best_prob", "loss")
        found = {name: getattr(self, name) for name in (*names, "num_rewards", "num_pending", "num_late")}
        rows = self.overview.to_frame().to_dict("records")
        arms = [row | {"arm": arm} for row, arm in zip(rows, self.overview.arms, strict=True)]
        if self.lead_shares is not None:
            found |= {"gain": self.gain, "gain_interval": self.gain_interval}
            found["lead_shares"] = {str(arm): share for arm, share in self.lead_shares.items()}
            found["segments"] = [one._asdict() | {"leader": self.overview.arms[one.leader]} for one in self.segments]
        found["age"] = None if self.age is None else self.age._asdict()
        found["rules"] = [rule._asdict() for rule in self.rules]
        return found | {"loss_after": {str(n): loss for n, loss in self.loss_after.items()}, "arms": arms}

    def plot(self, unit: str = "") -> Any:
        """Return the figure of `Bandit.plot`."""
        return plot_bandit(self.overview, self.played, self.title, self.overview.source, unit)

    def plot_contexts(self, unit: str = "") -> Any:
        """Return a figure of the expected reward of each arm along each entry of the context; None without a context.

        The other entries are averaged over, as in the contexts that were seen.
        """
        return plot_profiles(self.profiles(), self.overview, self.title, unit)

    def to_html(self, path: str | PathLike | None = None) -> str:
        """Return the report as one HTML page with its figure, and write it to a file if a path is given."""
        answer, *lines = self.text.splitlines()
        parts = [
            f'<p class="answer">{escaped(answer)}</p>',
            html_paragraphs(lines),
            f'<div class="wide">{html_table(self.overview)}</div>',
            html_figure(answer, self.plot()),
        ]
        if self.segments:
            parts.append(_html_segments(self.segments, self.overview.arms))
        by_context = self.plot_contexts()
        if by_context is not None:
            parts.append(html_figure("Expected reward of each arm along the entries of the context.", by_context))
        lead = f"{len(self.overview.arms)} arms, {self.num_rewards:,} rewards; {self.overview.source}."
        page = html_page(self.title, lead, parts, self.seed)
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page

    def _repr_html_(self) -> str:
        return f"<div>{html_paragraphs(self.text.splitlines())}{html_table(self.overview)}</div>"


def make_report(
    found: Overview,
    after: LossesAfter,
    *,
    played: np.ndarray,
    title: str,
    evidence: str,
    num_pending: int,
    oldest: str,
    num_late: int = 0,
    age: KnowledgeAge | None = None,
    note: str = "",
    rules: tuple[RuleDistance, ...] = (),
    profiles: Callable[[], list[RewardCurves]] = list,
    seed: int = 0,
) -> Report:
    """Write the report.

    Args:
        after: expected losses of the leader after more decisions.
        played: index of the arm of every learnt reward, in order.
        evidence: what the numbers rest on, in words.
        oldest: since when the oldest pending decision waits, in words.
        num_late: number of rewards that came after their decisions had expired.
        age: how old the posterior behind the decisions of deciders was.
        note: a remark about what the arms mean; empty for none.
        rules: what each stopping rule of the design would find now.
        profiles: the expected rewards along each entry of the context.
        seed: of the bandit.
    """
    order, num_rewards = found.leaders, int(found.num_rewards.sum())
    leader = int(order[0])
    where = f", {found.where}" if found.where else ""
    centre = "median" if found.is_median[leader] else "mean"
    interval = float(found.low[leader]), float(found.high[leader])
    rewards = "1 reward" if num_rewards == 1 else f"{num_rewards:,} rewards"
    personal = found.by_context
    leads = "leads" if personal is None else "is the best single arm"
    best_prob = float((found.best_prob if personal is None else personal.single_best_prob)[leader])
    first = f"{name_of(found.arms[leader])} {leads} after {rewards}: expected reward"
    if num_rewards == 0:
        first = f"No rewards yet. By the prior, {name_of(found.arms[leader])} has the expected reward"
    lines = [
        f"{first} {found.mean[leader]:.4g} ({'posterior ' if num_rewards else ''}{centre}; "
        f"95% interval {interval[0]:.4g} to {interval[1]:.4g}{where})"
    ]
    runner_up, lead = None, (np.nan, np.nan, np.nan)
    if found.num_open > 1:
        second = int(order[1])
        runner_up, lead = found.arms[second], found.lead(leader, second)
        lines[0] += f", {lead[0]:.3g} more than {name_of(runner_up)} (95% interval {lead[1]:.3g} to {lead[2]:.3g})"
        kind = f"best of {found.num_open} arms" if personal is None else f"best single one of {found.num_open} arms"
        retired = _names_of(found.arms[arm] for arm in order[found.num_open :])
        lines.append(
            f"It is the {kind} with probability {probability(best_prob)}."
            + (f" Retired, and not compared: {retired}." if retired else "")
        )
        if personal is not None:
            lines += _context_lines(found, personal, leader)
        lines.append(_loss_text(float(found.loss[leader]), after, personal is not None, float(found.mean[leader])))
    lines[0] += "."
    if rules:
        lines.append(f"Stopping rules at this posterior: {'; '.join(rule.words for rule in rules)}.")
    waiting = "1 decision waits" if num_pending == 1 else f"{num_pending} decisions wait"
    lines.append(f"Evidence: {evidence}.")
    late = "1 reward" if num_late == 1 else f"{num_late:,} rewards"
    came = f" {late} came after the decision had expired, and replaced what was recorded then." if num_late else ""
    still = f"{waiting} for a reward{oldest}" if num_pending else "no decision waits for a reward"
    lines.append(f"Pending: {still}.{came}")
    if age is not None:
        lines.append(f"Deciders: {age.text}.")
    if note:
        lines.append(f"Note: {note}.")
    return Report(
        printable("\n".join(lines)),
        found.arms[leader],
        runner_up,
        float(found.mean[leader]),
        interval,
        lead[0],
        lead[1:],
        best_prob,
        float(found.loss[leader]),
        dict(after.by_number),
        num_rewards,
        num_pending,
        found,
        played,
        title,
        None if personal is None else dict(zip(found.arms, personal.lead_shares.tolist(), strict=True)),
        () if personal is None else personal.segments,
        None if personal is None else personal.gain,
        None if personal is None else personal.gain_interval,
        rules,
        profiles,
        seed,
        num_late,
        age,
    )


def evidence_text(name: str, explanation: Explanation, found: Overview, doubts: str) -> str:
    """Return what the numbers rest on, in words.

    Args:
        name: of the program.
        doubts: why the draws cannot be trusted; empty if they can.
    """
    text = f"{posterior_kind(explanation)} posterior of the program {name}, {found.source}"
    if doubts:
        return f"{text}. NOT TRUSTED: {without_details(doubts)}"
    return text if explanation.is_exact else f"{text}; no diagnostic contradicts the draws"


def name_of(arm: Any) -> str:
    """Return an arm's name in a sentence."""
    return f"arm {arm}" if isinstance(arm, int) else str(shown_name(arm))


def probability(value: float) -> str:
    """Return a probability in three digits, without claiming 0 or 1."""
    return "below 0.001" if value < 0.0005 else "above 0.999" if value > 0.9995 else f"{value:.3f}"


def _names_of(arms: Iterable[Any]) -> str:
    names = [name_of(arm) for arm in arms]
    more = [f"{len(names) - _MOST_NAMED} others"] if len(names) > _MOST_NAMED else []
    return ", ".join(names[:_MOST_NAMED] + more)


def _context_lines(found: Overview, personal: ByContext, leader: int) -> list[str]:
    """Return in which share of the contexts and in which segments each arm leads, and what choosing by context is worth."""
    order = [int(arm) for arm in np.argsort(-personal.lead_shares, kind="stable") if personal.lead_shares[arm] > 0]
    if order == [leader]:
        return [f"It leads in each of the {found.num_contexts} contexts, so choosing by context gains nothing."]
    shares = ", ".join(f"{name_of(found.arms[arm])} {personal.lead_shares[arm]:.0%}" for arm in order[:_MOST_NAMED])
    others = len(order) - _MOST_NAMED
    more = (
        f", {others} other{'s' if others > 1 else ''} {personal.lead_shares[order[_MOST_NAMED:]].sum():.0%}"
        if others > 0
        else ""
    )
    low, high = personal.gain_interval
    shown = "" if low > 0 else "; no gain is shown"
    lines = [
        f"Share of the {found.num_contexts} contexts in which each arm leads: {shares}{more}. "
        f"Choosing the leader of each context earns {personal.gain:.3g} more per decision than "
        f"{name_of(found.arms[leader])} alone (95% interval {low:.3g} to {high:.3g}"
        f"{shown})."
    ]
    if personal.segments:
        lines.append(_segments_text(found, personal.segments, leader))
    return lines


def _segments_text(found: Overview, segments: Sequence[Segment], leader: int) -> str:
    """Return where another arm than the best single one leads, the segments with most to gain first."""
    name = name_of(found.arms[leader])
    others = sorted((one for one in segments if one.leader != leader), key=lambda one: -one.lead * one.share)
    if not others:
        return f"Segments: {name} leads on average in each value, group or half of an entry of the context."
    parts = [
        f"for {one.name} ({one.share:.0%} of the contexts) {name_of(found.arms[one.leader])} leads, {one.lead:.3g} more than "
        f"{name} (95% interval {one.lead_interval[0]:.3g} to {one.lead_interval[1]:.3g})"
        for one in others[:_MOST_SEGMENTS]
    ]
    if len(others) > _MOST_SEGMENTS:
        parts.append(f"{name} does not lead in {len(others) - _MOST_SEGMENTS} others")
    left = [one.name for one in segments if one.leader == leader]
    if left:
        more = f" and {len(left) - _MOST_SEGMENTS} others" if len(left) > _MOST_SEGMENTS else ""
        listed = ", ".join(left[:_MOST_SEGMENTS]) + more
        parts.append(f"for {listed} {name} leads")
    return f"Segments: {'; '.join(parts)}."


def _loss_text(loss: float, after: LossesAfter, is_by_context: bool, mean: float) -> str:
    if np.isnan(loss):
        return "The expected loss of choosing it is not defined, because an expected reward has no posterior mean."
    against = ", against the best arm of each context" if is_by_context else ""
    text = f"Choosing it now loses {loss:.2g} per decision{against}, on average over the posterior"
    later = [f"{value:.2g} after {n:,} more decisions" for n, value in after.by_number.items()]
    if loss < _NEGLIGIBLE * abs(mean):
        return f"{text}: less than 0.01% of its expected reward, so more decisions are worth almost nothing."
    if not later:
        return f"{text}."
    text += f"; about {', '.join(later)}"
    num, least = max(after.by_number.items())
    if loss - least > _LEAST_WORTH * loss:
        return f"{text}, so {num:,} more are worth up to {loss - least:.2g} for each decision after them."
    if loss - after.shared_equally > _LEAST_WORTH * loss:
        return (
            f"{text}: the selector now plays the other arms so seldom that it learns little about them. Shared equally by all "
            f"arms, {num:,} more would leave {after.shared_equally:.2g}."
        )
    return f"{text}, so {num:,} more are worth almost nothing."


def _html_segments(segments: Sequence[Segment], arms: Sequence[Any]) -> str:
    header = (
        "segment",
        "share",
        "leader",
        "expected reward",
        "95% interval",
        "P(best)",
        "more than the best single arm",
    )
    rows = [
        (
            one.name,
            f"{one.share:.0%}",
            str(shown_name(arms[one.leader])),
            f"{one.mean:.4g}",
            "[{:.4g}, {:.4g}]".format(*one.interval),
            f"{one.best_prob:.3f}",
            f"{one.lead:.3g} " + "[{:.3g}, {:.3g}]".format(*one.lead_interval) if one.lead else "",
        )
        for one in segments
    ]
    return html_rows(header, rows)
