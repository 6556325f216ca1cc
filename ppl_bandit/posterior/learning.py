"""Fold rows into a posterior: what a live bandit has learnt is a value, replaced whole or not at all."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.posterior.capacity import Room, look
from ppl_bandit.posterior.compiled_functions import (
    QUICKLY,
    Compiled,
    Verdict,
    compiled_functions,
    context_like,
    contexts_like,
    row_numbers,
)
from ppl_bandit.posterior.task import Task
from ppl_bandit.posterior.warm_start import Start, leave, words_of
from ppl_bandit.program.model.recorded_readings import listing
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import forbid_programs
from ppl_bandit.types import Engine, Interaction

__all__ = ["Learner", "Rows", "fold", "pad_rows", "pieces", "prepare_growth", "start"]

_SIZES = (1024, 32, 1)  # of the pieces of many rows, compiled once each
_FIRST_ROOM = 4000  # rows: steps without a pause must not outrun the compiler, and room that is empty costs nothing
_FIRST_BYTES = 1 << 22  # of their contexts, which a step copies: of large ones there is room for a quarter as many rows


class Learner(NamedTuple):
    """What a bandit has learnt, and by which engine.

    Attributes:
        run: the engine's functions, compiled.
        held: the engine's state, as the compiled functions take it.
        seed: the bandit's, on the device.
        has_warned: whether its user knows that these draws lack evidence and that no engine is left to move to.
        doubts: why the draws of now lack evidence, in words; empty where they do not.
        num_doubted: how often in a row they were renewed and did.
        num_refreshes: how often its draws were renewed.
        room: for more rows.
        examples: the rows that the engine was sought for, where it took over from one that refused them.
    """

    engine: Engine
    run: Compiled
    held: Any
    seed: Any
    has_warned: bool = False
    doubts: str = ""
    num_doubted: int = 0
    num_refreshes: int = 0
    room: Room = Room()
    examples: Interaction | None = None

    @property
    def state(self) -> Any:
        """The engine's state, to look at."""
        return self.run.state(self.held)


class Rows(NamedTuple):
    """Rows of data whose form was checked: arms by index (N,), {outcome: (N,)}, and contexts with a leading axis N."""

    arms: np.ndarray
    rewards: dict[str, np.ndarray]
    contexts: Any


def start(task: Task, factory: Callable[[RewardModel], Engine]) -> Learner:
    """Build an engine, and return it with its prior; its first decision and update are compiled in the background.

    Where another process has started on the same task before, what it proved and traced is taken over.

    Raises:
        ValueError: if the factory does not return an engine.
    """
    words = words_of(task.selector, task.num_samples, task.draws, factory)
    found: Start | None = None if words is None else task.model.found(*words)
    with jax.enable_x64(True), listing() as recordings:
        engine = _built(factory, task.model) if found is None else found.engine(lambda: _built(factory, task.model))
        is_left = (
            words is not None
            and found is None
            and (engine.capabilities.reserve is None or engine.capabilities.is_traceable_without_program)
        )
        run = compiled_functions(task.model, engine, task.selector, task.num_samples, task.draws, is_portable=is_left)
        if found is not None:
            found.give_to(run, recordings)
        returned = run.init(np.int64(task.seed))
        held = run.finish[0](returned)[0]
        held = (
            held if engine.capabilities.reserve is None else engine.capabilities.reserve(held, _first_room(task.model))
        )
        learner = Learner(engine, run, held, jax.device_put(np.int64(task.seed)))
    _prepare(task, learner, learner.held)
    if words is not None and is_left:
        leave(words, task, engine, run, recordings)
    return learner


def _built(factory: Callable[[RewardModel], Engine], model: RewardModel) -> Engine:
    engine = factory(model)
    if not isinstance(engine, Engine):
        raise ValueError(f"engine must be a factory that returns an Engine, it returned {type(engine).__name__}")
    return engine


def _first_room(model: RewardModel) -> int:
    row_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(contexts_like(model, 1)))
    return _FIRST_ROOM if row_bytes * _FIRST_ROOM <= _FIRST_BYTES else _FIRST_ROOM // 4


def prepare_growth(task: Task, learner: Learner, num_rows: int) -> Learner:
    """Compile for the shape that an engine's state will grow to next, in the background, as soon as that is in sight.

    Args:
        num_rows: how many were learnt in all.
    """
    engine = learner.engine
    if engine.capabilities.reserve is None or learner.room.is_sure(num_rows):
        return learner
    with jax.enable_x64(True):
        room, grown = look(engine.capabilities.reserve, learner.room, learner.held, num_rows)
    if grown is not None:
        _prepare(task, learner, grown, forbid_programs if engine.capabilities.is_traceable_without_program else None)
    return learner._replace(room=room)


