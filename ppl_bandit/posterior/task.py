"""Learning tasks, the rows that a posterior learns, and the history of an experiment.

Also here: learn some outcomes of a row now and the others later.

An engine on `counting_model` takes rows in which every outcome counts or not. A live bandit changes to it at the first reward
that is learnt in part, so that bandits without such rewards keep their smaller program.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ppl_bandit import engines
from ppl_bandit.inputs.numbers import Arms
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.outcomes import any_rewards, counting_context, counting_model
from ppl_bandit.types import Engine, Selector


class DesignRecord(NamedTuple):
    """What is recorded of the design of an experiment.

    Attributes:
        settings: the design as JSON values.
        allocation: probabilities of the arms before the first look; None lets the selector decide.
    """

    settings: Mapping[str, Any]
    allocation: tuple[float, ...] | None


class Windows(NamedTuple):
    """Times that are part of an experiment, in seconds; None is no limit.

    Attributes:
        unit: how long the decision of a unit stands.
        reward: after which a pending decision is settled.
        default: {outcome: value} of its reward; None discards it.
    """

    unit: float | None = None
    reward: float | None = None
    default: Mapping[str, float] | None = None


class Task(NamedTuple):
    """The fixed settings of a live bandit.

    Attributes:
        may_fall_back: whether another engine may replace an exact one that refuses a datum.
        draws: whether every decision draws the latents, even if the law of the decision is known (`engines.decide`).
        design: None for an experiment without one.
        late: entries of the context that are known only with the reward.
        factory: of the engine.
        windows: of units and rewards.
        is_partial: whether the engine takes rows of which some outcomes do not count.
    """

    model: RewardModel
    arms: Arms
    selector: Selector
    num_samples: int
    seed: int
    may_fall_back: bool
    draws: bool = False
    design: DesignRecord | None = None
    late: tuple[str, ...] = ()
    factory: Any = None
    windows: Windows = Windows()
    is_partial: bool = False


class Rows(NamedTuple):
    """Checked rows of data.

    Attributes:
        arms: indices, (N,).
        rewards: {outcome: (N,)}; nan for an outcome that is not learnt yet.
        contexts: with a leading axis N.
        counted: (N, outcomes), which outcomes to learn now; None learns all that are not nan.
        positions: (N,), of their events, if they are in a history; rows with position 0 cannot be edited.
    """

    arms: np.ndarray
    rewards: dict[str, np.ndarray]
    contexts: Any
    counted: np.ndarray | None = None
    positions: Any = None


def learning_model(task: Task) -> RewardModel:
    """Return the model of the rows that the engine takes."""
    return counting_model(task.model) if task.is_partial else task.model


def counted_rows(task: Task, rows: Rows) -> Rows:
    """Return rows as the engine takes them: `counted` is a part of the contexts, and no reward is nan."""
    if not task.is_partial:
        return rows
    model = task.model
    counted = is_known(rows, model.outcomes) if rows.counted is None else rows.counted
    stand_in = any_rewards(model)
    rewards = {name: np.where(np.isnan(values), stand_in[name], values) for name, values in rows.rewards.items()}
    return Rows(rows.arms, rewards, counting_context(model, rows.contexts, counted))


def is_known(rows: Rows, outcomes: tuple[str, ...]) -> np.ndarray:
    """Return which outcomes of each row are known, (N, outcomes)."""
    return np.stack([~np.isnan(rows.rewards[name]) for name in outcomes], axis=1)


@functools.lru_cache(maxsize=8)
def counting_engine(model: RewardModel, factory: Callable[[RewardModel], Engine]) -> Engine:
    """Return an engine on `counting_model` whose readings take the contexts of `model`."""
    with jax.enable_x64(True):
        engine = factory(counting_model(model))
    own = engine.capabilities
    everything = np.ones(len(model.outcomes), bool)

    def at_decision(read: Callable | None) -> Any:
        if read is None:
            return None
        return lambda state, context: read(state, counting_context(model, context, everything))

    readings = {"marginals": at_decision(own.marginals), "infinite_means": at_decision(own.infinite_means)}
    return engine._replace(capabilities=own._replace(add_rows=None, **readings))


def why_not_in_part(task: Task, engine: Engine) -> str:
    """Return why an experiment learns complete rewards only, in words; empty if it learns outcomes as they come.

    Args:
        engine: of the prior.
    """
    if task.is_partial:
        return ""
    if task.model.moving_sites:
        return "its latents move, so that a later outcome belongs to another time"
    if engine.settings.get("discount", 1.0) != 1.0:
        return "the engine discounts old rewards, and an outcome that comes later is not newer"
    factory = task.factory.func if isinstance(task.factory, functools.partial) else task.factory
    if (
        getattr(engines, getattr(factory, "__name__", ""), None) is not factory
    ):  # it may ignore the model that it is given
        return "the engine is not one of this library's"
    found = counting_engine(task.model, task.factory).explanation
    if found.engine != engine.explanation.engine:
        return f"the {engine.explanation.engine} engine fits complete rewards only"
    return ""


_BLOCK = 256  # number of parts that are joined into one


class History:
    """All rows that were learnt.

    Rows are stored in parts as they were added, and joined when they are read. An outcome that is not learnt yet is nan.

    Args:
        num_rows: number of the rows before those that are added.
        load: returns these rows; called when they are first read.

    Attributes:
        num_completed: number of updates that learnt more outcomes of a row.
    """

    def __init__(self, outcomes: tuple[str, ...], num_rows: int = 0, load: Callable[[], "History"] | None = None):
        self._outcomes = outcomes
        self._load = load  # histories that extend this one share it, and it loads once
        # Joined blocks, a list of later parts, and the number of these parts that belong to this history: histories that
        # extend it share the list.
        self._parts: tuple[tuple[Rows, ...], list[Rows], int] = ((), [], 0)
        # Changes of rows that are not made yet, and the number of them that belong to this history, which share the list.
        self._edits: tuple[list[Mapping[int, Rows | None]], int] = ([], 0)
        self.num_rows = num_rows
        self.num_completed = 0

    def __len__(self) -> int:
        return self.num_rows

    def extended(self, *parts: Rows) -> "History":
        """Return a history with more rows, which have positions."""
        blocks, pieces, num_pieces = self._parts
        if len(pieces) > num_pieces:  # another history extends this one
            pieces = pieces[:num_pieces]
        pieces.extend(parts)
        if len(pieces) >= _BLOCK:
            blocks, pieces = (*blocks, _joined(pieces)), []
        if len(blocks) >= _BLOCK:
            blocks = (_joined(blocks),)
        longer = History(self._outcomes, self.num_rows + sum(part.arms.size for part in parts), self._load)
        longer._parts, longer._edits = (blocks, pieces, len(pieces)), self._edits
        longer.num_completed = self.num_completed
        return longer

    def with_rows(self, rows: Sequence[tuple[int, Rows]], positions: Sequence[int]) -> "History":
        """Return a history with more rows, each given with the index of its event in `positions`."""
        parts = [Rows(*own[:3], positions=np.array([positions[index]] * own.arms.size)) for index, own in rows]
        return self.extended(*parts) if parts else self

    def edited(self, edits: Mapping[int, Rows | None], num_completed: int = 0) -> "History":
        """Return a history with other rows at some positions, one each; None removes a row, if it is there.

        Changes are made when rows are read, or when there are many; removals at once.

        Args:
            num_completed: how many of the changes are more outcomes of a row.
        """
        changed = History(self._outcomes, self.num_rows, self._load)
        changed._parts, changed.num_completed = self._parts, self.num_completed + num_completed
        if None in edits.values():
            rows, _ = _edited(self.rows(), edits)
            changed._load, changed._parts, changed.num_rows = None, _parts_of(rows), rows.arms.size
            return changed
        waiting, num_waiting = self._edits
        waiting = waiting if len(waiting) == num_waiting else waiting[:num_waiting]
        waiting.append(edits)
        if len(waiting) >= _BLOCK:
            rows, others = _edited(self._own(), {position: edit for each in waiting for position, edit in each.items()})
            changed._parts, waiting = _parts_of(rows), [others]
        changed._edits = waiting, len(waiting)
        return changed

    def _own(self) -> Rows:
        """Return the rows that were added, without the changes."""
        blocks, pieces, num_pieces = self._parts
        parts = [*blocks, *pieces[:num_pieces]]
        if len(parts) > 1:
            parts = [_joined(parts)]
            self._parts = (parts[0],), [], 0  # the same rows
        if not parts:
            nothing = {name: np.zeros(0) for name in self._outcomes}
            return Rows(np.zeros(0, int), nothing, None, positions=np.zeros(0, np.int64))
        return parts[0]

    def rows(self) -> Rows:
        """Return all rows; contexts are None if there are no rows."""
        rows, earlier = self._own(), None if self._load is None else self._load().rows()
        if earlier is not None and earlier.arms.size:
            rows = _joined([earlier, rows]) if rows.arms.size else earlier
        waiting, num_waiting = self._edits
        if num_waiting:
            rows, _ = _edited(
                rows, {position: edit for each in waiting[:num_waiting] for position, edit in each.items()}
            )
        return rows


def _parts_of(rows: Rows) -> tuple[tuple[Rows, ...], list[Rows], int]:
    return (rows,) if rows.arms.size else (), [], 0


def _edited(rows: Rows, edits: Mapping[int, Rows | None]) -> tuple[Rows, dict[int, Rows | None]]:
    """Return a copy of rows with changes at their positions, and the changes at other positions."""
    kept = jax.tree.map(np.copy, rows)
    positions = kept.positions
    is_kept, others = np.ones(positions.size, bool), {}
    order = np.argsort(positions, kind="stable")  # rows may be learnt in the order of their decisions
    for position, edit in edits.items():
        place = int(np.searchsorted(positions, position, sorter=order))
        row = order[min(place, positions.size - 1)] if positions.size else -1
        if row < 0 or positions[row] != position:
            others[position] = edit
        elif edit is None:
            is_kept[row] = False
        else:
            for leaf, own in zip(jax.tree.leaves(kept[:3]), jax.tree.leaves(edit[:3]), strict=True):
                leaf[row] = own[0]
    return (kept if is_kept.all() else jax.tree.map(lambda leaf: leaf[is_kept], kept)), others


def _joined(pieces: Sequence[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *pieces)
