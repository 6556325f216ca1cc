"""Playing worlds, a chunk at a time: each kind of selector is compiled once, beside the others, and played on every core."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit import selectors as rules
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import large_options
from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.runtime.cpu_threads import Needs, compiled, needs_of
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.hindsight import can_judge, judge
from ppl_bandit.simulation.records import is_stuck
from ppl_bandit.simulation.rollouts import rollout_to_end, world_key
from ppl_bandit.types import Engine, Key, Selection, Selector

__all__ = ["Player", "kinds_of"]

_CPU_CHUNK, _ACCELERATOR_CHUNK = 16, 1 << 14
_NUM_TRUTHS = 32


class _Kind(NamedTuple):
    """Selectors that are compiled as one function of two numbers.

    Attributes:
        make: numbers -> selector.
        numbers: {id of selector: its numbers}.
    """

    make: Callable[[Any], Selector]
    numbers: dict[int, tuple[float, float]]


class Player:
    """Plays worlds of a program, the same ones whoever plays them.

    Args:
        num_worlds: how many will be asked for at most: chunks are no larger.
        precision: "float64" or "float32".
        num_truths: truths that each world is judged by, where draws from its posterior can stand for them; None is enough.

    Attributes:
        num_workers: threads that play.
        num_chunk: worlds that are played together.
        num_truths: truths that each world is judged by; 1 is its own.
    """

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
        num_truths: int | None = None,
    ):
        self._parts = model, engine, environment, int(horizon), int(num_samples)
        self._seed, self._is_double = seed, precision == "float64"
        is_cpu = jax.default_backend() == "cpu"
        self.num_workers = num_cores() if is_cpu else 1
        self._in_turn = is_cpu and not engine.explanation.is_exact
        self.num_chunk = max(1, min(_CPU_CHUNK if is_cpu else _ACCELERATOR_CHUNK, num_worlds))
        most = _NUM_TRUTHS if can_judge(model, engine, environment) else 1
        self.num_truths = most if num_truths is None else min(num_truths, most)
        self._compiled: dict[int, tuple[Callable, tuple[float, float]]] = {}
        self._kept: list[Selector] = []
        self._pool: ThreadPoolExecutor | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold a pool of threads; what has not begun when something goes wrong is dropped."""
        with ThreadPoolExecutor(self.num_workers) as pool:
            self._pool = pool
            try:
                yield
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def prepare(self, named: Mapping[str, Selector]) -> None:
        """Compile all that is not yet compiled, beside each other."""
        kinds = kinds_of([rule for rule in named.values() if id(rule) not in self._compiled])
        # Tracing stays in one thread, because NumPyro keeps its handlers in one stack; compiling needs no program.
        assert self._pool is not None  # inside `working`
        compiling = [(kind, self._pool.submit(compiled, *self._lower(kind))) for kind in kinds]
        self._kept += list(named.values())  # an id is that of a living object
        for kind, future in compiling:
            self._compiled |= {own: (future.result(), numbers) for own, numbers in kind.numbers.items()}

    def worlds(self, named: Mapping[str, Selector], begin: int, end: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Play the worlds of these numbers with each of the candidates.

        Returns:
            {name: regret after the last step, and whether it ended stuck, (worlds, truths)}.
        """
        starts = range(begin, end, self.num_chunk)
        parts = self._map(self._chunk, [(rule, start) for rule in named.values() for start in starts])
        found = {}
        for number, name in enumerate(named):
            own = parts[number * len(starts) : (number + 1) * len(starts)]
            regret, stuck = (np.concatenate(part)[: end - begin] for part in zip(*own, strict=True))
            found[name] = regret.astype(float), stuck
        return found

    def scale_of(self, num_worlds: int) -> np.ndarray | None:
        """Return which of the environment's scales each world has; None where there is one."""
        environment = self._parts[2]
        if len(environment.scales) == 1:
            return None
        with jax.enable_x64(self._is_double):
            keys = _keys(jr.key(self._seed), jnp.asarray(0), num_worlds)
            return np.asarray(jax.vmap(lambda key: environment.which_scale(world_key(key)))(keys))

    def _chunk(self, rule_and_start: tuple[Selector, int]) -> Any:
        rule, start = rule_and_start
        run, numbers = self._compiled[id(rule)]
        return jax.device_get(run(jr.key(self._seed), jnp.asarray(start), jnp.asarray(numbers)))

    def _map(self, function: Callable, items: list) -> list:
        assert self._pool is not None  # inside `working`

        def inside(item: Any) -> Any:
            with jax.enable_x64(self._is_double):
                return function(item)

        return list(self._pool.map(inside, items))

    def _lower(self, kind: _Kind) -> tuple[Any, Needs]:
        model, engine, environment, horizon, num_samples = self._parts

        def one(key: Key, numbers: Float[Array, " 2"]) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
            record, contexts, state = rollout_to_end(
                key, model, engine, kind.make(numbers), environment, num_steps=horizon, num_samples=num_samples
            )
            if self.num_truths == 1:
                return jnp.sum(record.regret)[None], is_stuck(record.regret[None])
            if engine.capabilities.with_wider_prior is not None and environment.scales != (1.0,):
                state = engine.capabilities.with_wider_prior(
                    state, environment.scale(world_key(key))
                )  # what the world's own prior would know
            truths = engine.sample(jr.fold_in(key, 3), state, self.num_truths)  # 2 and below are the rollout's
            return judge(model, truths, record.arm, contexts)

        def run(key: Key, start: Int[Array, ""], numbers: Float[Array, " 2"]) -> Any:
            keys = _keys(key, start, self.num_chunk)
            if self._in_turn:
                return jax.lax.map(lambda key: one(key, numbers), keys)
            return jax.vmap(one, in_axes=(0, None))(keys, numbers)

        options = large_options() if jax.default_backend() == "cpu" else None
        traced = jax.jit(run, compiler_options=options).trace(jr.key(self._seed), jnp.asarray(0), jnp.zeros(2))
        return traced.lower(), needs_of(traced.jaxpr)


def _keys(key: Key, start: Int[Array, ""], num_worlds: int) -> Key:
    return jax.vmap(lambda number: jr.fold_in(key, number))(start + jnp.arange(num_worlds))


def kinds_of(candidates: Sequence[Selector]) -> list[_Kind]:
    """Sort selectors by what must be compiled apart.

    Those that differ in patience, or in a learning above 0, are one kind; so are all that look at p-hat alone, which is most of
    their work.
    """
    kinds: dict[Any, _Kind] = {}
    by_shares = [rule for rule in candidates if rule.select_from_probs is not None and not rule.uses_marginals]
    for rule in candidates:
        place: Any = id(rule)
        make, numbers = partial(_itself, rule), (0.0, 0.0)
        if rule.select_from_probs is not None and not rule.uses_marginals:
            place, make = "shares", partial(_one_of, by_shares)
            numbers = float([other is rule for other in by_shares].index(True)), 0.0
        elif rule.name == rules.optimistic_gittins.__name__:
            horizon, patience, learning = (rule.settings[name] for name in ("horizon", "patience", "learning"))
            # A learning of 0 needs nothing that only some engines offer.
            place, make = (horizon, learning > 0), partial(_gittins, horizon, learning > 0)
            numbers = float(patience), float(learning)
        kinds.setdefault(place, _Kind(make, {})).numbers[id(rule)] = numbers
    return list(kinds.values())


def _gittins(horizon: int, has_learning: bool, numbers: Float[Array, " 2"]) -> Selector:
    return rules.optimistic_gittins(horizon, *(numbers if has_learning else numbers[:1]))


def _itself(rule: Selector, numbers: Float[Array, " 2"]) -> Selector:
    del numbers
    return rule


def _one_of(candidates: list[Selector], numbers: Float[Array, " 2"]) -> Selector:
    """Return the selector of a number that is known when it runs."""

    def choose(ways: list[Callable[..., Selection]], key: Key, given: Array, step: Any, allowed: Any) -> Selection:
        calls = [lambda way=way: way(key, given, step, allowed=allowed) for way in ways]
        return jax.lax.switch(numbers[0].astype(int), calls)

    def select(key: Key, table: Array, step: Any, *, allowed: Any = None, marginals: Any = None) -> Selection:
        return choose([rule.decide for rule in candidates], key, table, step, allowed)

    def select_from_probs(
        key: Key, shares: Array, step: Any, *, allowed: Any = None, marginals: Any = None
    ) -> Selection:
        return choose(
            [rule.select_from_probs for rule in candidates if rule.select_from_probs], key, shares, step, allowed
        )

    return candidates[0] if len(candidates) == 1 else Selector("one_of", {}, select, select_from_probs)
