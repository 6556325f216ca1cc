"""The live bandit: decisions out, rewards in, in any order and after any delay.

All that it computes are the pure functions of an engine and a selector, in float64 whatever jax's flag says; all that it
keeps is a stream of events, in memory or in a journal, and what was learnt from it. This is the edge: bad input is turned
away here before anything is recorded.
"""

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import numpy as np

from ppl_bandit import engines, selectors
from ppl_bandit.engines.exact.laws.expectation import INFINITE_WORDS
from ppl_bandit.inputs.checks import Arms, check_contexts, check_engine, check_rewards, check_selector, count_rows
from ppl_bandit.inputs.data_frames import contexts_from, is_frame, rows_from
from ppl_bandit.inputs.numbers import check_count, seconds
from ppl_bandit.journal import checkpoints
from ppl_bandit.journal.events import Event
from ppl_bandit.journal.journal import Journal
from ppl_bandit.journal.opening import can_grow, grown, open_experiment
from ppl_bandit.journal.rewarding import discarding, expiring, importing, rewarding
from ppl_bandit.journal.stores.memory import MemoryStore
from ppl_bandit.live.decisions import Decision
from ppl_bandit.live.files import saving
from ppl_bandit.live.views import ReadableBandit
from ppl_bandit.posterior.learning import Learner, Rows, start
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.gc_pause import uncollected
from ppl_bandit.types import Engine, Selector

__all__ = ["Bandit"]

_ROWS_PER_CHECKPOINT = 1000


