"""Alarms of a running experiment, folded from its events: e-processes (`alarm_processes`), and the engine's own doubts."""

import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.random as jr
import numpy as np

from ppl_bandit.display.terminal import shown_name
from ppl_bandit.journal.events import CORRECTED, DECIDED, DISCARDED, FORGOTTEN, IMPORTED, REWARDED, Event
from ppl_bandit.journal.projection import Projection, forgotten, initial_projection, refit, rows_of_event
from ppl_bandit.journal.stores.sql import SqlStore
from ppl_bandit.live.alarm_processes import (
    DriftState,
    concentration_process,
    drift_process,
    first_alarm,
    log_mean,
    missing_process,
    new_bets,
    new_drift,
    override_steps,
    sample_ratio_process,
    sample_ratio_start,
    sample_ratio_steps,
)
from ppl_bandit.posterior.fallback import learn
from ppl_bandit.posterior.learning import Learner, draw
from ppl_bandit.posterior.task import Rows
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Interaction, without_details

if TYPE_CHECKING:
    import pandas

LEVEL = 0.05  # of each kind of alarm: the probability that it ever rings while nothing is wrong
_NUM_DRAWS = 1_000  # of the posterior predictive: at half their worth an estimated rank has a standard error of .02
_LEAST_ESS = 0.5
_BLOCK = 64  # rows ranked at once: one shape is compiled
_PAGE = 2_000  # events read at once
_COLUMNS = ("alarm", "arm", "since", "figure", "threshold", "level", "what_to_do")

_REMEDIES = {
    "sample_ratio": "arms are not played with the recorded probabilities: look for what overrides or loses decisions (caches, "
    "filters, retries); do not evaluate these decisions",
    "missing_rewards": "rewards do not come back as often as tolerated: repair the report of rewards, and do not compare arms "
    "before you know whether they are missing for bad results more often",
    "drift": "the rewards of this arm changed: look for a change in the world or in the measurement; use a program whose "
    "parameters change over time (`previous`), or start a new experiment",
    "concentration": "arms that were almost surely the best lost their lead: decisions settled on an arm sooner than the "
    "rewards justify; look for rewards that are counted twice, and for a program that is too certain; selectors.with_floor "
    "keeps all arms in play",
    "untrusted_inference": "use P(best) with caution until the alarm is silent; explain(details=True) has the measures",
}


class AlarmSettings(NamedTuple):
    """What the alarms of an experiment depend on.

    Attributes:
        outcomes: of the program.
        num_draws: number of posterior draws behind each P(best).
        has_context: whether rewards depend on a context.
        is_moving: whether the program's latents move.
        missing: tolerated share of rewards that do not come.
        overdue_after: seconds after which a pending reward counts as missing; None counts discarded decisions only.
        is_ordered: whether a reward is judged once every earlier decision is settled or overdue. Rewards that come sooner the
            larger they are, such as clicks, would else look like a drift.
        after: seconds since 1970: earlier decisions are left out.
    """

    outcomes: tuple[str, ...]
    num_draws: int
    has_context: bool
    is_moving: bool
    missing: float = 0.05
    overdue_after: float | None = None
    is_ordered: bool = False
    after: float = -math.inf


class _Ring(NamedTuple):
    """The state of one alarm: the largest log of its process, the time at which it rang first, and its threshold then."""

    highest: float
    since: float | None
    threshold: float


class _Open(NamedTuple):
    """A decision that is not judged yet: its time and arm, and the event that settled it, if one did."""

    time: float
    arm: int
    settled: Event | None = None


class _Judged(NamedTuple):
    """An event that drift depends on, and whether its reward is ranked; else it is only learnt."""

    event: Event
    is_ranked: bool = True


