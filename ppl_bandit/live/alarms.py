"""Alarms of a running experiment, each valid however often somebody looks: e-processes, and the engine's own doubts.

An e-process is nonnegative and has expectation at most 1 at every stopping time while nothing is wrong. So the probability that
it ever reaches 1 / alpha is at most alpha (Ville's inequality), and it may be computed again after every decision.
"""

import functools
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.journal.decision_events import DISCARDED_STATUS, PENDING_STATUS, REWARDED_STATUS, DecisionRecord
from ppl_bandit.posterior.learning import Learner, draw
from ppl_bandit.program.model.reward_model import RewardModel

if TYPE_CHECKING:
    import pandas

__all__ = ["drift_process", "find_alarms", "first_alarm", "missing_process", "sample_ratio_process"]

LEVEL = 0.05  # of each kind of alarm: the probability that it ever rings while nothing is wrong
_TILTS = np.array([-1.6, -0.8, -0.4, -0.2, 0.2, 0.4, 0.8, 1.6])  # log odds ratios of an arm's probability
_RATES = np.array([1.25, 1.5, 2.0, 3.0, 5.0])  # factors on the odds of a missing reward
_SLOPES = np.array([-0.6, -0.3, 0.3, 0.6])  # of the density of ranks after a change
_ROWS_PER_START = 100  # a change may begin after every so many rewards of an arm
_NUM_DRAWS = 200  # of the posterior predictive
_COLUMNS = ("alarm", "arm", "since", "figure", "threshold", "level", "what_to_do")

_REMEDIES = {
    "sample_ratio": "arms are not played with the recorded probabilities: look for what overrides or loses decisions (caches, "
    "filters, retries); do not evaluate these decisions",
    "missing_rewards": "rewards do not come back as often as tolerated: repair the report of rewards, and do not compare arms "
    "before you know whether they are missing for bad results more often",
    "drift": "the rewards of this arm changed: look for a change in the world or in the measurement; use a program whose "
    "latents move, or start a new experiment",
    "untrusted_inference": "the posterior is not to be trusted: see explain(); try another engine or a simpler program",
}


class _Alarm(NamedTuple):
    """One alarm: its kind and arm, the time at which it rang first, its figure and threshold, and a remark of its own."""

    kind: str
    arm: Any
    since: float
    figure: float
    threshold: float
    note: str = ""


def find_alarms(
    records: Sequence[DecisionRecord],
    names: Sequence[Any],
    *,
    model: RewardModel | None = None,
    learner: Learner | None = None,
    missing: float = 0.05,
    overdue_after: float | None = None,
    after: float = -math.inf,
    now: float = math.inf,
) -> "pandas.DataFrame":
    """Return one row per alarm: which, of which arm, since when, its figure, threshold and level, and what to do.

    Args:
        records: the decisions, in their order.
        names: the arms.
        model: needed for the drift of rewards that depend on a context.
        learner: the posterior; its doubts are an alarm.
        missing: tolerated share of rewards that do not come.
        overdue_after: seconds after which a pending reward counts as missing; None counts discarded decisions only.
        after: seconds since 1970: earlier decisions and rewards are left out.
        now: likewise, the time of asking.
    """
    import pandas

    records = [record for record in records if record.decided.time >= after]
    alarms, checked = (
        [*_sample_ratio(records, len(names)), *_missing(records, missing, overdue_after, now)],
        list(_REMEDIES),
    )
    drifts = _drifts(records, names, model, learner)
    if drifts is None:
        checked.remove("drift")
    if learner is None:
        checked.remove("untrusted_inference")
    elif learner.doubts:
        alarms.append(_Alarm("untrusted_inference", None, math.nan, math.nan, math.nan, learner.doubts))
    rows = [
        (
            alarm.kind,
            shown_name(alarm.arm),
            alarm.since,
            alarm.figure,
            alarm.threshold,
            1.0 / alarm.threshold,
            f"{alarm.note}: {_REMEDIES[alarm.kind]}" if alarm.note else _REMEDIES[alarm.kind],
        )
        for alarm in [*alarms, *(drifts or ())]
    ]
    table = pandas.DataFrame(rows, columns=list(_COLUMNS))
    table["since"] = pandas.to_datetime(table["since"].astype(float), unit="s", utc=True)
    table.attrs["checked"] = checked
    return table


