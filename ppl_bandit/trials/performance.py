"""Operating characteristics from simulated trials, each with its standard error."""

import math
from typing import Any

import numpy as np

from ppl_bandit.evaluation.confidence_sequences import OPTIMAL_PLAYS, excludes_mean
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import ENDINGS, endings
from ppl_bandit.trials.trial_runs import TrialRecord

_ALPHA = 0.05
_ALWAYS = ("superiority", "equivalence", "futility", "undecided")


def performance(
    found: TrialRecord, design: Design, control: int, arms: list[Any], bounds: tuple[float, float] | None
) -> dict[str, float]:
    """Return the operating characteristics of one scenario: figures, and their standard errors with the suffix `_se`.

    Args:
        control: index of the first control; -1 without one.
        bounds: smallest and largest possible reward, for confidence sequences; None if they are not known.
    """
    row: dict[str, float] = {}
    num = found.ending.size

    def add(name: str, values: Any) -> None:
        values = np.asarray(values, float)
        row[name] = float(np.mean(values)) if num else math.nan
        row[f"{name}_se"] = float(np.std(values) / math.sqrt(num))

    names = endings(design)
    stopping = [name for name in names[1:] if name not in _ALWAYS and design.rule(name) is not None]
    chosen = found.arm
    # Where every other arm was inferior, the control is left alone, and no arm was superior to it.
    keeps_control = (found.ending == ENDINGS.index("superiority")) & (chosen == control)
    for name in (*_ALWAYS[:3], *stopping, _ALWAYS[3]):
        add(name, (found.ending == names.index(name)) & ~keeps_control)
    if control >= 0:
        add("control_kept", keeps_control)
    each = np.arange(num)
    true_value, best = found.truth[each, chosen], found.truth.max(axis=1)
    is_superior = declares_superiority(found, control)
    claimed = np.array(found.truth)  # a non-inferior arm exceeds the control less the margin
    if control >= 0:
        claimed[:, control] -= design.margin
    is_right = _is_right(found, control, claimed)
    add("power", is_superior & is_right)
    add("familywise_error", is_superior & ~is_right)
    is_null = bool(np.all(np.abs(claimed - claimed[:, :1]) <= 1e-9 * (1.0 + np.abs(claimed))))
    add("type_i_error", is_superior if is_null else np.full(num, np.nan))
    add("selected_best", true_value == best)
    for index, name in enumerate(arms):
        add(f"selected_{name}", chosen == index)
    rows = np.asarray(design.look_rows)[found.look]
    add("mean_rows", rows)
    for order in (0.05, 0.25, 0.5, 0.75, 0.95):
        name = f"rows_q{100 * order:02.0f}"
        row[name], row[f"{name}_se"] = _quantile(rows, order)
    for index, name in enumerate(arms):
        add(f"share_{name}", found.counts[:, index] / rows)
    add("mean_outcome", np.sum(found.counts * found.truth, axis=1) / rows)
    add("sum_outcomes", np.sum(found.sums, axis=1))
    spread = best - found.truth.min(axis=1)
    ideal = np.divide(true_value - found.truth.min(axis=1), spread, out=np.full(num, np.nan), where=spread > 0)
    add("ideal_design_percentage", 100.0 * ideal)
    add("loss", best - true_value)
    # The posterior mean, and the estimate of the confidence sequence of `evaluate`: the mean of the arm's outcomes.
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_outcome = found.sums[each, chosen] / found.outcomes[each, chosen]
    for prefix, estimate in (("", found.mean[each, chosen]), ("sequence_", mean_outcome)):
        error = estimate - true_value
        add(f"{prefix}bias", error)
        rmse = float(math.sqrt(np.mean(error**2)))
        row[f"{prefix}rmse"] = rmse
        row[f"{prefix}rmse_se"] = 0.0 if rmse == 0 else float(np.std(error**2) / (2.0 * rmse * math.sqrt(num)))
    is_covered = (found.low <= found.truth) & (found.truth <= found.high)
    add("coverage", is_covered[each, chosen])
    add("coverage_all", np.mean(is_covered, axis=1))
    if bounds is not None:
        by_sequence = sequence_covers(found, bounds)
        add("sequence_coverage", by_sequence[each, chosen])
        add("sequence_coverage_all", np.mean(by_sequence, axis=1))
        num_arms = len(arms)  # each at the level 1 - .05 / A: all cover at once
        add("sequence_coverage_simultaneous", np.all(sequence_covers(found, bounds, _ALPHA / num_arms), axis=1))
    for index, name in enumerate(arms):
        add(f"bias_{name}", found.mean[:, index] - found.truth[:, index])
    return row


def declares_superiority(found: TrialRecord, control: int) -> np.ndarray:
    """Return whether each trial declares an arm superior: to all others, or, with a control, to the control at any look.

    An arm that beats the control replaces it, and the control is dropped; nothing else drops the control.
    """
    return np.asarray(found.ending == ENDINGS.index("superiority") if control < 0 else ~found.active[:, control])


def sequence_covers(found: TrialRecord, bounds: tuple[float, float], alpha: float = _ALPHA) -> np.ndarray:
    """Return whether the confidence sequence of each arm contains its true mean at the end, (trials, A).

    It is the beta-binomial mixture sequence of `evaluate`, for rewards within bounds. Only the mixture at the true mean is
    needed for that.
    """
    low, width = bounds[0], bounds[1] - bounds[0]
    trials = np.asarray(found.outcomes)
    successes = (np.asarray(found.sums) - low * trials) / width
    truth = np.clip((np.asarray(found.truth) - low) / width, 1e-12, 1.0 - 1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        is_excluded = excludes_mean(truth, successes, trials, alpha, OPTIMAL_PLAYS)
    return ~is_excluded | (trials == 0)


def _is_right(found: TrialRecord, control: int, claimed: np.ndarray) -> np.ndarray:
    """Return whether the selected arm is strictly better than all others; with a control, than it less the margin."""
    each = np.arange(found.ending.size)
    truth = np.array(claimed)
    own = truth[each, found.arm]
    if control >= 0:
        is_control = found.arm == control
        return np.where(is_control, own >= truth.max(axis=1), own > truth[:, control])
    truth[each, found.arm] = -np.inf
    return own > truth.max(axis=1)


def _quantile(values: np.ndarray, order: float) -> tuple[float, float]:
    """Return a quantile, and half the distance of the order statistics one standard error away."""
    spread = math.sqrt(order * (1.0 - order) / values.size)
    low, middle, high = np.quantile(values, np.clip([order - spread, order, order + spread], 0.0, 1.0))
    return float(middle), float(high - low) / 2.0
