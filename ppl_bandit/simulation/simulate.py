"""Many realizations of bandits against a simulated world, as one labelled dataset.

Realizations are vectorised, and run in chunks that fit a memory budget. The random numbers of a realization come from the
seed and its own number, so that a result depends neither on how the work was cut up nor on where it ran. All selectors meet
the same realizations: their differences are paired.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, Int

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime import cpu_threads
from ppl_bandit.runtime.compile_ahead import in_order_options
from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.runtime.jax_adapter import eliminate_dead_code, inner_jaxprs
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.simulation import records
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.types import Engine, Key, Selector

if TYPE_CHECKING:
    import xarray

__all__ = ["realize", "simulate"]

_CACHE = 1 << 20  # bytes of a chunk that stay close to a core
_LEAST_ON_CPU = 4  # realizations of a chunk
_NUM_TIMED_STEPS = 20  # before a long run, to say what it costs
_SECONDS_BETWEEN_LINES = 20.0
_WORTH_SAYING = 5.0  # seconds
_WORKING_COPIES = 6  # of a realization's draws, while they are drawn and compared


def simulate(
    key: Key | int,
    reward_model: RewardModel,
    engine: Engine | Callable[[RewardModel], Engine],
    selector: Selector | Mapping[str, Selector],
    environment: Environment,
    *,
    num_steps: int,
    num_realizations: int,
    num_samples: int = 1000,
    summary: bool = False,
    memory: int | None = None,
    draws: bool = False,
    precision: str = "float64",
    mesh: Mesh | None = None,
    progress: bool = False,
) -> "xarray.Dataset":
    """Simulate realizations of a bandit, and return all that happened, or a summary of it.

    Interrupted (Ctrl-C), it returns the realizations that are done and says so; the attribute `is_complete` is then 0.

    Args:
        key: a key, or a seed.
        engine: an engine of the reward model, or a factory such as `engines.conjugate`.
        selector: a selector, or {name: selector}: several give the result a dimension `selector`.
        environment: the world; it may be another program than the reward model.
        num_steps: decisions in a realization.
        num_realizations: independent repetitions.
        num_samples: posterior draws M behind each decision.
        summary: whether to keep means, standard deviations and quantiles over the realizations in place of every step of
            each one.
        memory: bytes that a chunk of realizations may take, roughly; None is half a gigabyte on a CPU, and a third of the
            memory of another device.
        draws: whether to draw all M rows of every table, also where p-hat can be drawn from its own law (see `rollout`).
        precision: "float64", as the live bandit whatever jax's flag says, or "float32", several times faster on a GPU.
        mesh: devices, in one axis, over which to spread the realizations; None is jax's default device.
        progress: whether to show how far it is and the time left: a bar on a terminal, else a line now and then.

    Returns:
        A dataset over `realization`, `step` and `arm`: arm, reward, regret (expected, of each step), num_candidates,
        best_arm_probs, is_trusted. Or, with `summary`, statistics of them over `step`, `arm`, `checkpoint`,
        `quantile`, and each realization's final regret.
    """
    counts = {"num_steps": num_steps, "num_realizations": num_realizations, "num_samples": num_samples}
    for name, value in (counts | ({} if memory is None else {"memory": memory})).items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    if environment.reward_model.num_arms != reward_model.num_arms:
        raise ValueError(
            f"environment has {environment.reward_model.num_arms} arms and reward_model {reward_model.num_arms}: a bandit "
            "and its world must have the same arms"
        )
    several = selector if isinstance(selector, Mapping) else {as_selector(selector).name: selector}
    named = {name: as_selector(select) for name, select in several.items()}
    if not named:
        raise ValueError("selector is empty: give at least one")
    if precision not in ("float64", "float32"):
        raise ValueError(f'precision must be "float64" or "float32", got {precision!r}')
    num_realizations = int(num_realizations)
    with jax.enable_x64(precision == "float64"):
        if not isinstance(engine, Engine):
            engine = engine(reward_model)
        key = jr.key(key) if isinstance(key, int | np.integer) else key
        parts: dict[str, list[Any]] = {name: [] for name in named}
        with _Progress(len(named) * num_realizations, progress) as bar:
            try:
                for name, select in named.items():

                    def play(key: Key, number: Array, last: Array | None = None, select: Selector = select) -> Any:
                        return rollout(
                            jr.fold_in(key, number),
                            reward_model,
                            engine,
                            select,
                            environment,
                            num_steps=int(num_steps),
                            num_samples=int(num_samples),
                            draws=draws,
                            last=last,
                        )

                    reduce = records.reduced if summary else None
                    in_turn = not engine.explanation.is_exact
                    options: dict[str, Any] = {"memory": memory, "mesh": mesh, "begin": bar.resume}
                    options["in_turn"] = int(num_steps) if in_turn else None
                    chunks = realize(play, key, num_realizations, reduce, **options)
                    for part, num_done in chunks:
                        parts[name].append(records.trimmed(part, num_done, summary))
                        bar.advance(num_done)
            except KeyboardInterrupt:
                if not any(parts.values()):
                    raise
                sys.stderr.write("\ninterrupted: the realizations that are done are kept\n")
    make = records.summarised if summary else records.stepwise
    datasets = {name: make(found) for name, found in parts.items() if found}
    facts = records.provenance(key, reward_model, engine, environment, counts) | {"precision": precision}
    return records.joined(datasets, isinstance(selector, Mapping), facts, num_realizations)


def realize(
    play: Callable[..., Any],
    key: Key,
    num_realizations: int,
    reduce: Callable[[Any, Bool[Array, " R"]], Any] | None = None,
    *,
    memory: int | None = None,
    mesh: Mesh | None = None,
    in_turn: int | None = None,
    begin: Callable[[float | None], None] | None = None,
) -> Iterator[tuple[Any, int]]:
    """Run numbered realizations in chunks; yield what is kept of each chunk, and how many of its first rows are real.

    Args:
        play: (key, number) -> what is kept of a realization. It makes its own key from the two.
        reduce: (chunk, which of its rows are real) -> what is kept of the chunk, with a leading axis; None keeps it all.
        in_turn: number of steps of a realization, where those of a chunk are to run one after another on a CPU: vectorised
            ones walk in step, and each would pay for every other one's refresh. Then `play` takes a third argument, the
            last step to play, and a few steps are timed before the first chunk.
        begin: called when all is compiled and the first chunk begins, with the seconds that all will take if they are known.
    """
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    is_double = jnp.zeros(()).dtype == jnp.float64
    num_devices = 1 if mesh is None else mesh.size
    # On a CPU each core has chunks of its own. Processes that share a mesh must all do the same things in the same order.
    num_workers = num_cores() if platform == "cpu" and mesh is None else 1
    if memory is None:
        memory = (
            1 << 29 if platform == "cpu" else jax.local_devices()[0].memory_stats()["bytes_limit"] // 3 * num_devices
        )
    is_single = in_turn is not None and platform == "cpu" and mesh is None
    last = (jnp.asarray(in_turn),) if is_single else ()
    play = jax.jit(play)  # traced once, for its size and to be run
    num_each = _chunk_size(
        play.trace(key, jnp.asarray(0), *last),
        -(-num_realizations // (num_devices * num_workers)),
        memory // (num_workers * num_devices),
        platform,
    )
    if is_single:
        num_each = 1  # nothing is gained by more, and an interruption waits for none of them
    num_chunk = num_devices * num_each

    def run(key: Key, start: Int[Array, ""], *last: Int[Array, ""]) -> Any:
        position = 0 if mesh is None else jax.lax.axis_index(mesh.axis_names[0])
        numbers = start + num_each * position + jnp.arange(num_each)
        every = jax.lax.map if is_single else lambda function, rows: jax.vmap(function)(rows)
        played = every(lambda number: records.compact(play(key, number, *last)), numbers)
        return played if reduce is None else reduce(played, numbers < num_realizations)

    if mesh is not None:
        each, same = PartitionSpec(mesh.axis_names[0]), PartitionSpec()
        run = jax.shard_map(run, mesh=mesh, in_specs=(same, same), out_specs=each, check_vma=False)
    starts = range(0, num_realizations, num_chunk)
    traced = jax.jit(run).trace(key, jnp.asarray(0), *last)
    compiled = cpu_threads.compiled(traced.lower(), cpu_threads.needs_of(traced.jaxpr), in_order_options())
    if begin is not None:
        begin(_foreseen(compiled, key, in_turn, num_realizations / num_workers) if is_single and in_turn else None)

    def finish(start: int) -> tuple[Any, int]:
        with jax.enable_x64(is_double):
            return _fetch(compiled(key, jnp.asarray(start), *last)), min(num_chunk, num_realizations - start)

    if platform != "cpu" or mesh is not None:
        yield from map(finish, starts)
        return
    # Also for a single core: the main thread only waits, so that it hears of an interruption at once.
    pool = ThreadPoolExecutor(num_workers)
    waiting = deque(pool.submit(finish, start) for start in starts)
    try:
        while waiting:
            yield waiting[0].result()
            waiting.popleft()
    finally:  # interrupted: what has not begun is dropped, and what has is not waited for
        pool.shutdown(wait=not waiting, cancel_futures=True)


def _foreseen(compiled: Any, key: Key, num_steps: int, num_turns: float) -> float:
    """Return the seconds that realizations will take, as a few steps of the first one do."""
    num_timed = min(_NUM_TIMED_STEPS, num_steps)
    began = time.monotonic()
    jax.block_until_ready(compiled(key, jnp.asarray(0), jnp.asarray(num_timed)))
    return (time.monotonic() - began) / num_timed * num_steps * math.ceil(num_turns)


def _fetch(part: Any) -> Any:
    """Return numpy arrays; where other processes hold shards of them, the shards of all."""
    if not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(part)):
        from jax.experimental import multihost_utils

        part = multihost_utils.process_allgather(part, tiled=True)
    return jax.device_get(part)


def _chunk_size(play: Any, num_realizations: int, memory: int, platform: str) -> int:
    """Return how many realizations fit the memory, and on a CPU also stay in its cache."""
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(play.out_info))
    # Without what nobody reads, which XLA leaves out: a simulation has no use for propensities.
    working = _WORKING_COPIES * _largest(eliminate_dead_code(play.jaxpr.jaxpr))
    fits = memory // (kept + working)
    if platform == "cpu":
        fits = min(fits, max(_CACHE // working, _LEAST_ON_CPU))
    return int(np.clip(fits, 1, num_realizations))


def _largest(jaxpr: Any) -> int:
    """Return the bytes of the largest array that a computation makes in a step; what a loop collects is counted as kept."""
    sizes = [1]
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            sizes += [math.prod(var.aval.shape) * 8 for var in eqn.outvars]
        sizes += [_largest(inner) for inner, _ in inner_jaxprs(eqn)]
    return max(sizes)


class _Progress:
    """How far a run is, and how long it will take, on the standard error: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int, is_shown: bool):
        self._total, self._done, self._is_shown = total, 0, is_shown
        self._spent, self._resumed, self._said = 0.0, time.monotonic(), -math.inf
        self._bar = None
        if is_shown and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="realization", unit_scale=True)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def resume(self, seconds: float | None = None) -> None:
        """Tell that realizations begin: what went before, such as compilation, says nothing about the time left.

        Args:
            seconds: that those of this selector will take, if a few steps told.
        """
        if self._is_shown and seconds is not None and seconds > _WORTH_SAYING:
            words = f"going by its first steps, this takes about {seconds:.0f} s; Ctrl-C keeps what is done"
            if self._bar is None:
                sys.stderr.write(words + "\n")
                sys.stderr.flush()
            else:
                self._bar.write(words, file=sys.stderr)
        self._resumed = time.monotonic()

    def advance(self, num: int) -> None:
        """Tell that realizations are done; the first ones tell what all of them will cost."""
        now = time.monotonic()
        self._done, self._spent, self._resumed = self._done + num, self._spent + now - self._resumed, now
        if self._bar is not None:
            self._bar.update(num)
        elif self._is_shown and self._done < self._total and now - self._said > _SECONDS_BETWEEN_LINES:
            left = self._spent * (self._total - self._done) / self._done
            self._said = now
            sys.stderr.write(f"{self._done} of {self._total} realizations; about {left:.0f} s left\n")
            sys.stderr.flush()
