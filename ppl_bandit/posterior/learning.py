"""A live posterior as a value: an engine, its compiled functions and its state; updates return another value."""

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.posterior.compiled_functions import CompiledFunctions, example_contexts
from ppl_bandit.posterior.task import Task, learning_model
from ppl_bandit.posterior.warm_start import find_start, store_start
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.cpu_threads import is_on_cpu, num_cores
from ppl_bandit.runtime.packed_state import Packed, pack, unpack
from ppl_bandit.selectors.selector_contract import check_horizon
from ppl_bandit.types import Engine, Interaction, Selection

# Batch sizes of an engine that stores no rows; each is compiled once, for about 3 s. 32 rows take 0.16 ms, one takes 0.1 ms.
UPDATE_SIZES = (1024, 32, 1)
# Rows. A larger capacity is compiled anew, for seconds. 16,000 in place of 4,000 make a step of a logistic program with 10
# features 1.13 times as long, of which most is copying the rows.
_FIRST_CAPACITY = 8000
RENEWED = ("collapsed", "collapsed_kalman", "reweight")  # engines that renew their draws as rewards arrive
_FIRST_BYTES = 1 << 22  # contexts of more bytes, which a step copies, start with an eighth of it


class Learner(NamedTuple):
    """What a bandit has learnt, and by which engine.

    Attributes:
        run: the engine's functions, compiled.
        stored: the engine's state as the compiled functions take it: packed, unless it grows.
        seed: the bandit's seed, on the device.
        has_warned: whether the user was warned that the draws lack evidence.
        doubts: why the present draws lack evidence, in words; empty if they do not.
        num_doubted: number of times in a row that the draws were renewed and still lacked evidence.
        num_refreshes: number of times that the draws were renewed.
        examples: rows that an exact engine refused and that this engine was chosen for.
    """

    engine: Engine
    run: CompiledFunctions
    stored: Any
    seed: Any
    has_warned: bool = False
    doubts: str = ""
    num_doubted: int = 0
    num_refreshes: int = 0
    examples: Interaction | None = None

    @property
    def state(self) -> Any:
        """The engine's state; NumPy arrays if it is stored packed."""
        return unpack(jax.device_get(self.stored)) if isinstance(self.stored, Packed) else self.stored

    @property
    def learns_singly(self) -> bool:
        """Whether rows that came together are best learnt one after another.

        An engine that stores rows compiles an update for each number of rows when it comes, for seconds. One row is compiled,
        and takes milliseconds where the draws are seldom renewed.
        """
        engine = self.engine
        return engine.capabilities.reserve is not None and engine.explanation.engine in RENEWED

    def with_state(self, state: Any) -> "Learner":
        """Return the learner with another state, of NumPy arrays."""
        return self._replace(stored=pack(state) if isinstance(self.stored, Packed) else state)


def start(task: Task, factory: Callable[[RewardModel], Engine], is_model_new: bool = False) -> Learner:
    """Return the prior of an engine; the first decision and update are compiled in the background.

    The first row does not wait for `update` where `quick_update` is sufficient: that is compiled before. The arguments are
    those of `find_start`.
    """
    found = find_start(task, factory, is_model_new)
    engine, run = found.engine, found.run
    capabilities, contexts = engine.capabilities, example_contexts(learning_model(task), 1)
    with jax.enable_x64(True):
        seed = np.int64(task.seed)
        run.init.prepare(seed)
        stored = run.init(seed)
        if capabilities.reserve is not None:
            stored = capabilities.reserve(stored, _first_capacity(contexts))
        learner = Learner(engine, run, stored, jax.device_put(seed))
        context = jax.tree.map(lambda leaf: leaf[0], example_contexts(task.model, 1))
        run.select.prepare(learner.seed, stored, np.int64(0), context, np.ones(len(task.arms), bool))
        rows = np.zeros(3 + len(task.model.outcomes))
        is_traced_later = run.quick_update is not None and capabilities.record_readings is not None
        if run.quick_update is not None:
            run.quick_update.prepare(learner.seed, stored, rows, contexts)
        if is_traced_later and run.update.exported is None:
            capabilities.record_readings(stored)  # type: ignore[misc]
        run.update.prepare(learner.seed, stored, rows, contexts, is_traced_later=is_traced_later)
    store_start(found)
    return learner


def _first_capacity(contexts: Any) -> int:
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(contexts))
    return _FIRST_CAPACITY if row_bytes * _FIRST_CAPACITY <= _FIRST_BYTES else _FIRST_CAPACITY // 8


def prepare_batches(task: Task, learner: Learner, decision_sizes: Sequence[int]) -> None:
    """Start to compile the decisions and the updates of many rows, at each size that calls use.

    An engine that stores rows compiles its updates when they come: their sizes depend on the number of rows.
    """
    allowed = np.ones(len(task.arms), bool)
    with jax.enable_x64(True):
        for size in decision_sizes:
            contexts = example_contexts(task.model, size)
            numbers = np.zeros(size, np.int64)
            learner.run.select_many.prepare(learner.seed, learner.stored, numbers, contexts, jax.device_put(allowed))
        for size in UPDATE_SIZES[:-1] if learner.engine.capabilities.reserve is None else ():
            rows = np.zeros(2 + size * (1 + len(task.model.outcomes)))
            contexts = example_contexts(learning_model(task), size)
            learner.run.update.prepare(learner.seed, learner.stored, rows, contexts)
    learner.run.select_many.wait()


def draw(learner: Learner, num_samples: int, context: Any = None) -> dict[str, np.ndarray]:
    """Return posterior draws as NumPy arrays.

    Args:
        context: if latents move, the draws are predicted to its time; None reads the next step.
    """
    with jax.enable_x64(True):
        return jax.device_get(learner.run.draw(num_samples)(learner.seed, learner.stored, context))


