"""What can be read from a bandit, by people and by programs; nothing here changes a later decision."""

import os
import time
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ppl_bandit.inputs.checks import check_contexts, count_rows
from ppl_bandit.inputs.data_frames import contexts_from, is_frame
from ppl_bandit.inputs.numbers import check_count, seconds
from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.live.show import summary
from ppl_bandit.live.show.figures import draw_bandit, kind_of
from ppl_bandit.live.show.html import as_html
from ppl_bandit.live.show.overview import Overview, as_frame, overview, some_contexts
from ppl_bandit.live.show.tables import history_table, pending_table
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Selector

if TYPE_CHECKING:
    import pandas

__all__ = ["ReadableBandit"]


class ReadableBandit:
    """The half of a `Bandit` that is read: its arms, its posterior, its tables and figures."""

    num_samples: int
    seed: int
    _selector: Selector
    _experiment: Experiment
    _pid: int

    @property
    def model(self) -> RewardModel:
        """The program with the arms of now."""
        return self._task.model

    @property
    def arms(self) -> list[Any]:
        """The arms, as decisions name them; the retired ones keep their place."""
        return list(self._task.arms.names)

    @property
    def retired(self) -> list[Any]:
        """The arms that are played no more."""
        standing = self._experiment.standing
        return [standing.task.arms.names[index] for index in sorted(standing.retired)]

    @property
    def explanation(self) -> Any:
        """The engine's own account of itself."""
        return self._learner.engine.explanation

    @property
    def num_rewards(self) -> int:
        """How many rewards the bandit has learnt from."""
        return len(self._experiment.history)

    def pending(self, older_than: Any = None) -> "pandas.DataFrame":
        """Return the decisions that wait for a reward, oldest first; those older than some seconds, or a timedelta."""
        self._follow()
        return pending_table(
            self._experiment, None if older_than is None else time.time() - seconds(older_than, "older_than")
        )

    def history(self) -> "pandas.DataFrame":
        """Return the rewards learnt, one row each, in the order of learning."""
        self._follow()
        return history_table(self._experiment)

    def posterior(self, num_samples: int = 1000) -> dict[str, np.ndarray]:
        """Return draws of the latents from the posterior, {site: (M, ...)}; reading them changes no later decision."""
        num_samples, learner = check_count(num_samples, "num_samples"), self._follow().learner
        with jax.enable_x64(True):
            return jax.device_get(learner.run.draw(self.seed, learner.held, num_samples))

    def posterior_parameters(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the parameters of the exact posterior, {site: {parameter: array}}; see the docs for their names.

        Raises:
            ValueError: if the engine is not exact.
        """
        learner = self._follow().learner
        if learner.engine.capabilities.parameters is None:
            raise ValueError(f"the {self.explanation.engine} engine has no closed form: use posterior(num_samples)")
        with jax.enable_x64(True):
            return jax.device_get(learner.engine.capabilities.parameters(learner.state))

    def expected_rewards(self, context: Any = None, num_samples: int | None = None) -> np.ndarray:
        """Return posterior draws of each arm's expected reward, (M, A)."""
        learner = self._follow().learner
        context = check_contexts(self.model, context, None, "context")
        num = self.num_samples if num_samples is None else check_count(num_samples, "num_samples")
        with jax.enable_x64(True):
            return np.asarray(learner.run.expected(self.seed, learner.held, context, num))

    def explain(self) -> str:
        """Return what was proved about the program, what the data say so far, and how decisions are made."""
        learner = self._follow().learner
        evidence = None
        with jax.enable_x64(True):  # asking computes it
            state = learner.state
            if hasattr(state, "log_evidence"):
                evidence = float(state.log_evidence), float(state.log_evidence_error)
        return summary.describe(self.explanation, self._overview(), self._selector.name, evidence, learner.doubts)

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
        learnt = "1 reward" if self.num_rewards == 1 else f"{self.num_rewards} rewards"
        return draw_bandit(
            found,
            self._rows()[0],
            f"{self._name}: {learnt}, {kind_of(self.explanation)} posterior",
            f"{found.draws.shape[0]} posterior draws, decisions by {self._selector}, seed {self.seed}",
            unit,
        )

    def _repr_html_(self) -> str:
        return as_html(self._name, self.explanation, self._overview(), len(self.pending()), str(self._selector))

    def to_arviz(self, num_samples: int = 1000) -> Any:
        """Return the posterior, the prior and the data as an ArviZ object (InferenceData, or DataTree on ArviZ 1)."""
        from ppl_bandit.live.show import arviz_export

        num_samples, prior = check_count(num_samples, "num_samples"), self._follow().prior
        with jax.enable_x64(True):
            drawn = jax.device_get(prior.run.draw(self.seed, prior.held, num_samples))
        return arviz_export.export(self.model, self.arms, self.posterior(num_samples), drawn, self._rows())

    @property
    def _name(self) -> str:
        return getattr(self.model.program, "__name__", "program")

    def _overview(self, contexts: Any = None) -> Overview:
        played, _, seen = self._rows()
        if self.model.context is None or contexts is not None:
            contexts = contexts_from(self.model, contexts) if is_frame(contexts) else contexts
            num_rows = None if contexts is None else count_rows(self.model, contexts)
            if num_rows == 0 and self.model.context is not None:
                raise ValueError(
                    "contexts must have a leading axis with one row per context, to average over: of a single one give every "
                    "array in a list"
                )
            chosen = check_contexts(self.model, contexts, num_rows, "contexts")
        elif played.size:
            chosen = some_contexts(seen)
        else:
            chosen = self.model.context_rows(1)
        return overview(self.model, self.arms, played, self.posterior(self.num_samples), chosen)

    @property
    def _task(self) -> Task:
        return self._experiment.standing.task

    @property
    def _learner(self) -> Learner:
        return self._experiment.standing.learner

    def _follow(self, *, is_waiting: bool = True) -> Any:
        self._check_process()
        return self._experiment.follow(is_waiting=is_waiting)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this bandit was built before the process was forked: build it in each process, after the fork"
            )

    def _rows(self) -> tuple[np.ndarray, dict[str, np.ndarray], Any]:
        with self._experiment.learning:
            return self._experiment.history.rows()
