"""What another selector would have earned if it had made the decisions itself: rejection sampling from a log.

It is a rollout that accepts rows of the log. The accepted rows are one path of that selector (Mandel, Liu, Brunskill and
Popovic, 2016, "Offline evaluation of online reinforcement learning algorithms"). The path is shorter than the log, and the
answer is for its length.

Also here: two reward programs on one log: which predicted the outcomes better, and which gives narrower intervals.

The score of a row is log p(outcome | rows before it), estimated as the log of the mean likelihood over posterior draws. The
differences of two programs' scores are a fair comparison under adaptive collection: each row is predicted before it is
learnt.
"""

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.engines.decide import decision_function
from ppl_bandit.evaluation.estimators import Estimate, weighted_mean
from ppl_bandit.evaluation.evaluate import find_model, valued_decisions
from ppl_bandit.evaluation.evaluation import evaluate_decisions
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions, has_varying_means
from ppl_bandit.evaluation.posterior_path import NUM_SAMPLES, engine_of, follow_posterior, rows_of_log, without_text
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.simulation.rollouts import (
    Play,
    Played,
    Step,
    accept_logged,
    follow_log,
    initial_state,
    log_steps,
    play_function,
)
from ppl_bandit.types import Engine, Selector

_MIN_ACCEPTED = 30


class RejectionResult(NamedTuple):
    """The rewards of one path of a selector.

    Attributes:
        mean: reward per decision over the accepted decisions.
        standard_error: of the mean of these decisions; other paths of the same selector differ by more.
        num_accepted: length of the path.
        num_decisions: length of the log.
        rewards: of the path, in its order.
        is_refused: whether the path is too short for a claim.
        verdict: the answer in words.
    """

    mean: float
    standard_error: float
    num_accepted: int
    num_decisions: int
    rewards: np.ndarray
    is_refused: bool
    verdict: str

    def __str__(self) -> str:
        return self.verdict


def evaluate_by_rejection(
    log: Any,
    selector: Selector,
    *,
    model: RewardModel | None = None,
    name: str = "default",
    outcome: str | None = None,
    value: Callable[..., Any] | None = None,
    seed: int = 0,
) -> RejectionResult:
    """Estimate what a selector would have earned if it had run, from the rows of a log that it accepts.

    In every row the selector decides from the posterior of the rows that it accepted before. The row is accepted with a
    probability for which the arms of accepted rows have the selector's own law.

    Args:
        log, model, name, outcome, value: as in `evaluate`.
        seed: of the acceptance; another seed gives another path from the same log.

    Raises:
        ValueError: if the log lacks the propensities of all arms, too many of them are 0, or latents of the model move.
    """
    if not isinstance(selector, Selector):
        raise ValueError(f"selector must be a selector such as selectors.thompson(), got {selector!r}")
    check_count(seed, "seed", 0)
    model = find_model(log, model)
    if model is None:
        raise ValueError("give model=, whose posterior the selector decides from")
    if model.moving_sites:
        raise ValueError(
            f"the program's latents {', '.join(model.moving_sites)} move, and accepted rows are further apart in "
            "time than the selector's own decisions: use evaluate(log, selector), which keeps every row, or a program "
            "whose latents do not move"
        )
    decisions, _ = valued_decisions(log, model, name=name, outcome=outcome, value=value)
    engine = engine_of(model)
    rewards = decisions.reward[accepted_rows(model, engine, selector, decisions, seed=seed)]
    mean, error = weighted_mean(rewards) if rewards.size else (math.nan, math.nan)
    is_refused = rewards.size < _MIN_ACCEPTED
    start = f"{selector} would have made {rewards.size} decisions with the {decisions.arm.size} rows of the log"
    if is_refused:
        verdict = f"{start}: fewer than {_MIN_ACCEPTED}, too few for a claim about what it would have earned."
    else:
        verdict = (
            f"{start}, and would have earned {mean:.4g} per decision (standard error {error:.2g}). This holds for "
            f"{rewards.size} decisions from the start, not for {decisions.arm.size}."
        )
    return RejectionResult(mean, error, rewards.size, decisions.arm.size, rewards, is_refused, verdict)


@functools.lru_cache(maxsize=8)
def _accept_function(model: RewardModel, engine: Engine, selector: Selector) -> Callable[..., Any]:
    """Return a compiled function that decides which rows of a log a selector accepts; logs of similar lengths share it.

    It takes a key, the engine's state before the first row, the steps of the log, and the largest ratio pi(a) / e(a), or None
    for the largest of each row. It returns a flag per step.
    """
    select = decision_function(model.expected_rewards, engine, selector, NUM_SAMPLES)

    def record(key: Any, play: Play, played: Played) -> tuple[Play, Any]:
        is_accepted = played.choice.is_kept[0]
        return play._replace(own=play.own + is_accepted), is_accepted

    @quick_jit
    def accept(key: Any, state: Any, steps: Step, bound: Any) -> Any:
        play = play_function(key, engine, accept_logged(select, bound), record)
        return follow_log(play, Play(state, own=jnp.asarray(0)), steps)[1]

    return accept


def accepted_rows(
    model: RewardModel, engine: Engine, selector: Selector, log: LoggedDecisions, *, seed: int = 0
) -> np.ndarray:
    """Return the indices of the rows of a log that a selector accepts: the decisions that it would have made.

    The selector learns from accepted rows alone. In each row it has probabilities pi(a); the row is accepted with
    probability pi(A) / (c e(A)), so that an accepted arm has the law pi. c is the largest ratio pi(a) / e(a) of the row;
    with contexts it is the same number for all rows, the largest 1 / e(a) of the log, because acceptance must not depend on
    the context. Without contexts, rows in which an arm has probability 0, such as those of a burn-in, are left out.

    Raises:
        ValueError: if the log lacks the probabilities of all arms, or no row can be used.
    """
    if log.propensities is None:
        raise ValueError(
            "rejection sampling needs the propensities of all arms in every row, not of the played arm alone"
        )
    is_used, is_varying = (log.propensities > 0).all(axis=1), has_varying_means(log)
    if not is_used.any() or (is_varying and not is_used.all()):
        raise ValueError(
            f"rejection sampling needs positive propensities of all arms, and {int((~is_used).sum())} of {is_used.size} rows "
            "have one that is 0 or not known: record with selectors.with_floor"
        )
    rows_of = ("arm", "reward", "propensity", "propensities", "outcomes", "contexts", "learnt_contexts")
    log = log._replace(**{name: jax.tree.map(lambda own: own[is_used], getattr(log, name)) for name in rows_of})
    assert log.propensities is not None
    num_rows = log.arm.size
    bound = float((1.0 / log.propensities).max()) if is_varying else None
    with jax.enable_x64(True):
        key_init, key_rows = jr.split(jr.key(seed))
        state = initial_state(key_init, engine, num_rows)
        accept = _accept_function(model, without_text(engine), selector)
        is_accepted = accept(key_rows, state, log_steps(*rows_of_log(model, log), log.propensities), bound)[:num_rows]
    return np.flatnonzero(is_used)[np.asarray(is_accepted)]


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
