"""The live bandit: decisions out, rewards in, in any order and after any delay.

All that it computes are the pure functions of an engine and a selector, in float64 whatever jax's flag says; all that it adds
is memory (state, history, open decisions) and an edge at which bad input is turned away before anything changes.
"""

import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ppl_bandit import engines, selectors
from ppl_bandit.live import snapshot, summary
from ppl_bandit.live.deciding import decide, decide_many
from ppl_bandit.live.decisions import Decision
from ppl_bandit.live.figures import draw_bandit
from ppl_bandit.live.history import History
from ppl_bandit.live.html import as_html
from ppl_bandit.live.inputs import Arms, check_contexts, check_rewards
from ppl_bandit.live.ladder import learn
from ppl_bandit.live.learning import Rows, Task, start
from ppl_bandit.live.overview import Overview, as_frame, overview, some_contexts
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.selectors.contract import as_selector
from ppl_bandit.types import Engine, Selection, Selector

if TYPE_CHECKING:
    import pandas

__all__ = ["Bandit"]


class Bandit:
    """A bandit on a reward model: `select` an arm, play it, `update` with its reward.

    Args:
        program: the NumPyro program of the reward, or a `RewardModel`.
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
    ):
        if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer) or num_samples < 1:
            raise ValueError(f"num_samples must be a positive integer, got {num_samples!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
        if isinstance(program, RewardModel) and num_arms is None and arms is None:
            num_arms = program.num_arms
        self._arms = Arms(num_arms, arms)
        self.num_samples, self.seed = int(num_samples), int(seed)
        self._selector = _DEFAULT_SELECTOR if selector is None else as_selector(selector)
        if not isinstance(program, RewardModel):
            program = RewardModel(program, len(self._arms), context, outcomes)
        if len(self._arms) != program.num_arms:
            raise ValueError(f"the reward model has {program.num_arms} arms, but {len(self._arms)} were given")
        self.model = program
        self._task = Task(
            self.model, self._arms, self._selector, self.num_samples, self.seed, engine is None, bool(draws)
        )
        self._learner = start(self._task, engines.choose if engine is None else engine)
        self._token = uuid.uuid4().hex[:12]
        self._num_decisions = 0
        self._open: dict[int, tuple[int, Any]] = {}  # decision number -> (arm index, context)
        self._history = History(self.model.outcomes)

    @property
    def arms(self) -> list[Any]:
        """The arms, as decisions name them."""
        return list(self._arms.names)

    @property
    def explanation(self) -> Any:
        """The engine's own account of itself."""
        return self._learner.engine.explanation

    @property
    def num_rewards(self) -> int:
        """How many rewards the bandit has learnt from."""
        return len(self._history)

    def warm_up(self) -> None:
        """Wait until the first decision and the first update are compiled; both began when the bandit was built."""
        for function in (self._learner.run.select, self._learner.run.learn):
            function.wait()

    def select(self, context: Any = None, allowed: Any = None) -> Decision:
        """Decide which arm to play.

        Args:
            context: the context of this decision, for a program that takes one.
            allowed: the arms that may be played, as a list or a mask; None allows all.
        """
        context = check_contexts(self.model, context, None, "context")
        mask = self._arms.mask(allowed)
        chosen = decide(self._task, self._learner, self._num_decisions, context, mask)
        return self._record(chosen, context)

    def select_many(
        self, contexts: Any = None, *, num_decisions: int | None = None, allowed: Any = None
    ) -> list[Decision]:
        """Decide for a batch; every row has its own posterior draws, as if selected one after another.

        Args:
            contexts: contexts with a leading axis, one row per decision.
            num_decisions: how many, for a program without context.
        """
        if self.model.context is None:
            if num_decisions is None or num_decisions < 1:
                raise ValueError("num_decisions must say how many decisions to make: the program takes no context")
            num_rows = int(num_decisions)
        else:
            leaves = jax.tree.leaves(contexts)
            num_rows = len(leaves[0]) if leaves and np.ndim(leaves[0]) else 0
            if num_rows == 0 or num_decisions not in (None, num_rows):
                raise ValueError("contexts must have a leading axis with one row per decision")
        contexts = check_contexts(self.model, contexts, num_rows, "contexts")
        mask = self._arms.mask(allowed)
        numbers = np.arange(self._num_decisions, self._num_decisions + num_rows)
        rows = decide_many(self._task, self._learner, numbers, contexts, mask)
        return [
            self._record(row, None if contexts is None else jax.tree.map(lambda leaf, i=i: leaf[i], contexts))
            for i, row in enumerate(rows)
        ]

    def update(
        self, decision: Decision | str | None = None, reward: Any = None, *, arm: Any = None, context: Any = None
    ) -> Any:
        """Learn from one reward, of a decision of this bandit or of an arm played otherwise.

        Args:
            decision: a decision of this bandit or its id; its arm and context are known.
            reward: the reward, a number, or {outcome: number} for several outcomes.
            arm: in place of a decision, the arm that was played,
            context: and the context that it was played in.

        Returns:
            The engine's evidence of this update.
        """
        if reward is None:
            raise ValueError("reward is missing")
        number = None
        if decision is not None:
            if arm is not None or context is not None:
                raise ValueError("give a decision or arm= and context=, not both: a decision knows its arm and context")
            number = self._number_of(decision)
            index, context = self._open[number]
        elif arm is None:
            raise ValueError("give a decision, or arm= (and context= for a program that takes one)")
        else:
            index = self._arms.index(arm)
            context = check_contexts(self.model, context, None, "context")
        rewards = check_rewards(self.model, reward, None, "reward")
        rows = None if context is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], context)
        info = self._absorb(Rows(np.array([index]), rewards, rows))
        if number is not None:
            del self._open[number]
        return info

    def update_many(self, *, arms: Any, rewards: Any, contexts: Any = None) -> Any:
        """Learn from many rewards at once, such as the history of an experiment: all rows, or none if any is wrong.

        Args:
            arms: the arm of each row.
            rewards: (N,), or {outcome: (N,)} for several outcomes.
            contexts: contexts with a leading axis N, for a program that takes one.
        """
        indices = self._arms.indices(arms)
        if indices.size == 0:
            raise ValueError("arms is empty: give at least one row")
        checked = check_rewards(self.model, rewards, indices.size, "rewards")
        rows = check_contexts(self.model, contexts, indices.size, "contexts")
        return self._absorb(Rows(indices, checked, rows))

    def posterior(self, num_samples: int = 1000) -> dict[str, np.ndarray]:
        """Return draws of the latents from the posterior, {site: (M, ...)}; reading them changes no later decision."""
        with jax.enable_x64(True):
            return jax.device_get(self._learner.run.draw(self.seed, self._learner.state, int(num_samples)))

    def posterior_parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the parameters of the exact posterior, {site: {parameter: array}}; see the docs for their names.

        Raises:
            ValueError: if the engine is not exact.
        """
        if self._learner.engine.parameters is None:
            raise ValueError(f"the {self.explanation.engine} engine has no closed form: use posterior(num_samples)")
        with jax.enable_x64(True):
            return jax.device_get(self._learner.engine.parameters(self._learner.state))

    def expected_rewards(self, context: Any = None, num_samples: int | None = None) -> np.ndarray:
        """Return posterior draws of each arm's expected reward, (M, A)."""
        context = check_contexts(self.model, context, None, "context")
        num = self.num_samples if num_samples is None else int(num_samples)
        with jax.enable_x64(True):
            return np.asarray(self._learner.run.expected(self.seed, self._learner.state, context, num))

    def explain(self) -> str:
        """Return what was proved about the program, what the data say so far, and how decisions are made."""
        evidence = None
        if hasattr(self._learner.state, "log_evidence"):
            with jax.enable_x64(True):
                evidence = float(self._learner.state.log_evidence), float(self._learner.state.log_evidence_error)
        return summary.describe(self.explanation, self._overview(), self._selector.name, evidence)

    def summary(self, contexts: Any = None) -> "pandas.DataFrame":
        """Return where the arms stand, one row per arm.

        Columns: arm, num_rewards, expected_reward (posterior mean), low and high (its central 95% interval), best_arm_prob, and
        expected_loss, what choosing this arm now would cost on average against the best.

        Args:
            contexts: with a leading axis, those to average over; None averages over the contexts of the rewards so far, at
                most 200 of them, or stays at the example context before the first.
        """
        return as_frame(self._overview(contexts))

    def plot(self, contexts: Any = None, unit: str = "") -> Any:
        """Return a figure: the posterior of each arm's expected reward, and who was played when.

        Args:
            contexts: as in `summary`.
            unit: of the expected reward, for its axis.
        """
        found = self._overview(contexts)
        kind = "exact" if self.explanation.is_exact else f"approximate ({self.explanation.engine})"
        return draw_bandit(
            found,
            self._history.rows()[0],
            f"{self._name}: {len(self._history)} rewards, {kind} posterior",
            f"{found.draws.shape[0]} posterior draws, decisions by {self._selector}, seed {self.seed}",
            unit,
        )

    def _repr_html_(self) -> str:
        return as_html(self._name, self.explanation, self._overview(), len(self._open), str(self._selector))

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Return the posterior, the prior and the data as an ArviZ object (InferenceData, or DataTree on ArviZ 1)."""
        from ppl_bandit.live import arviz_export

        with jax.enable_x64(True):
            prior = jax.device_get(
                self._learner.run.draw(self.seed, self._learner.run.init(self.seed), int(num_samples))
            )
        return arviz_export.export(
            self.model, self._arms.names, self.posterior(num_samples), prior, self._history.rows()
        )

    def save(self, path: str | PathLike) -> None:
        """Write everything that later decisions depend on to one file, without pickle; an existing file is replaced whole."""
        snapshot.write(path, self._contents())

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        program: Callable | RewardModel,
        *,
        context: Any = None,
        engine: Callable[[RewardModel], Engine] | None = None,
        selector: Selector | None = None,
    ) -> "Bandit":
        """Continue a saved bandit as if it had never stopped.

        Args:
            program: the program that it was saved with; the file holds data, never code.
            context: the example context; needed only where it is not made of dicts, lists, tuples and arrays.
            engine: the engine factory, if one was given when the bandit was built.
            selector: the selector, if one was given when the bandit was built.
        """
        kept = snapshot.read(path)
        bandit = cls(
            program,
            None if kept["named"] else kept["num_arms"],
            arms=kept["arms"] if kept["named"] else None,
            context=kept["context"] if context is None else context,
            outcomes=tuple(kept["outcomes"]),
            engine=getattr(engines, kept["engine"], None) if engine is None else engine,
            selector=selector,
            num_samples=kept["num_samples"],
            seed=kept["seed"],
        )
        bandit._restore(kept)
        return bandit

    @property
    def _name(self) -> str:
        return getattr(self.model.program, "__name__", "program")

    def _overview(self, contexts: Any = None) -> Overview:
        played, _, seen = self._history.rows()
        if self.model.context is None or contexts is not None:
            num_rows = None if contexts is None else len(jax.tree.leaves(contexts)[0])
            chosen = check_contexts(self.model, contexts, num_rows, "contexts")
        elif len(self._history):
            chosen = some_contexts(seen)
        else:
            chosen = self.model.context_rows(1)
        return overview(self.model, self._arms.names, played, self.posterior(self.num_samples), chosen)

    def _record(self, chosen: Selection, context: Any) -> Decision:
        number, arm = self._num_decisions, int(chosen.arm)
        self._num_decisions += 1
        self._open[number] = (arm, context)
        return Decision(
            f"{self._token}-{number}",
            self._arms.names[arm],
            np.asarray(chosen.best_arm_probs),
            int(chosen.num_candidates),
            float(chosen.propensities[arm]),
            np.asarray(chosen.propensities),
            context,
        )

    def _number_of(self, decision: Decision | str) -> int:
        name = decision.id if isinstance(decision, Decision) else decision
        token, _, digits = name.rpartition("-") if isinstance(name, str) else ("", "", "")
        if token != self._token or not digits.isdigit() or int(digits) >= self._num_decisions:
            raise ValueError(
                f"decision {name!r} was not made by this bandit: pass a decision of its own, or arm= and context= for a "
                "play that was decided elsewhere"
            )
        if int(digits) not in self._open:
            raise ValueError(
                f"decision {name!r} already has its reward: each decision takes one; use arm= for further plays"
            )
        return int(digits)

    def _absorb(self, rows: Rows) -> Any:
        """Learn rows that passed the checks of their form; on any error nothing has changed."""
        self._learner, info, notes = learn(self._task, self._learner, self._history, rows)
        self._history.append(*rows)
        for note in notes:
            warnings.warn(note, stacklevel=3)
        return info

    def _contents(self) -> dict[str, Any]:
        return {
            "named": not isinstance(self._arms.names[0], int),
            "num_arms": len(self._arms),
            "arms": [str(name) for name in self._arms.names],
            "context": self.model.context,
            "outcomes": list(self.model.outcomes),
            "num_samples": self.num_samples,
            "seed": self.seed,
            "engine": self.explanation.engine,
            "may_fall_back": self._task.may_fall_back,
            "selector": str(self._selector),
            "fingerprint": snapshot.fingerprint(self.model),
            "token": self._token,
            "num_decisions": self._num_decisions,
            "open": [(number, arm) for number, (arm, _) in self._open.items()],
            "open_contexts": _stacked([context for _, context in self._open.values()]),
            "state": self._learner.state,
            "history": self._history.rows(),
        }

    def _restore(self, kept: Mapping[str, Any]) -> None:
        snapshot.check_same(kept, self._contents())
        self._task = self._task._replace(may_fall_back=kept["may_fall_back"])
        self._token, self._num_decisions = kept["token"], kept["num_decisions"]
        rows = kept["open_contexts"]
        for position, (number, arm) in enumerate(kept["open"]):
            context = None if rows is None else self._like_context(rows, position)
            self._open[number] = (arm, context)
        state = jax.tree.unflatten(jax.tree.structure(self._learner.state), kept["state"])
        self._learner = self._learner._replace(state=state)
        arms, rewards, contexts = kept["history"]
        if len(arms):
            treedef = jax.tree.structure(self.model.context)
            rows = None if self.model.context is None else jax.tree.unflatten(treedef, jax.tree.leaves(contexts))
            self._history.append(arms, rewards, rows)

    def _like_context(self, rows: Any, position: int) -> Any:
        leaves = [leaf[position] for leaf in jax.tree.leaves(rows)]
        return jax.tree.unflatten(jax.tree.structure(self.model.context), leaves)


_DEFAULT_SELECTOR = selectors.double_sampling()  # one for all, so that it is compiled once


def _stacked(contexts: list[Any]) -> Any:
    if not contexts or contexts[0] is None:
        return None
    return jax.tree.map(lambda *leaves: np.stack(leaves), *contexts)
