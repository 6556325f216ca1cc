"""One decision, as `Bandit.select` returns it."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ppl_bandit.journal.events import Event

__all__ = ["Decision", "decision_from_event", "decision_id"]


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
    """

    id: str
    arm: Any
    best_arm_probs: np.ndarray
    num_candidates: int
    propensity: float
    propensities: np.ndarray = field(repr=False)
    context: Any = field(default=None, repr=False)
    notes: tuple[str, ...] = ()

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
        }


def decision_from_event(event: Event, context: Any, notes: tuple[str, ...]) -> Decision:
    """Return the decision that an event records."""
    body, propensities = event.body, event.body["propensities"]
    return Decision(
        str(event.decision),
        body["name"],
        body["best_arm_probs"],
        body["num_candidates"],
        propensities.item(event.arm),
        propensities,
        context,
        notes,
    )


def decision_id(decision: Any) -> str:
    """Return the id of a decision, which may be given by its id.

    Raises:
        ValueError: for anything else.
    """
    name = decision.id if isinstance(decision, Decision) else decision
    if not isinstance(name, str):
        raise ValueError(f"decision must be a decision or its id, got {decision!r}")
    return name
