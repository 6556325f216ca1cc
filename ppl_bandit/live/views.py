"""The methods that read a bandit: arms, posterior, tables, texts and figures. None of them changes a later decision."""

import functools
import math
import os
import textwrap
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.display.terminal import printable, shown_name
from ppl_bandit.evaluation.evaluate import evaluate
from ppl_bandit.evaluation.evaluation import Evaluation
from ppl_bandit.evaluation.logged_decisions import LoggedDecisions
from ppl_bandit.evaluation.recorded_decisions import decisions_from_experiment
from ppl_bandit.inputs.checks import check_contexts, count_rows
from ppl_bandit.inputs.data_frames import context_columns, contexts_from, is_frame
from ppl_bandit.inputs.late_entries import at_example_values, fill_late, late_note
from ppl_bandit.inputs.numbers import as_seconds, check_count
from ppl_bandit.journal.audit import decision_records, knowledge_age
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.projection import Projection
from ppl_bandit.journal.stores.store import JournalError
from ppl_bandit.live.alarms import AlarmSettings, AlarmWatch
from ppl_bandit.live.decisions import domain_doubt, place_propensities
from ppl_bandit.live.exports import history_table, pending_table
from ppl_bandit.live.lookahead import losses_after
from ppl_bandit.live.looks import rule_distances
from ppl_bandit.live.overview import Overview, arm_overview, closed_form, slot_note, subsample_contexts
from ppl_bandit.live.rendering import bandit_html, explanation_text, plot_bandit, posterior_kind
from ppl_bandit.live.report import Report, evidence_text, make_report
from ppl_bandit.live.reward_curves import RewardCurves, context_profiles, levels_over_time, plot_levels
from ppl_bandit.posterior.learning import Learner, draw, draw_expected_rewards, evidence_of
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.trials.design import Design
from ppl_bandit.types import Interaction, InvalidContext, Selector, check_flag

if TYPE_CHECKING:
    import pandas


class Health(NamedTuple):
    """Whether a bandit can record, and its state.

    Attributes:
        is_writable: whether its journal can be written now.
        reason: why not; empty if it can.
        position: of the last event that it knows.
        num_decisions: made so far.
        num_rewards: learnt so far.
    """

    is_writable: bool
    reason: str
    position: int
    num_decisions: int
    num_rewards: int


