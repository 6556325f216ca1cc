"""Compile engines for a set of rows, and run them: the pure functions of the live bandit, timed."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit import engines
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import CompiledAhead, quick_jit
from ppl_bandit.runtime.xla_options import large_options, small_options
from ppl_bandit.simulation.chunks import run_jobs
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.types import Draws, Engine, Interaction, Key, NotConjugate, Selection, Selector

Decide = Callable[[Key, Mapping[str, Any], int], Selection]
EngineFactory = Callable[[RewardModel], Engine]


class ComparisonSetup(NamedTuple):
    """Settings that all engines share.

    Attributes:
        parts: the rows once per checkpoint, each masked to the rows that are new since the last one.
        decide: the selector, in every context.
    """

    model: RewardModel
    data: Interaction
    parts: list[Interaction]
    decide: Decide
    num_samples: int
    num_runs: int

    @property
    def all_rows(self) -> Interaction:
        """All rows in one part."""
        return self.parts[0]._replace(mask=jnp.ones(len(self.data.arm), bool))

    def num_rows_after(self, number: int) -> int:
        """Count the rows of the parts up to and including `number`."""
        return sum(int(np.sum(np.asarray(part.mask))) for part in self.parts[: number + 1])


class EngineRun(NamedTuple):
    """Result of one run of an engine on rows.

    Attributes:
        draws: {site: (M, ...)}; for NUTS in the order of its chains, so that their autocorrelation can be computed.
        info: scalar diagnostics of the engine, {name: number}.
        chosen: the selection in each context: arm (C,), best_arm_probs (C, A), num_candidates (C,), propensities (C, A).
        seconds: from rows to draws, without compilation.
        state: of the engine, after the rows.
    """

    draws: dict[str, np.ndarray]
    info: dict[str, float]
    chosen: Selection
    seconds: float
    state: Any


class CompiledEngine(NamedTuple):
    """An engine whose functions are compiled for one number of rows and of draws.

    Attributes:
        engine: the engine itself.
        seconds: duration of its construction (for the exact engine, of the proof), tracing and compilation.
        start: key -> state, with capacity for all rows.
        learn: (key, state, rows) -> (state, info).
        draw: (key, state) -> draws.
    """

    engine: Engine
    seconds: float
    start: Callable[[Key], Any]
    learn: Callable[[Key, Any, Interaction], tuple[Any, Any]]
    draw: Callable[[Key, Any], Draws]


def compile_engine(factory: EngineFactory, model: RewardModel, rows: Interaction, num_samples: int) -> CompiledEngine:
    """Build an engine, and compile its functions with the options of the live bandit."""
    begin = time.perf_counter()
    engine = factory(model)
    reserve = engine.capabilities.reserve
    init = CompiledAhead(engine.init)
    learn = CompiledAhead(engine.update, small_options if reserve is None else large_options)
    draw = CompiledAhead(lambda key, state: engine.sample(key, state, num_samples))

    def start(key: Key) -> Any:
        state = init(key)
        return state if reserve is None else reserve(state, rows.arm.shape[0])

    key = jr.key(0)
    state = start(key)
    learn.prepare(key, state, rows)
    draw.prepare(key, state)
    learn.wait()
    draw.wait()
    return CompiledEngine(engine, time.perf_counter() - begin, start, learn, draw)


def run_engine(compiled: CompiledEngine, key: Key, parts: Sequence[Interaction], decide: Decide) -> list[EngineRun]:
    """Learn parts of the data one after another; return a result after each."""
    key_start, key_parts = jr.split(key)
    found: list[EngineRun] = []
    num_seen = 0
    begin = time.perf_counter()
    state = compiled.start(key_start)
    for rows, key_part in zip(parts, jr.split(key_parts, len(parts)), strict=True):
        key_learn, key_draw, key_decide = jr.split(key_part, 3)
        state, info, draws = _learn_and_draw(compiled, state, rows, key_learn, key_draw)
        seconds = time.perf_counter() - begin
        num_seen += rows.arm.shape[0] if rows.mask is None else int(np.sum(rows.mask))
        chosen = jax.device_get(decide(key_decide, draws, num_seen + 1))
        found.append(EngineRun(jax.device_get(draws), _scalars(info), chosen, seconds, state))
        begin = time.perf_counter()
    return found


def _learn_and_draw(
    compiled: CompiledEngine, state: Any, rows: Interaction, key_learn: Key, key_draw: Key
) -> tuple[Any, Any, Draws]:
    def both() -> tuple[Any, Any, Draws]:
        after, info = compiled.learn(key_learn, state, rows)
        return after, info, jax.block_until_ready(compiled.draw(key_draw, after))

    # An engine that stores no data is as fast as starting a thread, which would distort its time.
    if compiled.engine.capabilities.reserve is None:
        return both()
    (found,) = run_jobs([both])  # in another thread, so that Ctrl-C interrupts this one during a long computation
    return found


def _scalars(info: Any) -> dict[str, float]:
    facts = jax.device_get(info)._asdict()
    found = {**facts.pop("checks", {}), **facts}
    return {name: float(value) for name, value in found.items() if value is not None and np.shape(value) == ()}


def make_decide(model: RewardModel, selector: Selector, contexts: Any) -> Decide:
    """Return a function (key, draws, step) -> Selection in every context (C, ...).

    Args:
        contexts: contexts of the decisions, with a leading axis; None for a program without.
    """

    def decide(key: Key, draws: Mapping[str, Array], step: Any) -> Selection:
        def decide_in(context: Any) -> Selection:
            return selector(key, model.expected_rewards(dict(draws), context), step)

        if contexts is None:
            return jax.tree.map(lambda leaf: leaf[None], decide_in(None))
        return jax.lax.map(decide_in, contexts)

    return quick_jit(decide)


def flatten_latents(model: RewardModel, draws: Mapping[str, Any]) -> np.ndarray:
    """Return draws (M, K): one column per element of every latent, sites in the program's order."""
    columns = [np.asarray(draws[name], float) for name in model.latent_shapes]
    return np.concatenate([column.reshape(len(column), -1) for column in columns], axis=1)


