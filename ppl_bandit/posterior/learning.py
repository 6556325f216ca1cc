"""A live posterior as a value: an engine, its compiled functions and its state; updates return another value."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.posterior.compiled_functions import (
    CompiledFunctions,
    UpdateResult,
    example_contexts,
    pack_rows,
)
from ppl_bandit.posterior.partial_rows import Rows, counted_rows, learning_model
from ppl_bandit.posterior.task import Task
from ppl_bandit.posterior.warm_start import find_start, store_start
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.packed_state import Packed, pack, unpack, with_changes
from ppl_bandit.types import Engine, Interaction

__all__ = [
    "Learner",
    "Rows",
    "batch_sizes",
    "draw",
    "draw_expected_rewards",
    "evidence_of",
    "fold",
    "pad_rows",
    "prepare_batches",
    "prepare_draws",
    "start",
]

# Batch sizes of an engine that stores no rows; each is compiled once, for about 3 s. 32 rows take 0.16 ms, one takes 0.1 ms.
_SIZES = (1024, 32, 1)
# Rows. A larger capacity is compiled anew, for seconds. 16,000 in place of 4,000 make a step of a logistic program with 10
# features 1.13 times as long, of which most is copying the rows.
_FIRST_CAPACITY = 8000
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
        for size in _SIZES[:-1] if learner.engine.capabilities.reserve is None else ():
            rows = np.zeros(2 + size * (1 + len(task.model.outcomes)))
            contexts = example_contexts(learning_model(task), size)
            learner.run.update.prepare(learner.seed, learner.stored, rows, contexts)
    learner.run.select_many.wait()


def fold(task: Task, learner: Learner, num_seen: int, rows: Rows) -> tuple[Any, Any]:
    """Return the stored state after an update with rows, and the engine's evidence.

    An engine that stores no rows gets them in batches of a few fixed sizes. Other engines read all their data at an update,
    so they get all rows at once.

    Args:
        num_seen: number of rows learnt before these; the engine's random keys depend on it.

    Raises:
        ValueError: for a reward that the program cannot produce.
    """
    engine, stored, num_rows = learner.engine, learner.stored, rows.arms.size
    rows = counted_rows(task, rows)
    reserve = engine.capabilities.reserve
    infos: list[Any] = []
    done = 0
    with jax.enable_x64(True):
        if reserve is not None:
            stored = reserve(stored, num_rows)
        for size in batch_sizes(num_rows, _SIZES) if reserve is None else [_rounded_up(num_rows)]:
            num_batch = min(size, num_rows - done)
            batch = rows if size == num_rows else _slice(rows, done, num_batch, size)
            numbers = pack_rows(task.model.outcomes, num_seen + done, num_batch, batch.arms, batch.rewards)
            stored, result = _update(learner, stored, numbers, batch.contexts, size)
            if not result.is_possible:  # padding repeats the last row, so it is impossible only if that row is
                raise _impossible_reward(task, rows, result.possible, done)
            infos.append(result.info)
            done += num_batch
            if engine.explanation.is_exact and not result.info.is_trusted:
                break  # the caller discards the whole update
    return stored, infos[0] if len(infos) == 1 else _joined(infos, done)


def _update(learner: Learner, stored: Any, numbers: np.ndarray, contexts: Any, size: int) -> tuple[Any, UpdateResult]:
    """Update with one batch: by `quick_update` for one row, if that is sufficient."""
    run, arguments = learner.run, (learner.seed, stored, numbers, contexts)
    if size == 1 and run.quick_update is not None:
        changes, packed = run.quick_update(*arguments)
        result = unpack(packed)
        if result.is_complete or not result.is_possible:
            return with_changes(changes, stored), result
    after, packed = run.update(*arguments)
    return after, unpack(packed)


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


def _slice(rows: Rows, start: int, num_rows: int, size: int) -> Rows:
    return pad_rows(jax.tree.map(lambda leaf: leaf[start : start + num_rows], rows), num_rows, size)


def _impossible_reward(task: Task, rows: Rows, possible: Mapping[str, np.ndarray], start: int) -> ValueError:
    name = next(name for name, fits in possible.items() if not fits.all())
    row = start + int(np.argmin(possible[name]))
    where = f" in row {row}" if rows.arms.size > 1 else ""
    return ValueError(
        f"{name}={rows.rewards[name][row]:g}{where} is outside the support of the outcome '{name}' on arm "
        f"{task.arms.names[rows.arms[row]]!r}: the program cannot produce it; correct the reward or the program"
    )


def _joined(infos: list[Any], num_rows: int) -> Any:
    """Join the evidence of several batches: concatenate fields with a row axis, take the last value of the others."""

    def join(*leaves: Any) -> Any:
        return np.concatenate(leaves)[:num_rows] if np.ndim(leaves[0]) else leaves[-1]

    joined = jax.tree.map(join, *infos)
    return joined._replace(is_trusted=np.all([info.is_trusted for info in infos]))


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


def _rounded_up(num_rows: int) -> int:
    """Round up to one of four sizes between powers of two, so that few sizes are compiled; at most a quarter is padding."""
    step = 1 << max((num_rows - 1).bit_length() - 3, 0)
    return -(-num_rows // step) * step


def pad_rows(tree: Any, num_rows: int, size: int) -> Any:
    """Repeat the last row up to a size."""
    if size == num_rows:
        return tree
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], size - num_rows, axis=0)]), tree)
