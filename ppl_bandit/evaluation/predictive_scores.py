"""Two reward programs on one log: which predicted the outcomes better, and which gives narrower intervals.

The score of a row is log p(outcome | rows before it), estimated as the log of the mean likelihood over posterior draws. The
differences of two programs' scores are a fair comparison under adaptive collection: each row is predicted before it is
learnt.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.evaluation.estimators import Estimate, weighted_mean
from ppl_bandit.evaluation.evaluate import valued_decisions
from ppl_bandit.evaluation.evaluation import evaluate_decisions
from ppl_bandit.evaluation.posterior_path import engine_of, follow_posterior
from ppl_bandit.program.model.reward_model import RewardModel

if TYPE_CHECKING:
    import pandas

_SURE = 2.0  # standard errors


class ProgramComparison(NamedTuple):
    """How two reward programs did on one log.

    Attributes:
        scores: mean log predictive score of each program, in nats per decision, with its standard error.
        difference: of the scores, first minus second, with the standard error of paired differences.
        widths: a DataFrame by arm: the width of the doubly robust interval under each program; nan where it is refused.
        verdict: the answer in words.
    """

    scores: dict[str, Estimate]
    difference: Estimate
    widths: "pandas.DataFrame"
    verdict: str

    def table(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row per program: mean log score, its standard error, mean width of the intervals."""
        import pandas

        rows = {name: (*found, float(self.widths[name].mean())) for name, found in self.scores.items()}
        return pandas.DataFrame.from_dict(rows, orient="index", columns=["log_score", "standard_error", "mean_width"])

    def __str__(self) -> str:
        return self.verdict


def compare_programs(
    log: Any,
    models: dict[str, RewardModel],
    *,
    level: float = 0.95,
    name: str = "default",
    outcome: str | None = None,
    value: Callable[..., Any] | None = None,
) -> ProgramComparison:
    """Compare two reward programs on a log by their predictions before each decision.

    Logs of more than 500 rows are learnt in 500 blocks; a row is then predicted from the rows before its block. Latents that
    move are predicted to each row.

    Args:
        log, level, name, outcome, value: as in `evaluate`.
        models: {label: reward model}, two of them, with the arms, outcomes and contexts of the log.
    """
    import pandas

    if len(models) != 2:
        raise ValueError(f"models must be two reward models by label, got {len(models)}")
    scores, widths = {}, {}
    for label, model in models.items():
        decisions, is_maximised = valued_decisions(log, model, name=name, outcome=outcome, value=value)
        engine = engine_of(model)
        path = follow_posterior(model, engine, decisions, has_scores=True)
        assert path.log_scores is not None
        scores[label] = path.log_scores
        expected = path.means if is_maximised else None
        found = [evaluate_decisions(decisions, arm, level=level, means=expected) for arm in decisions.names]
        widths[label] = [one.interval[1] - one.interval[0] for one in found]
    difference = weighted_mean(np.subtract(*scores.values()))
    frame = pandas.DataFrame(widths, index=pandas.Index([shown_name(arm) for arm in decisions.names], name="arm"))
    means = {label: weighted_mean(own) for label, own in scores.items()}
    return ProgramComparison(means, difference, frame, printable(_verdict(difference, frame)))


def _verdict(difference: Estimate, widths: "pandas.DataFrame") -> str:
    first, second = widths.columns
    value, error = difference
    shown = f"{abs(value):.3g} nats per decision (standard error {error:.2g})"
    if not math.isfinite(value):
        impossible = first if value < 0 else second
        answer = f"{impossible} gave an outcome of the log probability 0."
    elif abs(value) > _SURE * error:
        better, worse = (first, second) if value > 0 else (second, first)
        answer = f"{better} predicted the log better than {worse}, by {shown}."
    else:
        answer = f"No difference is shown between the predictions of {first} and {second}: {shown}."
    mean = widths.mean()
    if not np.isfinite(mean).all():
        return f"{answer} No arm has an interval: `evaluate` of an arm says why."
    return (
        f"{answer} Mean width of the arms' intervals: {mean[first]:.3g} with {first}, {mean[second]:.3g} with {second}."
    )