class AlarmWatch:
    """The alarms of one experiment after the events that were read so far; a call reads the new ones only."""

    def __init__(self, settings: AlarmSettings):
        self.settings = settings
        self._position, self._now = 0, -math.inf
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._num_decisions = self._num_settled = self._num_missing = 0
        self._num_arms, self._allocation = 0, sample_ratio_start(0)
        self._drift: dict[tuple[int, int], DriftState] = {}
        self._ties: dict[tuple[int, int], np.random.Generator] = {}
        self._bets = new_bets()
        self._rings: dict[tuple[str, int | None, int], _Ring] = {}
        self._predictive: _Predictive | None = None
        self._doubtful_since: float | None = None
        missing_process(np.zeros(0), np.zeros(0), settings.missing)  # raises for a share outside (0, 1)

    def read(self, store: SqlStore, name: str, now: float, projection: Projection | None = None) -> None:
        """Fold the events since the last call.

        Args:
            now: the time, for rewards that are overdue.
            projection: its program is needed for the drift of rewards that depend on a context.
        """
        if projection is not None and self.settings.has_context and not self.settings.is_moving:
            self._predictive = self._predictive or _Predictive(projection)
            self._predictive.follow(projection)
        while True:
            events = store.read(name, self._position, limit=_PAGE, whole=True)
            is_last = len(events) < _PAGE
            self._fold(events, now if is_last else -math.inf)
            if is_last:
                break
        is_doubtful = projection is not None and bool(projection.learner.doubts)
        since = self._now if self._doubtful_since is None else self._doubtful_since
        self._doubtful_since = since if is_doubtful else None

    def table(self, names: Sequence[Any], learner: Learner | None = None) -> "pandas.DataFrame":
        """Return one row per alarm: which, of which arm, since when, its figure, threshold and level, and what to do.

        Args:
            names: the arms.
            learner: the posterior; its doubts are an alarm.
        """
        import pandas

        rows: list[tuple] = []
        for (kind, arm, outcome), ring in sorted(self._rings.items(), key=lambda pair: str(pair[0])):
            if ring.since is None:
                continue
            note = ""
            if kind == "missing_rewards":
                share = self._num_missing / max(self._num_settled, 1)
                note = (
                    f"{share:.1%} of {self._num_settled} rewards are missing, {self.settings.missing:.1%} tolerated: "
                )
            elif kind == "drift" and len(self.settings.outcomes) > 1:
                note = f"outcome {self.settings.outcomes[outcome]}: "
            figure = math.exp(min(ring.highest, 700.0)) if ring.highest < math.inf else math.inf
            whose = None if arm is None else shown_name(names[arm])
            level = 1.0 / ring.threshold
            rows.append((kind, whose, ring.since, figure, ring.threshold, level, note + _REMEDIES[kind]))
        checked = [kind for kind in _REMEDIES if self._is_checked(kind, learner)]
        if learner is not None and learner.doubts:
            remedy = f"{without_details(learner.doubts)}; {_REMEDIES['untrusted_inference']}"
            num = max(learner.num_doubted, 1)  # a check of the engine, not a test: it has no level
            rows.append(("untrusted_inference", None, self._doubtful_since, float(num), 1.0, math.nan, remedy))
        table = pandas.DataFrame(rows, columns=list(_COLUMNS))
        table["since"] = pandas.to_datetime(table["since"].astype(float), unit="s", utc=True)
        table.attrs["checked"] = checked
        return table

    def _is_checked(self, kind: str, learner: Learner | None) -> bool:
        """Return whether an alarm can be told: drift needs latents that do not move, and the program if there is a context."""
        if kind == "drift":
            return not self.settings.is_moving and (not self.settings.has_context or self._predictive is not None)
        if kind == "concentration":  # P(best) is no martingale along contexts, or if the best arm changes
            return not (self.settings.is_moving or self.settings.has_context)
        return kind != "untrusted_inference" or learner is not None

    def _fold(self, events: Sequence[Event], now: float) -> None:
        steps: list[tuple[float, int, Any]] = []  # time, arm, propensities; or time, -1, step of an override
        counts: list[tuple[float, int, int]] = []  # time, missing, decisions
        judged: list[_Judged] = []
        beliefs: list[tuple[float, list[float]]] = []
        for event in events:
            self._position, self._now = event.position, max(self._now, event.time)
            id = event.decision
            if event.kind in (IMPORTED, FORGOTTEN):
                judged.append(_Judged(event, False))
            if event.kind == FORGOTTEN:  # settled decisions that still wait are no longer judged
                erased = set(event.body["rows"])
                for key in [key for key, own in self._open.items() if own.settled and own.settled.position in erased]:
                    del self._open[key]
            if id is None:
                continue
            if event.kind == DECIDED:
                if event.time >= self.settings.after:
                    body = event.body
                    self._open[id] = _Open(event.time, int(event.arm or 0))
                    self._num_decisions += 1
                    steps.append((event.time, int(event.arm or 0), body["propensities"]))
                    if "allowed" not in body:
                        probs = body["best_arm_probs"]
                        beliefs.append((event.time, probs if isinstance(probs, list) else probs.tolist()))
                    counts.append((event.time, self._num_missing, self._num_decisions))
            elif event.settles and id in self._open:
                own = self._open[id]
                if event.kind != DISCARDED and event.body.get("shown", 0) is None and event.arm != own.arm:
                    steps.append((event.time, -1, (own.arm, event.arm)))
                if own.settled is None:
                    self._open[id] = own._replace(settled=event)
                if not self.settings.is_ordered:
                    self._judge(id, event.time, judged, counts)
            elif event.settles and event.kind in (REWARDED, CORRECTED) and event.body.get("of") is None:
                judged.append(_Judged(event, False))  # of a decision that is left out, or was missing
            self._judge_in_order(self._now, judged, counts)
        if now > self._now:
            self._now = now
            self._judge_in_order(now, judged, counts)
        self._watch_allocation(steps)
        times = [time for time, _, _ in counts]
        num_missing, num_decisions = np.array([row[1:] for row in counts], int).reshape(-1, 2).T
        found = missing_process(num_missing, num_decisions, self.settings.missing)
        self._see("missing_rewards", None, 0, found, times, 1.0 / LEVEL)
        if self._is_checked("concentration", None):
            probs = [row for _, row in beliefs]
            found, self._bets = concentration_process(probs, self.settings.num_draws, self._bets)
            self._see("concentration", None, 0, found, [time for time, _ in beliefs], 1.0 / LEVEL)
        if self._is_checked("drift", None):
            self._watch_drift(judged)

    def _judge_in_order(self, now: float, judged: list[_Judged], counts: list[tuple[float, int, int]]) -> None:
        """Judge the oldest decisions, as far as they are settled or overdue."""
        while self._open and self.settings.is_ordered:
            id, first = next(iter(self._open.items()))
            overdue = self.settings.overdue_after
            if first.settled is None and (overdue is None or now - first.time <= overdue):
                return
            self._judge(id, now, judged, counts)

    def _judge(self, id: str, now: float, judged: list[_Judged], counts: list[tuple[float, int, int]]) -> None:
        """Count a decision as rewarded or missing."""
        own = self._open.pop(id)
        if own.settled is not None and own.settled.body.get("reason") == "erased":
            return
        self._num_settled += 1
        if own.settled is None or own.settled.kind == DISCARDED:
            self._num_missing += 1
            counts.append((now, self._num_missing, self._num_decisions))
        else:
            judged.append(_Judged(own.settled))

    def _watch_allocation(self, steps: Sequence[tuple[float, int, Any]]) -> None:
        num_arms = max([self._num_arms, *(len(body) for _, arm, body in steps if arm >= 0)])
        self._grow(num_arms)
        if not steps:
            return
        found = np.empty((len(steps), *self._allocation.shape))
        drawn = [row for row, (_, arm, _) in enumerate(steps) if arm >= 0]
        propensities = np.zeros((len(drawn), num_arms))
        for number, row in enumerate(drawn):
            propensities[number, : len(steps[row][2])] = steps[row][2]
        found[drawn] = sample_ratio_steps(np.array([steps[row][1] for row in drawn], int), propensities)
        for row in set(range(len(steps))).difference(drawn):
            drawn_arm, shown = steps[row][2]
            found[row] = override_steps(drawn_arm, shown, num_arms)
        logs, self._allocation = sample_ratio_process(found, self._allocation)
        self._see("sample_ratio", None, 0, logs, [time for time, _, _ in steps], 1.0 / LEVEL)

    def _grow(self, num_arms: int) -> None:
        """Add arms, with the mean capital of the others: the mean over all arms then stays an e-process."""
        if num_arms == self._num_arms:
            return
        self._allocation = sample_ratio_start(num_arms, self._allocation if self._num_arms else None)
        mean = float(log_mean(np.array([own.value for own in self._drift.values()]))) if self._num_arms else 0.0
        for arm in range(self._num_arms, num_arms):
            for outcome in range(len(self.settings.outcomes)):
                key = arm, outcome
                self._drift[key] = new_drift(mean)
                self._ties[key] = np.random.default_rng(key)
        self._num_arms = num_arms

    def _watch_drift(self, judged: Sequence[_Judged]) -> None:
        outcomes, found = self.settings.outcomes, list[tuple[Event, list[float]]]()
        if self._predictive is None:
            found = [
                (event, [event.body["reward"][name] for name in outcomes]) for event, is_ranked in judged if is_ranked
            ]
        else:
            found = self._ranked(judged, self._predictive)
        if not found:
            return
        arms, values = np.array([int(event.arm or 0) for event, _ in found]), np.array([own for _, own in found], float)
        threshold = len(self._drift) / LEVEL
        for (arm, outcome), state in self._drift.items():
            rows = np.flatnonzero(arms == arm).tolist()
            if rows:
                key, ties = (arm, outcome), self._ties[arm, outcome].random(len(rows))
                process, self._drift[key] = drift_process(values[rows, outcome], ties, state)
                self._see("drift", arm, outcome, process, [found[row][0].time for row in rows], threshold)

    def _ranked(self, judged: Sequence[_Judged], predictive: "_Predictive") -> list[tuple[Event, list[float]]]:
        """Return the ranks of the rewards that are judged; those of erased units have no context."""
        found, batch = list[tuple[Event, list[float]]](), list[tuple[_Judged, Rows]]()
        for index, one in enumerate(judged):
            rows = predictive.rows(one.event)
            if rows is not None:
                batch.append((one, rows))
            if batch and (one.event.kind == FORGOTTEN or index == len(judged) - 1):
                joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *(rows for _, rows in batch))
                positions = np.repeat([own.event.position for own, _ in batch], [rows.arms.size for _, rows in batch])
                ranks = dict(zip(positions.tolist(), predictive.ranks(joined, positions).tolist(), strict=True))
                found += [(own.event, ranks[own.event.position]) for own, _ in batch if own.is_ranked]
                batch = []
            if one.event.kind == FORGOTTEN:
                predictive.forget(one.event.body["rows"])
        return found

    def _see(
        self, kind: str, arm: int | None, outcome: int, process: np.ndarray, times: Sequence[float], threshold: float
    ) -> None:
        """Keep the largest value of a process, and the time at which it reached its threshold first."""
        if not process.size:
            return
        ring = self._rings.get((kind, arm, outcome), _Ring(-math.inf, None, threshold))
        if ring.since is None:
            first = first_alarm(process, threshold)
            ring = ring._replace(threshold=threshold, since=None if first is None else times[first])
        self._rings[kind, arm, outcome] = ring._replace(highest=max(ring.highest, float(process.max())))