def _prepare(task: Task, learner: Learner, held: Any, within: Callable | None = None) -> None:
    context, contexts = context_like(task.model), contexts_like(task.model, 1)
    with jax.enable_x64(True):
        learner.run.select.prepare(
            learner.seed, held, np.int64(0), context, np.ones(len(task.arms), bool), within=within
        )
        if learner.engine.capabilities.reserve is not None:
            held = learner.engine.capabilities.reserve(held, 1)
        # The larger one first: whoever calls the other while it queues compiles that.
        for learn in (learner.run.learn, learner.run.learn_quickly):
            if learn is not None:
                learn.prepare(learner.seed, held, np.zeros(3 + len(task.model.outcomes)), contexts, within=within)


def fold(task: Task, learner: Learner, num_seen: int, rows: Rows) -> tuple[Any, Any]:
    """Return the engine's state with rows folded into it, as it is held, and its evidence; nothing is changed.

    Where an engine keeps no data, rows come in pieces of a few fixed sizes, each compiled once. The others read all of their
    data at an update, so that they are given all rows at once.

    Args:
        num_seen: rows folded before these; the engine's random numbers come from it.

    Raises:
        ValueError: for a reward that the program cannot produce.
    """
    engine, held, num_rows = learner.engine, learner.held, rows.arms.size
    infos, done = list[Any](), 0
    with jax.enable_x64(True):
        if engine.capabilities.reserve is not None and not learner.room.has(num_seen + num_rows):
            held = engine.capabilities.reserve(held, num_rows)
        for size in pieces(num_rows, _SIZES) if engine.capabilities.reserve is None else [_roomy(num_rows)]:
            piece = rows if size == num_rows else _slice(rows, done, min(size, num_rows - done), size)
            num_piece = min(size, num_rows - done)
            numbers = row_numbers(num_seen + done, num_piece, piece.arms, piece.rewards)
            held, verdict = _learnt(learner, held, numbers, piece.contexts, size)
            if not verdict.is_possible:  # rows that fill a piece up repeat its last one
                raise _impossible(task, rows, verdict.possible, done)
            infos.append(verdict.info)
            done += num_piece
            if engine.explanation.is_exact and not verdict.info.is_trusted:
                break  # all rows or none
    return held, infos[0] if len(infos) == 1 else _joined(infos, done)


def _learnt(learner: Learner, held: Any, numbers: np.ndarray, contexts: Any, size: int) -> tuple[Any, Verdict]:
    """Return the state after a piece, as it is held, and the verdict on it: quickly, where that is enough."""
    run, arguments = learner.run, (learner.seed, held, numbers, contexts)
    if size == 1 and run.learn_quickly is not None:
        returned = run.learn_quickly(*arguments)
        after, (verdict, is_enough) = run.finish[QUICKLY](returned, held)
        if not run.learn.is_ready:
            run.learn.wait()  # at the first row, and not at the one that first needs it
        if is_enough or not verdict.is_possible:
            return after, verdict
    returned = run.learn(*arguments)  # which notes how to finish
    return run.finish[size](returned)


def _slice(rows: Rows, start: int, num_rows: int, size: int) -> Rows:
    return pad_rows(jax.tree.map(lambda leaf: leaf[start : start + num_rows], rows), num_rows, size)


def _impossible(task: Task, rows: Rows, possible: Mapping[str, np.ndarray], start: int) -> ValueError:
    name = next(name for name, fits in possible.items() if not fits.all())
    row = start + int(np.argmin(possible[name]))
    where = f" in row {row}" if rows.arms.size > 1 else ""
    return ValueError(
        f"{name}={rows.rewards[name][row]:g}{where} is outside the support of the outcome '{name}' on arm "
        f"{task.arms.names[rows.arms[row]]!r}: the program cannot produce it; correct the reward or the program"
    )


def _joined(infos: list[Any], num_rows: int) -> Any:
    """Join the evidence of several pieces: what has a row axis in rows, and the last of what has none."""

    def join(*leaves: Any) -> Any:
        return np.concatenate(leaves)[:num_rows] if np.ndim(leaves[0]) else leaves[-1]

    joined = jax.tree.map(join, *infos)
    return joined._replace(is_trusted=np.all([info.is_trusted for info in infos]))


def pieces(num_rows: int, sizes: Sequence[int]) -> list[int]:
    """Cut rows into pieces of fixed sizes, of which the last is 1; a fifth of a piece, at most, is filled up."""
    if num_rows == 1:
        return [1]
    found = []
    for size in sizes:
        while num_rows >= (0.8 * size if size > 1 else 1):
            found.append(size)
            num_rows -= size
    return found


def _roomy(num_rows: int) -> int:
    """Round up to one of four sizes between powers of two: at most a quarter is filled up, and few sizes are compiled."""
    step = 1 << max((num_rows - 1).bit_length() - 3, 0)
    return -(-num_rows // step) * step


def pad_rows(tree: Any, num_rows: int, size: int) -> Any:
    """Repeat the last row up to a size."""
    if size == num_rows:
        return tree
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], size - num_rows, axis=0)]), tree)
