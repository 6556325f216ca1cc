"""Checks and probabilities of slates: distinct arms, chosen one after another."""

import math
from typing import Any

import numpy as np

from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.projection import Projection

_MAX_SLATES = 2000  # that `place_propensities` adds up: one compiled decision each


def check_size(projection: Projection, allowed: np.ndarray, size: Any) -> int:
    """Return the number of places of a slate.

    Raises:
        ValueError: if it is not a count, or there are fewer arms to play.
    """
    size, num_playable = check_count(size, "size"), _num_playable(projection, allowed)
    if size > num_playable:
        raise ValueError(
            f"size={size} places need as many distinct arms, but {num_playable} may be played: allow more arms, or ask for a "
            f"slate of at most {num_playable}"
        )
    return size


def place_propensities(
    experiment: Experiment, projection: Projection, allowed: np.ndarray, context: Any, size: Any
) -> np.ndarray:
    """Return the probability of each arm in each place of the next slate, (size, A): a sum over the places before.

    Raises:
        ValueError: if there are too many slates to add up.
    """
    size = check_size(projection, allowed, size)
    num_slates = math.perm(_num_playable(projection, allowed), size - 1)
    if num_slates > _MAX_SLATES:
        raise ValueError(
            f"size={size} of {int(allowed.sum())} arms needs a sum over {num_slates} slates, the limit is {_MAX_SLATES}: allow "
            "fewer arms, or read the probabilities of one slate, select(size=...).propensities"
        )
    found = np.zeros((size, allowed.size))
    slates: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(size):
        longer: dict[tuple[int, ...], float] = {}
        for chosen, prob in slates.items():
            probs = prob * experiment.next_propensities(projection, allowed, context, chosen)
            found[place] += probs
            longer |= {(*chosen, int(arm)): float(probs[arm]) for arm in np.flatnonzero(probs)}
        slates = longer
    return found


def _num_playable(projection: Projection, allowed: np.ndarray) -> int:
    return int(allowed.sum()) - sum(bool(allowed[arm]) for arm in projection.retired)
