"""Choose a selector by simulation: play worlds drawn from the program's prior, and take the one with the least regret.

All candidates see the same worlds, contexts and rewards (common random numbers), so that their differences have much smaller
standard errors than their means. After each round of worlds, candidates that are clearly behind the leader are eliminated.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.random as jr
import numpy as np

from ppl_bandit import engines, selectors as rules
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.simulation.candidate_runs import CandidateSimulator, group_selectors
from ppl_bandit.simulation.elimination import (
    CandidateRegret,
    Tuned,
    are_differences_known,
    choose_candidate,
    relative_to_best,
    remaining_candidates,
)
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.simulate import check_sizes
from ppl_bandit.types import Engine, Key, Selector

__all__ = ["PATIENCES", "candidates", "eliminate", "tune"]

PATIENCES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # steps of about three: smaller steps change the regret little
_FIRST_ROUND = 32
_MIN_WORLDS = 128  # worlds that the chosen candidate plays at least


def tune(
    reward_model: RewardModel,
    horizon: int,
    selectors: Mapping[str, Selector] | Sequence[Selector] | None = None,
    *,
    criterion: str | float = "mean",
    environment: Environment | None = None,
    contexts: Callable[[Key], Any] | None = None,
    doubt: float = 1.0,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_worlds: int = 512,
    tolerance: float = 0.06,
    num_samples: int = 1000,
    precision: str = "float64",
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Find the selector with the least regret over a horizon, in worlds drawn from the program's prior.

    Every candidate plays the same 32 worlds, then twice as many, and so on. A candidate that is behind the leader by more than
    2.5 standard errors of the difference is eliminated. It stops when the remaining differences are known to `tolerance`,
    or after `num_worlds`. If several candidates are equal to the leader within sampling error, it takes one whose index has
    `learning`, which is least sensitive to a wrong prior; else the one with the lowest 99th percentile
    (`ppl_bandit.simulation.elimination.choose_candidate`). The result depends on the prior: `doubt` allows for a
    wrong scale.

    If the engine is exact and worlds come from its own prior, each history is judged by 32 draws from its posterior instead of
    its truth (`ppl_bandit.simulation.posterior_regret`): the same law, and at most a tenth of the worlds for the same errors.

    Args:
        horizon: decisions in the experiment.
        selectors: candidates, {name: selector} or a sequence; None is `candidates(...)`: every selector, and
            `optimistic_gittins` with six values of patience.
        criterion: "mean", or a quantile of regret such as 0.95 if bad runs matter more than the average.
        environment: source of the worlds; None is `Environment.from_prior(reward_model, contexts)`.
        contexts: key -> one context, for a program that takes one.
        doubt: factor by which the prior may be too narrow or too wide. With 3.0, a third of the worlds each have a third of
            the prior's scale, its own, and three times it (`Environment.from_prior`), and regret is compared relative to
            the best candidate of each scale. For other scales, give an environment.
        engine: an engine of the reward model or its factory; None is `engines.choose`.
        num_worlds: largest number of worlds.
        tolerance: standard error of the remaining differences, relative to the leader's regret, at which it stops; 0 plays
            all `num_worlds`.
        num_samples: posterior draws M behind a decision, where any are drawn.
        precision: "float64", or "float32", several times faster on a GPU.
        seed: random seed.
        say: called with a line of progress: the compilation, and the remaining candidates after each round.

    Returns:
        The chosen selector and the scores of all candidates.

    Raises:
        ValueError: if an argument is invalid.
    """
    check_sizes({"horizon": horizon, "num_worlds": num_worlds, "num_samples": num_samples}, precision)
    _check(criterion, tolerance, doubt)
    if environment is not None and contexts is not None:
        raise ValueError("contexts was given together with environment, which draws its own: leave one of them out")
    if environment is not None and doubt != 1.0:
        raise ValueError("doubt was given together with environment, which has its own scales: leave one of them out")
    say = say or (lambda line: None)
    with jax.enable_x64(precision == "float64"):
        built = engine if isinstance(engine, Engine) else (engine or engines.choose)(reward_model)
        if environment is None:
            scales = (1.0,) if doubt == 1.0 else (1.0 / doubt, 1.0, float(doubt))
            environment = Environment.from_prior(reward_model, contexts, scales=scales, engine=built)
        if selectors is None:
            named = candidates(reward_model, built, horizon)
        else:
            named = {name: as_selector(rule) for name, rule in _named(selectors).items()}
        begun = time.perf_counter()
        simulator = CandidateSimulator(reward_model, built, environment, horizon, num_samples, seed, num_worlds)
        regrets = eliminate(simulator, named, criterion, num_worlds, tolerance, say)
        seconds, scale_of = time.perf_counter() - begun, simulator.world_scales(num_worlds)
        return choose_candidate(regrets, criterion, horizon, seconds, environment.scales, scale_of)


def eliminate(
    simulator: CandidateSimulator,
    named: Mapping[str, Selector],
    criterion: str | float,
    num_worlds: int,
    tolerance: float,
    say: Callable[[str], None],
) -> dict[str, CandidateRegret]:
    """Play worlds in rounds, each twice as long as the last, and eliminate candidates that are clearly behind."""
    scale_of = simulator.world_scales(num_worlds)
    say(f"compiling {len(group_selectors(named))} functions for {len(named)} candidates ...")
    begun = time.perf_counter()
    simulator.compile(named)
    say(f"compiled in {time.perf_counter() - begun:.0f} s; simulating up to {num_worlds} worlds")
    regrets: dict[str, CandidateRegret] = {}
    remaining, num_done, size = list(named), 0, min(max(_FIRST_ROUND, simulator.chunk_size), num_worlds)
    while True:
        for name, found in simulator.simulate({name: named[name] for name in remaining}, num_done, size).items():
            before = regrets[name][2:] if name in regrets else (found[0][:0], found[1][:0])
            regrets[name] = CandidateRegret(name, named[name], *map(np.concatenate, zip(before, found, strict=True)))
        num_done = size
        compared = {name: regrets[name] for name in remaining}
        if scale_of is not None:
            compared = relative_to_best(compared, scale_of)
        remaining = remaining_candidates(list(compared.values()), criterion)
        say(f"after {num_done} worlds and {time.perf_counter() - begun:.0f} s: {', '.join(remaining)}")
        is_known = are_differences_known([compared[name] for name in remaining], criterion, tolerance)
        if num_done >= num_worlds or num_done >= _MIN_WORLDS and is_known:
            return regrets
        size = min(2 * num_done, num_worlds)


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
    named = dict(selectors) if isinstance(selectors, Mapping) else {str(as_selector(s)): s for s in selectors}
    if not named:
        raise ValueError("selectors is empty: give at least one candidate, or None for all of them")
    return named


def _check(criterion: Any, tolerance: Any, doubt: Any) -> None:
    is_quantile = isinstance(criterion, float) and 0.0 < criterion < 1.0
    if criterion != "mean" and not is_quantile:
        raise ValueError(f'criterion must be "mean" or a quantile strictly inside (0, 1), got {criterion!r}')
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance must be a number in [0, 1), got {tolerance!r}; 0 plays all num_worlds")
    if isinstance(doubt, bool) or not isinstance(doubt, int | float) or not 1.0 <= doubt < np.inf:
        raise ValueError(
            f"doubt must be a number of at least 1, got {doubt!r}; 3.0 is a prior three times too narrow or wide"
        )