class ReadableBandit:
    """The read-only half of a `Bandit`."""

    num_samples: int
    seed: int
    _selector: Selector
    _experiment: Experiment
    _pid: int
    _is_closed = False
    _watching: threading.Lock
    _watch: AlarmWatch | None = None
    _design: Design | None = None

    @property
    def model(self) -> RewardModel:
        """The reward model, with the current arms."""
        return self._task.model

    @property
    def arms(self) -> list[Any]:
        """The arms as in `Decision.arm`, the retired ones included."""
        return list(self._task.arms.names)

    @property
    def retired(self) -> list[Any]:
        """The arms that are no longer played."""
        projection = self._experiment.projection
        return [projection.task.arms.names[index] for index in sorted(projection.retired)]

    @property
    def is_paused(self) -> bool:
        """Whether new decisions are refused until `resume`."""
        return self._experiment.projection.is_paused

    @property
    def explanation(self) -> Any:
        """The engine, and why it was chosen."""
        return self._learner.engine.explanation

    @property
    def num_rewards(self) -> int:
        """Number of rewards learnt."""
        return len(self._experiment.history)

    def pending(self, older_than: Any = None) -> "pandas.DataFrame":
        """Return the decisions with a pending reward, oldest first.

        With several outcomes, or late entries of the context, the column `waiting_for` names what is not known yet, and
        `learnt` the outcomes that were learnt already. `attrs["note"]` says why known outcomes wait for the others, if they do.

        Args:
            older_than: minimal age in seconds, or a timedelta; None returns all.
        """
        until = None if older_than is None else time.time() - as_seconds(older_than, "older_than")
        self._catch_up()
        return pending_table(self._experiment, until)

    def history(self) -> "pandas.DataFrame":
        """Return the learnt rewards, one row each, in the order of learning."""
        self._catch_up()
        return history_table(self._experiment)

    def alarms(self, *, missing: float = 0.05, overdue_after: Any = None, after: Any = None) -> "pandas.DataFrame":
        """Return what is wrong with the running experiment, one row per alarm; no rows if nothing is.

        `sample_ratio`: arms are not played with their recorded probabilities. `missing_rewards`: more rewards are missing than
        tolerated. `drift`: the rewards of an arm change. `concentration`: the entropy of the allocation fell faster than the
        evidence, so that arms which were almost surely the best lost their lead. `untrusted_inference`: the engine doubts its
        posterior. The first four are e-processes: the probability that one ever rings while nothing is wrong is at most .05,
        however often you ask. An alarm stays, because its evidence does. A call reads the events since the call before.

        Columns: alarm, arm, since, figure (the largest value of the e-process), threshold, level, what_to_do;
        `attrs["checked"]` lists the kinds that could be checked.

        Args:
            missing: tolerated share of rewards that do not come.
            overdue_after: seconds, or a timedelta, after which a pending reward counts as missing; None is the bandit's
                `reward_window`, if overdue decisions have no default reward. Without any, only discarded decisions count.
            after: a datetime with a time zone: earlier decisions are left out, for instance those before a repair.
        """
        if after is not None and getattr(after, "tzinfo", None) is None:
            raise ValueError(f"after must be a datetime with a time zone, got {after!r}; datetime.now(UTC) is one")
        self._catch_up()
        experiment, projection = self._experiment, self._experiment.projection
        model, windows, learner = projection.task.model, projection.task.windows, projection.learner
        window = windows.reward if windows.default is None else None
        settings = AlarmSettings(
            model.outcomes,
            self.num_samples,
            model.context is not None,
            bool(model.moving_sites),
            missing,
            window if overdue_after is None else as_seconds(overdue_after, "overdue_after"),
            windows.reward is not None or overdue_after is not None,
            -math.inf if after is None else after.timestamp(),
        )
        with self._watching:
            if self._watch is None or self._watch.settings != settings:
                self._watch = AlarmWatch(settings)
            self._watch.read(experiment.store, experiment.name, time.time(), projection)
            return self._watch.table(projection.task.arms.names, learner)

    def records(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yield one row of JSON values per decision, oldest first: what was decided, and what became of it.

        Args:
            after: the position in the row after which to begin.
        """
        self._catch_up()
        return decision_records(self._experiment.store, self._experiment.name, list(context_columns(self.model)), after)

    def health(self) -> Health:
        """Return whether decisions and rewards can be recorded now, and how many there are; it never raises JournalError."""
        experiment, reason = self._experiment, ""
        try:
            self._check_process()
            experiment.store.ping()
        except JournalError as error:
            reason = str(error)
        projection = experiment.projection
        num_decisions = int(projection.num_played.sum())  # not the last number, which two processes may give at once
        return Health(not reason, reason, projection.position, num_decisions, len(projection.history))

    def logged_decisions(self) -> LoggedDecisions:
        """Return the rewarded decisions with their propensities, in the order of decisions; see `evaluate`."""
        self._catch_up()
        return decisions_from_experiment(self._experiment)

    def evaluate(self, target: Any, **settings: Any) -> Evaluation:
        """Say what may be concluded about a target from this bandit's own decisions; see `ppl_bandit.evaluate`."""
        return evaluate(self, target, **settings)

    def posterior(self, num_samples: int = 1000) -> dict[str, np.ndarray]:
        """Return posterior draws of the latents, {site: (M, ...)}."""
        num_samples, learner = check_count(num_samples, "num_samples"), self._catch_up().learner
        return draw(learner, num_samples)

    def posterior_parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the parameters of the exact posterior, {site: {parameter: array}}; the docs list their names.

        Raises:
            ValueError: if the engine has no closed form.
        """
        learner = self._catch_up().learner
        if learner.engine.capabilities.parameters is None:
            raise ValueError(f"the {self.explanation.engine} engine has no closed form: use posterior(num_samples)")
        with jax.enable_x64(True):
            return jax.device_get(learner.engine.capabilities.parameters(learner.state))

    @property
    def log_evidence(self) -> float:
        """The log density of the rewards learnt under the program, log p(rewards): its score against another program's.

        With a discount it is the sum of the log predictive densities of the batches that were learnt.

        Raises:
            ValueError: if the engine does not estimate it.
        """
        return evidence_of(self._catch_up().learner)[0]

    @property
    def log_evidence_error(self) -> float:
        """The standard error of `log_evidence`; 0 where it is exact."""
        return evidence_of(self._catch_up().learner)[1]

    def expected_rewards(self, context: Any = None, num_samples: int | None = None) -> np.ndarray:
        """Return posterior draws of each arm's expected reward, (M, A)."""
        learner = self._catch_up().learner
        context = check_contexts(self.model, fill_late(self.model, self._task.late, context), None, "context")
        num = self.num_samples if num_samples is None else check_count(num_samples, "num_samples")
        return draw_expected_rewards(learner, context, num)

    def propensities(self, context: Any = None, allowed: Any = None, *, size: int | None = None) -> np.ndarray:
        """Return the probability with which `select` would play each arm now, (A,); no decision is recorded.

        Args:
            context: as in `select`.
            allowed: as in `select`.
            size: number of places of a slate. The result is then (size, A): the probability of each arm in each place, a sum
                over all arms in the places before.
        """
        projection = self._catch_up()
        context = check_contexts(self.model, fill_late(self.model, self._task.late, context), None, "context")
        mask = projection.task.arms.mask(allowed)
        if size is None:
            return self._experiment.next_propensities(projection, mask, context)
        return place_propensities(self._experiment, projection, mask, context, size)

    def explain(self, *, details: bool = False) -> str:
        """Return a text: the engine and why it was chosen, the arms so far, and the selector.

        Args:
            details: whether to add, for a program that is not exact, measures and what was tried.
        """
        check_flag(details, "details")
        learner = self._catch_up().learner
        is_estimated = learner.engine.capabilities.log_evidence is not None and not learner.engine.explanation.is_exact
        evidence = evidence_of(learner) if is_estimated else None
        note = "; ".join(filter(None, (self.model.expected_reward_note, late_note(self.model, self._task.late))))
        found = self._overview()
        doubts = self._doubts(found)
        return explanation_text(self.explanation, found, self._selector, evidence, doubts, note, details)

    def summary(self, contexts: Any = None) -> "pandas.DataFrame":
        """Return a table with one row per arm.

        Columns: arm, num_rewards, expected_reward (posterior mean), low and high (its central 95% interval), best_arm_prob, and
        expected_loss, E[max_b theta_b - theta_a]. They are in closed form where the engine has one, and from `num_samples`
        posterior draws otherwise; `attrs["source"]` says which. If arms are retired, the column is_retired marks them, and the
        best arm is looked for among the others.

        Args:
            contexts: contexts to average over, with a leading axis; None averages over at most 200 contexts of the learnt
                rewards, or uses the example context if there is none. If latents move by a clock, the table is that of the
                latest time among them.
        """
        if contexts is None and slot_note(self.model):
            warnings.warn(slot_note(self.model), stacklevel=2)
        found, retired = self._overview(contexts), self.retired
        table = found.to_frame()
        if retired:
            table["is_retired"] = [arm in retired for arm in found.arms]
        return table

    def plot(self, contexts: Any = None, unit: str = "") -> Any:
        """Return a figure: the posterior of each arm's expected reward, and the share of each arm in the plays.

        Up to six arms are drawn as densities. Of more arms, the 15 with the largest means are drawn as intervals, and the
        others in one row. If the program's latents move, the figure shows the expected rewards over time, with bands.

        Args:
            contexts: as in `summary`.
            unit: of the expected reward, for its axis.
        """
        if self.model.moving_sites and self.num_rewards:
            played, rewards, seen = self._rows()
            rows = Interaction(jnp.asarray(played), dict(rewards), seen)
            levels = levels_over_time(self.model, self._learner.engine, self.seed, rows)
            caption = f"decisions by {self._selector.name}"
            return plot_levels(levels, self.arms, played, self._headline, caption, unit)
        found = self._overview(contexts)
        caption = f"{found.source}; decisions by {self._selector.name}"
        if contexts is None and slot_note(self.model):
            caption = "\n".join(textwrap.wrap(f"{caption}. NOTE: {slot_note(self.model)}", 130))
        return plot_bandit(found, self._rows()[0], self._headline, caption, unit)

    def __repr__(self) -> str:
        arms = [shown_name(arm) for arm in (self.arms if len(self.arms) <= 6 else [*self.arms[:5], "..."])]
        names = f"{len(self.arms)} arm{'s' * (len(self.arms) > 1)} ({', '.join(map(str, arms))})"
        return printable(f"<Bandit on {self._headline}; {names}; decisions by {self._selector.name}>")

    def report(self, contexts: Any = None, *, more: Sequence[int] | None = None) -> Report:
        """Return the answer in a few lines: which arm leads, by how much, how certain that is, and what more data would change.

        The expected loss after n more decisions assumes that they are shared among the arms with the current propensities
        (`numerics.expected_loss` has the formula). Where the number of rewards that a posterior is worth has no closed form,
        it is estimated by simulating the program at posterior draws.

        Args:
            contexts: as in `summary`.
            more: numbers n of further decisions; None takes about as many as there are rewards, and ten times as many.
        """
        if more is not None:
            given = [more] if isinstance(more, int) else more
            if isinstance(given, str) or not hasattr(given, "__iter__"):
                raise ValueError(f"more must be numbers of further decisions, as in more=(100, 1000), got {more!r}")
            more = [check_count(n, "more") for n in given]
        found, num_rewards = self._overview(contexts), self.num_rewards
        if more is None:
            size = 10 ** math.floor(math.log10(max(num_rewards, 10)))
            about = max(size * round(num_rewards / size), 10)
            more = (about, 10 * about)
        pending = self.pending()
        oldest = f", the oldest since {pending.decided[0]:%Y-%m-%d %H:%M} UTC" if len(pending) else ""
        return make_report(
            found,
            losses_after(self._experiment, found, sorted(set(more))),
            played=self._rows()[0],
            title=self._headline,
            evidence=evidence_text(self._name, self.explanation, found, self._doubts(found)),
            num_pending=len(pending),
            oldest=oldest,
            num_late=self._experiment.projection.num_late,
            age=knowledge_age(self._experiment.store, self._experiment.name),
            note="; ".join(
                filter(None, (self.model.expected_reward_note, "" if contexts is not None else slot_note(self.model)))
            ),
            rules=() if self._design is None else rule_distances(self._catch_up(), self._design),
            profiles=functools.partial(self._context_profiles, found.contexts),
            seed=self.seed,
        )

    def _context_profiles(self, contexts: Any) -> list[RewardCurves]:
        if contexts is None or self.model.moving_sites or slot_note(self.model):
            return []
        return context_profiles(self.model, draw(self._catch_up().learner, self.num_samples), contexts)

    def _repr_html_(self) -> str:
        return bandit_html(self._name, self.explanation, self._overview(), len(self.pending()), str(self._selector))

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Return the posterior, the prior and the data as an ArviZ object (InferenceData, or DataTree on ArviZ 1).

        Rewards of which some outcomes are not known yet are in the posterior, but not in the data. If latents move, the
        posterior is that of the next step, and there are no groups of the log likelihood and of replicated rewards: the
        latents at the time of earlier rewards are not kept.
        """
        from ppl_bandit.live.exports import export

        num_samples, prior = check_count(num_samples, "num_samples"), self._catch_up().prior
        drawn = draw(prior, num_samples)
        rows = self._rows()
        is_complete = ~np.any([np.isnan(values) for values in rows[1].values()], axis=0)
        if not is_complete.all():
            rows = jax.tree.map(lambda leaf: leaf[is_complete], rows)
        return export(self.model, self.arms, self.posterior(num_samples), drawn, rows)

    @property
    def _headline(self) -> str:
        learnt = "1 reward" if self.num_rewards == 1 else f"{self.num_rewards} rewards"
        return f"{self._name}: {learnt}, {posterior_kind(self.explanation)} posterior"

    @property
    def _name(self) -> str:
        return getattr(self.model.program, "__name__", "program")

    def _overview(self, contexts: Any = None) -> Overview:
        played, _, seen = self._rows()
        if self.model.context is None or contexts is not None:
            contexts = contexts_from(self.model, contexts, late=self._task.late) if is_frame(contexts) else contexts
            if contexts is not None:
                contexts = fill_late(self.model, self._task.late, contexts, is_batch=True)
            num_rows = None if contexts is None else count_rows(self.model, contexts)
            if num_rows == 0 and self.model.context is not None:
                raise InvalidContext(
                    "contexts must have a leading axis with one row per context; for a single context put every array in a list"
                )
            chosen = check_contexts(self.model, contexts, num_rows, "contexts")
        elif played.size:
            seen = at_example_values(self.model, self._task.late, seen)
            if self.model.has_clock and len(seen) == 1:  # contexts that differ in their times alone
                seen = {"time": np.max(seen["time"], keepdims=True)}
            chosen = subsample_contexts(seen, table_size=self.num_samples * len(self.arms))
        else:
            chosen = self.model.context_rows(1)
        learner, num_contexts = self._catch_up().learner, 0 if chosen is None else len(jax.tree.leaves(chosen)[0])
        retired = self._experiment.projection.retired
        is_open = ~np.isin(np.arange(len(self.arms)), list(retired)) if retired else None
        exact = closed_form(learner, self.arms, played, chosen, is_open) if num_contexts <= 1 else None
        if exact is not None and exact.is_complete:
            return exact
        is_clocked = self.model.has_clock and num_contexts > 0
        latest = jax.tree.map(lambda leaf: leaf[np.argmax(chosen["time"])], chosen) if is_clocked else None
        drawn = arm_overview(self.model, self.arms, played, draw(learner, self.num_samples, latest), chosen, is_open)
        if exact is None:
            return drawn
        return exact._replace(best_prob=drawn.best_prob, loss=drawn.loss, draws=drawn.draws)

    def _doubts(self, found: Overview) -> str:
        """Return why the numbers of an overview cannot be trusted, in words; empty if they can."""
        contexts, num = [self.model.context], found.num_contexts
        if found.contexts is not None and num:
            contexts = [jax.tree.map(lambda leaf, row=row: leaf[row], found.contexts) for row in range(num)]
        return "; ".join(filter(None, (self._learner.doubts, domain_doubt(self.model, self._learner, contexts))))

    @property
    def _task(self) -> Task:
        return self._experiment.projection.task

    @property
    def _learner(self) -> Learner:
        return self._experiment.projection.learner

    def _catch_up(self, *, wait: bool = True) -> Projection:
        self._check_process()
        return self._experiment.catch_up(wait=wait)

    def _check_process(self) -> None:
        if self._is_closed:
            raise JournalError("this bandit was closed: build it again to continue the experiment")
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this bandit was built before the process was forked: build it in each process, after the fork"
            )

    def _rows(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
        with self._experiment.fold_lock:
            return self._experiment.history.rows()[:3]
