"""An independent version, in plain NumPy loops over named arms, of the order of checks in adaptr (R)."""

import numpy as np


def share_best(table, arms):
    """Return {arm: share of draws in which it is the largest of these arms}."""
    winners = np.argmax(table[:, arms], axis=1)
    return {arm: float(np.mean(winners == place)) for place, arm in enumerate(arms)}


def look_without_control(table, arms, low, high, equal, delta):
    """Return (ending, arms left)."""
    arms, probs = list(arms), share_best(table, arms)
    while any(value < low for value in probs.values()):
        arms = [arm for arm in arms if probs[arm] >= low]
        probs = share_best(table, arms)
    if max(probs.values()) >= high:
        return "superiority", arms
    own = table[:, arms]
    if np.mean(own.max(axis=1) - own.min(axis=1) < delta) >= equal:
        return "equivalence", arms
    return "continue", arms


def look_with_control(table, arms, control, low, high, equal, delta, futile, gain, only_first):
    """Return (ending, arms left, control)."""
    arms, first, stop = list(arms), control, None
    while True:
        own = table[:, control]
        better = {arm: np.mean(table[:, arm] > own) for arm in arms if arm != control}
        for arm in [arm for arm, value in better.items() if value < low]:
            arms.remove(arm)
        again = False
        left = {arm: value for arm, value in better.items() if arm in arms}
        if left and max(left.values()) >= high:
            winner = max(left, key=lambda arm: left[arm])
            arms.remove(control)
            control, again = winner, True
        elif not (only_first and control != first):
            for arm in [arm for arm in left if np.mean(np.abs(table[:, arm] - own) < delta) >= equal]:
                arms.remove(arm)
            if left and len(arms) == 1:
                stop = "equivalence"
            remaining = [arm for arm in left if arm in arms]
            for arm in [arm for arm in remaining if np.mean(table[:, arm] - own < gain) >= futile]:
                arms.remove(arm)
            if remaining and len(arms) == 1:
                stop = "futility"
        if len(arms) == 1:
            return stop or "superiority", arms, control
        if not again:
            return "continue", arms, control
