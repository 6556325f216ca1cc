"""The posterior of any program, updated as data arrive: the engines of the bandit for programs without arms.

The program becomes a reward model with one arm, whose context are the data of a row. Rows are learnt by the same functions as
those of a bandit, with the same proofs, checks and fallbacks.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
from numpyro.primitives import Messenger

from ppl_bandit import engines, selectors
from ppl_bandit.inputs.checks import check_contexts, check_engine, check_rewards
from ppl_bandit.inputs.numbers import Arms, check_count
from ppl_bandit.posterior.fallback import learn
from ppl_bandit.posterior.learning import Learner, draw, evidence_of, start
from ppl_bandit.posterior.task import History, Rows, Task
from ppl_bandit.program.keywords import KEYWORDS, takes
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Engine, check_flag

_SELECTOR = selectors.greedy()  # shared, so that posteriors share compiled functions; it is never asked
_NUM_POINTS = 3  # at which the identity of the exact evidence is evaluated; its values differ by rounding


class Online:
    """The posterior of a program without arms, updated as data arrive.

    Args:
        program: a NumPyro program of keywords, the data of N rows, each with a leading axis N. It has a sample site of shape
            (N,) for every outcome, or of shape (), which stands for N independent rows, and never passes `obs=` to it. It may
            take the keywords `previous` and `elapsed`, as a program of a bandit whose latents move; the entry `time` of the
            data is then its clock.
        outcomes: names of the sample sites that are observed.
        engine: a factory such as `engines.nuts`; None lets `engines.choose` pick: exact if the program is proved conjugate.
        seed: of all random numbers; the same seed and calls give the same draws.
    """

    def __init__(
        self,
        program: Callable,
        outcomes: Sequence[str] = ("y",),
        *,
        engine: Callable[[RewardModel], Engine] | None = None,
        seed: int = 0,
    ):
        if not callable(program):
            raise ValueError(f"program must be a NumPyro program, a function of data; got {type(program).__name__}")
        check_engine(engine)
        self._program = program
        if (
            not isinstance(outcomes, str | list | tuple)
            or not outcomes
            or any(not isinstance(o, str) for o in outcomes)
        ):
            raise ValueError(f"outcomes must be names of sample sites, got {outcomes!r}")
        self._outcomes = (outcomes,) if isinstance(outcomes, str) else tuple(outcomes)
        self._engine = engine
        self._seed = check_count(seed, "seed", 0)
        self._built: tuple[Task, Learner] | None = None
        self._learner: Learner | None = None
        self._history = History(self._outcomes)
        self._simulate: Callable | None = None

    def __repr__(self) -> str:
        name = getattr(self._program, "__name__", "program")
        return f"Online({name}, outcomes={self._outcomes}, {self.num_rows} rows)"

    @property
    def num_rows(self) -> int:
        """Number of rows that were learnt."""
        return len(self._history)

    def update(self, outcomes: Mapping[str, Any], /, **data: Any) -> Any:
        """Learn rows; an error changes nothing.

        Latents that move take a step for each row, in the order of the calls; with a clock, in the order of `time`: rows that
        arrive late are put in their place, and the rows after them are learnt again.

        Args:
            outcomes: {outcome: (N,)}, or numbers for one row without leading axes.
            data: {entry: (N, ...)}, the other arguments of the program.

        Returns:
            The engine's diagnostics of this update.
        """
        if not isinstance(outcomes, Mapping):
            raise ValueError(f'outcomes must be a dict such as {{"{self._outcomes[0]}": values}}, got {outcomes!r}')
        if not outcomes:
            raise ValueError(f"outcomes is empty, expected {list(self._outcomes)}")
        data = _arrays(data)
        if all(np.ndim(value) == 0 for value in outcomes.values()):
            outcomes = {name: np.atleast_1d(value) for name, value in outcomes.items()}
            data = {name: value[None] for name, value in data.items()}
        num_rows = len(next(iter(outcomes.values()), ()))
        task, prior = self._start(data)
        values = check_rewards(task.model, outcomes, num_rows, "outcomes")
        contexts = check_contexts(task.model, data or None, num_rows, "data")
        if num_rows == 0:
            raise ValueError("outcomes is empty: give at least one row")
        rows = Rows(np.zeros(num_rows, int), values, contexts)
        history, learner = self._history, self._learner or prior
        is_late = task.model.has_clock and _is_late(history, contexts["time"])
        if is_late:
            past = history.rows()
            joined: Any = jax.tree.map(lambda *leaves: np.concatenate(leaves), past[:3], rows[:3])
            order = np.argsort(joined[2]["time"], kind="stable")
            rows = Rows(*jax.tree.map(lambda leaf: leaf[order], joined))
            history, learner = History(self._outcomes), prior
        elif task.model.has_clock:
            order = np.argsort(contexts["time"], kind="stable")
            rows = Rows(*jax.tree.map(lambda leaf: leaf[order], rows[:3]))
        learner, info, notes = learn(task, learner, history, rows)
        self._learner = learner
        self._history = history.extended(rows._replace(positions=np.zeros(rows.arms.size, np.int64)))
        for note in notes:
            warnings.warn(note, stacklevel=2)
        return info

    def save(self, path: str | PathLike) -> None:
        """Write the rows that were learnt to a file, which `load` reads in another process."""
        _, outcomes, contexts, *_ = self._history.rows()
        rows: dict[str, Any] = {f"outcome {name}": values for name, values in outcomes.items()}
        rows |= {f"data {name}": values for name, values in (contexts or {}).items()} if self.num_rows else {}
        with open(path, "wb") as file:
            np.savez(file, outcomes=np.array(self._outcomes), **rows)

    @classmethod
    def load(
        cls,
        path: str | PathLike,
        program: Callable,
        *,
        engine: Callable[[RewardModel], Engine] | None = None,
        seed: int = 0,
    ) -> "Online":
        """Learn the rows of a file of `save`, in one update; the posterior is the same where it is exact.

        Args:
            program: as at the beginning; another program learns the same rows.
        """
        with np.load(path, allow_pickle=False) as file:
            own = cls(program, file["outcomes"].tolist(), engine=engine, seed=seed)
            parts: dict[str, dict[str, np.ndarray]] = {"outcome": {}, "data": {}}
            for key in file.files[1:]:
                kind, _, name = key.partition(" ")
                parts[kind][name] = file[key]
        if len(next(iter(parts["outcome"].values()))):
            own.update(parts["outcome"], **parts["data"])
        return own

    def posterior(self, num_samples: int = 1000) -> dict[str, np.ndarray]:
        """Return posterior draws, {site: (M, ...)}; of latents that move, the draws of the next step."""
        num_samples = check_count(num_samples, "num_samples")
        task, prior = self._start(None)
        return draw(self._learner or prior, num_samples)

    def predict(self, num_samples: int = 1000, /, **data: Any) -> dict[str, np.ndarray]:
        """Return draws of the outcomes of new rows, {outcome: (M, N)}.

        Args:
            data: {entry: (N, ...)}, the other arguments of the program; latents that move are predicted to their `time`. A
                program without data predicts one row.
        """
        num_samples, data = check_count(num_samples, "num_samples"), _arrays(data)
        task, prior = self._start(data)
        model, learner = task.model, self._learner or prior
        num_rows = next((len(value) for value in data.values() if value.ndim), 1)
        contexts = check_contexts(model, data or None, num_rows, "data")
        if self._simulate is None:

            def simulate(keys: Any, draws: Any, contexts: Any) -> Any:
                arm = jnp.zeros(jax.tree.leaves(contexts)[0].shape[0] if contexts is not None else 1, int)
                found = jax.vmap(lambda key, latents: model.draw_reward(key, latents, arm, contexts))(keys, draws)
                return found if isinstance(found, dict) else {model.outcomes[0]: found}

            self._simulate = quick_jit(simulate)
        times = contexts["time"] if model.has_clock else np.zeros(num_rows)
        found = {name: np.zeros((num_samples, num_rows)) for name in model.outcomes}
        for number, time in enumerate(np.unique(times)):
            where = np.flatnonzero(times == time)
            own = jax.tree.map(lambda leaf, where=where: leaf[where], contexts)
            at = jax.tree.map(lambda leaf: leaf[0], own) if model.has_clock else None
            draws = draw(learner, num_samples, at)
            with jax.enable_x64(True):
                key = jr.fold_in(jr.fold_in(jr.key(task.seed), self.num_rows), number)
                for name, values in self._simulate(jr.split(key, num_samples), draws, own).items():
                    found[name][:, where] = np.asarray(values)
        return found

    @property
    def log_evidence(self) -> float:
        """The log density of all rows under the program, log p(data): the score of a program against another one.

        Raises:
            ValueError: if the engine does not estimate it.
        """
        return self._evidence()[0]

    @property
    def log_evidence_error(self) -> float:
        """The standard error of `log_evidence`; 0 where it is exact."""
        return self._evidence()[1]

    def explain(self, *, details: bool = False) -> str:
        """Return which engine is used and why, as text.

        Args:
            details: whether to add measures and what was tried.
        """
        task, prior = self._start(None)
        explanation = (self._learner or prior).engine.explanation
        return str(explanation) if check_flag(details, "details") else explanation.summary

    def _evidence(self) -> tuple[float, float]:
        task, prior = self._start(None)
        return evidence_of(self._learner or prior) if self.num_rows else (0.0, 0.0)

    def _start(self, data: Mapping[str, Any] | None) -> tuple[Task, Learner]:
        """Return the task and the prior; they are built with the first data, of which one row is the example."""
        if self._built is None:
            if data is None and _needs_data(self._program):
                raise ValueError("the program takes data, and none were given yet: call update or predict first")
            example = {name: _first(value, name) for name, value in (data or {}).items()} or None
            program = _with_one_arm(self._program, self._outcomes, example is not None)
            model = RewardModel(program, 1, example, self._outcomes)
            factory = engines.choose if self._engine is None else self._engine
            task = Task(model, Arms(1, None), _SELECTOR, 1, self._seed, self._engine is None, factory=factory)
            self._built = task, start(task, factory, is_model_new=True)
        return self._built


def _arrays(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    found = {name: np.asarray(value) for name, value in data.items()}
    for name, value in found.items():
        if value.dtype.kind not in "fiub":
            raise ValueError(f"{name} must be an array of numbers with a row for each outcome, got {data[name]!r}")
    return found


def _first(value: np.ndarray, name: str) -> np.ndarray:
    if value.ndim == 0 or not len(value):
        raise ValueError(f"{name} has shape {value.shape}, expected a leading axis with at least one row")
    return value[0]


def _is_late(history: History, times: np.ndarray) -> bool:
    return len(history) > 0 and bool(np.min(times) < np.max(history.rows().contexts["time"]))


def _needs_data(program: Callable) -> bool:
    parameters = inspect.signature(program).parameters
    return any(own.default is own.empty for name, own in parameters.items() if name not in KEYWORDS)


@functools.lru_cache(maxsize=8)  # so that posteriors of one program share its proof
def _with_one_arm(program: Callable, outcomes: tuple[str, ...], has_data: bool) -> Callable:
    """Return a program as one of `arm` and `context`, whose expected reward is constant."""
    takes_time = takes(program, "time") or any(
        own.kind is own.VAR_KEYWORD for own in inspect.signature(program).parameters.values()
    )

    def run(arm: Any, context: Any = None, **moves: Any) -> None:
        num_rows = jnp.shape(arm)[0]
        data = {name: value for name, value in (context or {}).items() if name != "time" or takes_time}
        with _Rows(num_rows, outcomes):
            program(**data, **moves)
        numpyro.deterministic("expected_reward", jnp.asarray(arm, float))

    positional = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("arm", "context")]
    moves = [own for name, own in inspect.signature(program).parameters.items() if name in KEYWORDS]
    run.__signature__ = inspect.Signature([*positional[: 1 + has_data], *moves])  # type: ignore[attr-defined]
    run.__name__ = getattr(program, "__name__", "program")
    return run


class _Rows(Messenger):
    """Repeats the law of an outcome of shape () for each row."""

    def __init__(self, num_rows: int, outcomes: tuple[str, ...]):
        super().__init__()
        self._num_rows, self._outcomes = num_rows, outcomes

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self._outcomes and msg["fn"].batch_shape == ():
            msg["fn"] = msg["fn"].expand((self._num_rows,))
