"""The live bandit: decisions out, rewards in, in any order and after any delay.

A `Bandit` runs the pure functions of an engine and a selector, in float64 whatever jax's default is. All that it stores is a
stream of events, in memory or in a journal, and the posterior folded from it. Wrong arguments are refused before anything is
recorded. The methods that read a bandit are in `views`.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, overload

import jax
import numpy as np

from ppl_bandit import engines, selectors
from ppl_bandit.inputs.checks import check_contexts, check_engine
from ppl_bandit.inputs.data_frames import contexts_of_decisions
from ppl_bandit.inputs.late_entries import check_late_names, check_late_values, fill_late
from ppl_bandit.inputs.numbers import Arms, as_seconds, check_count, check_text
from ppl_bandit.journal.audit import Verification
from ppl_bandit.journal.checkpoints import make_checkpoint, save_checkpoint
from ppl_bandit.journal.events import REWARDED, Event
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.open_experiment import open_experiment, record_identity
from ppl_bandit.journal.outcome_events import Discard, Expiry, LearnRequest, Report, Reported
from ppl_bandit.journal.projection import Projection, context_from_leaves, initial_projection
from ppl_bandit.journal.repeats import Ask, Repeat, check_unit
from ppl_bandit.journal.replay import recompute_posteriors
from ppl_bandit.journal.stores.appending import unit_key
from ppl_bandit.journal.stores.memory import MemoryStore
from ppl_bandit.journal.stores.store import JournalError, call_within
from ppl_bandit.live.decisions import (
    Decision,
    Slate,
    asks_of,
    check_size,
    decide_asked,
    decision_from_event,
    decision_ids,
    plain,
)
from ppl_bandit.live.designs import arms_with, design_record, refuse_stopped, retired_with, settings_of_design
from ppl_bandit.live.looks import LookVerdict, look_difference, prepare_look, take_look
from ppl_bandit.live.overview import closed_form
from ppl_bandit.live.rendering import evaluation_note
from ppl_bandit.live.reported_rewards import check_windows, learn_rows, many_rewards, one_update, reward_values
from ppl_bandit.live.saved_bandit import EarlierFile, checked_path, is_earlier_file, read_bandit, save_bandit
from ppl_bandit.live.views import ReadableBandit
from ppl_bandit.posterior.learning import SIZES, Learner, prepare_batches, prepare_draws, start
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.keywords import takes
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.outcomes import (
    check_information_directed,
    outcome_information,
    uninformative_arms_note,
)
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.trials.design import Design, design_from_settings
from ppl_bandit.types import Engine, Selector, check_flag

_EVENTS_PER_CHECKPOINT = 2000  # opening folds at most as many, in about 0.1 s
_DEFAULT_SELECTOR = selectors.double_sampling()  # shared, so that bandits share its compiled functions


class Bandit(ReadableBandit):
    """A bandit on a reward model: `select` an arm, play it, `update` with its reward. Threads may share one.

    Args:
        program: the NumPyro program of the reward, or a `RewardModel`. If it takes the keyword `num_arms`, arms can be added
            later.
        num_arms: number of arms; not needed with `arms`.
        arms: names of the arms, strings; `Decision.arm` is then one of these names.
        context: one example context, for a program that takes one.
        outcomes: names of the sample sites that are observed.
        engine: a factory such as `engines.nuts`; None lets `engines.choose` pick: exact if the program is proved conjugate.
        selector: a selector; None is `selectors.double_sampling()`.
        num_samples: number of posterior draws M behind each decision.
        seed: of all random numbers; the same seed and calls give the same decisions.
        draws: whether every decision draws the latents M times. By default p-hat is drawn from its own distribution where
            that is known, which is equivalent and faster.
        burn_in: number of decisions that each arm gets before the selector chooses among all; also for arms added later.
        journal: a path, a URL or a `Journal`: every decision and reward is recorded there before the call returns, and
            opening the same journal and name again continues the experiment. None keeps everything in memory.
        name: of the experiment in the journal; None is "default".
        design: a `Design`: `look` then says when to stop. Decisions are refused while a look is due, and after a stop. Its
            selector and its burn-in are used.
        late: entries of a dict context that are known only with the reward, such as the days of follow-up. Decisions use
            their example values; `update(decision, reward, context={"days": 12.0})` brings those that are learnt.
        unit_window: seconds or a timedelta that the decision of a unit stands, see `select`; None: for ever.
        reward_window: seconds or a timedelta after which a pending decision is settled by itself; None: never.
        default_reward: the reward of overdue decisions, such as 0 for a click that did not come; None discards them.
        allow_changed: whether to continue an experiment with another program or other settings than it was opened with; the
            change is recorded.

    Raises:
        JournalError: if the journal cannot be used, or this experiment was recorded with another program or other settings.
    """

    def __init__(
        self,
        program: Callable | RewardModel,
        num_arms: int | None = None,
        *,
        arms: Sequence[str] | None = None,
        context: Any = None,
        outcomes: tuple[str, ...] = ("reward",),
        engine: Callable[[RewardModel], Engine] | None = None,
        selector: Selector | None = None,
        num_samples: int = 1000,
        seed: int = 0,
        draws: bool = False,
        burn_in: int = 0,
        journal: str | PathLike | Journal | None = None,
        name: str | None = None,
        design: Design | Mapping[str, Any] | None = None,
        late: Sequence[str] = (),
        unit_window: Any = None,
        reward_window: Any = None,
        default_reward: Any = None,
        allow_changed: bool = False,
    ):
        self.num_samples = check_count(num_samples, "num_samples")
        self.seed = check_count(seed, "seed", 0)
        burn_in = check_count(burn_in, "burn_in", 0)
        allow_changed = check_flag(allow_changed, "allow_changed")
        if name is not None and journal is None:
            raise ValueError(f"name={name!r} is the name of an experiment in a journal: give journal= too")
        name = "default" if name is None else check_text(name, "name")
        if journal is not None and not isinstance(journal, Journal | str | PathLike):
            raise ValueError(f"journal must be a path, a URL or a Journal, got {journal!r}")
        if not callable(program) and not isinstance(program, RewardModel):
            raise ValueError(f"program must be a NumPyro program, a function of arm, or a RewardModel, got {program!r}")
        if isinstance(program, RewardModel) and num_arms is None and arms is None:
            num_arms = program.num_arms
        names = Arms(num_arms, arms)
        check_engine(engine)
        self._factory = engines.choose if engine is None else engine
        self._may_fall_back = engine is None
        self._design = design_from_settings(design) if isinstance(design, Mapping) else design
        if self._design is not None:
            selector, burn_in = settings_of_design(self._design, selector, burn_in, len(names))
        self._selector = _DEFAULT_SELECTOR if selector is None else as_selector(selector)
        self._draws = check_flag(draws, "draws")
        self._pid = os.getpid()
        if isinstance(program, RewardModel):
            if len(names) != program.num_arms:
                raise ValueError(
                    f"the reward model has {program.num_arms} arms, but num_arms or arms gives {len(names)}"
                )
            self._program, self._reward_model = program.program, program
        else:
            self._program = program
            self._reward_model = RewardModel(program, len(names), context, outcomes)
        self._late = check_late_names(self._reward_model, late)
        self._windows = check_windows(self._reward_model, self._late, unit_window, reward_window, default_reward)
        self._next_sweep, self._watching = 0.0, threading.Lock()
        check_information_directed(self._reward_model, self._selector)
        self._context_structure: Any = jax.tree.structure(self._reward_model.context)
        task, prior = self._build(list(names.names), not isinstance(program, RewardModel))
        self._journal = journal if isinstance(journal, Journal) or journal is None else Journal(journal)
        self._owns_store = self._journal is None or self._journal is not journal
        if (
            self._journal is None
        ):  # nothing was recorded before: without the fingerprint of an identity, this takes no time
            projection = initial_projection(task, prior)
            self._experiment = Experiment(MemoryStore(), name, projection, self._build, burn_in)
        else:
            self._experiment = open_experiment(
                self._journal.store, name, task, prior, self._build, burn_in, allow_changed
            )
        uninformative = [self.arms[arm] for arm in outcome_information(self._reward_model).uninformative]
        if uninformative:
            warnings.warn(uninformative_arms_note(uninformative), stacklevel=2)
        if self._selector.is_deterministic:
            warnings.warn(evaluation_note(self._selector), stacklevel=2)

    def warm_up(self, batches: bool = False) -> None:
        """Wait until the first decision and the first update are compiled; the constructor starts both in the background.

        It compiles what the first report reads, too: the laws of the arms, or draws where they have no closed form.

        Args:
            batches: whether to compile `select_many` and `update_many` too, for batches of every size.
        """
        if check_flag(batches, "batches"):
            prepare_batches(self._task, self._learner, SIZES[:-1])
        self._learner.run.wait()
        if self._design is not None:
            prepare_look(self._experiment.projection, self._design)
        exact = None if self.model.context is not None else closed_form(self._learner, self.arms, np.zeros(0, int))
        if exact is None or not exact.is_complete:
            prepare_draws(self._task, self._learner)
        import pandas  # noqa: F401 - a quarter of the time of the first `report`

    @overload
    def select(
        self,
        context: Any = None,
        allowed: Any = None,
        *,
        size: None = None,
        unit: str | None = None,
        request_id: str | None = None,
    ) -> Decision: ...

    @overload
    def select(
        self, context: Any = None, allowed: Any = None, *, size: int, unit: None = None, request_id: str | None = None
    ) -> Slate: ...

    def select(
        self,
        context: Any = None,
        allowed: Any = None,
        *,
        size: int | None = None,
        unit: str | None = None,
        request_id: str | None = None,
    ) -> Decision | Slate:
        """Decide which arm to play, or which arms to show in order, and record the decision.

        Args:
            context: the context of this decision, for a program that takes one.
            allowed: the arms that may be played, as a list or a mask of booleans; None allows all.
            size: number of places of a slate: distinct arms, chosen one after another from the same posterior. Each place is
                an ordinary decision among the arms that are left. None chooses one arm.
            unit: who the decision is for, a text of at most 256 bytes. A unit has one standing decision: asking again returns
                it, as long as its arm is allowed and not retired, it was not discarded, and `unit_window` is not over.
            request_id: id of this request, a text of at most 256 bytes. The same request gives the same decision, from any
                process.

        Raises:
            RequestIdReused: if the request was made with other arguments.
        """
        if self._is_closed or os.getpid() != self._pid:
            self._check_process()
        with call_within(self._experiment.store.timeout):
            projection = self._experiment.catch_up(wait=False)
            if self._windows.reward is not None and self._expire_overdue():
                projection = self._experiment.projection
            if self._late:
                context = fill_late(projection.task.model, self._late, context)
            if context is not None or projection.task.model.context is not None:
                context = check_contexts(projection.task.model, context, None, "context")
            arms, is_slate = projection.task.arms, size is not None
            mask = arms.all_allowed if allowed is None else arms.mask(allowed)
            if unit is not None or request_id is not None:
                leaves = jax.tree.map(lambda leaf: leaf[None], context)
                asked = [plain(allowed), plain(size)]
                asks = asks_of([unit], [request_id], 1, leaves, asked, ("unit", "request_id"))
                if is_slate and unit is not None:
                    raise ValueError(
                        "unit was given with size: a unit has one decision; give request_id to repeat a slate"
                    )
                num = check_count(size, "size") if is_slate else None  # the arms of an earlier slate may be retired
                (found,) = self._decide_asked(projection, mask, context, asks, num_places=num)
                return Slate(tuple(found)) if is_slate else found[0]
            if self._design is not None:
                refuse_stopped(projection, self._design, 1)
            num = check_size(projection, mask, size) if is_slate else None
            events = self._experiment.decide(projection, mask, context, num, is_slate=is_slate)
        task, learner = projection.task, projection.learner
        made = [decision_from_event(event, context, task, learner) for event in events]
        return Slate(tuple(made)) if is_slate else made[0]

    def _decide_asked(
        self, projection: Projection, mask: np.ndarray, contexts: Any, asks: list[Ask], **shape: Any
    ) -> list[list[Decision]]:
        given = self._experiment, projection, mask, contexts, asks, self._windows.unit, self._refuse_stopped
        projection, found = decide_asked(*given, **shape)
        return [[self._decision(projection, event) for event in events] for events in found]

    def _refuse_stopped(self, projection: Projection, num_new: int) -> None:
        if self._design is not None:
            refuse_stopped(projection, self._design, num_new)

    def select_many(
        self,
        contexts: Any = None,
        *,
        num_decisions: int | None = None,
        allowed: Any = None,
        units: Sequence[str | None] | None = None,
        request_ids: Sequence[str | None] | None = None,
    ) -> list[Decision]:
        """Make many decisions at once; each has its own posterior draws, as if made one after another.

        Args:
            contexts: contexts with a leading axis, one row per decision; or a DataFrame, pandas or polars, whose columns are
                found by name.
            num_decisions: number of decisions, for a program without context.
            allowed: as in `select`.
            units: the unit of each decision, or None, as in `select`. Equal ones get the same decision.
            request_ids: the id of each request, or None, as in `select`.
        """
        with call_within(self._experiment.store.timeout):
            projection = self._catch_up(wait=False)
            contexts, num_rows = contexts_of_decisions(projection.task.model, contexts, num_decisions, self._late)
            mask = projection.task.arms.mask(allowed)
            asks = (
                asks_of(units, request_ids, num_rows, contexts, [plain(allowed), None]) if units or request_ids else []
            )
            if asks:
                return [made for (made,) in self._decide_asked(projection, mask, contexts, asks, is_batch=True)]
            self._refuse_stopped(projection, num_rows)
            events = self._experiment.decide(projection, mask, contexts, num_rows)
            return [self._decision(projection, event) for event in events]

    def look(self) -> LookVerdict:
        """Take the look that is due by the design, record it, and say whether to stop.

        A look is due as soon as its number of decisions is reached, and decisions are refused until it is taken. It uses the
        rewards that are known; only the last one of a design with `max_rows` waits for those that are pending. If none is due,
        the verdict of the last one is returned. The same look gives the same verdict in every process and after a
        crash, and `operating_characteristics` simulates it.

        Raises:
            ValueError: if the bandit has no design.
        """
        if self._design is None:
            raise ValueError("this bandit has no design: build it with design=Design(looks, stopping=...)")
        self._catch_up()
        return take_look(self._experiment, self._design)

    def update(
        self,
        decision: Decision | Slate | str | None = None,
        reward: Any = None,
        *,
        arm: Any = None,
        context: Any = None,
        correct: bool = False,
        shown: Any = None,
        propensity: float | None = None,
        request_id: str | None = None,
    ) -> Any:
        """Learn from one reward: of a decision of this bandit, or of an arm that another system decided to play.

        The same reward may be reported again, and counts once. The outcomes of a decision may be reported one at a time; each
        is learnt if its density depends on no value that is missing, and otherwise when that is known.

        Args:
            decision: a decision of this experiment, or its id; or a slate.
            reward: a number, or {outcome: number} for several outcomes. Of a slate, {place: reward} with places from 0, or a
                list with None for places without a reward yet; each is learnt as an ordinary reward.
            arm: without a decision, the arm that was played.
            context: without a decision, its context; with one, {entry: value} of its late entries.
            correct: whether to replace the reward reported before. The posterior then is as if only the new reward had been
                reported.
            shown: the arm that was really shown, if another system replaced that of the decision; it is learnt as that arm.
            propensity: the probability with which it was shown. Without it, `evaluate` leaves this reward out.
            request_id: id of this request, a text of at most 256 bytes. A repeated request changes nothing.

        Returns:
            The engine's diagnostics of this update; None if there was nothing new to learn, or outcomes are missing.
        """
        with call_within(self._experiment.store.timeout):
            if decision is None:
                self._catch_up()
            given = decision, reward, arm, context, correct, shown, propensity, request_id
            return self._learn(*one_update(self._experiment.projection.task, *given))[1]

    def update_each(self, rows: Sequence[Mapping[str, Any]]) -> list[bool | Exception]:
        """Learn from many rewards at once; one that is refused leaves the others as they are.

        Args:
            rows: the arguments of `update` for each reward, by name.

        Returns:
            For each row, whether something was recorded (False if it was known), or the error that `update` would raise.
        """
        with call_within(self._experiment.store.timeout):
            self._catch_up()
            if not isinstance(rows, Sequence) or any(not isinstance(row, Mapping) for row in rows):
                raise ValueError(f"rows must be a list of mappings, the arguments of `update` by name, got {rows!r}")
            found = learn_rows(self._experiment, rows)
            self._checkpoint(_EVENTS_PER_CHECKPOINT)
            return found

    def update_many(
        self,
        frame: Any = None,
        *,
        arm: str = "arm",
        reward: str | Mapping[str, str] | None = None,
        decisions: Sequence[Decision | str] | None = None,
        arms: Any = None,
        rewards: Any = None,
        contexts: Any = None,
        propensity: Any = None,
        correct: bool = False,
    ) -> Any:
        """Learn from many rewards at once: all rows, or none if any is wrong.

        Give a DataFrame, or `decisions` and `rewards`, or `arms`, `rewards` and `contexts`.

        Args:
            frame: a DataFrame, pandas or polars, with a row for each play that another system decided. Its columns are found by
                name.
            arm: the frame's column of arms.
            reward: the frame's column of rewards, or {outcome: column}; None uses the names of the outcomes.
            decisions: the decision of each row, or its id.
            arms: the arm of each row, for plays that another system decided.
            rewards: (N,), or {outcome: (N,)} for several outcomes.
            contexts: the context of each row of `arms`, with a leading axis N; with decisions, {entry: (N, ...)} of their
                late entries; with a frame, its context columns as a list,
                or as {name: column}, if they do not have the context's own names.
            propensity: the probability with which each play of `arms` was chosen, (N,); with a frame, the name of its column.
                It does not change what is learnt. `evaluate` then counts these plays as decisions.
            correct: whether to replace the rewards reported before.

        Returns:
            As `update`.
        """
        if decisions is None:
            self._catch_up()
        given = (frame, arm, reward, decisions, arms, rewards, contexts, propensity, correct)
        return self._learn(many_rewards(self._task, *given))[1]

    def discard(self, decision: Decision | Slate | str, *, correct: bool = False) -> None:
        """Expect no reward for a decision, or for any place of a slate; with `correct`, remove the reward that it has.

        Outcomes that were learnt already stay, unless `correct` removes them.
        """
        correct = check_flag(correct, "correct")
        self._learn(Discard(decision_ids(decision), correct))

    def expire(self, older_than: Any = None, reward: Any = None, *, context: Any = None) -> int:
        """Settle decisions whose reward has been pending for too long, and return their number.

        A reward that comes after that is recorded as a correction.

        Args:
            older_than: seconds, or a timedelta; None takes `reward_window` and `default_reward`.
            reward: the reward to record for them, such as 0 for a click that did not come; None discards them.
            context: {entry: value} of the late entries to record with the reward.
        """
        if older_than is None:
            if self._windows.reward is None or reward is not None:
                raise ValueError("older_than is missing: give it, or build the bandit with reward_window=")
            self._next_sweep = 0.0
            return self._expire_overdue()
        until = time.time() - as_seconds(older_than, "older_than")
        late, _ = check_late_values(self.model, self._late, context, None, "context")
        values = None if reward is None else Reported(reward_values(self.model, reward), late)
        return len(self._learn(Expiry(until, values))[0])

    def _expire_overdue(self) -> int:
        """Settle the decisions that are overdue by `reward_window`, and return their number.

        It reads the decisions that became overdue since the last time, at least a second ago, or a tenth of the window.
        """
        window, now = self._windows.reward, time.time()
        if window is None or now < self._next_sweep:
            return 0
        until, default, experiment = now - window, self._windows.default, self._experiment
        after, num = experiment.settled_until, 0
        self._next_sweep = now + min(1.0, window / 10)  # also if this one fails
        first, made = experiment.store.first_after(experiment.name, until, after)
        if experiment.store.pending(experiment.name, until, after, first):
            reward = None if default is None else Reported(default)
            num = len(self._learn(Expiry(until, reward, after, first))[0])
        experiment.settled_until = first - 1
        self._next_sweep = max(self._next_sweep, min(made, now) + window)
        return num

    def erase(self, unit: str) -> int:
        """Erase a unit: blank its name and the contexts of its decisions and rewards; return the number of its decisions.

        The posterior stays as it is, unless its engine stores rows. With a context, the unit's rows leave `history`, pending
        decisions are discarded, and a later correction or new arm learns without them. A unit that asks again is a new one.
        """
        self._catch_up()
        if unit is None:
            raise ValueError("unit is missing: give the unit to erase")
        owner, experiment = unit_key(str(check_unit(unit, "unit"))), self._experiment
        return experiment.erase(owner, lambda projection: make_checkpoint(experiment, projection))

    def add_arm(self, name: str | None = None) -> Any:
        """Add an arm, which starts at its prior, or bring back a retired one; return its name.

        Args:
            name: of the arm; None if the arms are numbered.

        Raises:
            ValueError: if the program does not take the keyword `num_arms`.
        """
        self._catch_up()
        projection = self._experiment.change_arms(lambda latest: arms_with(latest, self._program, name))
        self._checkpoint(1)  # to open is not to refit again
        return projection.task.arms.names[-1] if name is None else name

    def retire_arm(self, arm: Any) -> None:
        """Stop playing an arm; its posterior is kept, and its pending rewards are still learnt."""
        self._catch_up()
        self._experiment.change_arms(lambda latest: {"retired": retired_with(latest, arm)})

    def pause(self) -> None:
        """Refuse new decisions, in every process, until `resume`; rewards are still learnt, and repeated requests answered."""
        self._catch_up()
        self._experiment.change_arms(lambda latest: {"is_paused": True})

    def resume(self) -> None:
        """Make decisions again."""
        self._catch_up()
        self._experiment.change_arms(lambda latest: {"is_paused": False})

    def verify(self, head: str | None = None) -> Verification:
        """Check that no event was edited or removed, and that the stored posteriors follow from the events.

        The posteriors are learnt again from the first event, which takes as long as it took to learn them.

        Args:
            head: what `Journal.head` returned earlier.

        Raises:
            JournalError: with the first position at which something is not what was recorded.
        """
        self._check_process()
        experiment = self._experiment
        record_identity(experiment)  # in memory it may be missing
        found = Journal.of(experiment.store, "the bandit").verify(experiment.name, head)
        return recompute_posteriors(experiment.store, found, self._build)

    def save(self, path: str | PathLike) -> None:
        """Write a copy of the bandit's journal, with a checkpoint, to one SQLite file; an existing file is replaced atomically.

        A bandit loaded from the file is independent of this one and of its journal. `ppl-bandit journal` reads the file, too.
        """
        self._catch_up()
        save_bandit(path, self._experiment)

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        program: Callable | RewardModel,
        *,
        context: Any = None,
        engine: Callable[[RewardModel], Engine] | None = None,
        selector: Selector | None = None,
        allow_changed: bool = False,
    ) -> "Bandit":
        """Load a saved bandit; it makes the same decisions as the saved one would have.

        Args:
            program: the program that it was saved with; the file holds data, not code.
            context: the example context; needed only if it is not made of dicts, lists, tuples and arrays.
            engine: the engine factory, if it is not part of this library.
            selector: the selector, if it is not part of this library.
            allow_changed: whether to accept another program, engine or selector; all rewards are then learnt again.

        Raises:
            ValueError: if the file was altered, or the program or a setting differs.
        """
        allow_changed = check_flag(allow_changed, "allow_changed")
        if is_earlier_file(checked_path(path)):
            earlier = EarlierFile.read(path)
            bandit = cls(program, **earlier.arguments(context, engine, selector))
            earlier.restore(bandit._experiment, allow_changed)
            return bandit
        journal, name, arguments = read_bandit(path, context, engine, selector)
        try:
            return cls(program, journal=journal, name=name, allow_changed=allow_changed, **arguments)
        except JournalError as error:
            raise ValueError(str(error)) from None

    def close(self) -> None:
        """Store the posterior, so that the experiment opens at once, and close the journal; later calls raise JournalError.

        A `Journal` that the bandit was given stays open. `with Bandit(...) as bandit:` closes it at the end.
        """
        if self._is_closed:
            return
        self._check_process()
        self._checkpoint(2)  # one event is that of the last checkpoint itself
        self._is_closed = True
        if self._owns_store:
            self._experiment.store.close()

    def __enter__(self) -> "Bandit":
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Bandit cannot be pickled or copied: it holds compiled functions; use save(path) and Bandit.load(path, program)"
        )

    def _build(self, names: list[Any], is_model_new: bool = False) -> tuple[Task, Learner]:
        """Return the task and the prior for a list of arms; `is_model_new` is as in `start`."""
        model = self._reward_model
        if len(names) != model.num_arms:
            if not takes(self._program, "num_arms"):
                raise ValueError(f"the experiment has {len(names)} arms, but the program has {model.num_arms}")
            model = RewardModel(self._program, len(names), model.context, model.outcomes)
        arms = Arms(len(names), None) if isinstance(names[0], int) else Arms(None, names)
        task = Task(model, arms, self._selector, self.num_samples, self.seed, self._may_fall_back, self._draws)
        task = task._replace(late=self._late, factory=self._factory, windows=self._windows)
        prior = start(task, self._factory, is_model_new or model is not self._reward_model)
        return task if self._design is None else task._replace(design=design_record(self._design, task, prior)), prior

    def _look_difference(self, projection: Projection, event: Event) -> str:
        return "" if self._design is None else look_difference(projection, self._design, event.body)

    def _catch_up(self, *, wait: bool = True) -> Projection:
        projection = super()._catch_up(wait=wait)
        return self._experiment.projection if self._expire_overdue() else projection

    def _learn(self, report: Report, repeat: Repeat | None = None) -> tuple[list[Event], Any]:
        """Learn from what is reported, and record it; return the events and the diagnostics. An error changes nothing."""
        if self._is_closed or os.getpid() != self._pid:
            self._check_process()
        experiment, request = self._experiment, LearnRequest(report, repeat)
        with call_within(experiment.store.timeout):
            recorded, info, notes = experiment.learn(request)
        is_refit = any(event.body.get("of") is not None and event.kind != REWARDED for event in recorded)
        if is_refit or experiment.projection.position >= experiment.checkpoint_position + _EVENTS_PER_CHECKPOINT:
            self._checkpoint(1 if is_refit else _EVENTS_PER_CHECKPOINT)  # to open is not to refit again
        for note in notes:
            warnings.warn(note, stacklevel=3)
        return recorded, info

    def _checkpoint(self, num_events: int) -> None:
        """Store the posterior if the journal has got so many events since the last time."""
        experiment = self._experiment
        position = experiment.projection.position
        if position >= experiment.checkpoint_position + num_events:
            experiment.checkpoint_position = position  # other threads go on
            save_checkpoint(experiment)

    def _decision(self, projection: Projection, event: Event) -> Decision:
        task, leaves = projection.task, event.body.get("context")
        if isinstance(event.body["propensities"], list):  # it was recorded before
            return decision_from_event(event, context_from_leaves(task.model, leaves), task)
        context = self._context_structure.unflatten(leaves or ())
        return decision_from_event(event, context, task, projection.learner)
