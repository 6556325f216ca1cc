"""Simulate many trials of one design: compiled once, run in chunks, for any scenario and thresholds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit import engines
from ppl_bandit.inputs.arms import Arms
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.simulation.chunks import ChunkFunction, run_chunks, trace_chunk
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.trials.allocation import check_limits
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import NO_ARM
from ppl_bandit.trials.simulated.learners import Setting, learner_of
from ppl_bandit.trials.simulated.trial_runs import TrialRecord, run_trial
from ppl_bandit.types import Engine, Key

__all__ = [
    "NUM_PRIOR_DRAWS",
    "TrialSimulator",
    "as_environment",
    "check_kinds",
    "check_units",
]

_CPU_CHUNK = 256
NUM_PRIOR_DRAWS = 1000


class TrialSimulator:
    """Simulated trials of a design.

    Args:
        model: the reward program of the analysis; scenarios have the same one.
        engine: an engine of the model or its factory; None is `engines.choose`.
        num_samples: posterior draws M, where a probability has no closed form.
        num_futures: simulated continuations behind a predictive probability of success.
        arms: names of the arms, in the program's order; None numbers them.
    """

    def __init__(
        self,
        model: RewardModel,
        design: Design,
        engine: Engine | Callable[[RewardModel], Engine] | None = None,
        num_samples: int = 1000,
        num_futures: int = 100,
        arms: Sequence[str] | None = None,
    ):
        if model.moving_sites:
            raise ValueError(
                f"the program's sites {sorted(model.moving_sites)} move with time, and designs are simulated for programs "
                "whose arms stay the same: give such a program"
            )
        check_count(num_samples, "num_samples")
        check_count(num_futures, "num_futures")
        self.arms = Arms(model.num_arms, arms).names
        control = design.control_index(self.arms)
        check_limits(design, model.num_arms, control)

        def draw_prior() -> Array:
            return model.expected_rewards(model.sample_prior(jr.key(0), NUM_PRIOR_DRAWS), model.context)

        with jax.enable_x64(True):
            check_units(design, lambda: run_once(draw_prior))
            built = engine if isinstance(engine, Engine) else (engine or engines.choose)(model)
            learner = learner_of(model, built, design.last_rows)
        self.setting = Setting(
            model, built, learner, design, NO_ARM if control is None else control, num_samples, num_futures
        )
        self._compiled: dict[Any, ChunkFunction] = {}

    def run(
        self,
        environment: Environment,
        num_trials: int,
        seed: int,
        *,
        first: int = 0,
        thresholds: np.ndarray | None = None,
        advance: Callable[[int], None] | None = None,
    ) -> TrialRecord:
        """Simulate trials in one world, or in worlds that the environment draws; return NumPy arrays with a leading axis.

        The random numbers of a trial depend on the seed and on its number only. The first run decides how many trials the
        compiled function simulates at once.

        Args:
            first: number of the first trial.
            thresholds: in place of the design's own, (rules, looks).
            advance: called with the number of trials that have finished.
        """
        with jax.enable_x64(True):
            limits = jnp.asarray(self.setting.design.thresholds() if thresholds is None else thresholds)
            truth = None if environment.truth is None else {k: jnp.asarray(v) for k, v in environment.truth.items()}
            key, arguments = jr.key(seed), (limits,) if truth is None else (limits, truth)
            function = self._function(environment, key, num_trials, arguments)
            parts = []
            for part in run_chunks(function, key, num_trials, first=first, arguments=arguments):
                parts.append(part)
                if advance is not None:
                    advance(part.look.size)
        return jax.tree.map(lambda *own: np.concatenate(own), *parts)

    def _function(self, environment: Environment, key: Key, num_trials: int, arguments: tuple) -> ChunkFunction:
        setting, engine = self.setting, self.setting.engine
        is_sequential = is_on_cpu() and not engine.explanation.is_exact
        size = min(num_trials, 4 if is_sequential else _CPU_CHUNK) if is_on_cpu() else None
        is_shared = environment.truth is not None and setting.model.context is None
        cached = "truth" if is_shared else id(environment)
        if cached not in self._compiled:

            def play(key: Key, number: Array, limits: Array, truth: Any = None) -> TrialRecord:
                world = environment if truth is None else environment.at(truth)
                return run_trial(jr.fold_in(key, number), setting, world, limits)

            compile_chunk = trace_chunk(
                play, key, num_trials, arguments=arguments, size=size, is_sequential=is_sequential
            )
            self._compiled[cached] = compile_chunk()
        return self._compiled[cached]


def check_kinds(model: Any, design: Any) -> None:
    """Refuse a program or another value in place of a reward model, and another value in place of a design.

    Raises:
        ValueError: says what to give instead.
    """
    if not isinstance(model, RewardModel):
        raise ValueError(
            f"model must be a RewardModel, got {model!r}: wrap a program as RewardModel(program, num_arms)"
        )
    if not isinstance(design, Design):
        raise ValueError(f"design must be a Design, got {design!r}: build one with Design(looks, stopping=...)")


def as_environment(model: RewardModel, scenario: Any, name: str) -> Environment:
    """Return the world of a scenario: an environment, a truth, or the common or separate values of the only latent site.

    Raises:
        ValueError: says what a scenario may be.
    """
    if isinstance(scenario, Environment):
        return scenario
    if isinstance(scenario, Mapping):
        return Environment(model, scenario)
    if scenario == "prior" and isinstance(scenario, str):
        return Environment.from_prior(model)
    is_numbers = isinstance(scenario, int | float | Sequence | np.ndarray) and not isinstance(scenario, str | bool)
    if is_numbers and list(model.latent_shapes.values()) == [(model.num_arms,)]:
        (site,) = model.latent_shapes
        values = np.asarray(scenario, float)
        if values.shape in ((), (model.num_arms,)):
            return Environment(model, {site: np.broadcast_to(values, (model.num_arms,))})
    raise ValueError(
        f"scenario {name!r} is {scenario!r}, expected a truth, {{site: value}} with the sites {sorted(model.latent_shapes)}, "
        'an Environment, or "prior"; a number, or one per arm, where the program has one latent per arm and no others'
    )


def check_units(design: Design, draw_table: Callable[[], np.ndarray]) -> None:
    """Refuse differences that no draw from the prior reaches: they are in another unit than the expected rewards.

    Args:
        draw_table: () -> (M, A), expected rewards drawn from the prior; called if the design has such a difference.

    Raises:
        ValueError: with the difference, and the largest one in draws from the prior.
    """
    deltas = [rule for rule in design.rules if rule.name in ("equivalence", "futility")]
    given = [(rule.name, "delta", rule.settings["delta"]) for rule in deltas]
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
