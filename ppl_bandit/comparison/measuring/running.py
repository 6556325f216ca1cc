"""Run engines on the same rows: the pure functions of the live bandit, timed, and repeated with other random numbers."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import Ahead, quick_jit
from ppl_bandit.types import Draws, Engine, Interaction, Key, NotConjugate, Selection, Selector

__all__ = [
    "Decide",
    "Factory",
    "Lab",
    "Run",
    "Runner",
    "build_runner",
    "check_certified",
    "flatten",
    "make_decide",
    "run",
    "say_cost",
    "timed",
]

Decide = Callable[[Key, Mapping[str, Any], int], Selection]
Factory = Callable[[RewardModel], Engine]

_WORTH_SAYING = 5.0  # seconds

_T = TypeVar("_T")


class Lab(NamedTuple):
    """What all engines are run with; the parts are the rows, masked to those that are new after each checkpoint."""

    model: RewardModel
    data: Interaction
    parts: list[Interaction]
    decide: Decide
    num_samples: int
    num_runs: int

    @property
    def whole(self) -> Interaction:
        """All rows at once."""
        return self.parts[0]._replace(mask=jnp.ones(len(self.data.arm), bool))

    def num_rows_after(self, number: int) -> int:
        """Count the rows up to and with the part of a number."""
        return sum(int(np.sum(np.asarray(part.mask))) for part in self.parts[: number + 1])


class Run(NamedTuple):
    """What is known after one run of an engine on rows.

    Attributes:
        draws: {site: (M, ...)}; in the order of its chains for NUTS, so that their correlation can be seen.
        info: the evidence that the engine gave of itself, {name: number}.
        chosen: the selector's answer in each context: arm (C,), best_arm_probs (C, A), num_candidates (C,), propensities
            (C, A).
        seconds: from rows to draws, by compiled functions.
        state: of the engine, after the rows.
    """

    draws: dict[str, np.ndarray]
    info: dict[str, float]
    chosen: Selection
    seconds: float
    state: Any


class Runner(NamedTuple):
    """An engine with its functions compiled, or being compiled, for one number of rows and of draws.

    Attributes:
        engine: the engine itself.
        seconds_to_build: what it took to be built; for the exact engine, the proof.
        start: key -> state, with room for all rows.
        learn: (key, state, rows) -> (state, info).
        draw: (key, state) -> draws.
        compiled: what is behind these three.
    """

    engine: Engine
    seconds_to_build: float
    start: Callable[[Key], Any]
    learn: Callable[[Key, Any, Interaction], tuple[Any, Any]]
    draw: Callable[[Key, Any], Draws]
    compiled: tuple[Ahead, ...]

    def seconds_until_ready(self) -> float:
        """Wait until all is compiled, and return what building, tracing and compiling took."""
        for function in self.compiled:
            function.wait()
        return self.seconds_to_build + sum(function.seconds for function in self.compiled)


def build_runner(factory: Factory, model: RewardModel, rows: Interaction, num_samples: int) -> Runner:
    """Build an engine and begin to compile its functions, with the options of the live bandit, for rows of this shape.

    What is compiled here by one core leaves the other free to build and trace the next engine.
    """
    begin = time.perf_counter()
    engine = factory(model)
    seconds = time.perf_counter() - begin
    init = Ahead(engine.init)
    learn = Ahead(engine.update, is_large=engine.capabilities.reserve is not None)
    draw = Ahead(lambda key, state: engine.sample(key, state, num_samples))

    def start(key: Key) -> Any:
        state = init(key)
        return state if engine.capabilities.reserve is None else engine.capabilities.reserve(state, rows.arm.shape[0])

    key = jr.key(0)
    state = start(key)
    learn.prepare(key, state, rows)
    draw.prepare(key, state)
    return Runner(engine, seconds, start, learn, draw, (init, learn, draw))


def run(runner: Runner, key: Key, parts: Sequence[Interaction], decide: Decide) -> list[Run]:
    """Absorb parts of the data one after another, and return what is known after each."""
    key_start, key_parts = jr.split(key)
    found: list[Run] = []
    num_seen = 0
    runner.seconds_until_ready()
    begin = time.perf_counter()
    state = runner.start(key_start)
    for rows, key_part in zip(parts, jr.split(key_parts, len(parts)), strict=True):
        key_learn, key_draw, key_decide = jr.split(key_part, 3)
        state, info, draws = _learn(runner, state, rows, key_learn, key_draw)
        seconds = time.perf_counter() - begin
        num_seen += rows.arm.shape[0] if rows.mask is None else int(np.sum(rows.mask))
        chosen = jax.device_get(decide(key_decide, draws, num_seen + 1))
        found.append(Run(jax.device_get(draws), _numbers(info), chosen, seconds, state))
        begin = time.perf_counter()
    return found


def timed(runner: Runner, rows: Interaction) -> float:
    """Return the seconds of an update and draws, once all is compiled.

    Args:
        rows: as many as the runner was built for, of which some may be masked.
    """
    runner.seconds_until_ready()
    state = runner.start(jr.key(0))
    begin = time.perf_counter()
    _learn(runner, state, rows, jr.key(1), jr.key(2))
    return time.perf_counter() - begin


def _learn(runner: Runner, state: Any, rows: Interaction, key_learn: Key, key_draw: Key) -> tuple[Any, Any, Draws]:
    def both() -> tuple[Any, Any, Draws]:
        after, info = runner.learn(key_learn, state, rows)
        return after, info, jax.block_until_ready(runner.draw(key_draw, after))

    # Where no data are kept an update is over at once, and its time would be that of starting a thread.
    return both() if runner.engine.capabilities.reserve is None else _interruptibly(both)


def _interruptibly(function: Callable[[], _T]) -> _T:
    """Call a function in a thread of its own: this one hears of Ctrl-C at once, and not when a long computation is over."""
    found: Future[_T] = Future()

    def call() -> None:
        try:
            with jax.enable_x64(True):
                found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return found.result()


def _numbers(info: Any) -> dict[str, float]:
    """Return the scalars of an engine's evidence."""
    facts = jax.device_get(info)._asdict()
    return {name: float(value) for name, value in facts.items() if np.ndim(value) == 0}


