"""Evaluate an arm, a difference or a policy on the decisions of an experiment."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.random as jr
import numpy as np

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.evaluation.evaluation import Evaluation, evaluate_decisions, resolve_arguments
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions, decisions_from_frame
from ppl_bandit.evaluation.posterior_path import engine_of, follow_posterior
from ppl_bandit.evaluation.recorded_decisions import decisions_from_journal
from ppl_bandit.evaluation.targets import Component, with_value
from ppl_bandit.inputs.data_frames import contexts_from, is_frame
from ppl_bandit.inputs.numbers import check_text
from ppl_bandit.journal.journal import Journal
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.types import Engine, Selector

if TYPE_CHECKING:
    import pandas

_NUM_DRAWS = 2000
_MOST_CONTEXTS = 200


def evaluate(
    log: Any,
    target: Any,
    *,
    model: RewardModel | None = None,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
    baseline: Any = None,
    name: str = "default",
    outcome: str | None = None,
    arms: Sequence[Any] | None = None,
    value: Callable[..., Any] | None = None,
) -> Evaluation:
    """Say what may be concluded about a target from decisions that were made adaptively.

    The estimate is doubly robust: it uses the recorded propensities and an outcome model that was fixed before each
    decision. Its interval holds at the sample size of the log; the confidence sequence holds at every decision, also if the
    experiment was stopped because of what it showed.

    Args:
        log: a `Bandit`; a `Journal`, with `name`; or a DataFrame with the columns arm, reward and propensity, in the order of
            decisions, and those of the context where `model` takes one. Columns `propensity_<arm>` give those of all arms.
        target: an arm; a pair of arms (first minus second); {arm: probability}; a function of the context that returns
            probabilities; or a `Selector`, whose probabilities at each logged decision follow from the model's posterior
            there.
        model: the reward model that predicts outcomes; None takes that of the bandit, and running means for other logs. A
            wrong model makes intervals wider, not wrong.
        level: of intervals and of the confidence sequence.
        bounds: smallest and largest possible reward, for finite-sample confidence sequences; rewards of two values that
            both came more than once are taken for 0 and 1 in another unit, and the verdict says so.
        baseline: an arm or policy to subtract.
        name: of the experiment in a journal.
        outcome: the outcome to evaluate. None takes the only one, if its mean is what the program maximises.
        arms: names of a DataFrame's arms, in the order of the model's arms; None sorts the names that occur.
        value: what a decision earned, in place of one outcome: a function of the outcome, an array with an entry for each
            decision, or of {outcome: array} of several; it may also take the arms, as in the program, and the contexts. Such as
            `lambda sale, arm: price[arm] * sale`.

    Raises:
        ValueError: for a log, target or bounds that cannot be used, or where it is not clear what a decision earned.
        JournalError: if the journal was edited.
    """
    model = find_model(log, model)
    decisions, is_maximised = valued_decisions(log, model, name=name, outcome=outcome, arms=arms, value=value)
    if model is None:
        return evaluate_decisions(decisions, target, level=level, bounds=bounds, baseline=baseline)
    no_probs = np.full((decisions.arm.size, len(decisions.names)), np.nan)
    resolve_arguments(decisions, target, level, bounds, baseline, lambda selector: no_probs)  # before the slow work
    engine = engine_of(model)
    selectors: list[Selector | None] = [one for one in (target, baseline) if isinstance(one, Selector)]
    paths = {id(one): follow_posterior(model, engine, decisions, one) for one in selectors or [None]}
    path = next(iter(paths.values()))  # they differ in the selector's probabilities alone

    def posterior(components: list[Component]) -> tuple[float, float]:
        return _posterior_interval(model, engine, path.state, decisions, components, level)

    def probs_of(selector: Any) -> np.ndarray:
        return paths[id(selector)].probs  # type: ignore[return-value]

    return evaluate_decisions(
        decisions,
        target,
        level=level,
        bounds=bounds,
        baseline=baseline,
        means=path.means if is_maximised else None,
        posterior=posterior if is_maximised and not model.moving_sites else None,
        probs_of=probs_of,
    )


def evaluate_arms(
    log: Any,
    *,
    model: RewardModel | None = None,
    level: float = 0.95,
    bounds: tuple[float, float] | None = None,
    name: str = "default",
    outcome: str | None = None,
    arms: Sequence[Any] | None = None,
    value: Callable[..., Any] | None = None,
) -> "pandas.DataFrame":
    """Evaluate all arms, with intervals that hold together: all of A contain their arm's mean with probability `level`.

    Each has the level 1 - (1 - level) / A (Bonferroni). So the arm with the best estimate may be chosen after looking at them.

    Args:
        log, model, bounds, name, outcome, arms, value: as in `evaluate`.
        level: of all intervals together, and of all confidence sequences together.

    Returns:
        A DataFrame by arm: estimate, standard_error, lower, upper, as of `evaluate`; sequence_lower, sequence_upper, the last
        row of the confidence sequence; is_refused; and the verdict on the arm alone.
    """
    import pandas

    model = find_model(log, model)
    decisions, is_maximised = valued_decisions(log, model, name=name, outcome=outcome, arms=arms, value=value)
    names = list(decisions.names)
    resolve_arguments(decisions, names[0], level, bounds, None, None)  # before the slow work
    means = None
    if model is not None and is_maximised:
        means = follow_posterior(model, engine_of(model), decisions).means
    each = 1.0 - (1.0 - level) / len(names)
    rows = []
    for arm in names:
        found = evaluate_decisions(decisions, arm, level=each, bounds=bounds, means=means)
        ends = found.sequence.iloc[-1][["lower", "upper"]]
        rows.append((found.estimate, found.standard_error, *found.interval, *ends, found.is_refused, found.verdict))
    columns = [
        "estimate",
        "standard_error",
        "lower",
        "upper",
        "sequence_lower",
        "sequence_upper",
        "is_refused",
        "verdict",
    ]
    return pandas.DataFrame(rows, index=pandas.Index([shown_name(arm) for arm in names], name="arm"), columns=columns)


def find_model(log: Any, model: RewardModel | None) -> RewardModel | None:
    """Return the given model, or that of a bandit; None for other logs."""
    if model is not None:
        check_reward_model(model, "model")
    return log.model if model is None and _is_bandit(log) else model


def valued_decisions(
    log: Any,
    model: RewardModel | None,
    *,
    name: str = "default",
    outcome: str | None = None,
    arms: Sequence[Any] | None = None,
    value: Callable[..., Any] | None = None,
) -> tuple[LoggedDecisions, bool]:
    """Return decisions whose rewards are what is evaluated, and whether the model's expected reward is the mean of that."""
    check_text(name, "name")
    if outcome is not None:
        check_text(outcome, "outcome")
    return with_value(logged_decisions(log, model, name=name, arms=arms), model, value, outcome)


