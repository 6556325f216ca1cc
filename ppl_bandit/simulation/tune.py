"""Let the program choose its selector: play worlds drawn from its own prior, and take what loses least in them.

All candidates meet the same worlds, contexts and rewards (common random numbers), so that their differences are far less
noisy than their means. They race: after each round of worlds, those that are clearly behind the leader play no further.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit import engines, selectors as rules
from ppl_bandit.numerics.compilation import large_options
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.selectors.contract import as_selector
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.races import Lane, Tuned, finish, still_racing
from ppl_bandit.simulation.records import is_stuck
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.types import Engine, Key, Selector

__all__ = ["LADDER", "Player", "candidates", "tune"]

LADDER = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)  # patience: each about a factor of three, which is as finely as it matters
_FIRST_ROUND = 64
_FEWEST = 256  # worlds behind the figures of a winner that has nobody left to race
_CPU_CHUNK, _ACCELERATOR_CHUNK = 16, 1 << 14


def tune(
    reward_model: RewardModel,
    horizon: int,
    selectors: Mapping[str, Selector] | Sequence[Selector] | None = None,
    *,
    criterion: str | float = "mean",
    environment: Environment | None = None,
    contexts: Callable[[Key], Any] | None = None,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_worlds: int = 512,
    num_samples: int = 1000,
    precision: str = "float64",
    seed: int = 0,
    say: Callable[[str], None] | None = None,
) -> Tuned:
    """Find the selector with the least regret over a horizon, in worlds that the program itself thinks likely.

    Every candidate plays the same 64 worlds, then twice as many, and so on; one that is behind the leader by more than three
    standard errors of the difference is dropped. Among those that end within one standard error of the leader, the one with
    the lowest 99th percentile is taken. What the answer says about the experiment to come is as good as the prior:
    give `environment` to see how it fares when that is wrong.

    Args:
        horizon: decisions in the experiment.
        selectors: candidates, {name: selector} or a sequence; None is `candidates(...)`: every selector, and a ladder of the
            patience of `optimistic_gittins`.
        criterion: "mean", or a quantile of regret such as 0.95 for those who fear the tail.
        environment: where the worlds come from; None is `Environment.from_prior(reward_model, contexts)`.
        contexts: key -> one context, for a program that takes one.
        engine: an engine of the reward model or its factory; None is `engines.choose`.
        num_worlds: worlds of the last round.
        num_samples: posterior draws M behind a decision, where any are drawn.
        precision: "float64", or "float32", several times faster on a GPU.
        seed: of all random numbers.
        say: hears what it will cost once that is known, and who is left after each round.

    Returns:
        The best selector, with the table behind the choice.

    Raises:
        ValueError: for arguments that cannot be used.
    """
    _check(horizon, criterion, num_worlds, num_samples, precision)
    if environment is not None and contexts is not None:
        raise ValueError("contexts was given beside environment, which draws its own: leave one of them out")
    environment = Environment.from_prior(reward_model, contexts) if environment is None else environment
    say = say or (lambda line: None)
    with jax.enable_x64(precision == "float64"):
        built = engine if isinstance(engine, Engine) else (engine or engines.choose)(reward_model)
        if selectors is None:
            named = candidates(reward_model, built, horizon)
        else:
            named = {name: as_selector(rule) for name, rule in _named(selectors).items()}
        begun = time.perf_counter()
        play = Player(reward_model, built, environment, horizon, num_samples, seed, num_worlds, precision)
        with play.working():
            say(f"compiling {play.prepare(named)} functions for {len(named)} candidates")
            lanes = {name: Lane(name, rule) for name, rule in named.items()}
            racing, num_done, size = list(lanes), 0, min(_FIRST_ROUND, num_worlds)
            while True:
                for name in racing:
                    lanes[name] = lanes[name].extended(*play.worlds(named[name], num_done, size))
                    if num_done == 0 and name == racing[0]:
                        first = time.perf_counter() - begun
                num_done = size
                if num_done == min(_FIRST_ROUND, num_worlds):
                    spent = time.perf_counter() - begun - first
                    each = spent / max(len(racing) - 1, 1) / num_done
                    survivors = min(len(racing), 4)
                    say(
                        f"{num_done} worlds took {first + spent:.0f} s; up to {num_worlds} worlds for about {survivors} that "
                        f"are left: about {each * survivors * (num_worlds - num_done):.0f} s more"
                    )
                racing = still_racing([lanes[name] for name in racing], criterion)
                is_decided = len(racing) == 1 and num_done >= min(_FEWEST, num_worlds)
                say(f"after {num_done} worlds: {', '.join(racing)}")
                if is_decided or num_done >= num_worlds:
                    break
                size = min(2 * num_done, num_worlds)
        return finish(lanes, criterion, horizon, time.perf_counter() - begun)


def candidates(reward_model: RewardModel, engine: Engine, horizon: int) -> dict[str, Selector]:
    """Return the selectors that are worth a try: all, where they cost the same, and a ladder of patience.

    Information-directed sampling reads a table of draws at every step. Where the engine spares the others that (the law of
    p-hat in closed form), it would cost twenty times as much as they do, and is left to those who ask for it.
    """
    knows_probs, knows_counts = _offers(reward_model, engine)
    named = {
        "double sampling": rules.double_sampling(),
        "Thompson": rules.thompson(),
        "Bayes-UCB": rules.bayes_ucb(),
        "top-two": rules.top_two(),
        "greedy": rules.greedy(),
    }
    if not knows_probs:
        named["information-directed"] = rules.information_directed()
    for patience in LADDER:
        named[f"Gittins, patience {patience:g}"] = rules.optimistic_gittins(horizon, patience)
    if knows_counts:
        named["Gittins, patience 2, learning 1"] = rules.optimistic_gittins(horizon, 2.0, 1.0)
        named["Gittins, patience 4, learning 0.5"] = rules.optimistic_gittins(
            horizon, 4.0, 0.5
        )  # for those who fear the tail
    return named


def _offers(reward_model: RewardModel, engine: Engine) -> tuple[bool, bool]:
    """Tell whether an engine knows the probabilities of arms to be best, and how much their posteriors are worth."""
    known: list[tuple[bool, bool]] = []

    def look() -> None:
        offered = None if engine.marginals is None else engine.marginals(engine.init(jr.key(0)), reward_model.context)
        if offered is None:
            known.append((False, False))
            return
        counts = None if offered.tail is None or offered.pseudo_counts is None else offered.pseudo_counts()
        known.append((offered.best_arm_probs is not None, counts is not None))

    with jax.enable_x64(True):
        jax.eval_shape(look)  # nothing is computed: it is asked what could be
    return known[0]


def _named(selectors: Mapping[str, Selector] | Sequence[Selector]) -> dict[str, Selector]:
    named = dict(selectors) if isinstance(selectors, Mapping) else {str(as_selector(s)): s for s in selectors}
    if not named:
        raise ValueError("selectors is empty: give at least one candidate, or None for all of them")
    return named


class _Kind(NamedTuple):
    """What must be compiled apart: selectors that differ in patience, or in a learning above 0, are one kind."""

    rule: Callable[[Any], Selector]
    numbers: tuple[float, float]


class Player:
    """Plays worlds, a chunk at a time; each kind of selector is compiled once, and may be played with another seed."""

    def __init__(
        self,
        model: RewardModel,
        engine: Engine,
        environment: Environment,
        horizon: int,
        num_samples: int,
        seed: int,
        num_worlds: int,
        precision: str,
    ):
        self._parts = model, engine, environment, int(horizon), int(num_samples)
        self.seed, self._is_double = seed, precision == "float64"
        is_cpu = jax.default_backend() == "cpu"
        self._num_workers = (os.cpu_count() or 1) if is_cpu else 1
        self._in_turn = is_cpu and not engine.explanation.is_exact
        most = _CPU_CHUNK if is_cpu else _ACCELERATOR_CHUNK
        self._num_chunk = max(1, min(most, num_worlds, -(-_FIRST_ROUND // self._num_workers) if is_cpu else most))
        self._compiled: dict[Any, Callable] = {}
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold a pool of threads; what has not begun when something goes wrong is dropped."""
        with ThreadPoolExecutor(self._num_workers) as pool:
            self._pool = pool
            try:
                yield
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def prepare(self, named: Mapping[str, Selector]) -> int:
        """Compile all kinds, beside each other, and return how many there are."""
        kinds = {_identity(rule): _kind(rule) for rule in named.values()}
        # Tracing stays in one thread, because NumPyro keeps its handlers in one stack; compiling needs no program.
        assert self._pool is not None  # inside `working`
        compiling = {name: self._pool.submit(self._lower(kind).compile) for name, kind in kinds.items()}
        self._compiled |= {name: future.result() for name, future in compiling.items()}
        return len(kinds)

    def worlds(self, selector: Selector, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Play the worlds of these numbers; return their regret after the last step, and whether they ended stuck."""
        run, numbers = self._compiled[_identity(selector)], jnp.asarray(_kind(selector).numbers)
        starts = list(range(begin, end, self._num_chunk))
        parts = self._map(lambda start: jax.device_get(run(jr.key(self.seed), jnp.asarray(start), numbers)), starts)
        regret, stuck = (np.concatenate(part)[: end - begin] for part in zip(*parts, strict=True))
        return regret.astype(float), stuck

    def _map(self, function: Callable, items: list) -> list:
        assert self._pool is not None  # inside `working`

        def inside(item: Any) -> Any:
            with jax.enable_x64(self._is_double):
                return function(item)

        return list(self._pool.map(inside, items))

    def _lower(self, kind: _Kind) -> Any:
        model, engine, environment, horizon, num_samples = self._parts

        def one(key: Key, numbers: Float[Array, " 2"]) -> tuple[Float[Array, ""], Bool[Array, ""]]:
            selector = kind.rule(numbers)
            regret = rollout(
                key, model, engine, selector, environment, num_steps=horizon, num_samples=num_samples
            ).regret
            return jnp.sum(regret), is_stuck(regret[None])[0]

        def run(key: Key, start: Int[Array, ""], numbers: Float[Array, " 2"]) -> Any:
            keys = jax.vmap(lambda number: jr.fold_in(key, number))(start + jnp.arange(self._num_chunk))
            if self._in_turn:
                return jax.lax.map(lambda key: one(key, numbers), keys)
            return jax.vmap(one, in_axes=(0, None))(keys, numbers)

        options = large_options() if jax.default_backend() == "cpu" else None
        return jax.jit(run, compiler_options=options).lower(jr.key(self.seed), jnp.asarray(0), jnp.asarray(kind.numbers))


def _kind(selector: Selector) -> _Kind:
    settings = selector.settings
    if selector.name != rules.optimistic_gittins.__name__:
        return _Kind(lambda numbers: selector, (1.0, 0.0))
    horizon, patience, learning = (settings[name] for name in ("horizon", "patience", "learning"))
    if learning == 0:  # needs nothing that only some engines offer
        return _Kind(lambda numbers: rules.optimistic_gittins(horizon, numbers[0]), (patience, 0.0))
    return _Kind(lambda numbers: rules.optimistic_gittins(horizon, *numbers), (patience, learning))


def _identity(selector: Selector) -> Any:
    if selector.name != rules.optimistic_gittins.__name__:
        return id(selector)
    return selector.name, selector.settings["horizon"], selector.settings["learning"] > 0


def _check(horizon: Any, criterion: Any, num_worlds: Any, num_samples: Any, precision: Any) -> None:
    for name, value in {"horizon": horizon, "num_worlds": num_worlds, "num_samples": num_samples}.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    is_quantile = isinstance(criterion, float) and 0.0 < criterion < 1.0
    if criterion != "mean" and not is_quantile:
        raise ValueError(f'criterion must be "mean" or a quantile strictly inside (0, 1), got {criterion!r}')
    if precision not in ("float64", "float32"):
        raise ValueError(f'precision must be "float64" or "float32", got {precision!r}')
