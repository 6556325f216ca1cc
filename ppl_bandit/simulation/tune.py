"""Let the program choose its selector: play worlds drawn from its own prior, and take what loses least in them.

All candidates meet the same worlds, contexts and rewards (common random numbers), so that their differences are far less
noisy than their means. They race: after each round of worlds, those that are clearly behind the leader play no further.
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
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.players import Player, kinds_of
from ppl_bandit.simulation.races import Lane, Tuned, finish, in_proportion, is_settled, still_racing
from ppl_bandit.types import Engine, Key, Selector

__all__ = ["LADDER", "candidates", "race", "tune"]

LADDER = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # patience: each about a factor of three, which is as finely as it matters
_FIRST_ROUND = 32
_FEWEST = 128  # worlds behind the figures of a winner
_NUM_LEFT = 5  # how many are thought to be left after the first round, to say beforehand what it will cost


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
    """Find the selector with the least regret over a horizon, in worlds that the program itself thinks likely.

    Every candidate plays the same 32 worlds, then twice as many, and so on; one that is behind the leader by more than 2.5
    standard errors of the difference is dropped. It ends when the differences that are left are known to `tolerance`,
    or after `num_worlds`. Among those that are level with the leader, one whose index has `learning` is taken, which bears a
    wrong prior best; else the one with the lowest 99th percentile (`ppl_bandit.simulation.races.finish`). What the answer says
    about the experiment to come is as good as the prior: say with `doubt` how wrong its scale may be.

    Where the engine is exact and worlds come from its own prior, each history is judged by 32 draws from its posterior in place
    of its truth (`ppl_bandit.simulation.hindsight`): the same law, and a tenth of the worlds for the same errors or fewer.

    Args:
        horizon: decisions in the experiment.
        selectors: candidates, {name: selector} or a sequence; None is `candidates(...)`: every selector, and a ladder of the
            patience of `optimistic_gittins`.
        criterion: "mean", or a quantile of regret such as 0.95 for those who fear the tail.
        environment: where the worlds come from; None is `Environment.from_prior(reward_model, contexts)`.
        contexts: key -> one context, for a program that takes one.
        doubt: how many times too narrow or too wide the prior may be. With 3.0, a third of the worlds each has a third of the
            prior's scale, its own, and three times it (`Environment.from_prior`), and regret is compared in proportion to that
            of the best candidate of each. For other scales, or other shares, give them to the environment.
        engine: an engine of the reward model or its factory; None is `engines.choose`.
        num_worlds: worlds of the last round, at most.
        tolerance: standard error of the differences that are left, relative to the leader's regret, at which it ends; 0 plays
            all `num_worlds`.
        num_samples: posterior draws M behind a decision, where any are drawn.
        precision: "float64", or "float32", several times faster on a GPU.
        seed: of all random numbers.
        say: hears what it will cost before the first round, and who is left after each.

    Returns:
        The best selector, with the table behind the choice.

    Raises:
        ValueError: for arguments that cannot be used.
    """
    _check(horizon, criterion, num_worlds, tolerance, num_samples, precision, doubt)
    if environment is not None and contexts is not None:
        raise ValueError("contexts was given beside environment, which draws its own: leave one of them out")
    if environment is not None and doubt != 1.0:
        raise ValueError("doubt was given beside environment, which has its own scales: leave one of them out")
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
        play = Player(reward_model, built, environment, horizon, num_samples, seed, num_worlds, precision)
        lanes = race(play, named, criterion, num_worlds, tolerance, say)
        scale_of = play.scale_of(num_worlds)
        return finish(lanes, criterion, horizon, time.perf_counter() - begun, environment.scales, scale_of)


def race(
    play: Player,
    named: Mapping[str, Selector],
    criterion: str | float,
    num_worlds: int,
    tolerance: float,
    say: Callable[[str], None],
) -> dict[str, Lane]:
    """Let candidates play worlds in rounds, each twice as long as the last, and drop those that are clearly behind."""
    scale_of = play.scale_of(num_worlds)
    with play.working():
        _say_the_cost(play, named, num_worlds, say)
        play.prepare(named)
        lanes: dict[str, Lane] = {}
        racing, num_done, size = list(named), 0, _first_round(play, num_worlds)
        while True:
            for name, found in play.worlds({name: named[name] for name in racing}, num_done, size).items():
                lanes[name] = lanes[name].extended(*found) if num_done else Lane(name, named[name], *found)
            num_done = size
            left = {name: lanes[name] for name in racing}
            judged = left if scale_of is None else in_proportion(left, scale_of)
            racing = still_racing(list(judged.values()), criterion)
            say(f"after {num_done} worlds: {', '.join(racing)}")
            is_known = is_settled([judged[name] for name in racing], criterion, tolerance)
            if num_done >= num_worlds or num_done >= _FEWEST and is_known:
                return lanes
            size = min(2 * num_done, num_worlds)


def _say_the_cost(play: Player, named: Mapping[str, Selector], num_worlds: int, say: Callable[[str], None]) -> None:
    """Compile and play a chunk of the last candidate, to say what all of them will take."""
    last = dict([list(named.items())[-1]])
    begun = time.perf_counter()
    play.prepare(last)
    compiled = time.perf_counter()
    play.worlds(last, 0, play.num_chunk)
    each = (time.perf_counter() - compiled) / play.num_chunk / play.num_workers
    num_kinds = len(kinds_of(list(named.values())))
    to_compile = (num_kinds - 1) * (compiled - begun) / play.num_workers
    first = _first_round(play, num_worlds)
    few = max(first, min(_FEWEST, num_worlds))
    soonest = to_compile + each * (len(named) * first + min(len(named), _NUM_LEFT) * (few - first))
    longest = soonest + each * min(len(named), _NUM_LEFT) * (num_worlds - few)
    say(
        f"about {soonest:.0f} s more, {to_compile:.0f} s of them to compile {num_kinds} functions for {len(named)} candidates; "
        f"up to {longest:.0f} s where they are close"
    )


def _first_round(play: Player, num_worlds: int) -> int:
    return min(max(_FIRST_ROUND, play.num_chunk), num_worlds)  # no less than what is played together anyway


def candidates(reward_model: RewardModel, engine: Engine, horizon: int) -> dict[str, Selector]:
    """Return the selectors that are worth a try: all, and a ladder of patience."""
    named = {
        "double sampling": rules.double_sampling(),
        "Thompson": rules.thompson(),
        "Bayes-UCB": rules.bayes_ucb(),
        "top-two": rules.top_two(),
        "greedy": rules.greedy(),
        "information-directed": rules.information_directed(),
    }
    for patience in LADDER:
        named[f"Gittins, patience {patience:g}"] = rules.optimistic_gittins(horizon, patience)
    if _knows_counts(reward_model, engine):
        named["Gittins, patience 2, learning 1"] = rules.optimistic_gittins(horizon, 2.0, 1.0)
        named["Gittins, patience 4, learning 0.5"] = rules.optimistic_gittins(
            horizon, 4.0, 0.5
        )  # for those who fear the tail
    return named


def _knows_counts(reward_model: RewardModel, engine: Engine) -> bool:
    """Tell whether an engine knows how many rewards the arms' posteriors are worth."""
    known: list[bool] = []

    def look() -> None:
        offered = (
            None
            if engine.capabilities.marginals is None
            else engine.capabilities.marginals(engine.init(jr.key(0)), reward_model.context)
        )
        counts = None if offered is None or offered.tail is None else offered.pseudo_counts
        known.append(counts is not None and counts() is not None)

    with jax.enable_x64(True):
        jax.eval_shape(look)  # nothing is computed: it is asked what could be
    return known[0]


