"""Playing worlds, a chunk at a time: each kind of selector is compiled once, beside the others, and played on every core."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit import selectors as rules
from ppl_bandit.numerics.compilation import large_options
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.hindsight import can_judge, judge
from ppl_bandit.simulation.records import is_stuck
from ppl_bandit.simulation.rollouts import rollout_to_end
from ppl_bandit.types import Engine, Key, Selector

__all__ = ["Player"]

_CPU_CHUNK, _ACCELERATOR_CHUNK = 16, 1 << 14
_NUM_TRUTHS = 32


class _Kind(NamedTuple):
    """What must be compiled apart: selectors that differ in patience, or in a learning above 0, are one kind."""

    rule: Callable[[Any], Selector]
    numbers: tuple[float, float]


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
        self.num_workers = (os.cpu_count() or 1) if is_cpu else 1
        self._in_turn = is_cpu and not engine.explanation.is_exact
        self.num_chunk = max(1, min(_CPU_CHUNK if is_cpu else _ACCELERATOR_CHUNK, num_worlds))
        most = _NUM_TRUTHS if can_judge(model, engine, environment) else 1
        self.num_truths = most if num_truths is None else min(num_truths, most)
        self._compiled: dict[Any, Callable] = {}
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

    def num_kinds(self, named: Mapping[str, Selector]) -> int:
        """Return how many functions these candidates need."""
        return len({_identity(rule) for rule in named.values()})

    def prepare(self, named: Mapping[str, Selector]) -> None:
        """Compile all kinds that are not yet compiled, beside each other."""
        kinds = {_identity(rule): _kind(rule) for rule in named.values() if _identity(rule) not in self._compiled}
        # Tracing stays in one thread, because NumPyro keeps its handlers in one stack; compiling needs no program.
        assert self._pool is not None  # inside `working`
        compiling = {name: self._pool.submit(self._lower(kind).compile) for name, kind in kinds.items()}
        self._compiled |= {name: future.result() for name, future in compiling.items()}

    def worlds(self, selector: Selector, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Play the worlds of these numbers.

        Returns:
            Regret after the last step and whether it ended stuck, (worlds, truths).
        """
        run, numbers = self._compiled[_identity(selector)], jnp.asarray(_kind(selector).numbers)
        starts = list(range(begin, end, self.num_chunk))
        parts = self._map(lambda start: jax.device_get(run(jr.key(self._seed), jnp.asarray(start), numbers)), starts)
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

        def one(key: Key, numbers: Float[Array, " 2"]) -> tuple[Float[Array, " K"], Bool[Array, " K"]]:
            record, contexts, state = rollout_to_end(
                key, model, engine, kind.rule(numbers), environment, num_steps=horizon, num_samples=num_samples
            )
            if self.num_truths == 1:
                return jnp.sum(record.regret)[None], is_stuck(record.regret[None])
            truths = engine.sample(jr.fold_in(key, 3), state, self.num_truths)  # 2 and below are the rollout's
            return judge(model, truths, record.arm, contexts)

        def run(key: Key, start: Int[Array, ""], numbers: Float[Array, " 2"]) -> Any:
            keys = jax.vmap(lambda number: jr.fold_in(key, number))(start + jnp.arange(self.num_chunk))
            if self._in_turn:
                return jax.lax.map(lambda key: one(key, numbers), keys)
            return jax.vmap(one, in_axes=(0, None))(keys, numbers)

        options = large_options() if jax.default_backend() == "cpu" else None
        return jax.jit(run, compiler_options=options).lower(
            jr.key(self._seed), jnp.asarray(0), jnp.asarray(kind.numbers)
        )


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