def make_decide(model: RewardModel, selector: Selector, contexts: Any) -> Decide:
    """Return the function (key, draws, step) -> Selection in every context (C, ...).

    Args:
        contexts: contexts to decide in, with a leading axis; None for a program without.
    """

    def decide(key: Key, draws: Mapping[str, Array], step: Any) -> Selection:
        def one(context: Any) -> Selection:
            return selector(key, model.expected_rewards(dict(draws), context), step)

        if contexts is None:
            return jax.tree.map(lambda leaf: leaf[None], one(None))
        return jax.lax.map(one, contexts)

    return quick_jit(decide)


def flatten(model: RewardModel, draws: Mapping[str, Any]) -> np.ndarray:
    """Return draws (M, K): one column per element of every latent, sites in the program's order."""
    columns = [np.asarray(draws[name], float) for name in model.latent_shapes]
    return np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1)


def say_cost(lab: Lab, who: str, runners: Iterable[Runner], num_runs: int, say: Callable[[str], None]) -> None:
    """Say what runs on all rows will take, if that may be long, going by an eighth of the rows.

    Some of an engine's work is the same for any number of rows, the rest is in proportion to it.
    """
    total = len(lab.data.arm)
    num_rows = -(-total // 8)
    few = lab.whole._replace(mask=jnp.arange(total) < num_rows)
    least = num_runs * sum(timed(runner, few) for runner in runners if runner.engine.capabilities.reserve is not None)
    most = least * total / num_rows
    if most > _WORTH_SAYING:
        say(f"going by {num_rows} of {total} rows, {who} will take between {least:.0f} and {most:.0f} s")


def check_certified(at: Run) -> None:
    """Raise NotConjugate where the exact engine does not stand by what it learnt."""
    if not at.info["is_trusted"]:
        raise NotConjugate("a row of the data is not conjugate, or their posterior is not proper in float64")