def sample_ratio_process(arms: np.ndarray, propensities: np.ndarray) -> np.ndarray:
    """Return the log of an e-process against "arm A_t was drawn with the probabilities e_t", after every decision.

    The mean, over arms a and tilts l, of the likelihood ratios prod_t exp(l [A_t = a]) / (1 - e_t(a) + e_t(a) exp(l)).

    Args:
        arms: (T,), indices of the arms that were played.
        propensities: (T, A).
    """
    num_rows, num_arms = propensities.shape
    if not num_rows:
        return np.zeros(0)
    logs = np.empty((num_rows, num_arms * _TILTS.size))
    for arm in range(num_arms):
        own, is_played = propensities[:, arm, None], (arms == arm)[:, None]
        logs[:, arm * _TILTS.size : (arm + 1) * _TILTS.size] = _TILTS * is_played - np.log1p(own * np.expm1(_TILTS))
    found = _log_mean(np.cumsum(logs, axis=0))
    impossible = np.cumsum(propensities[np.arange(num_rows), arms] <= 0) > 0
    return np.where(impossible, math.inf, found)


def missing_process(is_missing: np.ndarray, tolerated: float) -> np.ndarray:
    """Return the log of an e-process against "each reward is missing with at most the tolerated probability".

    Args:
        is_missing: (T,), of the decisions whose reward was due, in their order.
        tolerated: strictly inside (0, 1).
    """
    if not 0.0 < tolerated < 1.0:
        raise ValueError(
            f"missing must lie strictly inside (0, 1), got {tolerated!r}: the share of rewards that may be missing"
        )
    odds = _RATES * tolerated / (1.0 - tolerated)
    rates = odds / (1.0 + odds)
    steps = np.where(
        np.asarray(is_missing, bool)[:, None], np.log(rates / tolerated), np.log((1 - rates) / (1 - tolerated))
    )
    return _log_mean(np.cumsum(steps, axis=0))


