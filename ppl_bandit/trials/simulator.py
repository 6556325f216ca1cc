"""Simulate many trials of one design: compiled once, run in chunks, for any scenario and thresholds."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from ppl_bandit.engines.choose import as_engine
from ppl_bandit.inputs.numbers import Arms, check_count
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.simulation.environment import Environment, check_world
from ppl_bandit.simulation.executors import Study, check_executor, prepare
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import NO_ARM
from ppl_bandit.trials.setting import Setting
from ppl_bandit.trials.trial_runs import TrialRecord, run_trial
from ppl_bandit.types import Engine, Key, check_flag

_CPU_CHUNK = 256
# On an H200, XLA compiled a chunk of 180,000 trials of five arms for 143 s, and one of 20,000, twice as fast, for 3 s.
_DEVICE_CHUNK = 20_000
NUM_PRIOR_DRAWS = 1000


class TrialSimulator:
    """Simulated trials of a design.

    Args:
        model: the reward program of the analysis; scenarios have the same one.
        engine: an engine of the model or its factory; None is `engines.choose`.
        num_samples: posterior draws M, where a probability has no closed form.
        arms: names of the arms, in the program's order; None numbers them.
        mesh, executor: devices, or workers, over which to spread the trials, as in `simulate`.
    """

    def __init__(
        self,
        model: RewardModel,
        design: Design,
        engine: Engine | Callable[[RewardModel], Engine] | None = None,
        num_samples: int = 1000,
        arms: Sequence[str] | None = None,
        *,
        mesh: Mesh | None = None,
        executor: Executor | None = None,
    ):
        check_executor(executor, mesh)
        if model.moving_sites:
            raise ValueError(
                f"the program's sites {sorted(model.moving_sites)} move with time, and designs are simulated for programs "
                "whose arms stay the same: give such a program"
            )
        check_count(num_samples, "num_samples")
        self.arms = Arms(model.num_arms, arms).names
        control = design.control_index(self.arms)

        def draw_prior() -> Array:
            return model.expected_rewards(model.sample_prior(jr.key(0), NUM_PRIOR_DRAWS), model.context)

        with jax.enable_x64(True):
            check_units(design, lambda: run_once(draw_prior))
            built = as_engine(model, engine)
            first = NO_ARM if control is None else control
            self.setting = Setting(model, built, design, first, num_samples)
        self._mesh, self._executor = mesh, executor
        self._runs: dict[Environment | str, Callable[..., Iterator[TrialRecord]]] = {}  # by world, which it keeps alive

    def run(
        self,
        environment: Environment,
        num_trials: int,
        seed: int,
        *,
        thresholds: np.ndarray | None = None,
        on_chunk: Callable[[TrialRecord], None] = lambda found: None,
    ) -> TrialRecord:
        """Simulate trials in one world, or in worlds that the environment draws; return NumPy arrays with a leading axis.

        The random numbers of a trial depend on the seed and on its number only. The first run decides how many trials the
        compiled function simulates at once.

        Args:
            thresholds: in place of the design's own, (rules, looks).
            on_chunk: called with the trials of every chunk that has finished.
        """
        with jax.enable_x64(True):
            limits = jnp.asarray(self.setting.design.thresholds() if thresholds is None else thresholds)
            truth = None if environment.truth is None else {k: jnp.asarray(v) for k, v in environment.truth.items()}
            key, arguments = jr.key(seed), (limits,) if truth is None else (limits, truth)
            parts: list[TrialRecord] = []
            for part in self._run_chunks(environment, key, num_trials, arguments):
                parts.append(part)
                on_chunk(part)
        return join_trials(parts)

    def _run_chunks(
        self, environment: Environment, key: Key, num_trials: int, arguments: tuple
    ) -> Iterator[TrialRecord]:
        setting, engine, mesh = self.setting, self.setting.engine, self._mesh
        is_sequential = is_on_cpu() and mesh is None and not engine.explanation.is_exact
        size = min(num_trials, 4 if is_sequential else _CPU_CHUNK) if is_on_cpu() and mesh is None else None
        is_own = environment.reward_model is setting.model and setting.model.context is None
        is_shared = environment.truth is not None and is_own
        worlds = Environment.from_prior(setting.model) if is_shared else environment  # one function for all truths

        def play(setting: Setting, key: Key, number: Array, limits: Array, truth: Any = None) -> TrialRecord:
            world = worlds if truth is None else worlds.at(truth)
            return run_trial(jr.fold_in(key, number), setting, world, limits)

        cached = "truth" if is_shared else environment
        if cached not in self._runs:
            study = Study(setting.model, setting, play, size, is_sequential)
            most = min(num_trials, _DEVICE_CHUNK * (1 if mesh is None else mesh.size))
            self._runs[cached] = prepare(study, key, most, arguments=arguments, mesh=mesh, executor=self._executor)()
        return self._runs[cached](key, num_trials, arguments=arguments)


def join_trials(parts: Sequence[TrialRecord]) -> TrialRecord:
    """Return the trials of several chunks as one record."""
    return jax.tree.map(lambda *own: np.concatenate(own), *parts)


def check_settings(model: Any, design: Any, num_trials: Any, seed: Any, progress: Any = False) -> None:
    """Refuse a program or another value in place of a reward model, another value in place of a design, and other numbers.

    Raises:
        ValueError: says what to give instead.
    """
    check_reward_model(model, "model")
    if not isinstance(design, Design):
        raise ValueError(f"design must be a Design, got {design!r}: build one with Design(looks, stopping=...)")
    check_count(num_trials, "num_trials")
    check_count(seed, "seed", 0)
    check_flag(progress, "progress")


def as_environment(model: RewardModel, scenario: Any, name: str) -> Environment:
    """Return the world of a scenario: an environment, a truth, or the common or separate values of the only latent site.

    Raises:
        ValueError: says what a scenario may be.
    """
    if isinstance(scenario, Environment):
        check_world(model, scenario, 0, f"scenario {name!r}")
        if scenario.changes or scenario.path is not None or scenario.reward_model.moving_sites:
            raise ValueError(
                f"scenario {name!r} changes during the trial, and the figures of a design compare with one truth: give a "
                "world that stays the same, or run the selector in this one with simulate"
            )
        return scenario
    if isinstance(scenario, Mapping):
        return _checked(model, scenario, name)
    if isinstance(scenario, str) and scenario == "prior":
        return Environment.from_prior(model)
    is_numbers = isinstance(scenario, int | float | Sequence | np.ndarray) and not isinstance(scenario, str | bool)
    if is_numbers and list(model.latent_shapes.values()) == [(model.num_arms,)]:
        (site,) = model.latent_shapes
        try:
            values = np.asarray(scenario, float)
        except (TypeError, ValueError):  # it holds no numbers
            values = np.empty(0)
        if values.shape in ((), (model.num_arms,)):
            return _checked(model, {site: np.broadcast_to(values, (model.num_arms,))}, name)
    raise ValueError(
        f"scenario {name!r} is {scenario!r}, expected a truth, {{site: value}} with the sites {sorted(model.latent_shapes)}, "
        'an Environment, or "prior"; a number, or one per arm, where the program has one latent per arm and no others'
    )


def _checked(model: RewardModel, truth: Mapping[str, Any], name: str) -> Environment:
    try:
        return Environment(model, truth)
    except ValueError as error:
        raise ValueError(f"scenario {name!r}: {error}") from None


def check_units(design: Design, draw_table: Callable[[], np.ndarray]) -> None:
    """Refuse differences that no draw from the prior reaches: they are in another unit than the expected rewards.

    Args:
        draw_table: () -> (M, A), expected rewards drawn from the prior; called if the design has such a difference.

    Raises:
        ValueError: with the difference, and the largest one in draws from the prior.
    """
    deltas = [rule for rule in design.rules if rule.name in ("equivalence", "futility")]
    given = [(rule.name, "delta", rule.settings["delta"]) for rule in deltas]
    given += [("superiority", "margin", design.margin)] if design.margin else []
    given += [(rule.name, "below", np.max(rule.threshold)) for rule in design.rules if rule.name == "expected_loss"]
    if not given:
        return
    table = draw_table()
    largest = float(np.nanmax(np.ptp(table, axis=1)))
    for name, argument, value in given:
        if value >= largest:
            raise ValueError(
                f"{name}: {argument} is {value:g}, but arms differ by at most {largest:.3g} in {len(table)} draws from the "
                "prior: give it in the unit of the expected reward (0.05 for five percentage points of a rate)"
            )
