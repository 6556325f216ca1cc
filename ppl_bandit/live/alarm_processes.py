"""E-processes of the alarms: pure functions that carry their state, so that new events cost the same however many came before.

An e-process is nonnegative and has expectation at most 1 at every stopping time while nothing is wrong. So the probability that
it ever reaches 1 / alpha is at most alpha (Ville's inequality), and it may be computed again after every event.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.types import check_number

_TILTS = np.array([-1.6, -0.8, -0.4, -0.2, 0.2, 0.4, 0.8, 1.6])  # log odds ratios of an arm's probability
_RATES = np.array([1.25, 1.5, 2.0, 3.0, 5.0])  # factors on the odds of a missing reward
_SLOPES = np.array([-0.6, -0.3, 0.3, 0.6])  # of the density of ranks after a change
_ROWS_PER_START = 100  # a change may begin after every so many rewards of an arm
_OPENING = (0.95, 0.99, 0.999)  # P(best) of an arm at which a bet against it opens
_CLOSING = 0.1  # P(best) of the arm below which the bet closes


class DriftState(NamedTuple):
    """The state of `drift_process` after some values.

    Attributes:
        seen: the values, sorted.
        logs: (B,), log of prod (1 + b (2 u - 1)) for each slope b.
        started: (B,), log of the sum of the weights of the starts so far, each over the product before it.
        capital: log of the process before its first value.
        value: log of the process now.
    """

    seen: list[float]
    logs: np.ndarray
    started: np.ndarray
    capital: float = 0.0
    value: float = 0.0


class Bet(NamedTuple):
    """One bet of `concentration_process` that an arm loses its lead.

    Attributes:
        opening: P(best) at which it opens.
        capital: log of what earlier bets have earned.
        arm: index of the arm; None while no bet is open.
        base: the estimate of 1 - P(best) at its opening; None until the decision after.
        is_closing: whether it closes at the next decision.
    """

    opening: float
    capital: float = 0.0
    arm: int | None = None
    base: float | None = None
    is_closing: bool = False


def sample_ratio_start(num_arms: int, logs: np.ndarray | None = None) -> np.ndarray:
    """Return the log capitals (A, L) of `sample_ratio_process`; arms that are added get the mean capital of the others."""
    if logs is None:
        return np.zeros((num_arms, _TILTS.size))
    added = np.full((num_arms - len(logs), _TILTS.size), log_mean(logs.ravel()))
    return np.concatenate([logs, added])


def sample_ratio_steps(arms: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """Return the log likelihood ratios l [A_t = a] - log(1 - e_t(a) + e_t(a) exp(l)) of all arms a and tilts l, (T, A, L).

    Args:
        arms: (T,), indices of the arms that were drawn.
        propensities: (T, A).
    """
    is_played = arms[:, None] == np.arange(propensities.shape[1])
    steps = _TILTS * is_played[..., None] - np.log1p(propensities[..., None] * np.expm1(_TILTS))
    steps[propensities[np.arange(arms.size), arms] <= 0] = math.inf
    return steps


def override_steps(drawn: int, shown: int, num_arms: int) -> np.ndarray:
    """Return the step (A, L) by which the arm that was shown replaces the one that was drawn."""
    arms = np.arange(num_arms)
    return np.multiply.outer((arms == shown) * 1.0 - (arms == drawn), _TILTS)


def sample_ratio_process(steps: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the log of an e-process against "arm A_t was drawn with the probabilities e_t" after every step, and its state.

    It is the mean of the likelihood ratios over arms and tilts.

    Args:
        steps: (T, A, L), see `sample_ratio_steps`.
        start: (A, L), the state before.
    """
    logs = start + np.cumsum(steps, axis=0)
    return log_mean(logs.reshape(len(logs), start.size)), logs[-1] if len(logs) else start


def missing_process(num_missing: np.ndarray, num_decisions: np.ndarray, tolerated: float) -> np.ndarray:
    """Return the log of an e-process against "each reward is missing with at most the tolerated probability".

    It is the mean of likelihood ratios over larger rates. It falls with every reward that is not missing, so to count one that
    is still awaited as not missing can only lower it.

    Args:
        num_missing: (T,), number of missing rewards so far.
        num_decisions: (T,), number of decisions so far.
        tolerated: strictly inside (0, 1).
    """
    if not 0.0 < check_number(tolerated, "missing") < 1.0:
        raise ValueError(
            f"missing must lie strictly inside (0, 1), got {tolerated!r}: the share of rewards that may be missing"
        )
    odds = _RATES * tolerated / (1.0 - tolerated)
    rates = odds / (1.0 + odds)
    present = np.asarray(num_decisions) - num_missing
    return log_mean(
        np.multiply.outer(num_missing, np.log(rates / tolerated))
        + np.multiply.outer(present, np.log((1 - rates) / (1 - tolerated)))
    )