def drift_process(values: np.ndarray, ties: np.ndarray) -> np.ndarray:
    """Return the log of an e-process against "these values are exchangeable", after every value.

    The rank of each value among those so far is uniform and independent of the earlier ranks, whatever the law of the values.
    A change makes later ranks small or large. The process is a mean over slopes b of prod (1 + b (2 u - 1)), started after
    every 100 values with weights that add up to 1.

    Args:
        values: (n,), such as the rewards of one arm in the order in which they were learnt.
        ties: (n,), uniform numbers, by which equal values are ranked.
    """
    if not values.size:
        return np.zeros(0)
    ranks = np.empty(values.size)
    seen: list[float] = []
    for row, value in enumerate(values.tolist()):
        below, upto = bisect_left(seen, value), bisect_right(seen, value)
        ranks[row] = (below + ties[row] * (upto - below + 1)) / (row + 1)
        insort(seen, value)
    logs = np.cumsum(np.log1p(_SLOPES * (2.0 * ranks[:, None] - 1.0)), axis=0)
    starts = np.arange(0, values.size, _ROWS_PER_START)
    weights = 1.0 / ((np.arange(starts.size) + 1.0) * (np.arange(starts.size) + 2.0))  # they add up to less than 1
    before = np.concatenate([np.zeros((1, _SLOPES.size)), logs])[starts]
    started = np.logaddexp.accumulate(np.log(weights)[:, None] - before, axis=0)
    found = logs + started[np.arange(values.size) // _ROWS_PER_START]
    unstarted = 1.0 / (np.arange(values.size) // _ROWS_PER_START + 2.0)  # the weights of the starts to come
    return _log_mean(np.logaddexp(found, np.log(unstarted)[:, None]))


def first_alarm(log_process: np.ndarray, threshold: float) -> int | None:
    """Return the first row at which an e-process reaches a threshold; None if it never does."""
    reached = np.flatnonzero(log_process >= math.log(threshold))
    return int(reached[0]) if reached.size else None


def _sample_ratio(records: Sequence[DecisionRecord], num_arms: int) -> list[_Alarm]:
    known = [record for record in records if record.decided.body.get("propensities") is not None]
    propensities = np.zeros((len(known), num_arms))
    for row, record in enumerate(known):
        own = record.decided.body["propensities"]
        propensities[row, : len(own)] = own
    arms = np.array([record.decided.arm for record in known], int)
    process = sample_ratio_process(arms, propensities)
    return _rung("sample_ratio", None, process, 1.0 / LEVEL, [record.decided.time for record in known])


def _missing(
    records: Sequence[DecisionRecord], tolerated: float, overdue_after: float | None, now: float
) -> list[_Alarm]:
    due, times = [], []
    for record in records:
        is_overdue = (
            overdue_after is not None and record.status == PENDING_STATUS and now - record.decided.time > overdue_after
        )
        if record.status != PENDING_STATUS or is_overdue:
            due.append(is_overdue or record.status == DISCARDED_STATUS)
            times.append(record.decided.time)
    process = missing_process(np.array(due, bool), tolerated)
    note = f"{np.mean(due):.1%} of {len(due)} rewards are missing, {tolerated:.1%} tolerated" if due else ""
    return _rung("missing_rewards", None, process, 1.0 / LEVEL, times, note)


def _drifts(
    records: Sequence[DecisionRecord], names: Sequence[Any], model: RewardModel | None, learner: Learner | None
) -> list[_Alarm] | None:
    """Return the alarms of single arms; None if drift cannot be told: latents move, or a context needs the program."""
    rewarded = [record for record in records if record.status == REWARDED_STATUS]
    rewarded.sort(key=lambda record: record.row or 0)
    if not rewarded:
        return []
    has_context = any(record.context is not None for record in rewarded)
    if has_context:  # those of erased units have none
        rewarded = [record for record in rewarded if record.context is not None]
    if (has_context and (model is None or learner is None)) or (model is not None and model.moving_sites):
        return None
    outcomes = list(rewarded[0].reward)
    values = {name: np.array([record.reward[name] for record in rewarded], float) for name in outcomes}
    arms = np.array([record.arm for record in rewarded], int)
    if has_context and model is not None and learner is not None:
        values = _predictive_ranks(model, learner, arms, values, rewarded)
    threshold, found = len(names) * len(outcomes) / LEVEL, []
    for arm, name in enumerate(names):
        rows = np.flatnonzero(arms == arm)
        for number, outcome in enumerate(outcomes):
            ties = np.random.default_rng([arm, number]).random(rows.size)
            process = drift_process(values[outcome][rows], ties)
            times = [rewarded[row].settled or math.nan for row in rows]
            note = f"outcome {outcome}" if len(outcomes) > 1 else ""
            found += _rung("drift", name, process, threshold, times, note)
    return found


def _predictive_ranks(
    model: RewardModel,
    learner: Learner,
    arms: np.ndarray,
    values: Mapping[str, np.ndarray],
    records: Sequence[DecisionRecord],
) -> dict[str, np.ndarray]:
    """Return the rank of every outcome among draws from the posterior predictive of its own arm and context, in (0, 1)."""
    leaves = [np.stack([np.asarray(record.context[i]) for record in records]) for i in range(len(records[0].context))]
    contexts = jax.tree.unflatten(jax.tree.structure(model.context), leaves)
    with jax.enable_x64(True):
        drawn = _predict(model)(jr.split(jr.key(0), _NUM_DRAWS), draw(learner, _NUM_DRAWS), jnp.asarray(arms), contexts)
    found = {}
    for number, (name, own) in enumerate(values.items()):
        others = np.asarray(drawn[name] if len(values) > 1 else drawn, float)
        below, equal = (others < own).sum(axis=0), (others == own).sum(axis=0)
        found[name] = (below + np.random.default_rng(number).random(own.size) * (equal + 1)) / (_NUM_DRAWS + 1)
    return found


@functools.lru_cache(maxsize=8)
def _predict(model: RewardModel) -> Callable[..., Any]:
    return jax.jit(jax.vmap(model.draw_reward, in_axes=(0, 0, None, None)))


def _rung(
    kind: str, arm: Any, process: np.ndarray, threshold: float, times: Sequence[float], note: str = ""
) -> list[_Alarm]:
    first = first_alarm(process, threshold)
    if first is None:
        return []
    with np.errstate(over="ignore"):
        return [_Alarm(kind, arm, times[first], float(np.exp(process.max())), threshold, note)]


def _log_mean(logs: np.ndarray) -> np.ndarray:
    """Return the log of the mean of exponentials over the last axis."""
    return np.logaddexp.reduce(logs, axis=-1) - math.log(logs.shape[-1])
