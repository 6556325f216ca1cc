"""One decision, as it is handed to a caller."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

__all__ = ["Decision"]


@dataclass(frozen=True, eq=False)
class Decision:
    """One decision: the arm to play, and the probabilities it was made by.

    Attributes:
        id: names the decision, among all decisions ever made; `Bandit.update` takes it in place of the decision.
        arm: the arm to play, by name if the bandit's arms have names.
        best_arm_probs: (A,), the posterior probability that each arm is best (p-hat).
        num_candidates: how many candidate arms the selector drew; 0 if it draws none.
        propensity: the probability with which this arm was played.
        propensities: (A,), the probability with which each arm would have been played.
        context: the context it was made in, or None.
        notes: what to know before its numbers are averaged, in words; mostly empty.
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
        """Return plain JSON values, for a message or a log."""
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