def logged_decisions(
    log: Any,
    model: RewardModel | None = None,
    *,
    name: str = "default",
    arms: Sequence[Any] | None = None,
) -> LoggedDecisions:
    """Return the decisions of a bandit, a journal or a DataFrame; see `evaluate`."""
    if isinstance(log, LoggedDecisions):
        found = log
    elif is_frame(log):
        num_arms = None if model is None else model.num_arms
        found = decisions_from_frame(log, arms, None if model is None else contexts_from(model, log), num_arms)
    elif isinstance(log, Journal):
        found = decisions_from_journal(log, name, model)
    elif _is_bandit(log):
        found = log.logged_decisions()
    else:
        raise ValueError(f"log must be a Bandit, a Journal or a DataFrame, got {type(log).__name__}")
    if model is not None and len(found.names) != model.num_arms:
        raise ValueError(f"the log has the arms {list(found.names)}, but the model has {model.num_arms} arms")
    return found


def _is_bandit(log: Any) -> bool:
    return not is_frame(log) and hasattr(log, "logged_decisions")


def _posterior_interval(
    model: RewardModel, engine: Engine, state: Any, log: LoggedDecisions, components: list[Component], level: float
) -> tuple[float, float]:
    """Return the model's own central interval of the target, averaged over at most 200 logged contexts."""
    rows = np.linspace(0, log.arm.size - 1, min(log.arm.size, _MOST_CONTEXTS)).astype(int)
    with jax.enable_x64(True):
        draws = engine.sample(jr.key(0), state, _NUM_DRAWS)
        if model.context is None:
            tables = np.asarray(model.expected_rewards(draws, None))[None]
            rows = rows[-1:]
        else:
            contexts = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], log.contexts)
            tables = np.asarray(jax.jit(jax.vmap(lambda context: model.expected_rewards(draws, context)))(contexts))
    value = np.zeros(_NUM_DRAWS)
    for sign, component in zip((1.0, -1.0), components, strict=False):
        value += sign * np.einsum("cma,ca->m", tables, component.probs[rows]) / rows.size
    low, high = np.quantile(value, [0.5 - 0.5 * level, 0.5 + 0.5 * level])
    return float(low), float(high)
