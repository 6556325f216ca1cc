"""One decision, or a slate of them, as `Bandit.select` returns it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ppl_bandit.engines.laws.mixture import INFINITE_MEAN_TEXT
from ppl_bandit.journal.events import Event
from ppl_bandit.posterior.learning import Learner, draw
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.reward_model import RewardModel

_NUM_CHECKED_DRAWS = 200  # of the posterior, where arguments may leave their domains


@dataclass(frozen=True, eq=False)
class Decision:
    """One decision: the arm to play, and the probabilities behind it.

    Attributes:
        id: unique id; `Bandit.update` takes it in place of the decision.
        arm: the arm to play, by name if the bandit's arms have names.
        best_arm_probs: (A,), the posterior probability that each arm is best (p-hat).
        num_candidates: number of candidate arms that the selector drew; 0 if it draws none.
        propensity: the probability with which this arm was played.
        propensities: (A,), the probability with which each arm would have been played.
        context: the context of the decision, or None.
        notes: warnings about these numbers; usually empty.
        unit: that the decision is for, or None.
        version: position of the last event that it knew.
        is_new: whether the call that returns it recorded it; False if the unit or the request had it before.
    """

    id: str
    arm: Any
    best_arm_probs: np.ndarray
    num_candidates: int
    propensity: float
    propensities: np.ndarray = field(repr=False)
    context: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()
    unit: str | None = None
    version: int = 0
    is_new: bool = field(default=True, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as JSON values, for a message or a log."""
        return {
            "id": self.id,
            "arm": self.arm,
            "best_arm_probs": self.best_arm_probs.tolist(),
            "num_candidates": self.num_candidates,
            "propensity": self.propensity,
            "propensities": self.propensities.tolist(),
            "context": jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), self.context),
            "notes": list(self.notes),
            "unit": self.unit,
            "version": self.version,
        }


@dataclass(frozen=True, eq=False)
class Slate:
    """Distinct arms in order, one decision for each place; `Bandit.update` takes their rewards by place.

    Attributes:
        decisions: of the places, in order; the propensities of each are given the arms in the places before.
    """

    decisions: tuple[Decision, ...]

    @property
    def arms(self) -> list[Any]:
        """The arms, by place."""
        return [decision.arm for decision in self.decisions]

    @property
    def propensity(self) -> float:
        """The probability of this slate: the product of the propensities of its places."""
        return math.prod(decision.propensity for decision in self.decisions)

    @property
    def propensities(self) -> np.ndarray:
        """(places, A), the probability of each arm in each place, given the arms in the places before."""
        return np.stack([decision.propensities for decision in self.decisions])

    @property
    def context(self) -> Any:
        """The context of the slate, or None."""
        return self.decisions[0].context

    def to_dict(self) -> dict[str, Any]:
        """Return the slate as JSON values, for a message or a log."""
        decisions = [decision.to_dict() for decision in self.decisions]
        return {"arms": self.arms, "propensity": self.propensity, "decisions": decisions}


def decision_from_event(event: Event, context: Any, task: Task, learner: Learner | None = None) -> Decision:
    """Return the decision that an event records.

    Args:
        learner: that it was made with, for its notes; None for a decision that was recorded before.
    """
    notes: tuple[str, ...] = ()
    if learner is not None and (
        learner.doubts or learner.engine.capabilities.infinite_means is not None or _may_have_notes(task.model)
    ):
        notes = _decision_notes(task, learner, context)
    body, propensities = event.body, np.asarray(event.body["propensities"])
    return Decision(
        str(event.decision),
        body["name"],
        np.asarray(body["best_arm_probs"]),
        body["num_candidates"],
        propensities.item(int(event.arm or 0)),
        propensities,
        context,
        notes,
        body.get("unit"),
        body["absorbed"],
        learner is not None,
    )


def _decision_notes(task: Task, learner: Learner, context: Any) -> tuple[str, ...]:
    """Return the warnings about the numbers of a decision: rough expected rewards, doubted draws, infinite means."""
    outside = domain_doubt(task.model, learner, [context])
    notes = tuple(filter(None, (task.model.expected_reward_note, learner.doubts, outside)))
    has_infinite_mean = learner.engine.capabilities.infinite_means
    if has_infinite_mean is None:
        return notes
    flags = zip(task.arms.names, has_infinite_mean(learner.state, context), strict=True)
    names = ", ".join(str(name) for name, is_infinite in flags if is_infinite)
    return (*notes, f"expected reward of {names}: {INFINITE_MEAN_TEXT}") if names else notes


def domain_doubt(model: RewardModel, learner: Learner, contexts: Sequence[Any]) -> str:
    """Return at which share of the posterior draws outcomes leave their domains, at the worst context; empty if at none."""
    if not model.may_leave_domains:
        return ""
    draws = draw(learner, _NUM_CHECKED_DRAWS, contexts[-1])
    share = max(float(_share_outside(model)(draws, context)) for context in contexts)
    if share == 0.0:
        return ""
    return (
        f"at {share:.1%} of the posterior draws an argument of an outcome is outside of its domain (a probability below 0, a "
        "negative scale): give the latents priors that stay inside"
    )


@functools.lru_cache(maxsize=8)
def _may_have_notes(model: RewardModel) -> bool:
    return bool(model.expected_reward_note) or model.may_leave_domains


@functools.lru_cache(maxsize=8)
def _share_outside(model: RewardModel) -> Callable[..., Any]:
    return jax.jit(model.share_outside_domains)


def decision_ids(decision: Any) -> list[str]:
    """Return the ids of the decisions of a slate, or that of one decision."""
    return [one.id for one in decision.decisions] if isinstance(decision, Slate) else [decision_id(decision)]


def decision_id(decision: Any) -> str:
    """Return the id of a decision, which may be given by its id.

    Raises:
        ValueError: for anything else.
    """
    name = decision.id if isinstance(decision, Decision) else decision
    if not isinstance(name, str):
        raise ValueError(f"decision must be a decision or its id, got {decision!r}")
    return name