def _named(selectors: Mapping[str, Selector] | Sequence[Selector]) -> dict[str, Selector]:
    named = dict(selectors) if isinstance(selectors, Mapping) else {str(as_selector(s)): s for s in selectors}
    if not named:
        raise ValueError("selectors is empty: give at least one candidate, or None for all of them")
    return named


def _check(
    horizon: Any, criterion: Any, num_worlds: Any, tolerance: Any, num_samples: Any, precision: Any, doubt: Any
) -> None:
    for name, value in {"horizon": horizon, "num_worlds": num_worlds, "num_samples": num_samples}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    is_quantile = isinstance(criterion, float) and 0.0 < criterion < 1.0
    if criterion != "mean" and not is_quantile:
        raise ValueError(f'criterion must be "mean" or a quantile strictly inside (0, 1), got {criterion!r}')
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0.0 <= tolerance < 1.0:
        raise ValueError(f"tolerance must be a number in [0, 1), got {tolerance!r}; 0 plays all num_worlds")
    if isinstance(doubt, bool) or not isinstance(doubt, int | float) or not 1.0 <= doubt < np.inf:
        raise ValueError(
            f"doubt must be a number of at least 1, got {doubt!r}; 3.0 is a prior three times too narrow or wide"
        )
    if precision not in ("float64", "float32"):
        raise ValueError(f'precision must be "float64" or "float32", got {precision!r}')