class _Predictive:
    """Ranks of rewards in the posterior predictive at their own arm and context, given all rewards before them.

    Under the program they are uniform and independent, on average over its prior. Draws from the posterior are weighted by the
    likelihood of the rows since, and drawn anew once they are worth less than half of their number. So the ranks do not depend
    on when `alarms` is called.
    """

    def __init__(self, projection: Projection):
        self._own = initial_projection(projection.task, projection.prior)
        self._waiting: list[tuple] = []  # rows that are not learnt yet, as `History` takes them
        self._num_rows = 0
        self._draws: Any = None
        self._logs = np.zeros(_NUM_DRAWS)  # log weights of the draws
        self._uniforms = np.random.default_rng(0)

    def follow(self, projection: Projection) -> None:
        """Continue with the arms of the bandit."""
        if projection.task is not self._own.task:
            self._learn()
            own = self._own._replace(task=projection.task, prior=projection.prior)
            self._own = own._replace(learner=refit(own, own.history)[0])

    def forget(self, positions: Sequence[int]) -> None:
        """Remove the rows of an erased unit."""
        self._learn()
        self._own = forgotten(self._own, positions, True)

    def rows(self, event: Event) -> Rows | None:
        """Return the rows of an event; None if it has none that can be learnt."""
        rows = rows_of_event(self._own.task.model, event)
        return None if rows is None else rows._replace(counted=None)

    def ranks(self, rows: Rows, positions: np.ndarray) -> np.ndarray:
        """Return the rank of every outcome of some rows, (N, outcomes) in [0, 1], and learn them."""
        task, found = self._own.task, np.empty((positions.size, len(self._own.task.model.outcomes)))
        start = 0
        while start < positions.size:
            if self._draws is None:
                seed = jax.device_put(np.int64(self._num_rows))  # other random numbers than before
                self._draws = draw(self._own.learner._replace(seed=seed), _NUM_DRAWS)
                self._logs = np.zeros(_NUM_DRAWS)
            num = min(_BLOCK, positions.size - start)
            index = np.minimum(start + np.arange(_BLOCK), start + num - 1)
            block = jax.tree.map(lambda leaf, index=index: leaf[index], rows[:3])
            with jax.enable_x64(True):
                numbers = self._num_rows + np.arange(_BLOCK)
                drawn, likelihoods = jax.device_get(_predict(task.model)(numbers, self._draws, *block))
            likelihoods = np.nan_to_num(likelihoods[:num], nan=-math.inf, posinf=1e100, neginf=-math.inf)
            steps = np.concatenate([self._logs[None], likelihoods])
            logs = np.cumsum(steps, axis=0)  # before each row, and after the last
            weights = np.exp(logs - np.maximum(logs.max(axis=1, keepdims=True), -1e300))
            totals = weights.sum(axis=1)
            is_worn = totals**2 < _LEAST_ESS * _NUM_DRAWS * np.maximum((weights**2).sum(axis=1), 1e-300)
            num = next((row for row in range(1, num) if is_worn[row]), num)
            shares = weights[:num] / totals[:num, None]
            for number, name in enumerate(task.model.outcomes):
                own, others = block[1][name][:num, None], drawn[name][:num]
                below, equal = ((shares * is_so).sum(axis=1) for is_so in (others < own, others == own))
                found[start : start + num, number] = below + self._uniforms.random(num) * equal
            taken = slice(start, start + num)
            self._waiting.append(
                jax.tree.map(lambda leaf, taken=taken: leaf[taken], Rows(*rows[:3], positions=positions))
            )
            self._num_rows, self._logs, start = self._num_rows + num, logs[num], start + num
            if is_worn[num]:
                self._learn()
        return found

    def _learn(self) -> None:
        """Learn the rows that wait; the next ones get new draws."""
        if self._waiting:
            part = jax.tree.map(lambda *leaves: np.concatenate(leaves), *self._waiting)
            task, start = self._own.task, 0
            while start < part.arms.size:  # an engine may be replaced on the way
                learner, history = self._own.learner, self._own.history
                size = 1 if learner.learns_singly else part.arms.size - start
                rows = jax.tree.map(lambda leaf, taken=slice(start, start + size): leaf[taken], part)
                learner, *_ = learn(task, learner, history, rows)
                self._own, start = self._own._replace(learner=learner, history=history.extended(rows)), start + size
        self._waiting, self._draws = [], None


@functools.lru_cache(maxsize=8)
def _predict(model: RewardModel) -> Callable[..., Any]:
    """Return the function (numbers, draws, arms, rewards, contexts) -> draws of the outcomes, log likelihoods, both (N, M)."""

    def one(key: jax.Array, latents: Any, row: Interaction) -> tuple[dict[str, jax.Array], jax.Array]:
        drawn = model.draw_reward(key, latents, row.arm, row.context)
        likelihood = model.log_likelihood(latents, jax.tree.map(lambda leaf: leaf[None], row))[0]
        return drawn if len(model.outcomes) > 1 else {model.outcomes[0]: drawn}, likelihood

    def many(numbers: Any, draws: Any, arms: Any, rewards: Any, contexts: Any) -> Any:
        def at(number: Any, row: Interaction) -> Any:  # a row's random numbers depend on its number alone
            keys = jr.split(jr.fold_in(jr.key(0), number), _NUM_DRAWS)
            return jax.vmap(one, in_axes=(0, 0, None))(keys, draws, row)

        return jax.vmap(at)(numbers, Interaction(arms, rewards, contexts))

    return jax.jit(many)
