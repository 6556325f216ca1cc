"""What may be concluded from decisions that were made adaptively: estimates, intervals, and whether the data support them."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_bandit.display.figure_style import escaped, figure_tools, ink
from ppl_bandit.display.terminal import printable
from ppl_bandit.evaluation import estimators
from ppl_bandit.evaluation.confidence_sequences import (
    ASYMPTOTIC,
    BETA_BINOMIAL,
    ScoredRows,
    Sequence,
    confidence_sequence,
)
from ppl_bandit.evaluation.estimators import Estimate
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions, has_varying_means
from ppl_bandit.evaluation.targets import Component, contrast_words, resolve_target
from ppl_bandit.inputs.numbers import as_plain_numbers

if TYPE_CHECKING:
    import pandas

MIN_EFFECTIVE_SAMPLE_SIZE = 30.0
MAX_WEIGHT_DEVIATION = 4.0  # standard errors of the mean weight from 1
_LARGEST_REWARD = 1e100  # in size; sums of the squares of larger ones overflow, those of the reciprocals underflow
_LARGEST_SHARE_UNSAID = 0.01  # of decisions that are left out, before the verdict says so
_GIVE_BOUNDS = (
    "the smallest and the largest possible reward (bounds=(low, high), --bounds LOW HIGH on the command line)"
)
_SMALL_SAMPLES = f"give {_GIVE_BOUNDS}, for a confidence sequence that holds in small samples"
_FLOOR = "in the next experiment, keep every arm's probability above a floor (selectors.with_floor)"
_TRUE_PROPENSITIES = "give every row the probability with which its arm was drawn at that decision"
_BLUE, _GREY = "#0072B2", "#999999"


class Evaluation(NamedTuple):
    """What a log says about a target.

    Attributes:
        label: what was estimated.
        estimate: of its mean reward, or of the difference.
        standard_error: of the estimate; nan where rewards are too rare for one.
        interval: at the fixed sample size of the log, cut to the bounds of the rewards; holds under adaptive collection. Where
            rewards are too rare for a normal interval, the last row of the sequence. (nan, nan) where it is refused.
        sequence: a DataFrame by number of decisions with columns estimate, lower, upper: holds at all of them at once.
        sequence_kind: which confidence sequence that is, and what it assumes.
        posterior: the model's own interval; None without a model, and if latents of the model move: what it knows at the end
            is the next step, while the estimate is an average over the decisions.
        diagnostics: what the weights are worth, by name.
        is_refused: whether the data do not support an interval.
        verdict: the answer in words.
        estimates: every estimator's result.
        level: of all intervals.
        cautions: what is wrong with the rows of the log, or assumed of them, in words; also in the verdict.
        is_normal: whether the interval, and those of `table()`, are normal ones.
    """

    label: str
    estimate: float
    standard_error: float
    interval: tuple[float, float]
    sequence: "pandas.DataFrame"
    sequence_kind: str
    posterior: tuple[float, float] | None
    diagnostics: dict[str, float]
    is_refused: bool
    verdict: str
    estimates: dict[str, Estimate]
    level: float
    cautions: tuple[str, ...] = ()
    is_normal: bool = True

    def table(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row per estimator and the columns estimate, standard_error, lower, upper.

        Without a normal interval the last three are nan.
        """
        import pandas

        nothing = math.nan, math.nan, math.nan
        rows = {
            name: (found.value, *((found.standard_error, *found.interval(self.level)) if self.is_normal else nothing))
            for name, found in self.estimates.items()
        }
        columns = ["estimate", "standard_error", "lower", "upper"]
        return pandas.DataFrame.from_dict(rows, orient="index", columns=columns)

    def plot(self) -> Any:
        """Return a figure: the estimators side by side, and the confidence sequence over the decisions."""
        table, sequence = self.table(), self.sequence
        chosen = "" if self.is_refused else _chosen(self.estimates)
        figure, (left, right) = figure_tools().subplots(1, 2, figsize=(11, 4.2), layout="constrained")
        for place, (name, row) in enumerate(table[::-1].iterrows()):
            margin = row["upper"] - row["estimate"]
            colour = _BLUE if name == chosen else _GREY
            left.errorbar(row["estimate"], place, xerr=margin, fmt="o", color=colour, capsize=3)
        left.set_yticks(range(len(table)), list(table.index[::-1]))
        title = f"estimators, {percent(self.level)} intervals" if self.is_normal else "estimators, without intervals"
        left.set_title(title + (" (refused)" if self.is_refused else ""))
        right.plot(sequence.index, sequence["estimate"], color=_BLUE)
        right.fill_between(sequence.index, sequence["lower"], sequence["upper"], color=_BLUE, alpha=0.2)
        right.set(xlabel="decisions", ylim=_visible(sequence))
        right.set_title(f"confidence sequence, valid at every decision ({percent(self.level)})")
        unit = "mean reward"
        if " minus " in self.label:
            unit = "difference of mean rewards"
            left.axvline(0.0, color=ink(), linewidth=0.8, linestyle=":")
            right.axhline(0.0, color=ink(), linewidth=0.8, linestyle=":")
        left.set_xlabel(unit)
        right.set_ylabel(unit)
        figure.suptitle(self.label)
        size, num = self.diagnostics["effective_sample_size"], self.diagnostics["num_decisions"]
        figure.supxlabel(f"{num:.0f} decisions, effective sample size {size:.0f}", fontsize=8)
        return figure

    def __str__(self) -> str:
        return self.verdict

    def _repr_html_(self) -> str:
        notes = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in self.diagnostics.items())
        table = self.table().to_html(float_format=lambda value: f"{value:.4g}", border=0)
        verdict = escaped(self.verdict).replace("\n", "<br>")
        return f"<p><b>{verdict}</b></p>{table}<p><small>{escaped(notes)}</small></p>"