def check_certified(run: EngineRun) -> None:
    """Raise NotConjugate if the exact engine does not trust its posterior."""
    if not run.info["is_trusted"]:
        raise NotConjugate("a row of the data is not conjugate, or the posterior is improper in float64")


def simulate_rows(
    model: RewardModel,
    truth: Mapping[str, Any],
    num_rows: int,
    *,
    contexts: Callable[[Any], Any] | None = None,
    selector: Selector | None = None,
    seed: int = 0,
) -> Interaction:
    """Simulate rows of a program whose latents are fixed to `truth`; latents that move start there, and take a step a row.

    Args:
        truth: {latent site: value}.
        contexts: key -> one context, for a program that takes one; None repeats the example.
        selector: chooses the arms, as in `simulate` with `engines.choose`; None plays them in turn.
        seed: random seed.
    """
    check_count(num_rows, "num_rows")
    with jax.enable_x64(True):
        world = Environment(model, truth, contexts)
        if selector is not None:
            return _play(world, num_rows, selector, seed)
        key_contexts, key_rewards = jr.split(jr.key(seed))
        keys, steps = jr.split(key_contexts, num_rows), jnp.arange(1, num_rows + 1)
        rows = None if model.context is None else jax.device_get(quick_jit(jax.vmap(world.draw_context))(keys, steps))
        if model.moving_sites:
            world = Environment.from_path(model, _path(world, jr.fold_in(key_rewards, num_rows), num_rows), contexts)
        arms: Any = np.arange(num_rows) % model.num_arms

        def draw(arm: Any, context: Any) -> Any:
            if not model.moving_sites:
                return world.draw_reward(key_rewards, arm, context)
            return jax.vmap(world.draw_reward)(jr.split(key_rewards, num_rows), arm, context, steps)

        reward = jax.device_get(quick_jit(draw)(jnp.asarray(arms), rows))
        return Interaction(arms, jax.tree.map(_as_float, reward), rows)


def _path(world: Environment, key: Any, num_rows: int) -> dict[str, np.ndarray]:
    """Return the truth of every row, {site: (N, ...)}, of a world that moves."""

    def step(truth: Any, key: Any) -> tuple[Any, Any]:
        return world.at(truth).step(key), truth

    def walk() -> Any:
        return jax.lax.scan(step, world.moving_truth, jr.split(key, num_rows))[1]

    return jax.device_get(quick_jit(walk)())


def _play(world: Environment, num_rows: int, selector: Selector, seed: int) -> Interaction:
    model = world.reward_model
    engine = engines.choose(model)

    def play(key: Any) -> Any:
        record, contexts, _ = rollout(key, model, engine, selector, world, num_steps=num_rows)
        return Interaction(record.arm, record.reward, contexts)

    played = jax.device_get(quick_jit(play)(jr.key(seed)))
    return played._replace(reward=jax.tree.map(_as_float, played.reward))


def _as_float(value: Any) -> np.ndarray:
    return np.asarray(value, float)
