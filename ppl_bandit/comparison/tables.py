"""Printed tables of comparisons and rankings."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.comparison.results import Comparison, Estimate, Ranking, largest_error
from ppl_bandit.live.overview import Overview, arm_overview
from ppl_bandit.live.report import name_of
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction


def overviews(
    model: RewardModel, arms: list[Any], data: Interaction, contexts: Any, draws: Mapping[str, np.ndarray]
) -> dict[str, Overview]:
    """Return the statistics of the arms under each of several sets of draws (M, K), {label: Overview}."""
    return {
        label: arm_overview(model, arms, np.asarray(data.arm), _by_site(model, flat), contexts)
        for label, flat in draws.items()
        if np.isfinite(flat).all()
    }


def _by_site(model: RewardModel, flat: np.ndarray) -> dict[str, np.ndarray]:
    """Invert `flatten_latents`."""
    ends = np.cumsum([math.prod(shape) for shape in model.latent_shapes.values()])
    parts = zip(model.latent_shapes.items(), np.split(flat, ends[:-1], axis=1), strict=True)
    return {name: part.reshape(len(flat), *shape) for (name, shape), part in parts}


def answer(result: Comparison) -> str:
    """Return one paragraph: the best arm, its lead and probability, and which engines decide differently."""
    found = result.overviews["reference"]
    leader = int(np.argmax(found.mean))
    where = f", {found.where} of the data" if found.where else ""
    sentences = [
        f"After {len(result.data.arm)} rows, {name_of(found.arms[leader])} has the highest expected reward{where}: "
        f"{found.mean[leader]:.4g} (95% interval {found.low[leader]:.4g} to {found.high[leader]:.4g})"
    ]
    if len(found.arms) > 1:
        second = int(found.leaders[1])
        gap, low, high = found.lead(leader, second)
        sentences[0] += (
            f", {gap:.3g} more than {name_of(found.arms[second])} (95% interval of the difference {low:.3g} to {high:.3g})"
        )
        sentences.append(
            f"It is the best arm with probability {found.best_prob[leader]:.3f}; the expected loss of choosing it now is "
            f"{found.loss[leader]:.2g}"
        )
    source = "the exact posterior" if result.reference.is_exact else result.reference.description.partition(":")[0]
    sentences.append(f"Source: {source}")
    different = [label for label in result.engines if decides_differently(result, label)]
    same = [label for label in result.engines if label not in different]
    if different:
        sentences.append(f"{_enumerate(different)} would have made a different decision; see the decisions below")
    if same:
        who = "All engines" if not different and len(same) > 1 else _enumerate(same)
        sentences.append(f"{who} would have made the same decision, within sampling error")
    return ". ".join(sentences) + "."


def verdict(result: Comparison) -> str:
    """Return one line per engine: whether its decisions differ from the reference's."""
    lines = []
    floor = result.reference.floor.other_arm_prob
    for label, engine in result.engines.items():
        share = engine.decisions.other_arm_prob
        if not np.isfinite(share.value):
            lines.append(f"{label}: its draws are not finite, so it cannot decide")
            continue
        text = (
            "DECIDES DIFFERENTLY from the reference"
            if decides_differently(result, label)
            else "decides like the reference"
        )
        lines.append(
            f"{label} {text}: it plays another arm than the reference with probability {share.value:.3f}; another sample of "
            f"the reference would with {floor.value:.3f} ± {_sampling_sd(result, label):.3f}"
        )
    return "\n".join(lines)


def decides_differently(result: Comparison, label: str) -> bool:
    """Return whether an engine's decisions differ from the reference's by more than three standard errors.

    The sampling error is that of as many samples of the reference itself.
    """
    share = float(result.engines[label].decisions.other_arm_prob.value)
    floor = float(result.reference.floor.other_arm_prob.value)
    return not share <= floor + 3.0 * _sampling_sd(result, label)


def _sampling_sd(result: Comparison, label: str) -> float:
    # At least one draw of M, because 20 samples may agree by chance.
    floor = result.reference.floor.other_arm_prob
    return max(float(floor.error), 1.0 / result.num_samples) / math.sqrt(len(result.engines[label].runs))


