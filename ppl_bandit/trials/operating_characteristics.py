"""Operating characteristics of a design: simulate it in scenarios, and tabulate how it ends."""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ppl_bandit.display.terminal import progress_reporter, shown_name
from ppl_bandit.evaluation.confidence_sequences import OPTIMAL_PLAYS, excludes_mean
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.executors import ExecutorLost
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.looks import ENDINGS, endings
from ppl_bandit.trials.simulator import TrialSimulator, as_environment, check_settings, join_trials
from ppl_bandit.trials.trial_runs import TrialRecord
from ppl_bandit.types import Engine

_ALPHA = 0.05
_ALWAYS = ("superiority", "equivalence", "futility", "undecided")


def performance(
    found: TrialRecord, design: Design, control: int, arms: list[Any], model: RewardModel
) -> dict[str, float]:
    """Return the operating characteristics of one scenario: figures, and their standard errors with the suffix `_se`.

    Args:
        control: index of the first control; -1 without one.
        model: of the analysis. Where it maximises something else than the mean of its only outcome, there are no figures of
            confidence sequences, which are about the outcomes.
    """
    row: dict[str, float] = {}
    num = found.ending.size

    def add(name: str, values: Any) -> None:
        values = np.asarray(values, float)
        row[name] = float(np.mean(values)) if num else math.nan
        row[f"{name}_se"] = float(np.std(values) / math.sqrt(num))

    names = endings(design)
    stopping = [name for name in names[1:] if name not in _ALWAYS and design.rule(name) is not None]
    chosen = found.arm
    # Where every other arm was inferior, the control is left alone, and no arm was superior to it.
    keeps_control = (found.ending == ENDINGS.index("superiority")) & (chosen == control)
    for name in (*_ALWAYS[:3], *stopping, _ALWAYS[3]):
        add(name, (found.ending == names.index(name)) & ~keeps_control)
    if control >= 0:
        add("control_kept", keeps_control)
    each = np.arange(num)
    true_value, best = found.truth[each, chosen], found.truth.max(axis=1)
    is_superior = declares_superiority(found, control)
    claimed = np.array(found.truth)  # a non-inferior arm exceeds the control less the margin
    if control >= 0:
        claimed[:, control] -= design.margin
    is_right = _is_right(found, control, claimed)
    add("power", is_superior & is_right)
    add("familywise_error", is_superior & ~is_right)
    is_null = bool(np.all(np.abs(claimed - claimed[:, :1]) <= 1e-9 * (1.0 + np.abs(claimed))))
    add("type_i_error", is_superior if is_null else np.full(num, np.nan))
    add("selected_best", true_value == best)
    for index, name in enumerate(arms):
        add(f"selected_{name}", chosen == index)
    rows = np.asarray(design.look_rows)[found.look]
    add("mean_rows", rows)
    for order in (0.05, 0.25, 0.5, 0.75, 0.95):
        name = f"rows_q{100 * order:02.0f}"
        row[name], row[f"{name}_se"] = _quantile(rows, order)
    for index, name in enumerate(arms):
        add(f"share_{name}", found.counts[:, index] / rows)
    add("mean_outcome", np.sum(found.counts * found.truth, axis=1) / rows)
    add("sum_outcomes", np.sum(found.sums, axis=1))
    spread = best - found.truth.min(axis=1)
    ideal = np.divide(true_value - found.truth.min(axis=1), spread, out=np.full(num, np.nan), where=spread > 0)
    add("ideal_design_percentage", 100.0 * ideal)
    add("loss", best - true_value)
    # The posterior mean, and the estimate of the confidence sequence of `evaluate`: the mean of the arm's outcomes.
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_outcome = found.sums[each, chosen] / found.outcomes[each, chosen]
    estimates = {"": found.mean[each, chosen]} | ({"sequence_": mean_outcome} if model.is_reward_an_outcome else {})
    for prefix, estimate in estimates.items():
        error = estimate - true_value
        add(f"{prefix}bias", error)
        rmse = float(math.sqrt(np.mean(error**2)))
        row[f"{prefix}rmse"] = rmse
        row[f"{prefix}rmse_se"] = 0.0 if rmse == 0 else float(np.std(error**2) / (2.0 * rmse * math.sqrt(num)))
    is_covered = (found.low <= found.truth) & (found.truth <= found.high)
    add("coverage", is_covered[each, chosen])
    add("coverage_all", np.mean(is_covered, axis=1))
    bounds = reward_bounds(model)
    if bounds is not None:
        by_sequence = sequence_covers(found, bounds)
        add("sequence_coverage", by_sequence[each, chosen])
        add("sequence_coverage_all", np.mean(by_sequence, axis=1))
        num_arms = len(arms)  # each at the level 1 - .05 / A: all cover at once
        add("sequence_coverage_simultaneous", np.all(sequence_covers(found, bounds, _ALPHA / num_arms), axis=1))
    for index, name in enumerate(arms):
        add(f"bias_{name}", found.mean[:, index] - found.truth[:, index])
    return row


