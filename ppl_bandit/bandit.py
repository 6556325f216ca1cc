"""The live bandit: decisions out, rewards in, in any order and after any delay.

All that it computes are the pure functions of an engine and a selector, in float64 whatever jax's flag says; all that it adds
is memory (state, history, open decisions) and an edge at which bad input is turned away before anything changes.
"""

import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit import engines, selectors, snapshot, summary
from ppl_bandit.compiled import compiled_choice, compiled_functions
from ppl_bandit.history import History
from ppl_bandit.inputs import Arms, check_contexts, check_rewards
from ppl_bandit.program import RewardModel
from ppl_bandit.types import Engine, Interaction, Selection, Selector

__all__ = ["Bandit", "Decision", "NotCertified"]


class NotCertified(ValueError):
    """A datum turned out not to be conjugate at run time; the bandit's state is as it was before."""


@dataclass(frozen=True, eq=False)
class Decision:
    """One decision: the arm to play, and the probabilities it was made by.

    Attributes:
        id: names the decision; `Bandit.update` takes it in place of the decision.
        arm: the arm to play, by name if the bandit's arms have names.
        best_arm_probs: (A,), the posterior probability that each arm is best (p-hat).
        num_candidates: how many candidate arms the selector drew; 0 if it draws none.
        propensity: the probability with which this arm was played.
        propensities: (A,), the probability with which each arm would have been played.
        context: the context it was made in, or None.
    """

    id: str
    arm: Any
    best_arm_probs: np.ndarray
    num_candidates: int
    propensity: float
    propensities: np.ndarray = field(repr=False)
    context: Any = field(default=None, repr=False)


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
    ):
        if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer) or num_samples < 1:
            raise ValueError(f"num_samples must be a positive integer, got {num_samples!r}")
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
        if isinstance(program, RewardModel) and num_arms is None and arms is None:
            num_arms = program.num_arms
        self._arms = Arms(num_arms, arms)
        self.num_samples, self.seed = int(num_samples), int(seed)
        self._selector = _DEFAULT_SELECTOR if selector is None else selector
        self._choice = compiled_choice(self._selector, self.num_samples, len(self._arms))
        if not isinstance(program, RewardModel):
            program = RewardModel(program, len(self._arms), context, outcomes)
        if len(self._arms) != program.num_arms:
            raise ValueError(f"the reward model has {program.num_arms} arms, but {len(self._arms)} were given")
        self.model = program
        self._may_fall_back = engine is None
        self._has_warned = False
        self._use_engine(self._build(engines.choose if engine is None else engine))
        self._token = uuid.uuid4().hex[:12]
        self._num_decisions = 0
        self._open: dict[int, tuple[int, Any]] = {}  # decision number -> (arm index, context)
        self._history = History(self.model.outcomes)
        self._state = self._prior()

    @property
    def arms(self) -> list[Any]:
        """The arms, as decisions name them."""
        return list(self._arms.names)

    @property
    def explanation(self) -> Any:
        """The engine's own account of itself."""
        return self._engine.explanation

    @property
    def num_rewards(self) -> int:
        """How many rewards the bandit has learnt from."""
        return len(self._history)

    def select(self, context: Any = None, allowed: Any = None) -> Decision:
        """Decide which arm to play.

        Args:
            context: the context of this decision, for a program that takes one.
            allowed: the arms that may be played, as a list or a mask; None allows all.
        """
        context = check_contexts(self.model, context, None, "context")
        mask = self._arms.mask(allowed)
        with jax.enable_x64(True):
            number = self._num_decisions
            if self._marginals is not None:
                chosen = self._run.decide(self.seed, self._state, number, context, mask)
            else:
                table = self._run.table(self.seed, self._state, number, context)
                chosen = self._choice.result()(np.int64(self.seed), table, np.int64(number), mask)
        return self._record(jax.device_get(chosen), context)

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
        with jax.enable_x64(True):
            padded = _padded((numbers, contexts), num_rows)
            chosen = self._run.decide_many(self.seed, self._state, *padded, mask)
        chosen = jax.device_get(chosen)
        rows = [jax.tree.map(lambda leaf, i=i: leaf[i], chosen) for i in range(num_rows)]
        for row in rows:
            self._check_selection(row)
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
        info = self._absorb(np.array([index]), rewards, rows)
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
        return self._absorb(indices, checked, rows)

    def posterior(self, num_samples: int = 1000) -> dict[str, np.ndarray]:
        """Return draws of the latents from the posterior, {site: (M, ...)}; reading them changes no later decision."""
        with jax.enable_x64(True):
            return jax.device_get(self._run.draw(self.seed, self._state, int(num_samples)))

    def posterior_parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the parameters of the exact posterior, {site: {parameter: array}}; see the docs for their names.

        Raises:
            ValueError: if the engine is not exact.
        """
        if self._engine.parameters is None:
            raise ValueError(f"the {self.explanation.engine} engine has no closed form: use posterior(num_samples)")
        with jax.enable_x64(True):
            return jax.device_get(self._engine.parameters(self._state))

    def expected_rewards(self, context: Any = None, num_samples: int | None = None) -> np.ndarray:
        """Return posterior draws of each arm's expected reward, (M, A)."""
        context = check_contexts(self.model, context, None, "context")
        num = self.num_samples if num_samples is None else int(num_samples)
        with jax.enable_x64(True):
            return np.asarray(self._run.expected(self.seed, self._state, context, num))

    def explain(self) -> str:
        """Return what was proved about the program, what the data say so far, and how decisions are made."""
        table = None if self.model.context is not None else self.expected_rewards()
        played = self._history.rows()[0]
        evidence = None
        if hasattr(self._state, "log_evidence"):
            with jax.enable_x64(True):
                evidence = float(self._state.log_evidence), float(self._state.log_evidence_error)
        return summary.describe(self.explanation, self._arms.names, played, table, self._selector, evidence)

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Return the posterior, the prior and the data as an ArviZ object (InferenceData, or DataTree on ArviZ 1)."""
        from ppl_bandit import arviz_export

        with jax.enable_x64(True):
            prior = jax.device_get(self._run.draw(self.seed, self._prior(), int(num_samples)))
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

    def _build(self, factory: Callable[[RewardModel], Engine]) -> Engine:
        with jax.enable_x64(True):
            return factory(self.model)

    def _use_engine(self, engine: Engine) -> None:
        self._engine = engine
        # Selectors without a use for marginals are compiled apart from the model, ahead of time.
        self._marginals = engine.marginals if getattr(self._selector, "uses_marginals", False) else None
        self._run = compiled_functions(
            self.model, engine.init, engine.update, engine.sample, self._marginals, self._selector, self.num_samples
        )

    def _prior(self) -> Any:
        with jax.enable_x64(True):
            return self._run.init(self.seed)

    def _record(self, chosen: Selection, context: Any) -> Decision:
        self._check_selection(chosen)
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

    def _check_selection(self, chosen: Selection) -> None:
        if int(chosen.arm) < 0:
            raise ValueError(
                "the expected rewards of this decision are not finite, so no arm can be chosen: the program's mean overflows "
                "or is undefined at this context or at draws from this posterior"
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

    def _absorb(self, arms: np.ndarray, rewards: dict[str, np.ndarray], contexts: Any) -> Any:
        """Learn rows that passed the checks of their form; on any error nothing has changed."""
        num_rows = arms.size
        given = rewards if len(self.model.outcomes) > 1 else rewards[self.model.outcomes[0]]
        with jax.enable_x64(True):
            rows = Interaction(*_padded((arms, given, contexts, np.ones(num_rows, bool)), num_rows))
            rows = rows._replace(mask=jnp.arange(rows.arm.shape[0]) < num_rows)
            state = self._state if self._engine.reserve is None else self._engine.reserve(self._state, num_rows)
            after, info, possible = jax.device_get(self._run.learn(self.seed, state, len(self._history), rows))
        for name, fits in possible.items():
            if not np.all(fits[:num_rows]):
                row = int(np.flatnonzero(~fits[:num_rows])[0])
                where = f" in row {row}" if num_rows > 1 else ""
                raise ValueError(
                    f"{name}={rewards[name][row]:g}{where} is outside the support of the outcome '{name}' on arm "
                    f"{self._arms.names[arms[row]]!r}: the program cannot produce it; correct the reward or the program"
                )
        if not bool(info.is_trusted):
            return self._step_up(arms, rewards, contexts, after, info)
        self._state = after
        self._history.append(arms, rewards, contexts)
        return info

    def _step_up(self, arms: np.ndarray, rewards: dict[str, np.ndarray], contexts: Any, after: Any, info: Any) -> Any:
        """Answer an update without evidence: move to the next rung of the ladder with the whole history, and say so.

        On the last rung the draws are kept, with one warning. On any error nothing has changed.
        """
        name = self.explanation.engine
        why = self._uncertified(arms, rewards, info) if self.explanation.is_exact else _doubts(name, info)
        if self.explanation.is_exact and not self._may_fall_back:
            raise NotCertified(f"{why}; nothing was learnt from it: leave engine out, or choose an approximate one")
        if name not in _LADDER:
            if not self._has_warned:
                warnings.warn(
                    f"{why}; no engine is left to move to, so these draws are used with caution", stacklevel=5
                )
                self._has_warned = True
            self._state = after
            self._history.append(arms, rewards, contexts)
            return info
        before = self._engine, self._state, self._history
        past = self._history.rows()
        try:
            self._use_engine(self._build(_LADDER[name]))
            self._state, self._history = self._prior(), History(self.model.outcomes)
            if past[0].size:
                self._absorb(*past)
            info = self._absorb(arms, rewards, contexts)
        except BaseException:
            self._use_engine(before[0])
            _, self._state, self._history = before
            raise
        warnings.warn(
            f"{why}; from here on the bandit uses the {self.explanation.engine} engine, with all {len(self._history)} "
            "rewards replayed",
            stacklevel=5,
        )
        return info

    def _uncertified(self, arms: np.ndarray, rewards: dict[str, np.ndarray], info: Any) -> str:
        row = int(np.flatnonzero(~np.asarray(info.is_certified))[0])
        shown = ", ".join(f"{name} {value[row]:g}" for name, value in rewards.items())
        return (
            f"the likelihood of {shown} on arm {self._arms.names[arms[row]]!r} is not conjugate (relative residual "
            f"{float(np.asarray(info.residual)[row]):.1e}), although every reward tried when the bandit was built was"
        )

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
            "may_fall_back": self._may_fall_back,
            "selector": getattr(self._selector, "__qualname__", type(self._selector).__name__),
            "fingerprint": snapshot.fingerprint(self.model),
            "token": self._token,
            "num_decisions": self._num_decisions,
            "open": [(number, arm) for number, (arm, _) in self._open.items()],
            "open_contexts": _stacked([context for _, context in self._open.values()]),
            "state": self._state,
            "history": self._history.rows(),
        }

    def _restore(self, kept: Mapping[str, Any]) -> None:
        snapshot.check_same(kept, self._contents())
        self._may_fall_back = kept["may_fall_back"]
        self._token, self._num_decisions = kept["token"], kept["num_decisions"]
        rows = kept["open_contexts"]
        for position, (number, arm) in enumerate(kept["open"]):
            context = None if rows is None else self._like_context(rows, position)
            self._open[number] = (arm, context)
        self._state = jax.tree.unflatten(jax.tree.structure(self._state), kept["state"])
        arms, rewards, contexts = kept["history"]
        if len(arms):
            treedef = jax.tree.structure(self.model.context)
            rows = None if self.model.context is None else jax.tree.unflatten(treedef, jax.tree.leaves(contexts))
            self._history.append(arms, rewards, rows)

    def _like_context(self, rows: Any, position: int) -> Any:
        leaves = [leaf[position] for leaf in jax.tree.leaves(rows)]
        return jax.tree.unflatten(jax.tree.structure(self.model.context), leaves)


_DEFAULT_SELECTOR = selectors.double_sampling()  # one for all, so that it is compiled once

# Where a live bandit goes when an engine's draws come without evidence.
_LADDER: dict[str, Callable[[RewardModel], Engine]] = {
    "conjugate": engines.reweight,
    "reweight": engines.nuts,
    "laplace": engines.nuts,
    "svi": engines.nuts,
}


def _doubts(engine: str, info: Any) -> str:
    """Name the evidence that an approximate update lacks."""
    facts = info._asdict() if hasattr(info, "_asdict") else {}
    shown = ", ".join(
        f"{name.replace('_', ' ')} {float(value):.3g}"
        for name, value in facts.items()
        if np.ndim(value) == 0 and name not in ("is_trusted", "is_full")
    )
    return f"the draws of the {engine} engine lack evidence ({shown})"


def _stacked(contexts: list[Any]) -> Any:
    if not contexts or contexts[0] is None:
        return None
    return jax.tree.map(lambda *leaves: np.stack(leaves), *contexts)


def _padded(tree: Any, num_rows: int) -> Any:
    """Repeat the last row up to a power of two, so that batches of any size compile O(log size) times."""
    size = 1 << (num_rows - 1).bit_length()
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], size - num_rows, axis=0)]), tree)
