"""Find the threshold of a stopping rule that gives a design its type I error, and judge it on fresh seeds.

Without a control, superiority's threshold decides only when a trial stops, not what happens before. One simulation without
the rule then gives the type I error for all thresholds at once: a trial would have stopped for superiority exactly if the
largest probability at any of its looks reaches the threshold, so that the threshold is a quantile of these maxima. Where the
path of a trial depends on the threshold (a control that is replaced by a winner, an inferiority threshold tied to it), it is
found by search: probit regression on trials with several thresholds.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize, special

from ppl_bandit.display.progress import progress_reporter
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.performance import declares_superiority
from ppl_bandit.trials.simulated.simulator import TrialSimulator, TrialsInterrupted, as_environment, check_kinds
from ppl_bandit.trials.simulated.trial_runs import TrialRecord
from ppl_bandit.types import Engine

if TYPE_CHECKING:
    from jax.sharding import Mesh

__all__ = ["calibrate"]

_NEVER = 2.0  # a threshold that no probability reaches
_NUM_STAGES = 8  # of a search
_LEAST_SEARCHED, _MOST_SEARCHED = 0.9, 0.9999


def calibrate(
    model: RewardModel,
    design: Design,
    null: Any,
    *,
    type_i_error: float = 0.05,
    symmetric: bool = False,
    num_trials: int = 30_000,
    seed: int = 0,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_samples: int = 1000,
    arms: Sequence[str] | None = None,
    mesh: "Mesh | None" = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> Design:
    """Return the design with the superiority threshold at which its type I error is as given.

    The type I error is the probability that a trial declares an arm superior under the null: it ends with superiority; with a
    control, an arm beats the control at any look. The threshold is found with one set of simulated trials and judged on
    another, with fresh seeds: on the seeds that chose it, it looks better than it is.

    Args:
        design: a design with a superiority rule, whose threshold is replaced by one number for all looks.
        null: the truth without a difference: a common value of the arms where the program has one latent per arm and
            no others, or a truth {site: value}. A list or a mapping {name: null} of several: the threshold holds the
            error in the worst of them.
        type_i_error: target, strictly inside (0, 1).
        symmetric: whether inferiority's threshold is 1 - p, as superiority's is p.
        num_trials: simulated trials of each null to find the threshold, and as many to judge it. The error of the result has
            the standard error sqrt(2 type_i_error (1 - type_i_error) / num_trials): .0018 by default; .0019 after a search.
        seed: random seed; the threshold is judged with seed + 1.
        engine, num_samples, arms, mesh, executor, progress: as in `operating_characteristics`.

    Returns:
        The design; its `calibration` says how the threshold was found and what its error is on fresh seeds.

    Raises:
        ValueError: if the design has no superiority rule, or no threshold reaches the target.
    """
    check_kinds(model, design)
    rule = design.rule("superiority")
    if rule is None:
        raise ValueError(
            "calibrate finds superiority's threshold, and the design has no such rule: add stopping.superiority(0.99)"
        )
    if not isinstance(type_i_error, float | np.floating) or not 0.0 < type_i_error < 1.0:
        raise ValueError(f"type_i_error must be a probability strictly inside (0, 1), got {type_i_error!r}")
    if symmetric and design.rule("inferiority") is None:
        raise ValueError(
            "symmetric=True ties inferiority's threshold to superiority's, and the design has no inferiority rule: add "
            "stopping.inferiority(0.01), or leave symmetric out"
        )
    check_count(num_trials, "num_trials")
    check_count(seed, "seed", 0)
    worlds = _nulls(model, null)
    # Thresholds are tried that the rules' own checks would refuse, so the design is only a template here.
    simulator = TrialSimulator(
        model,
        design.with_threshold("superiority", _MOST_SEARCHED),
        engine,
        num_samples,
        arms=arms,
        mesh=mesh,
        executor=executor,
    )
    advance = progress_reporter("calibration", 2 * num_trials * len(worlds), "trials") if progress else None

    def run(world: Environment, threshold: float, num: int, seed: int, first: int = 0) -> TrialRecord:
        limits = _thresholds(design, threshold, symmetric)
        try:
            return simulator.run(world, num, seed, first=first, thresholds=limits, advance=advance)
        except TrialsInterrupted as error:  # a part of the trials has no threshold
            raise error.__cause__ or error from None

    def measure(world: Environment, threshold: float, num: int, seed: int, first: int = 0) -> float:
        found = run(world, threshold, num, seed, first)
        return float(np.mean(declares_superiority(found, simulator.setting.control)))

    def find(world: Environment) -> float:
        if design.control is None and not symmetric:
            peak = np.asarray(run(world, _NEVER, num_trials, seed).peak)[:, design.rules.index(rule)]
            return _quantile_of_peaks(peak, type_i_error)
        start = float(np.mean(rule.threshold))
        return _search(lambda at, first, num: measure(world, at, num, seed, first), start, type_i_error, num_trials)

    found = {name: find(world) for name, world in worlds.items()}
    worst = max(found, key=lambda name: found[name])
    threshold = found[worst]
    fresh = {name: measure(world, threshold, num_trials, seed + 1) for name, world in worlds.items()}
    error = fresh[worst]
    calibrated = design.with_threshold("superiority", threshold)
    if symmetric:
        calibrated = calibrated.with_threshold("inferiority", 1.0 - threshold)
    calibration = {
        "rule": "superiority",
        "threshold": threshold,
        "target": type_i_error,
        "null": worst if len(worlds) == 1 else f"{worst}, the worst of {len(worlds)} nulls",
        "type_i_error": error,
        "type_i_error_se": float(np.sqrt(error * (1.0 - error) / num_trials)),
        "by_null": fresh,
        "num_trials": num_trials,
        "seed": seed,
    }
    return dataclasses.replace(calibrated, calibration=calibration)


def _nulls(model: RewardModel, null: Any) -> dict[str, Environment]:
    if isinstance(null, Mapping) and not set(null) & set(model.latent_shapes):
        named = {str(name): value for name, value in null.items()}
    elif isinstance(null, list | tuple | np.ndarray) and not np.ndim(null) == 0:
        named = {f"null {_shown(value)}": value for value in null}
    else:
        named = {f"null {_shown(null)}": null}
    worlds = {name: as_environment(model, value, name) for name, value in named.items()}
    for name, world in worlds.items():
        if world.truth is None:
            raise ValueError(
                f"{name}: a null is one world without a difference, not worlds from the prior: give a common value"
            )
        rewards = np.asarray(world.expected_rewards(model.context))
        if np.ptp(rewards) > 1e-6 * (1.0 + np.abs(rewards).max()):
            raise ValueError(
                f"{name}: the arms' expected rewards are {rewards.tolist()}, expected one common value: give the value that "
                "all arms have without a difference, such as 0.3"
            )
    return worlds


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _thresholds(design: Design, threshold: float, symmetric: bool) -> np.ndarray:
    limits = design.thresholds().copy()
    for index, rule in enumerate(design.rules):
        if rule.name == "superiority":
            limits[index] = threshold
        elif rule.name == "inferiority" and symmetric:
            limits[index] = 1.0 - threshold
    return limits


def _quantile_of_peaks(peak: np.ndarray, target: float) -> float:
    """Return the threshold from the largest probability of each trial without the rule: a quantile of them."""
    peaks = np.sort(peak)
    allowed = int(target * peaks.size)  # trials that may stop
    threshold = 0.5 * (peaks[-allowed - 1] + peaks[-allowed]) if 0 < allowed < peaks.size else float(peaks[-1])
    if not 0.5 <= threshold < 1.0:
        raise ValueError(
            f"no threshold has a type I error of {target:g}: the threshold would be {threshold:.6g}; allow more looks, or drop "
            "the inferiority rule, which ends a trial when one arm is left"
        )
    return float(threshold)


def _search(measure: Callable[[float, int, int], float], start: float, target: float, num_trials: int) -> float:
    """Return the threshold by a search in stages with new trials in each, all of which are used for the result.

    After each stage the error is fitted as a function of the threshold by probit regression, nearly linear where the threshold
    is on the scale of probits too. The next stage runs at the threshold where the fit reaches the target.

    Args:
        measure: (threshold, number of the first trial, number of trials) -> share of them with an error.
        start: threshold of the first stage.
    """
    low, high = special.ndtri(_LEAST_SEARCHED), special.ndtri(_MOST_SEARCHED)
    num = -(-num_trials // _NUM_STAGES)
    begin = position = float(np.clip(special.ndtri(start), low, high))
    positions, errors = [], []
    for stage in range(_NUM_STAGES):
        positions.append(position)
        errors.append(measure(float(special.ndtr(position)), stage * num, num))
        root = _fitted_root(np.array(positions), num * np.array(errors), num, target, begin)
        position = float(np.clip(root, low, high))
    if root < low:
        raise ValueError(
            f"the type I error is below {target:g} even with superiority({_LEAST_SEARCHED:g}): give a smaller type_i_error, or "
            "use that threshold"
        )
    if root > high:
        raise ValueError(
            f"the type I error is above {target:g} even with superiority({_MOST_SEARCHED:g}): look later or less often, or "
            "give a larger type_i_error"
        )
    return float(special.ndtr(position))


def _fitted_root(positions: np.ndarray, num_errors: np.ndarray, num: int, target: float, start: float) -> float:
    """Return the position at which the probit of the error, fitted by a falling line, is that of the target.

    Weak priors keep the first steps short: root ~ Normal(start, 1), slope ~ LogNormal(log 1.5, 0.5). In simulated designs the
    slope was between 1.1 and 2.
    """

    def loss(parameters: np.ndarray) -> float:
        root, log_slope = parameters
        probits = special.ndtri(target) - np.exp(log_slope) * (positions - root)
        likelihood = num_errors @ special.log_ndtr(probits) + (num - num_errors) @ special.log_ndtr(-probits)
        return float(0.5 * (root - start) ** 2 + 0.5 * ((log_slope - np.log(1.5)) / 0.5) ** 2 - likelihood)

    found = optimize.minimize(loss, [positions[-1], np.log(1.5)], method="Nelder-Mead", options={"xatol": 1e-6})
    return float(found.x[0])