def _visible(sequence: "pandas.DataFrame") -> tuple[float, float] | None:
    """Return limits of an axis that show the sequence from a tenth of the decisions on; wider bounds before leave the panel."""
    later = sequence[sequence.index >= sequence.index[-1] / 10]
    values = later[["estimate", "lower", "upper"]].to_numpy()
    values = values[np.isfinite(values).all(axis=1)]
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    margin = 0.08 * (high - low) or 1.0
    return low - margin, high + margin


def evaluate_decisions(
    log: LoggedDecisions,
    target: Any,
    *,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
    baseline: Any = None,
    means: np.ndarray | None = None,
    posterior: Callable[[list[Component]], tuple[float, float]] | None = None,
    probs_of: Callable[[Any], np.ndarray] | None = None,
) -> Evaluation:
    """Evaluate a target on logged decisions.

    Args:
        target, baseline: see `resolve_target`; with a baseline, the difference target minus baseline is estimated.
        bounds: smallest and largest possible reward. None for unknown ones; see `_checked_bounds`.
        means: (T, A), the outcome model's mean reward of every arm before each decision; None takes running means.
        posterior: components -> the model's own interval.
    """
    is_given = bounds is not None
    components, bounds = resolve_arguments(log, target, level, bounds, baseline, probs_of)
    _check_propensities(log)
    _check_unit(log.reward)
    log = log._replace(is_varying=has_varying_means(log))
    is_known = np.ones(log.arm.size, bool)
    if means is None:
        means = estimators.running_means(log.arm, log.reward, len(log.names))
        is_known[0] = False  # nothing was known before the first row
    parts = [_scored(log, component, means, is_known, level) for component in components]
    found = _estimates(log, parts, means)
    diagnostics = _diagnostics(log, parts)
    sequence = confidence_sequence(log, parts, level, bounds)
    rare = [part for part in parts if _events(part) < estimators.needed_events(level)]
    reasons = _refusals(log, parts)
    if bounds is None and not reasons:
        reasons = [(_too_rare(log, part, level), _SMALL_SAMPLES) for part in rare]
    chosen = found[_chosen(found)]
    if reasons:
        interval = math.nan, math.nan
    elif rare:
        estimate, *ends = (float(value) for value in sequence.frame.iloc[-1][["estimate", "lower", "upper"]])
        chosen, interval = Estimate(estimate, math.nan), (ends[0], ends[1])
    else:
        interval = _within(chosen.interval(level), bounds, len(components))
    cautions = _cautions(log)
    if not (is_given or bounds is None or bounds == (0.0, 1.0)):
        low, high = (f"{end:.6g}" for end in bounds)
        cautions.append(
            f"all rewards are {low} or {high}, and others are taken to be impossible; if not, give {_GIVE_BOUNDS}"
        )
    why = "; ".join(_too_rare(log, part, level) for part in rare)
    return Evaluation(
        contrast_words(components),
        chosen.value,
        chosen.standard_error,
        interval,
        sequence.frame,
        sequence.kind,
        None if posterior is None else posterior(components),
        diagnostics,
        bool(reasons),
        printable(_verdict(components, chosen, interval, sequence, diagnostics, reasons, why, cautions, level)),
        found,
        level,
        tuple(cautions),
        not (reasons or rare),
    )


