"""The expected reward of each arm along something: an entry of the context, or the number of rewards."""

from typing import Any, NamedTuple

import numpy as np


class RewardCurves(NamedTuple):
    """A curve of each arm, with a band.

    Attributes:
        name: what it is along.
        values: (G,), of that.
        mean, low, high: (G, A), posterior mean of the expected reward, and its central 95% interval.
    """

    name: str
    values: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def draw(self, axis: Any, arm: int, colour: str, dash: Any, label: str) -> None:
        """Draw the line and the band of one arm."""
        axis.plot(self.values, self.mean[:, arm], color=colour, linestyle=dash, label=label)
        axis.fill_between(self.values, self.low[:, arm], self.high[:, arm], color=colour, alpha=0.13, linewidth=0)