def prepare_draws(task: Task, learner: Learner) -> None:
    """Compile `draw` for the task's number of draws."""
    function = learner.run.draw(task.num_samples)
    with jax.enable_x64(True):
        function.prepare(learner.seed, learner.stored, None)
    function.wait()


def draw_expected_rewards(learner: Learner, context: Any, num_samples: int) -> np.ndarray:
    """Return posterior draws of each arm's expected reward, (M, A)."""
    with jax.enable_x64(True):
        return np.asarray(learner.run.expected_rewards(num_samples)(learner.seed, learner.stored, context))


def evidence_of(learner: Learner) -> tuple[float, float]:
    """Return the log density of the rewards learnt, log p(rewards), and its standard error, 0 if it is exact.

    Raises:
        ValueError: if the engine does not estimate it.
    """
    find = learner.engine.capabilities.log_evidence
    if find is None:
        raise ValueError(
            f"the {learner.engine.explanation.engine} engine does not estimate the log evidence: leave engine out, or use "
            "engines.reweight"
        )
    with jax.enable_x64(True):
        return find(jax.device_get(learner.state))


def batch_sizes(num_rows: int, sizes: Sequence[int]) -> list[int]:
    """Split a number of rows into batches of fixed sizes, the last of which is 1; a single row alone is a batch of 1.

    At most half of a batch is padding, except in the smallest of more than one row, which costs about as much as two rows.
    """
    found = []
    smallest = min((size for size in sizes if size > 1), default=1)
    for size in sizes:
        least = 2 if size == smallest else -(-size // 2)
        while num_rows >= least:
            found.append(size)
            num_rows -= size
    return found


def row_batches(tree: Any, num_rows: int, sizes: Sequence[int]) -> list[tuple[int, int, Any]]:
    """Return rows in batches of some sizes; the last is filled up with copies of its last row.

    Returns:
        The index of the first row, the number of rows without copies, and the batch.
    """
    if sizes == [num_rows]:
        return [(0, num_rows, tree)]
    batches, start = [], 0
    for size in sizes:
        indices = np.minimum(np.arange(start, start + size), num_rows - 1)
        batches.append((start, min(size, num_rows - start), jax.tree.map(lambda leaf, own=indices: leaf[own], tree)))
        start += size
    return batches


# Batch sizes; each is compiled once, for about 6 s. On one core 64 decisions take 0.8 ms, 16 take 0.5 ms, one takes 0.24 ms.
SIZES = (64, 16, 1)


def decide(
    task: Task, learner: Learner, numbers: Sequence[int], contexts: Any, allowed: np.ndarray, *, is_batch: bool
) -> list[Selection]:
    """Return the decisions with some numbers, counted from 0; each has its own posterior draws, and its arrays are read-only.

    Args:
        contexts: in a batch, with a leading axis, one row per decision; otherwise one context. None for a program without.

    Raises:
        ValueError: if the expected rewards of any are not finite, or the last decision lies beyond the selector's horizon.
    """
    if task.selector.horizon is not None:
        check_horizon(numbers[-1] + 1, task.selector.horizon)
    if is_batch:
        rows = _rows(learner, np.array(numbers), contexts, allowed)
    else:
        with jax.enable_x64(True):
            mask = _mask(allowed.tobytes())
            row = learner.run.select(learner.seed, learner.stored, np.int64(numbers[0]), contexts, mask)
            # A copy: a store keeps parts of it for every decision, and a view would keep the device's buffers, 4 kB each.
            rows = np.array(row)[None]
    rows.flags.writeable = False
    found = []
    for row, values in zip(rows, rows.tolist(), strict=True):  # indexing an array takes several times as long
        num_arms = (len(values) - 2) // 2  # see `_selection_row` of `compiled_functions`
        if values[0] < 0:
            raise ValueError(
                "the expected rewards of this decision are not finite, so no arm can be chosen: the program's mean overflows "
                "or is undefined at this context or at draws from this posterior"
            )
        fields: Any = int(values[0]), row[1 : 1 + num_arms], int(values[1 + num_arms]), row[2 + num_arms :]
        found.append(Selection(*fields))
    return found


def _rows(learner: Learner, numbers: np.ndarray, contexts: Any, allowed: np.ndarray) -> np.ndarray:
    """Return one row for each decision of a batch."""
    run, seed, stored = learner.run, learner.seed, learner.stored
    sizes = batch_sizes(numbers.size, SIZES)
    parts = [part for *_, part in row_batches((numbers, contexts), numbers.size, sizes)]
    with jax.enable_x64(True):
        mask = _mask(allowed.tobytes())

    def rows(part: Any) -> np.ndarray:
        with jax.enable_x64(True):  # the setting is local to a thread
            if part[0].size > 1:
                return np.asarray(run.select_many(seed, stored, *part, mask))
            return np.asarray(run.select(seed, stored, *jax.tree.map(lambda leaf: leaf[0], part), mask))[None]

    for part in {part[0].size: part for part in parts if part[0].size > 1}.values():
        run.select_many.prepare(seed, stored, *part, mask)  # traced here: only this thread may run the program
    run.select_many.wait()
    if sum(size > 1 for size in sizes) <= 1 or not is_on_cpu():
        found = list(map(rows, parts))
    else:
        with ThreadPoolExecutor(num_cores()) as pool:
            found = list(pool.map(rows, parts))
    return np.concatenate(found)[: numbers.size]


@functools.lru_cache(maxsize=256)
def _mask(allowed: bytes) -> jax.Array:
    """Return a mask of arms on the device; a bandit uses few different ones."""
    return jax.device_put(np.frombuffer(allowed, bool))