def resolve_arguments(
    log: LoggedDecisions,
    target: Any,
    level: float,
    bounds: tuple[float, float] | None,
    baseline: Any,
    probs_of: Callable[[Any], np.ndarray] | None,
) -> tuple[list[Component], tuple[float, float] | None]:
    """Return the components of what is evaluated, and the bounds of the reward; see `evaluate_decisions`.

    Raises:
        ValueError: for an argument that does not fit the log.
    """
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0.0 < level < 1.0:
        raise ValueError(f"level must lie strictly inside (0, 1), got {level!r}; 0.95 gives 95% intervals")
    if log.arm.size == 0:
        raise ValueError("the log has no rewarded decision with a propensity: there is nothing to evaluate")
    bounds = _checked_bounds(log, bounds)
    components = resolve_target(log, target, probs_of)
    if baseline is not None:
        try:
            others = resolve_target(log, baseline, probs_of)
        except ValueError as error:
            raise type(error)(str(error).replace("target", "baseline", 1)) from None
        if len(components) + len(others) > 2:
            raise ValueError(
                "baseline was given with a pair of arms: give one arm or policy as target, one as baseline"
            )
        if components[0].arm is not None and components[0].arm == others[0].arm:
            raise ValueError(f"baseline is the arm {baseline!r}, and so is the target: give two different ones")
        components += others
    return components, bounds


def _chosen(estimates: Mapping[str, Estimate]) -> str:
    """Return the name of the estimator that is reported."""
    return "dr_stabilised" if "dr_stabilised" in estimates else "dr"