def _enumerate(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class TextTable(NamedTuple):
    """A table to print; the note explains its columns."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


_MAX_LATENTS = 12  # per engine in the printed table; JSON has all
_MAX_ARMS = 6  # whose probabilities are listed


def comparison_text(result: Comparison) -> str:
    """Return the tables as text."""
    lines = [
        f"{result.name}: {len(result.data.arm)} rows, {len(result.arms)} arms; M = {result.num_samples} draws a run, "
        f"{len(next(iter(result.engines.values())).runs) if result.engines else 0} runs an engine, seed {result.seed}",
        f"reference: {result.reference.description}",
        "",
        *textwrap.wrap(answer(result), 120),
    ]
    if not result.reference.is_trusted:
        lines.append("  warning: the reference does not pass its own diagnostics")
    lines += [f"{label}: not run: {why}" for label, why in result.refused.items()]
    for table in tables(result):
        lines += ["", table.title, *_aligned(table.header, table.rows)]
    lines += ["", verdict(result)]
    return "\n".join(lines)


def tables(result: Comparison) -> list[TextTable]:
    """Return the tables of a comparison: cost and diagnostics, decisions, latents, and the stream."""
    return [_costs(result), _decisions(result), _latents(result), _stream(result)]


def _costs(result: Comparison) -> TextTable:
    rows = []
    for label, engine in result.engines.items():
        info = engine.info
        rows.append(
            [
                label,
                f"{engine.seconds_cold:.3g}",
                f"{engine.seconds_warm.value:.3g}",
                f"{engine.ess.min():.0f}",
                f"{np.max(engine.r_hat):.3f}",
                f"{info['divergences']:.1%}" if "divergences" in info else "-",
                f"{info['k_hat']:.2f}" if "k_hat" in info else "-",
                "yes" if info["is_trusted"] else "NO",
            ]
        )
    header = ["engine", "s cold", "s warm", "least ESS", "most R-hat", "divergences", "k-hat", "trusted"]
    cold = "build, compile or load from the cache, and run" if result.is_cached else "build, compile and run"
    note = (
        "Least ESS: effective sample size of the M draws, for the worst latent. R-hat: 1 if the runs agree. Divergences: "
        "share of diverging trajectories; more than 1% bias the draws. k-hat: Pareto shape of the importance weights; "
        "above 0.7 the draws are unreliable. Trusted: the engine's own diagnostics."
    )
    return TextTable(f"Cost and diagnostics (cold: {cold}; warm: run)", header, rows, note)


def _decisions(result: Comparison) -> TextTable:
    reference = result.reference
    floor = reference.floor

    shown = np.arange(len(result.arms))
    if shown.size > _MAX_ARMS:
        shown = result.overviews["reference"].leaders[:_MAX_ARMS]

    def line(label: str, probs: Any, num: Any, plays: Any, distance: str, other: str) -> list[str]:
        return [label, _list(probs[shown]), f"{np.mean(num):.1f}", _list(plays[shown]), distance, other]

    rows = [
        line(
            f"({reference.name})",
            reference.best_arm_probs.mean(axis=0),
            reference.num_candidates,
            reference.propensities.mean(axis=0),
            f"floor {floor.best_arm_probs.value:.3f}",
            f"floor {floor.other_arm_prob.value:.3f}",
        )
    ]
    for label, engine in result.engines.items():
        d = engine.decisions
        rows.append(
            line(
                label,
                d.best_arm_probs.value.mean(axis=0),
                d.num_candidates.value,
                d.propensities.value.mean(axis=0),
                _plus_minus(d.best_arm_probs_distance),
                _plus_minus(d.other_arm_prob),
            )
        )
    num = reference.best_arm_probs.shape[0]
    where = "" if result.contexts is None else f", averaged over {num} contexts of the data"
    header = ["engine", "p-hat", "N", "propensities", "TV of p-hat", "P(other arm)"]
    note = (
        "p-hat: share of posterior draws in which each arm is best. N: number of candidate arms that double sampling draws; it "
        "grows with certainty. Propensities: probability of playing each arm. TV of p-hat: total variation distance to the "
        "reference's p-hat, between 0 and 1. P(other arm): the same for the propensities; how often another arm would be "
        "played. Floor: distance between the reference and another sample of it of the same size (sampling error alone)."
    )
    which = "" if shown.size == len(result.arms) else f" (those of {len(result.arms)} with the largest means)"
    names = ", ".join(str(result.arms[index]) for index in shown)
    title = f"Decisions by {result.selector}{where}; arms {names}{which}"
    return TextTable(title, header, rows, note)


def _latents(result: Comparison) -> TextTable:
    floor = result.reference.floor
    rows = []
    for label, engine in result.engines.items():
        errors = engine.latents
        order = np.argsort(-errors.wasserstein.value, kind="stable")[:_MAX_LATENTS]
        for k in sorted(order):
            rows.append(
                [
                    label,
                    result.labels[k],
                    _plus_minus(errors.mean, k, sign=True),
                    _plus_minus(errors.sd, k, sign=True),
                    f"{errors.quantiles.value[0, k]:+.3f}",
                    f"{errors.quantiles.value[-1, k]:+.3f}",
                    f"{_plus_minus(errors.wasserstein, k)} ({floor.wasserstein.value[k]:.3f})",
                    f"{_plus_minus(errors.kolmogorov, k)} ({floor.kolmogorov.value[k]:.3f})",
                ]
            )
    header = ["engine", "latent", "mean", "sd", "2.5%", "97.5%", "W1 (floor)", "KS (floor)"]
    shown = f"; the {_MAX_LATENTS} largest of {len(result.labels)}" if len(result.labels) > _MAX_LATENTS else ""
    note = (
        "Mean, 2.5%, 97.5%: difference to the reference. sd: relative error. W1: Wasserstein-1 distance. KS: largest "
        "difference of the cumulative distributions. In brackets the floor, as above."
    )
    return TextTable(f"Errors of the latents, in sds of the reference{shown}", header, rows, note)


def _stream(result: Comparison) -> TextTable:
    rows = []
    for point in result.stream:
        floor = point.reference.floor
        for label, (latents, decisions) in point.engines.items():
            rows.append(
                [
                    f"{point.num_rows}",
                    label,
                    f"{largest_error(latents.mean.value):.3f}",
                    f"{largest_error(latents.sd.value):.3f}",
                    f"{largest_error(latents.wasserstein.value):.3f} ({largest_error(floor.wasserstein.value):.3f})",
                    f"{decisions.best_arm_probs_distance.value:.3f} ({floor.best_arm_probs.value:.3f})",
                    f"{decisions.other_arm_prob.value:.3f} ({floor.other_arm_prob.value:.3f})",
                ]
            )
    header = ["rows", "engine", "mean", "sd", "W1 (floor)", "TV of p-hat (floor)", "P(other arm) (floor)"]
    return TextTable("As the rows grow (largest error over the latents)", header, rows)


def ranking_text(ranking: Ranking) -> str:
    """Return the table of a ranking and its conclusion as text."""
    table = ranking_table(ranking)
    return "\n".join([table.title, *_aligned(table.header, table.rows), "", *conclusion(ranking)])


def conclusion(ranking: Ranking) -> list[str]:
    """Return lines: the lead of the first program, and warnings."""
    first, second = ranking.scores[:2]
    lead = first.log_evidence - second.log_evidence
    error = math.hypot(first.log_evidence_error, second.log_evidence_error)
    is_clear = lead - 2.0 * error > math.log(3.0)
    lines = [
        f"{first.name} is ahead of {second.name} by {lead:.2f} ± {error:.2f} in log evidence, odds of {_odds(lead)} to 1"
        + ("" if is_clear else ": no clear difference")
    ]
    if ranking.why_no_loo:
        lines.append(f"LOO was not computed: {ranking.why_no_loo}")
    for score in ranking.scores:
        if score.num_bad_rows:
            lines.append(
                f"warning: LOO of {score.name} is unreliable for {score.num_bad_rows} rows (Pareto k-hat above 0.7)"
            )
    return lines


def ranking_table(ranking: Ranking) -> TextTable:
    """Return the table of a ranking."""
    rows = [
        [
            f"{number}",
            score.name,
            f"{score.log_evidence:.3f}"
            + ("" if score.evidence_way == "exact" else f" ± {score.log_evidence_error:.3f}"),
            score.evidence_way,
            f"{score.probability:.3g}",
            *(
                "-" if math.isnan(value) else f"{value:.2f} ± {error:.2f}"
                for value, error in (
                    (score.elpd, score.elpd_error),
                    (score.elpd_difference, score.elpd_difference_error),
                )
            ),
        ]
        for number, score in enumerate(ranking.scores, 1)
    ]
    header = ["rank", "model", "log evidence", "by", "P(model)", "LOO elpd", "behind the best"]
    note = (
        "Log evidence: log probability of all rows under the prior. P(model): posterior probability of each model under equal "
        "prior probabilities. LOO elpd: log density of each row predicted from all others, summed; higher is better."
    )
    return TextTable(f"Models on the same {ranking.num_rows} rows, seed {ranking.seed}", header, rows, note)


def _odds(log_odds: float) -> str:
    return f"{math.exp(log_odds):.3g}" if log_odds < 50 else f"1e{log_odds / math.log(10.0):.0f}"


def _plus_minus(value: Estimate, index: int | None = None, sign: bool = False) -> str:
    mean, error = (part if index is None else part[index] for part in value)
    return f"{mean:{'+' if sign else ''}.3f} ± {error:.3f}"


def _list(values: np.ndarray) -> str:
    return " ".join(f"{value:.3f}" for value in values)


def _aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    return [
        "  " + "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in [header, *rows]
    ]
