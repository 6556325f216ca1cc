"""Operating characteristics of a design: simulate it in scenarios, and tabulate how it ends."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bandit.arguments import check_flag
from ppl_bandit.display.progress import progress_reporter
from ppl_bandit.display.terminal import shown_name
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.executors import ExecutorLost
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import endings
from ppl_bandit.trials.performance import performance
from ppl_bandit.trials.simulator import TrialSimulator, as_environment, check_kinds, join_trials
from ppl_bandit.trials.trial_runs import TrialRecord
from ppl_bandit.types import Engine

if TYPE_CHECKING:
    import pandas
    import xarray
    from jax.sharding import Mesh

_RULE_FIELDS = ("evidence", "peak")  # of a trial, one entry per rule; the others have one per arm


@dataclass(frozen=True, eq=False, repr=False)
class OperatingCharacteristics:
    """How a design ends in each scenario.

    Attributes:
        design: the design.
        dataset: all simulated trials, an `xarray.Dataset` over scenario, trial, arm, at_look and rule; `ending` is an
            index into its attribute `endings`, `arm` (the selected one) into its attribute `arms`.
        seconds: time of the simulation, with compilation.
        method: how the posterior at a look was computed, in words.
        arms: names of the arms, or their numbers.
        is_complete: whether all trials have finished.
    """

    design: Design
    _records: dict[str, TrialRecord]
    _control: int
    _bounds: tuple[float, float] | None
    seconds: float
    method: str
    _seed: int
    arms: list[Any]
    is_complete: bool = True

    @property
    def dataset(self) -> "xarray.Dataset":
        """All simulated trials."""
        import xarray

        names = list(self._records)
        first, num = self._records[names[0]], min(found.look.size for found in self._records.values())
        data = {}
        for field in first._fields:
            values = np.stack([getattr(self._records[name], field)[:num] for name in names])
            own = ("at_look", "rule" if field in _RULE_FIELDS else "arm")[4 - max(values.ndim, 2) :]
            data[field] = (("scenario", "trial", *own), values)
        coords = {
            "scenario": names,
            "rows_at_look": ("at_look", np.asarray(self.design.look_rows)),
            "rule": [rule.name for rule in self.design.rules],
        }
        attrs = {
            "endings": list(endings(self.design)),
            "arms": self.arms,
            "design": self.design.describe(),
            "seed": self._seed,
            "method": self.method,
            "is_complete": int(self.is_complete),
        }
        return xarray.Dataset(data, coords, attrs)

    def table(self) -> "pandas.DataFrame":
        """Return one row per scenario, one column per figure, and its standard error in the column with the suffix `_se`."""
        import pandas

        rows = {
            name: performance(found, self.design, self._control, self.arms, self._bounds)
            for name, found in self._records.items()
        }
        table = pandas.DataFrame.from_dict(rows, orient="index").rename_axis("scenario")
        return table.rename(index=shown_name, columns=shown_name)

    def plot(self, scenario: str | None = None) -> Any:
        """Draw status over looks, sample sizes, allocation and errors of estimates; return the matplotlib figure.

        Args:
            scenario: one of the scenarios; None draws all, one row each.
        """
        from ppl_bandit.trials.figures import draw_characteristics

        if scenario is not None and scenario not in self._records:
            raise ValueError(f"scenario is {scenario!r}, expected one of {list(self._records)}")
        chosen = self._records if scenario is None else {scenario: self._records[scenario]}
        return draw_characteristics(self.design, chosen, self.arms)

    def __repr__(self) -> str:
        num = next(iter(self._records.values())).ending.size
        return f"OperatingCharacteristics({list(self._records)}, {num} trials each, {self.seconds:.1f} s)"


def operating_characteristics(
    model: RewardModel,
    design: Design,
    scenarios: Any,
    *,
    num_trials: int = 10_000,
    seed: int = 0,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_samples: int = 1000,
    arms: Sequence[str] | None = None,
    mesh: "Mesh | None" = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> OperatingCharacteristics:
    """Simulate a design in scenarios, and return how it ends.

    After Ctrl-C, or if the executor is lost, it returns the finished trials: the scenarios in turn, the last one with fewer.

    All scenarios use the same random numbers for trial i, so that their differences have small errors. The posterior and
    the verdict of every look are computed as in the live bandit. Where the program is conjugate, a block of rows between looks
    is one update without certificates; other engines take 100 to 10,000 times as long: begin with `num_trials=100`.

    Args:
        model: the reward program.
        design: the design.
        scenarios: {name: truth}; a truth is {site: value}, or an `Environment`, or "prior" for a new world from the prior in
            every trial, or, where the program has one latent per arm and no others, the values of the arms. Also one
            `Environment`, or "prior", alone.
        num_trials: simulated trials of each scenario; a probability p has the standard error sqrt(p (1 - p) / num_trials).
        seed: random seed.
        engine: an engine of the model or its factory; None is `engines.choose`.
        num_samples: posterior draws M at a look, where a probability has no closed form.
        arms: names of the arms, in the program's order, for a control that is given by name, the table and the figure; None
            numbers them.
        mesh, executor: devices, or workers, over which to spread the trials, as in `simulate`.
        progress: whether to report progress on the standard error.

    Raises:
        ValueError: if the design or a scenario does not fit the model.
    """
    check_kinds(model, design)
    check_count(num_trials, "num_trials")
    check_count(seed, "seed", 0)
    check_flag(progress, "progress")
    named = scenarios if isinstance(scenarios, Mapping) and not _is_truth(model, scenarios) else {"scenario": scenarios}
    if isinstance(scenarios, Environment) or isinstance(scenarios, str):
        named = {"prior" if isinstance(scenarios, str) or scenarios.truth is None else "truth": scenarios}
    if not named:
        raise ValueError("scenarios is empty: give at least one, {name: truth}")
    worlds = {str(name): as_environment(model, scenario, str(name)) for name, scenario in named.items()}
    begun = time.perf_counter()
    simulator = TrialSimulator(model, design, engine, num_samples, arms, mesh=mesh, executor=executor)
    records: dict[str, TrialRecord] = {}
    begun_records: dict[str, list[TrialRecord]] = {}  # of the scenario that is being simulated
    try:
        for name, world in worlds.items():
            report, parts = progress_reporter(name, num_trials, "trials"), begun_records.setdefault(name, [])

            def keep(part: TrialRecord, report: Any = report, parts: Any = parts) -> None:
                parts.append(part)
                if progress:
                    report(part.look.size)

            records[name] = simulator.run(world, num_trials, seed, on_chunk=keep)
            del begun_records[name]
    except (KeyboardInterrupt, ExecutorLost) as error:
        records |= {name: join_trials(parts) for name, parts in begun_records.items() if parts}
        if not records:
            raise
        sys.stderr.write(f"\n{str(error) or 'interrupted'}: the finished trials are kept\n")
    setting = simulator.setting
    method = f"{setting.engine.explanation.engine}, {setting.method}"
    return OperatingCharacteristics(
        design,
        records,
        setting.control,
        reward_bounds(model),
        time.perf_counter() - begun,
        method,
        seed,
        simulator.arms,
        all(name in records and records[name].look.size == num_trials for name in worlds),
    )


def sweep_priors(
    models: Mapping[str, RewardModel], design: Design, scenarios: Any, **settings: Any
) -> "pandas.DataFrame":
    """Return the table of operating characteristics for several priors: one row per prior and scenario.

    The prior is that of the analysis. A scenario is the same world for all of them, but "prior" draws from each program's own.

    Args:
        models: {name: program}, with the same latents and arms.
        design, scenarios, settings: as in `operating_characteristics`.
    """
    import pandas

    if not isinstance(models, Mapping) or not models:
        raise ValueError(f"models must be {{name: RewardModel}}, one for each prior, got {models!r}")
    found = {name: operating_characteristics(model, design, scenarios, **settings) for name, model in models.items()}
    return pandas.concat({shown_name(name): own.table() for name, own in found.items()}, names=["prior"])


def reward_bounds(model: RewardModel) -> tuple[float, float] | None:
    """Return the smallest and the largest possible reward; None if a reward is unbounded or there are several outcomes."""
    import jax
    import jax.numpy as jnp
    import jax.random as jr
    import numpyro.distributions as dist

    if len(model.outcomes) > 1:
        return None
    supports: list[Any] = []

    def read() -> None:
        latents = {name: value[0] for name, value in model.sample_prior(jr.key(0), 1).items()}
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1), key=jr.key(0))
        supports.append(trace[model.outcomes[0]]["fn"].support)

    jax.eval_shape(read)
    constraints = dist.constraints
    return (0.0, 1.0) if supports[0] in (constraints.boolean, constraints.unit_interval) else None


def _is_truth(model: RewardModel, scenarios: Mapping) -> bool:
    return set(scenarios) == set(model.latent_shapes) and not any(isinstance(v, Mapping) for v in scenarios.values())