def _checked_bounds(log: LoggedDecisions, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return the bounds of the rewards; two values that both came more than once are 0 and 1 in another unit."""
    if bounds is None:
        values, counts = np.unique(log.reward, return_counts=True)
        if np.isin(values, (0.0, 1.0)).all():
            return 0.0, 1.0
        return (float(values[0]), float(values[1])) if values.size == 2 and counts.min() > 1 else None
    try:
        low, high = as_plain_numbers(bounds, "bounds")
    except (TypeError, ValueError):
        raise ValueError(f"bounds must be (smallest, largest) possible reward, got {bounds!r}") from None
    if not (low < high and np.isfinite([low, high]).all()):
        raise ValueError(
            f"bounds must be (smallest, largest) possible reward, two finite numbers, got {bounds!r}; leave bounds out where a "
            "reward has none"
        )
    outside = np.flatnonzero((log.reward < low) | (log.reward > high))
    if outside.size:
        raise ValueError(f"bounds are {bounds}, but row {outside[0]} has the reward {log.reward[outside[0]]:g}")
    return float(low), float(high)


def _check_unit(reward: np.ndarray) -> None:
    largest = float(np.abs(reward).max(initial=0.0))
    if largest > _LARGEST_REWARD or 0.0 < largest < 1.0 / _LARGEST_REWARD:
        raise ValueError(
            f"log: the largest reward is {largest:g} in size, and its square is no number that a computer tells from "
            f"{'infinity' if largest > 1.0 else '0'}: give rewards in another unit, as rewards / {largest:.0e}"
        )


def _check_propensities(log: LoggedDecisions) -> None:
    wrong = np.flatnonzero(~((log.propensity > 0) & (log.propensity <= 1)))
    if wrong.size:
        raise ValueError(
            f"row {wrong[0]} of the log played its arm with a recorded propensity of {log.propensity[wrong[0]]:g}: expected a "
            "probability in (0, 1]; leave out rows whose propensity is not known"
        )


def _within(
    interval: tuple[float, float], bounds: tuple[float, float] | None, num_components: int
) -> tuple[float, float]:
    """Cut an interval to the values that a mean reward, or a difference of two, can have."""
    if bounds is None:
        return interval
    low, high = bounds if num_components == 1 else (bounds[0] - bounds[1], bounds[1] - bounds[0])
    return min(max(interval[0], low), high), min(max(interval[1], low), high)


def _scored(
    log: LoggedDecisions, component: Component, means: np.ndarray, is_known: np.ndarray, level: float
) -> ScoredRows:
    every = log.propensities
    needed = component.probs > 0
    lacks = np.zeros(component.probs.shape, bool) if every is None else (every <= 0) & needed
    has_overlap = np.asarray(~lacks.any(axis=1))
    is_used = np.asarray(has_overlap & is_known)
    weights = estimators.importance_weights(component.probs, log.arm, log.propensity)[is_used]
    probs, arm, reward = component.probs[is_used], log.arm[is_used], log.reward[is_used]
    scores = estimators.doubly_robust_scores(probs, weights, means[is_used], arm, reward)
    allocation = None
    # Weights that follow the propensities would tilt an average over decisions whose means differ.
    if every is not None and is_used.any() and not (log.is_varying and log.contexts is None):
        variances = estimators.policy_variances(probs, every[is_used])
        # Without contexts v_t is known before A_t is drawn; with them it depends on the row's own context.
        allocation = variances**-0.5 if log.contexts is None else estimators.stabilising_weights(variances)
    counted = weights if allocation is None else weights * allocation
    events = estimators.effective_events(counted, reward, level)
    with np.errstate(invalid="ignore", divide="ignore"):
        sizes = np.cumsum(weights) ** 2 / np.cumsum(weights**2)
    is_enough = (sizes >= MIN_EFFECTIVE_SAMPLE_SIZE) & (events >= estimators.needed_events(level))
    if log.contexts is not None and not has_overlap.all():  # the rows that are used have other contexts
        is_enough[:] = False
    return ScoredRows(component, has_overlap, is_used, weights, scores, allocation, events, is_enough)


def _events(part: ScoredRows) -> float:
    return float(part.num_events[-1]) if part.num_events.size else 0.0


def _estimates(log: LoggedDecisions, parts: list[ScoredRows], means: np.ndarray) -> dict[str, Estimate]:
    """Return every estimator's result, by name: a weighted mean of scores, or the difference of two."""
    if not all(part.is_used.any() for part in parts):
        return {"dr": Estimate(math.nan, math.nan)}
    every = [_weighted_scores(log, part, means) for part in parts]
    found = {name: estimators.weighted_contrast(*zip(*(own[name] for own in every), strict=True)) for name in every[0]}
    return found | {"dm": found["dm"]._replace(standard_error=math.nan)}  # the log does not tell the model's error


def _weighted_scores(
    log: LoggedDecisions, part: ScoredRows, means: np.ndarray
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the scores and the weights of all rows, by the name of the estimator; rows that are not used weigh 0."""

    def all_rows(values: np.ndarray) -> np.ndarray:
        rows = np.zeros(log.arm.size)
        rows[part.is_used] = values
        return rows

    is_used, weights, scores = part.is_used.astype(float), all_rows(part.weights), all_rows(part.scores)
    found = {
        "ips": (weights * log.reward, is_used),
        "snips": (log.reward, weights),
        "dm": (np.sum(part.component.probs * means, axis=1), is_used),
        "dr": (scores, is_used),
    }
    return found if part.allocation is None else found | {"dr_stabilised": (scores, all_rows(part.allocation))}


def _diagnostics(log: LoggedDecisions, parts: list[ScoredRows]) -> dict[str, float]:
    """Return what the weights are worth; of two components the worse figure."""
    sizes = [estimators.effective_sample_size(part.weights) for part in parts]
    worst = parts[int(np.argmin(sizes))]
    needed = worst.component.probs > 0
    every = log.propensities
    smallest = log.propensity[needed[np.arange(log.arm.size), log.arm]] if every is None else every[needed]
    num_decisions = log.arm.size + log.num_unrewarded
    return {
        "num_decisions": float(num_decisions),
        "effective_sample_size": min(sizes),
        "effective_events": min(_events(part) for part in parts),
        "mean_weight": float(worst.weights.mean()) if worst.weights.size else math.nan,
        "max_weight": float(worst.weights.max()) if worst.weights.size else math.nan,
        "smallest_propensity": float(np.nanmin(smallest)) if np.any(smallest >= 0) else 0.0,
        "share_of_zero_propensities": float(1.0 - worst.has_overlap.mean()),
        "share_of_unrewarded_decisions": log.num_unrewarded / num_decisions,
        "num_without_propensity": float(log.num_without_propensity),
        "num_late": float(log.num_late),
    }


def _refusals(log: LoggedDecisions, parts: list[ScoredRows]) -> list[tuple[str, str]]:
    """Return why the data do not support an interval, each with its remedy; empty where they do."""
    reasons = [(doubt, _TRUE_PROPENSITIES) for doubt in log.doubts]
    for part in parts:
        label, weights = part.component.label, part.weights
        if log.contexts is not None and not part.has_overlap.all():
            share = f"{1 - part.has_overlap.mean():.1%} of the contexts"
            reasons.append((f"{label} plays arms that the log could not play in {share}", _FLOOR))
        if not part.is_used.any() or not weights.any():
            reasons.append((f"no decision of the log tells about {label}: no overlap", _FLOOR))
            continue
        size = estimators.effective_sample_size(weights)
        if size < MIN_EFFECTIVE_SAMPLE_SIZE:
            small = f"{label} has an effective sample size of {size:.1f}, below {MIN_EFFECTIVE_SAMPLE_SIZE:.0f}"
            reasons.append((small, f"{_more(log, size, MIN_EFFECTIVE_SAMPLE_SIZE)}; or, {_FLOOR}"))
            continue  # the standard error of the mean weight is then no guide
        error = float(weights.std()) / math.sqrt(weights.size)
        if abs(float(weights.mean()) - 1.0) > MAX_WEIGHT_DEVIATION * max(error, 1e-12):
            wrong = (
                f"the mean importance weight of {label} is {weights.mean():.3g}, more than {MAX_WEIGHT_DEVIATION:.0f} standard "
                "errors from 1: the recorded propensities are not those of the decisions"
            )
            reasons.append((wrong, _TRUE_PROPENSITIES))
    return reasons


def _too_rare(log: LoggedDecisions, part: ScoredRows, level: float) -> str:
    """Return that the rewards of a component rest on too few events, and how many decisions are likely to bring enough."""
    label, found, needed = part.component.label, _events(part), estimators.needed_events(level)
    own = log.reward[part.is_used][part.weights > 0]
    if found == 0:
        only = f": all {own.size} are {own[0]:.4g}" if own.size else ""
        return f"the rewards of {label} do not differ{only}; a normal interval needs at least {needed:.0f} events"
    return (
        f"the rewards of {label} are worth {found:.3g} events (of a rare reward: how often it came), and a normal interval "
        f"at {percent(level)} needs {needed:.0f}: {_more(log, found, needed)}"
    )


def _more(log: LoggedDecisions, found: float, needed: float) -> str:
    return f"about {float(f'{log.arm.size * (needed / found - 1.0):.1g}'):,.0f} more decisions like these"


def percent(level: float) -> str:
    """Return a level in words with its digits: .995 is "99.5%"."""
    return f"{100.0 * level:.4g}%"


def _cautions(log: LoggedDecisions) -> list[str]:
    """Return what the rows of the log leave open, in words."""
    found = list(log.cautions)
    num_decisions = log.arm.size + log.num_unrewarded
    share = log.num_unrewarded / num_decisions
    if share > _LARGEST_SHARE_UNSAID:
        found.append(
            f"{share:.1%} of the decisions ({log.num_unrewarded} of {num_decisions}) have no reward. What is said here holds "
            "only if whether a reward is missing does not depend on what it would have been"
        )
    num_plays, num_without = log.arm.size + log.num_without_propensity, log.num_without_propensity - log.num_shown
    if log.num_shown:
        rewards = "1 reward is" if log.num_shown == 1 else f"{log.num_shown} rewards are"
        found.append(
            f"{rewards} of an arm that another system showed in place of the decision's, with a probability that is not known, "
            "and left out. What is said here holds only for the others"
        )
    if log.num_erased:
        found.append(f"Without the contexts of erased units: {log.num_erased} rewards are left out")
    share = num_without / num_plays
    if share > _LARGEST_SHARE_UNSAID:
        found.append(
            f"{share:.1%} of the rewards ({num_without} of {num_plays}) have no propensity and are left out. "
            "What is said here holds only for the others"
        )
    if log.num_late:
        late = "1 reward came" if log.num_late == 1 else f"{log.num_late} rewards came"
        found.append(f"{late} after the decision had expired, and replaced what was recorded then")
    return found


def _verdict(
    components: list[Component],
    chosen: Estimate,
    interval: tuple[float, float],
    sequence: Sequence,
    diagnostics: Mapping[str, float],
    reasons: list[tuple[str, str]],
    why_sequence: str,
    cautions: list[str],
    level: float,
) -> str:
    """Return the answer, then the cautions, then what it rests on; a line each."""
    said = [f"Caution: {caution}." for caution in cautions]
    last = sequence.frame.iloc[-1]
    is_bounded = math.isfinite(last["upper"] - last["lower"])
    is_turned = (
        len(components) == 2 and interval[1] < 0
    )  # the answer is then told the other way round, the sequence with it
    low, high = (-last["upper"], -last["lower"]) if is_turned else (last["lower"], last["upper"])
    anytime = f"{low:.4g} to {high:.4g}"
    if reasons:
        remedies = [remedy for _, remedy in reasons]
        is_valid = _TRUE_PROPENSITIES not in remedies or sequence.kind == BETA_BINOMIAL
        if is_valid and sequence.kind == ASYMPTOTIC:
            remedies.append(_SMALL_SAMPLES)
        rest = f"What remains valid is the confidence sequence, {anytime} at {percent(level)} ({sequence.kind}). "
        if not (is_valid and is_bounded):
            rest = ""
        return "\n".join(
            [
                f"No interval for {contrast_words(components)}: {'; '.join(reason for reason, _ in reasons)}.",
                *said,
                f"{rest}Remedy: {'; '.join(dict.fromkeys(remedies))}.",
            ]
        )
    shown = f"{percent(level)} interval {interval[0]:.4g} to {interval[1]:.4g}"
    if len(components) == 1:
        answer = f"The mean reward of {components[0].label} is {chosen.value:.4g} ({shown})."
    else:
        first, second = (component.label for component in components)
        if interval[0] > 0:
            answer = f"{first} beats {second} by {chosen.value:.4g} ({shown})."
        elif is_turned:
            turned = f"{percent(level)} interval {-interval[1]:.4g} to {-interval[0]:.4g}"
            answer = f"{second} beats {first} by {-chosen.value:.4g} ({turned})."
        else:
            answer = f"No difference is shown between {first} and {second}: {chosen.value:.4g} ({shown})."
    if why_sequence:
        looked = f"The interval is the confidence sequence ({sequence.kind}), because {why_sequence}."
    elif is_bounded:
        looked = f"If you looked at the data before the end, use the confidence sequence: {anytime}."
    else:
        looked = f"If you looked at the data before the end, give {_GIVE_BOUNDS}, for a confidence sequence."
    support = (
        f"The data support this: the effective sample size is {diagnostics['effective_sample_size']:.0f}, the smallest "
        f"recorded probability {diagnostics['smallest_propensity']:.2g}."
    )
    return "\n".join([answer, *said, f"{looked}" if why_sequence else f"{support} {looked}"])