def new_drift(capital: float = 0.0) -> DriftState:
    """Return the state of `drift_process` before the first value."""
    return DriftState([], np.zeros(_SLOPES.size), np.full(_SLOPES.size, -math.inf), capital, capital)


def drift_process(values: np.ndarray, ties: np.ndarray, state: DriftState) -> tuple[np.ndarray, DriftState]:
    """Return the log of an e-process against "these values are exchangeable" after every value, and its state.

    The rank of each value among those so far is uniform and independent of the earlier ranks, whatever the law of the values.
    A change makes later ranks small or large. The process is a mean over slopes b of prod (1 + b (2 u - 1)), started after
    every 100 values with weights that add up to 1.

    Args:
        values: (n,), such as the rewards of one arm in the order of its decisions.
        ties: (n,), uniform numbers, by which equal values are ranked.
        state: after the values before; its list is extended.
    """
    seen, num_before = state.seen, len(state.seen)
    if not values.size:
        return np.zeros(0), state
    ranks = np.empty(values.size)
    for row, value in enumerate(values.tolist()):
        below, upto = bisect_left(seen, value), bisect_right(seen, value)
        ranks[row] = (below + ties[row] * (upto - below + 1)) / (len(seen) + 1)
        insort(seen, value)
    numbers = num_before + np.arange(values.size)
    logs = state.logs + np.cumsum(np.log1p(_SLOPES * (2.0 * ranks[:, None] - 1.0)), axis=0)
    starts = numbers // _ROWS_PER_START
    weights = 1.0 / ((starts + 1.0) * (starts + 2.0))  # they add up to less than 1
    before = np.concatenate([state.logs[None], logs[:-1]])
    is_start = (numbers % _ROWS_PER_START == 0)[:, None]
    new = np.where(is_start, np.log(weights)[:, None] - before, -math.inf)
    started = np.logaddexp.accumulate(np.concatenate([state.started[None], new]), axis=0)[1:]
    unstarted = np.log(1.0 / (starts + 2.0))[:, None]  # the weights of the starts to come
    found = state.capital + log_mean(np.logaddexp(logs + started, unstarted))
    return found, DriftState(seen, logs[-1], started[-1], state.capital, float(found[-1]))


def new_bets() -> list[Bet]:
    """Return the state of `concentration_process` before the first decision."""
    return [Bet(opening) for opening in _OPENING]


def concentration_process(
    best_arm_probs: Sequence[Sequence[float]], num_draws: int, bets: list[Bet]
) -> tuple[np.ndarray, list[Bet]]:
    """Return the log of an e-process against "P(best) is that of the posterior" after every decision, and its state.

    Under the model P(best) of an arm is a martingale, so an arm that has .99 loses its lead with probability .01. A bet opens
    when an arm reaches some P(best). Its stake is divided by an estimate of 1 - P(best) from the *next* decision, and it is
    paid 1 - P(best) at the decision after the arm has fallen below .1: with K of M draws in which another arm is best,
    E[(M + 1) / (K + 1)] is at most 1 / P(another is best), and these draws are not those that chose the moment. So its
    expectation is at most 1 although each P(best) is an estimate from M draws. A bet that never closes earns nothing.

    Args:
        best_arm_probs: one entry for each arm, of every decision.
        num_draws: M.
        bets: the state before.
    """
    bets, found = list(bets), np.empty(len(best_arm_probs))
    capitals = np.array([bet.capital for bet in bets])
    value = float(log_mean(capitals))
    for row, probs in enumerate(best_arm_probs):
        leader = max(probs)
        for number, bet in enumerate(bets):
            if bet.arm is None:
                if leader >= bet.opening:
                    bets[number] = bet._replace(arm=probs.index(leader))
            elif bet.base is None:
                bets[number] = bet._replace(base=((1.0 - probs[bet.arm]) * num_draws + 1.0) / (num_draws + 1.0))
            elif bet.is_closing:
                payoff = (1.0 - probs[bet.arm]) / bet.base
                capitals[number] += math.log(payoff) if payoff > 0 else -math.inf
                bets[number] = Bet(bet.opening, float(capitals[number]))
                value = float(log_mean(capitals))
            elif probs[bet.arm] < _CLOSING:
                bets[number] = bet._replace(is_closing=True)
        found[row] = value
    return found, bets


def first_alarm(log_process: np.ndarray, threshold: float) -> int | None:
    """Return the first row at which an e-process reaches a threshold; None if it never does."""
    reached = np.flatnonzero(log_process >= math.log(threshold))
    return int(reached[0]) if reached.size else None


def log_mean(logs: np.ndarray) -> Any:
    """Return the log of the mean of exponentials over the last axis."""
    return np.logaddexp.reduce(logs, axis=-1) - math.log(logs.shape[-1])
