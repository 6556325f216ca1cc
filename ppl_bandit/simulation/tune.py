"""Choose a selector by simulation: play worlds drawn from the program's prior, and take the one with the least regret.

All candidates see the same worlds, contexts and rewards (common random numbers), so that their differences have much smaller
standard errors than their means.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.random as jr

from ppl_bandit import selectors as rules
from ppl_bandit.arguments import check_function
from ppl_bandit.engines.choose import as_engine
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.simulation.candidate_runs import simulate_candidates
from ppl_bandit.simulation.environment import Environment, check_environment
from ppl_bandit.simulation.executors import check_executor
from ppl_bandit.simulation.simulate import check_sizes
from ppl_bandit.simulation.standings import Tuned, choose_candidate
from ppl_bandit.types import Engine, Key, Selector

PATIENCES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # steps of about three: smaller steps change the regret little


def tune(
    reward_model: RewardModel,
    horizon: int,
    selectors: Mapping[str, Selector] | Sequence[Selector] | None = None,
    *,
    criterion: str | float = "mean",
    environment: Environment | None = None,
    contexts: Callable[[Key], Any] | None = None,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_worlds: int = 256,
    num_samples: int = 1000,
    precision: str = "float64",
    seed: int = 0,
    executor: Executor | None = None,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Find the selector with the least regret over a horizon, in worlds drawn from the program's prior.

    Every candidate plays the same worlds, and the differences are paired. If several candidates are equal to the leader within
    sampling error, it takes one whose index has `learning`, which is least sensitive to a wrong prior; else the one with the
    lowest 99th percentile (`ppl_bandit.simulation.standings.choose_candidate`). The result depends on the prior: to see what
    a wrong one costs, give an `environment` of a program with another prior.

    If the engine is exact and worlds come from its own prior, each history is judged by 32 draws from its posterior instead of
    its truth (`ppl_bandit.simulation.posterior_regret`): the same law, and at most a tenth of the worlds for the same errors.

    After Ctrl-C, or if the executor is lost, the candidates that have played all worlds are compared.

    Args:
        horizon: decisions in the experiment.
        selectors: candidates, {name: selector} or a sequence; None is `candidates(...)`: every selector, and
            `optimistic_gittins` with six values of patience.
        criterion: "mean", or a quantile of regret such as 0.95 if bad runs matter more than the average.
        environment: source of the worlds; None is `Environment.from_prior(reward_model, contexts)`.
        contexts: key -> one context, for a program that takes one.
        engine: an engine of the reward model or its factory; None is `engines.choose`.
        num_worlds: worlds that each candidate plays; with four times as many, differences are known twice as well.
        num_samples: posterior draws M behind a decision, where any are drawn.
        precision: "float64", or "float32", several times faster on a GPU.
        seed: random seed.
        executor: as in `simulate`.
        say: called with a line of progress: the compilation, and each candidate that has played.

    Returns:
        The chosen selector and the scores of all candidates.

    Raises:
        ValueError: if an argument is invalid.
    """
    check_sizes({"horizon": horizon, "num_worlds": num_worlds, "num_samples": num_samples}, precision)
    check_reward_model(reward_model, "reward_model")
    if environment is not None:
        check_environment(environment)
    is_quantile = isinstance(criterion, float) and 0.0 < criterion < 1.0
    if criterion != "mean" and not is_quantile:
        raise ValueError(f'criterion must be "mean" or a quantile strictly inside (0, 1), got {criterion!r}')
    if environment is not None and contexts is not None:
        raise ValueError("contexts was given together with environment, which draws its own: leave one of them out")
    check_executor(executor)
    check_count(seed, "seed", 0)
    say = (lambda line: None) if say is None else check_function(say, "say", "of a line of text, such as print")
    with jax.enable_x64(precision == "float64"):
        if environment is None:
            environment = Environment.from_prior(reward_model, contexts)
        built = as_engine(reward_model, engine)
        if selectors is None:
            named = candidates(reward_model, built, horizon)
        else:
            named = {name: as_selector(rule) for name, rule in _named(selectors).items()}
        begun = time.perf_counter()
        found = simulate_candidates(
            named,
            reward_model,
            built,
            environment,
            num_steps=horizon,
            num_worlds=num_worlds,
            num_samples=num_samples,
            seed=seed,
            executor=executor,
            say=say,
        )
        return choose_candidate(found, criterion, horizon, time.perf_counter() - begun)


def candidates(reward_model: RewardModel, engine: Engine, horizon: int) -> dict[str, Selector]:
    """Return the default candidates: every selector, and `optimistic_gittins` with several values of patience."""
    named = {
        "double sampling": rules.double_sampling(),
        "Thompson": rules.thompson(),
        "Bayes-UCB": rules.bayes_ucb(),
        "top-two": rules.top_two(),
        "greedy": rules.greedy(),
        "information-directed": rules.information_directed(),
    }
    for patience in PATIENCES:
        named[f"Gittins, patience {patience:g}"] = rules.optimistic_gittins(horizon, patience)
    if _has_pseudo_counts(reward_model, engine):
        # The second explores more: for users to whom bad runs matter more than the average.
        for patience, learning in ((2.0, 1.0), (4.0, 0.5)):
            rule = rules.optimistic_gittins(horizon, patience, learning)
            named[f"Gittins, patience {patience:g}, learning {learning:g}"] = rule
    return named


def _has_pseudo_counts(reward_model: RewardModel, engine: Engine) -> bool:
    """Return whether the engine knows how many rewards each arm's posterior is worth."""
    known: list[bool] = []

    def read() -> None:
        marginals = engine.capabilities.marginals
        offered = None if marginals is None else marginals(engine.init(jr.key(0)), reward_model.context)
        counts = None if offered is None or offered.tail is None else offered.pseudo_counts
        known.append(counts is not None and counts() is not None)

    with jax.enable_x64(True):
        jax.eval_shape(read)
    return known[0]


def _named(selectors: Mapping[str, Selector] | Sequence[Selector]) -> dict[str, Selector]:
    if not isinstance(selectors, Mapping | Sequence) or isinstance(selectors, str):
        raise ValueError(f"selectors must be {{name: selector}}, or a sequence of selectors, got {selectors!r}")
    named = dict(selectors) if isinstance(selectors, Mapping) else {str(as_selector(s)): s for s in selectors}
    if not named:
        raise ValueError("selectors is empty: give at least one candidate, or None for all of them")
    return named