def declares_superiority(found: TrialRecord, control: int) -> np.ndarray:
    """Return whether each trial declares an arm superior: to all others, or, with a control, to the control at any look.

    An arm that beats the control replaces it, and the control is dropped; nothing else drops the control.
    """
    return np.asarray(found.ending == ENDINGS.index("superiority") if control < 0 else ~found.active[:, control])


def sequence_covers(found: TrialRecord, bounds: tuple[float, float], alpha: float = _ALPHA) -> np.ndarray:
    """Return whether the confidence sequence of each arm contains its true mean at the end, (trials, A).

    It is the beta-binomial mixture sequence of `evaluate`, for rewards within bounds. Only the mixture at the true mean is
    needed for that.
    """
    low, width = bounds[0], bounds[1] - bounds[0]
    trials = np.asarray(found.outcomes)
    successes = (np.asarray(found.sums) - low * trials) / width
    truth = np.clip((np.asarray(found.truth) - low) / width, 1e-12, 1.0 - 1e-12)
    with np.errstate(divide="ignore", invalid="ignore"):
        is_excluded = excludes_mean(truth, successes, trials, alpha, OPTIMAL_PLAYS)
    return ~is_excluded | (trials == 0)


def _is_right(found: TrialRecord, control: int, claimed: np.ndarray) -> np.ndarray:
    """Return whether the selected arm is strictly better than all others; with a control, than it less the margin."""
    each = np.arange(found.ending.size)
    truth = np.array(claimed)
    own = truth[each, found.arm]
    if control >= 0:
        is_control = found.arm == control
        return np.where(is_control, own >= truth.max(axis=1), own > truth[:, control])
    truth[each, found.arm] = -np.inf
    return own > truth.max(axis=1)


def _quantile(values: np.ndarray, order: float) -> tuple[float, float]:
    """Return a quantile, and half the distance of the order statistics one standard error away."""
    spread = math.sqrt(order * (1.0 - order) / values.size)
    low, middle, high = np.quantile(values, np.clip([order - spread, order, order + spread], 0.0, 1.0))
    return float(middle), float(high - low) / 2.0


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
        stopped_by: Ctrl-C, or the loss of the executor, after which the finished trials were kept; None if all have finished.
    """

    design: Design
    _records: dict[str, TrialRecord]
    _control: int
    _model: RewardModel
    seconds: float
    method: str
    _seed: int
    arms: list[Any]
    stopped_by: BaseException | None = None

    @property
    def is_complete(self) -> bool:
        """Whether all trials have finished."""
        return self.stopped_by is None

    @property
    def num_trials(self) -> dict[str, int]:
        """Number of finished trials of each scenario."""
        return {name: found.ending.size for name, found in self._records.items()}

    @property
    def dataset(self) -> "xarray.Dataset":
        """All simulated trials, as many of each scenario as have finished of all."""
        import xarray

        names = list(self._records)
        first, num = self._records[names[0]], min(self.num_trials.values())
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
            name: performance(found, self.design, self._control, self.arms, self._model)
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
        return f"OperatingCharacteristics({self.num_trials} trials, {self.seconds:.1f} s)"


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
    check_settings(model, design, num_trials, seed, progress)
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
    stopped_by: BaseException | None = None
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
        stopped_by = error
        sys.stderr.write(f"\n{str(error) or 'interrupted'}: the finished trials are kept\n")
    setting = simulator.setting
    method = f"{setting.engine.explanation.engine}, {setting.method}"
    return OperatingCharacteristics(
        design,
        records,
        setting.control,
        model,
        time.perf_counter() - begun,
        method,
        seed,
        simulator.arms,
        stopped_by,
    )


def sweep_priors(
    models: Mapping[str, RewardModel], design: Design, scenarios: Any, **settings: Any
) -> "pandas.DataFrame":
    """Return the table of operating characteristics for several priors: one row per prior and scenario.

    The prior is that of the analysis. A scenario is the same world for all of them, but "prior" draws from each program's own.
    After Ctrl-C, or if the executor is lost, it has the rows of the finished trials; `table.attrs["is_complete"]` is then 0.

    Args:
        models: {name: program}, with the same latents and arms.
        design, scenarios, settings: as in `operating_characteristics`.
    """
    import pandas

    if not isinstance(models, Mapping) or not models:
        raise ValueError(f"models must be {{name: RewardModel}}, one for each prior, got {models!r}")
    tables, is_complete = {}, True
    for name, model in models.items():
        try:
            found = operating_characteristics(model, design, scenarios, **settings)
            tables[shown_name(name)], is_complete = found.table(), found.is_complete
        except (KeyboardInterrupt, ExecutorLost):  # before any trial with this prior had finished
            if not tables:
                raise
            is_complete = False
        if not is_complete:
            break
    table = pandas.concat(tables, names=["prior"])
    table.attrs["is_complete"] = int(is_complete)
    return table


def reward_bounds(model: RewardModel) -> tuple[float, float] | None:
    """Return the smallest and the largest possible reward; None if it is unbounded, or not the only outcome."""
    import jax
    import jax.numpy as jnp
    import jax.random as jr
    import numpyro.distributions as dist

    if not model.is_reward_an_outcome:
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
