"""An independent version, in plain NumPy loops over named arms, of the order of checks and of the allocation in adaptr (R)."""

import numpy as np


def rescaled(values):
    return values / values.sum()


def reallocated(probs, fixed, low, high, power, match=None):
    """Return allocation probabilities; nan in `fixed`, `low` or `high` is no restriction."""
    probs = np.array(probs, float)
    if match is not None and probs.size > 1:
        probs[match] = max(value for arm, value in enumerate(probs) if arm != match)
        if not probs.any():
            probs[:] = 1.0
        probs = rescaled(probs)
    if np.isnan(np.concatenate([fixed, low, high])).all():
        return rescaled(probs**power)
    final = np.array(fixed, float)
    if not np.isnan(final).any():
        return rescaled(final)
    while abs(np.nansum(final) - 1.0) > 1e-13:
        rest, is_open = 1.0 - np.nansum(final), np.isnan(final)
        total = probs[is_open].sum()
        trial = final.copy()
        trial[is_open] = rest * (probs[is_open] / total if total > 0 else 1.0 / is_open.sum())
        if power < 1:
            trial[is_open] = rest * rescaled(rescaled(trial[is_open]) ** power)
        for arm in np.flatnonzero(is_open):
            if trial[arm] < low[arm]:
                trial[arm] = final[arm] = low[arm]
            elif trial[arm] > high[arm]:
                trial[arm] = final[arm] = high[arm]
        if abs(trial.sum() - 1.0) <= 1e-13:
            final = trial
        if not np.isnan(final).any() and abs(final.sum() - 1.0) > 1e-13:
            final = rescaled(final)
    return final


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