class Bandit(ReadableBandit):
    """A bandit on a reward model: `select` an arm, play it, `update` with its reward. Threads may share one.

    Args:
        program: the NumPyro program of the reward, or a `RewardModel`. One that takes the keyword `num_arms` can be given
            more arms later.
        num_arms: number of arms; not needed where `arms` names them.
        arms: names of the arms, strings; decisions then speak them.
        context: one example context, for a program that takes one.
        outcomes: names of the sample sites that are observed.
        engine: a factory such as `engines.nuts`; None lets `engines.choose` pick the exact engine wherever it is proved.
        selector: a selector; None is `selectors.double_sampling()`.
        num_samples: posterior draws M behind each decision.
        seed: of all of the bandit's random numbers; the same seed and calls give the same decisions.
        draws: whether every decision draws the latents M times, also where p-hat can be drawn from its own law, which is the
            same and faster.
        burn_in: decisions that every arm gets before the selector chooses among all; arms added later get theirs, too.
        journal: a path, a URL or a `Journal`: every decision and reward is recorded there before the call returns, and
            opening the same journal and name again continues the experiment. None keeps everything in memory.
        name: of the experiment in the journal; None is "default".
        allow_changed: whether to continue an experiment with another program or other settings than it was opened with; the
            change is recorded.

    Raises:
        JournalError: if the journal cannot be used, or holds another experiment under this name.
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
        allow_changed: bool = False,
    ):
        self.num_samples = check_count(num_samples, "num_samples")
        self.seed = check_count(seed, "seed", 0)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be an integer below 2**63, got {seed!r}")
        burn_in = check_count(burn_in, "burn_in", 0)
        if name is not None and (not isinstance(name, str) or not name or journal is None):
            raise ValueError(
                f"name must be a text, and names an experiment of a journal, got {name!r}; give journal= too"
            )
        if isinstance(program, RewardModel) and num_arms is None and arms is None:
            num_arms = program.num_arms
        given = Arms(num_arms, arms)
        check_engine(engine)
        self._factory = engines.choose if engine is None else engine
        self._may_fall_back = engine is None
        self._selector = _DEFAULT_SELECTOR if selector is None else check_selector(selector)
        self._draws = bool(draws)
        self._pid = os.getpid()
        if isinstance(program, RewardModel):
            if len(given) != program.num_arms:
                raise ValueError(f"the reward model has {program.num_arms} arms, but {len(given)} were given")
            self._program, self._given = program.program, program
        else:
            self._program = program
            self._given = RewardModel(grown(program, len(given)), len(given), context, outcomes)
        self._context_form: Any = jax.tree.structure(self._given.context)
        task, prior = self._build(list(given.names))
        self._journal = journal if isinstance(journal, Journal) or journal is None else Journal(journal)
        store = MemoryStore() if self._journal is None else self._journal.store
        self._experiment = open_experiment(
            store, name or "default", task, prior, self._build, burn_in, bool(allow_changed)
        )
        self._num_kept = len(self._experiment.history)

    def warm_up(self) -> None:
        """Wait until the first decision and the first update are compiled; both began when the bandit was built."""
        run = self._learner.run
        for function in (run.select, run.learn_quickly, run.learn):
            if function is not None:
                function.wait()

    def select(self, context: Any = None, allowed: Any = None) -> Decision:
        """Decide which arm to play.

        Args:
            context: the context of this decision, for a program that takes one.
            allowed: the arms that may be played, as a list or a mask of booleans; None allows all.
        """
        standing = self._follow(is_waiting=False)
        context = check_contexts(standing.task.model, context, None, "context")
        mask = standing.task.arms.mask(allowed)
        (event,) = self._experiment.decide(standing, mask, context, None)
        return self._decision(event)

    def select_many(
        self, contexts: Any = None, *, num_decisions: int | None = None, allowed: Any = None
    ) -> list[Decision]:
        """Decide for a batch; every row has its own posterior draws, as if selected one after another.

        Args:
            contexts: contexts with a leading axis, one row per decision; or a DataFrame, pandas or polars, whose columns are
                found by name.
            num_decisions: how many, for a program without context.
        """
        standing = self._follow(is_waiting=False)
        model = standing.task.model
        contexts = contexts_from(model, contexts) if is_frame(contexts) else contexts
        if model.context is None:
            if num_decisions is None:
                raise ValueError("num_decisions must say how many decisions to make: the program takes no context")
            num_rows = check_count(num_decisions, "num_decisions")
        else:
            num_rows = count_rows(model, contexts)
            if num_rows == 0 or num_decisions not in (None, num_rows):
                raise ValueError("contexts must have a leading axis with one row per decision")
        contexts = check_contexts(model, contexts, num_rows, "contexts")
        mask = standing.task.arms.mask(allowed)
        with uncollected():  # thousands of records at once, which all stay
            events = self._experiment.decide(standing, mask, contexts, num_rows)
            return list(map(self._decision, events))

    def update(
        self,
        decision: Decision | str | None = None,
        reward: Any = None,
        *,
        arm: Any = None,
        context: Any = None,
        correct: bool = False,
    ) -> Any:
        """Learn from one reward, of a decision of this bandit or of an arm played otherwise.

        The same reward may be reported again, and counts once. A decision with several outcomes may get them one by one; it
        is learnt when the last is known.

        Args:
            decision: a decision of this experiment or its id; its arm and context are known.
            reward: the reward, a number, or {outcome: number} for several outcomes.
            arm: in place of a decision, the arm that was played,
            context: and the context that it was played in.
            correct: whether to replace what was reported before: the posterior becomes what it had been with this reward.

        Returns:
            The engine's evidence of this update; None where there was nothing to learn yet, or nothing new.
        """
        if reward is None:
            raise ValueError("reward is missing")
        if decision is not None:
            if arm is not None or context is not None:
                raise ValueError("give a decision or arm= and context=, not both: a decision knows its arm and context")
            checked = check_rewards(self.model, reward, None, "reward", is_partial=True)
            given = {_id_of(decision): {name: float(value[0]) for name, value in checked.items()}}
            return self._learn(rewarding(self._experiment, given, bool(correct)))
        if arm is None:
            raise ValueError("give a decision, or arm= (and context= for a program that takes one)")
        if correct:
            raise ValueError("correct=True needs a decision: a play that was decided elsewhere has none to be found by")
        task = self._follow().task
        index = task.arms.index(arm)
        context = check_contexts(task.model, context, None, "context")
        checked = check_rewards(task.model, reward, None, "reward")
        rows = None if context is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], context)
        return self._learn(importing(Rows(np.array([index]), checked, rows)))

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
        correct: bool = False,
    ) -> Any:
        """Learn from many rewards at once: all rows, or none if any is wrong.

        Args:
            frame: a DataFrame, pandas or polars, with a row for each play that was decided elsewhere; its columns are found by
                name: `arm`; `reward`, by default those named as the outcomes; and those of the context, which `contexts` lists,
                or renames as {name: column}, where they are called otherwise. In place of a frame:
            decisions: the decision, or its id, of each row; or
            arms: the arm of each row, for plays that were decided elsewhere, such as the history of an experiment,
            contexts: and their contexts with a leading axis N, for a program that takes one.
            rewards: (N,), or {outcome: (N,)} for several outcomes.
            correct: whether to replace what was reported before.
        """
        if frame is not None:
            if not is_frame(frame) or any(value is not None for value in (decisions, arms, rewards)):
                raise ValueError(
                    f"frame must be a DataFrame, and all that is given, got {type(frame).__name__}; for arrays use arms=, "
                    "rewards= and contexts="
                )
            arms, rewards, contexts = rows_from(self.model, frame, arm, reward, contexts)
        elif rewards is None:
            raise ValueError("rewards is missing")
        if (decisions is None) == (arms is None):
            raise ValueError("give decisions= or arms=, and not both")
        if decisions is not None:
            if contexts is not None:
                raise ValueError("contexts was given with decisions=: a decision knows its context")
            if isinstance(decisions, str | bytes | set | frozenset | Mapping | Decision) or not hasattr(
                decisions, "__len__"
            ):
                raise ValueError(f"decisions must be a sequence of decisions or ids, got {type(decisions).__name__}")
            names = [_id_of(decision) for decision in decisions]
            if not names or len(set(names)) < len(names):
                raise ValueError("decisions is empty" if not names else "decisions names one twice: give each once")
            checked = check_rewards(self.model, rewards, len(names), "rewards", is_partial=True)
            given = {name: {o: float(v[row]) for o, v in checked.items()} for row, name in enumerate(names)}
            return self._learn(rewarding(self._experiment, given, bool(correct)))
        if correct:
            raise ValueError("correct=True needs decisions=: plays that were decided elsewhere cannot be found again")
        task = self._follow().task
        indices = task.arms.indices(arms)
        if indices.size == 0:
            raise ValueError("arms is empty: give at least one row")
        checked = check_rewards(task.model, rewards, indices.size, "rewards")
        rows = check_contexts(task.model, contexts, indices.size, "contexts")
        return self._learn(importing(Rows(indices, checked, rows)))

    def discard(self, decision: Decision | str, *, correct: bool = False) -> None:
        """Stop waiting for a decision's reward; with `correct`, take back the reward that it got."""
        self._learn(discarding(self._experiment, [_id_of(decision)], bool(correct)))

    def expire(self, older_than: Any, reward: Any = None) -> int:
        """Settle decisions that have waited too long, and return how many.

        Args:
            older_than: seconds, or a timedelta.
            reward: what they count as, such as 0 for a click that never came; None: as never rewarded.
        """
        until = time.time() - seconds(older_than, "older_than")
        value = None
        if reward is not None:
            checked = check_rewards(self.model, reward, None, "reward")
            value = {name: float(array[0]) for name, array in checked.items()}
        make, count = expiring(self._experiment, until, value), 0

        def counted(standing: Any) -> list[Event]:
            nonlocal count
            events = make(standing)
            count = len(events)
            return events

        self._learn(counted)
        return count

    def add_arm(self, name: str | None = None) -> Any:
        """Add an arm, which starts at its prior, or take a retired one back; return its name.

        Args:
            name: of the new arm; None where arms are numbered.

        Raises:
            ValueError: if the program cannot be written out for more arms: one that can takes the keyword `num_arms`.
        """
        standing = self._follow()
        names = list(standing.task.arms.names)
        if name in self.retired:
            self._experiment.rearrange(names, standing.retired - {names.index(name)})
            return name
        if (name is None) != isinstance(names[0], int):
            raise ValueError(f"name is {name!r}, but the arms are {names}: name an arm where the others have names")
        if name is not None:
            Arms(None, [*names, name])  # a text, and another one
        if not can_grow(self._program):
            raise ValueError(
                "the program is written for a fixed number of arms: let it take num_arms, as in `def model(arm, *, num_arms): "
                'with numpyro.plate("arms", num_arms): ...`, and give each new arm its own latents'
            )
        added = len(names) if name is None else name
        self._experiment.rearrange([*names, added], standing.retired)
        return added

    def retire_arm(self, arm: Any) -> None:
        """Play an arm no more; what was learnt about it stays, and its late rewards are still learnt."""
        standing = self._follow()
        retired = standing.retired | {standing.task.arms.index(arm)}
        if len(retired) == len(standing.task.arms):
            raise ValueError(f"arm={arm!r} is the last one that is played: add another before it is retired")
        self._experiment.rearrange(list(standing.task.arms.names), retired)

    def save(self, path: str | PathLike) -> None:
        """Write everything that later decisions depend on to one file, without pickle; an existing file is replaced whole.

        The file is a copy: a bandit that is loaded from it goes on by itself, without the journal of this one.
        """
        self._follow()
        saving.save(path, self._experiment)

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
        """Continue a saved bandit as if it had never stopped.

        Args:
            program: the program that it was saved with; the file holds data, never code.
            context: the example context; needed only where it is not made of dicts, lists, tuples and arrays.
            engine: the engine factory, where it is not one of this library.
            selector: the selector, where it is not one of this library.
            allow_changed: whether to go on with another program, engine or selector: all rewards are learnt again.

        Raises:
            ValueError: if the file was altered, or the program or a setting differs.
        """
        kept = saving.read(path)
        bandit = cls(program, **kept.arguments(context, engine, selector))
        kept.restore(bandit._experiment, allow_changed)
        bandit._num_kept = len(bandit._experiment.history)
        return bandit

    def __reduce__(self) -> Any:
        raise TypeError(
            "a Bandit cannot be pickled or copied: it holds compiled functions; use save(path) and Bandit.load(path, program)"
        )

    def _build(self, names: list[Any]) -> tuple[Task, Learner]:
        """Return the task and the prior for some arms."""
        model = self._given
        if len(names) != model.num_arms:
            if not can_grow(self._program):
                raise ValueError(
                    f"the experiment has {len(names)} arms, but the program is written for {model.num_arms}"
                )
            model = RewardModel(grown(self._program, len(names)), len(names), model.context, model.outcomes)
        arms = Arms(len(names), None) if isinstance(names[0], int) else Arms(None, names)
        task = Task(model, arms, self._selector, self.num_samples, self.seed, self._may_fall_back, self._draws)
        return task, start(task, self._factory)

    def _learn(self, make_events: Callable) -> Any:
        """Record and learn; on any error nothing has changed."""
        self._check_process()
        info, notes = self._experiment.learn(make_events)
        if self._journal is not None and len(self._experiment.history) >= self._num_kept + _ROWS_PER_CHECKPOINT:
            with self._experiment.learning:
                self._num_kept = len(self._experiment.history)
                checkpoints.keep(self._experiment)
        for note in notes:
            warnings.warn(note, stacklevel=3)
        return info

    def _decision(self, event: Event) -> Decision:
        body = event.body
        context = self._context_form.unflatten(body["context"] or ())
        propensities = body["propensities"]
        return Decision(
            event.decision,  # type: ignore[arg-type]
            body["name"],
            body["best_arm_probs"],
            body["num_candidates"],
            propensities.item(event.arm),
            propensities,
            context,
            self._notes(context),
        )

    def _notes(self, context: Any) -> tuple[str, ...]:
        find = self._learner.engine.capabilities.infinite_means
        if find is None:
            return ()
        named = zip(self.arms, find(self._learner.state, context), strict=True)
        arms = [name for name, is_infinite in named if is_infinite]
        return (f"expected reward of {', '.join(map(str, arms))}: {INFINITE_WORDS}",) if arms else ()


_DEFAULT_SELECTOR = selectors.double_sampling()  # one for all, so that it is compiled once


def _id_of(decision: Any) -> str:
    name = decision.id if isinstance(decision, Decision) else decision
    if not isinstance(name, str):
        raise ValueError(f"decision must be a decision or its id, got {decision!r}")
    return name
