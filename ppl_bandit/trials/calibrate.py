"""Find the threshold of superiority that gives a design its type I error, and judge it on fresh seeds.

Up to the first look at which an arm is superior, a trial is the same whatever the threshold. So one simulation without the rule
gives the type I error for all thresholds at once: a trial would have declared an arm superior exactly if the largest
probability at any of its looks reaches the threshold, and the threshold is a quantile of these maxima.

Also here: estimates after a trial that could stop early: median unbiased, by simulation of the design.

The mean outcome of an arm is too far from the others if the trial stopped because of it. Order the possible results of an arm
by that mean (Emerson and Fleming, 1990, "Parameter estimation following group sequential hypothesis testing"). The adjusted
estimate is the truth under which half of all trials of the design give a larger mean, and half a smaller one; of all arms at
once.
"""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.distributions import biject_to

from ppl_bandit.display.terminal import progress_reporter
from ppl_bandit.inputs.numbers import as_plain_numbers
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.operating_characteristics import declares_superiority, operating_characteristics
from ppl_bandit.trials.simulator import TrialSimulator, as_environment, check_settings
from ppl_bandit.trials.trial_runs import TrialRecord
from ppl_bandit.types import Engine

if TYPE_CHECKING:
    import pandas
    from jax.sharding import Mesh

_NEVER = 2.0  # a threshold that no probability reaches
_TIE = 1e-9  # probabilities of the same outcomes differ by rounding


def calibrate(
    model: RewardModel,
    design: Design,
    null: Any,
    *,
    type_i_error: float = 0.05,
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
        type_i_error: target, strictly inside (0, 1). Where few outcomes are possible, the error is the next one below it.
        num_trials: simulated trials of each null to find the threshold, and as many to judge it. The error of the result has
            the standard error sqrt(2 type_i_error (1 - type_i_error) / num_trials): .0018 by default.
        seed: random seed; the threshold is judged with seed + 1.
        engine, num_samples, arms, mesh, executor, progress: as in `operating_characteristics`.

    Returns:
        The design; its `calibration` says how the threshold was found and what its error is on fresh seeds.

    Raises:
        ValueError: if the design has no superiority rule, or no threshold reaches the target.
    """
    check_settings(model, design, num_trials, seed, progress)
    rule = design.rule("superiority")
    if rule is None:
        raise ValueError(
            "calibrate finds superiority's threshold, and the design has no such rule: add stopping.superiority(0.99)"
        )
    if not isinstance(type_i_error, float | np.floating) or not 0.0 < type_i_error < 1.0:
        raise ValueError(f"type_i_error must be a probability strictly inside (0, 1), got {type_i_error!r}")
    simulator = TrialSimulator(model, design, engine, num_samples, arms=arms, mesh=mesh, executor=executor)
    worlds = _nulls(model, null, simulator.setting.control, design.margin)
    report = progress_reporter("calibration", 2 * num_trials * len(worlds), "trials")
    advance = report if progress else lambda num: None
    place = design.rules.index(rule)

    def run(world: Environment, threshold: float, seed: int) -> TrialRecord:
        limits = design.thresholds().copy()
        limits[place] = threshold
        return simulator.run(world, num_trials, seed, thresholds=limits, on_chunk=lambda part: advance(part.look.size))

    def measure(world: Environment, threshold: float) -> float:
        return float(np.mean(declares_superiority(run(world, threshold, seed + 1), simulator.setting.control)))

    found = {
        name: _quantile_of_peaks(np.asarray(run(world, _NEVER, seed).peak)[:, place], type_i_error)
        for name, world in worlds.items()
    }
    worst = max(found, key=lambda name: found[name])
    threshold = found[worst]
    fresh = {name: measure(world, threshold) for name, world in worlds.items()}
    error = fresh[worst]
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
    return dataclasses.replace(design.with_threshold("superiority", threshold), calibration=calibration)


def _nulls(model: RewardModel, null: Any, control: int, margin: float) -> dict[str, Environment]:
    if isinstance(null, Mapping) and not set(null) & set(model.latent_shapes):
        named = {str(name): value for name, value in null.items()}
    elif isinstance(null, list | tuple | np.ndarray) and not np.ndim(null) == 0:
        named = {f"null {_shown(value)}": value for value in null}
    else:
        named = {f"null {_shown(null)}": null}
    if not named:
        raise ValueError(f"null is {null!r}, expected at least one world without a difference, such as 0.3")
    worlds = {name: as_environment(model, value, name) for name, value in named.items()}
    for name, world in worlds.items():
        if world.truth is None:
            raise ValueError(
                f"{name}: a null is one world without a difference, not worlds from the prior: give a common value"
            )
        rewards = np.array(world.expected_rewards(model.context))
        if margin:
            rewards[control] -= margin
        more = f"; the control {margin:g} more, the margin" if margin else ""
        if np.ptp(rewards) > 1e-6 * (1.0 + np.abs(rewards).max()):
            raise ValueError(
                f"{name}: the arms' expected rewards are {rewards.tolist()}, expected one common value: give the value that "
                f"all arms have without a difference, such as 0.3{more}"
            )
    return worlds


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)


def _quantile_of_peaks(peak: np.ndarray, target: float) -> float:
    """Return the threshold from the largest probability of each trial without the rule: a quantile of them.

    At most the share `target` of the trials reaches it, and less if many have the same largest probability, as with few rows.
    """
    peaks = np.sort(peak)
    highest = peaks[-int(target * peaks.size) - 1]  # of the trials that may not stop
    above = peaks[peaks > highest + _TIE]
    threshold = 0.5 * (highest + above[0]) if above.size else 1.0
    if not 0.5 <= threshold < 1.0:
        raise ValueError(
            f"no threshold has a type I error of {target:g}: the threshold would be {threshold:.6g}; allow more looks or rows, "
            "simulate more trials, or drop the inferiority rule, which ends a trial when one arm is left"
        )
    return float(threshold)


_MOST_DOUBLINGS = 10


def rows_for_power(
    model: RewardModel,
    design: Design,
    scenario: Any,
    *,
    power: float = 0.8,
    num_trials: int = 2000,
    tolerance: float = 0.05,
    **settings: Any,
) -> tuple[Design, dict[int, tuple[float, float]]]:
    """Return the design with the fewest rows that has a wanted power, and (power, its standard error) by number of rows.

    The looks, the burn-in and `max_rows` are multiplied by one factor, which is doubled, or halved, and then bisected. The
    thresholds stay as they are: calibrate the result. Every number of rows is a compilation and `num_trials` trials. An error
    of the power of .01 changes the number of rows by about 2 to 3 percent near a power of .8.

    Args:
        design: has a superiority rule; its looks are the shape of those to be found.
        scenario: one truth with a difference, as in `operating_characteristics`.
        power: of the table of `operating_characteristics`: the probability to declare a better arm superior and to select it.
        tolerance: the number of rows found is at most this share above one with less power.
        settings: of `operating_characteristics`, such as `seed`, `arms` and `executor`.

    Raises:
        ValueError: if a thousand times as many rows, or a thousandth of them, do not bracket the power.
        KeyboardInterrupt, ExecutorLost: the search has no result then.
    """
    if not 0.0 < power < 1.0 or not tolerance > 0.0:
        raise ValueError(
            f"power must lie strictly inside (0, 1) and tolerance above 0, got {power!r} and {tolerance!r}"
        )
    if design.rule("superiority") is None:
        raise ValueError("rows_for_power needs a design with a superiority rule: add stopping.superiority(0.99)")
    tried: dict[int, tuple[float, float]] = {}

    def reaches(factor: float) -> bool:
        scaled = _scaled(design, factor)
        if scaled.last_rows not in tried:
            found = operating_characteristics(model, scaled, {"truth": scenario}, num_trials=num_trials, **settings)
            if found.stopped_by is not None:  # the search needs the power, and fewer trials would mislead it
                raise found.stopped_by
            row = found.table().loc["truth"]
            tried[scaled.last_rows] = float(row.power), float(row.power_se)
        return tried[scaled.last_rows][0] >= power

    step = 0.5 if reaches(1.0) else 2.0
    ends = [1.0]
    while reaches(ends[-1] * step) == (step < 1.0):
        ends.append(ends[-1] * step)
        if len(ends) > _MOST_DOUBLINGS:
            last = max(tried) if step > 1.0 else min(tried)
            raise ValueError(
                f"the power is {tried[last][0]:.3g} with {last} rows: give looks nearer to a power of {power:g}"
            )
    low, high = sorted((ends[-1], ends[-1] * step))
    while high > low * (1.0 + tolerance) and _scaled(design, math.sqrt(low * high)).last_rows not in tried:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if reaches(middle) else (middle, high)
    return _scaled(design, high), dict(sorted(tried.items()))


def _scaled(design: Design, factor: float) -> Design:
    def rows(number: int) -> int:
        return math.ceil(number * factor)

    looks = sorted({rows(look) for look in design.looks})
    if len(looks) < len(design.looks) or looks[0] < 2:
        raise ValueError(
            f"the looks {list(design.looks)} cannot be multiplied by {factor:g}: give fewer, or a lower power"
        )
    most = None if design.max_rows is None else rows(design.max_rows)
    return replace(design, looks=looks, burn_in=int(design.burn_in * factor), max_rows=most, calibration=None)


_MOST_ROUNDS = 15
_NUM_BISECTIONS = 60
_FARTHEST = 30.0  # of a latent, mapped to the real line


def adjusted_estimates(
    model: RewardModel,
    design: Design,
    means: Sequence[float],
    *,
    num_trials: int = 2000,
    seed: int = 0,
    engine: Engine | Callable[[RewardModel], Engine] | None = None,
    num_samples: int = 1000,
    arms: Sequence[str] | None = None,
    executor: Executor | None = None,
) -> "pandas.DataFrame":
    """Return the mean outcome of every arm after a trial, and the median unbiased estimate beside it.

    The design is simulated at the estimates, which then move by the difference of the observed and the median simulated mean,
    until these agree; a warning says if they do not. The adjusted estimate has a sampling error as large as that of the mean:
    report an interval beside it.

    Args:
        model: a program with one latent per arm and no others.
        means: the mean of the outcomes of each arm, in the program's order.
        num_trials: simulated trials in each round; there are at most 15 rounds.
        seed, engine, num_samples, arms, executor: as in `operating_characteristics`.

    Returns:
        A DataFrame by arm: `mean`; `adjusted`; and `simulation_error`, the standard error of the latter due to simulation.

    Raises:
        ValueError: if the program has other latents, or a mean is none that the program can have.
    """
    import pandas

    check_settings(model, design, num_trials, seed)
    if model.context is not None or list(model.latent_shapes.values()) != [(model.num_arms,)]:
        raise ValueError(
            f"adjusted_estimates needs a program with one latent per arm and no context, got the sites {model.latent_shapes}: "
            "report the confidence sequence of evaluate, which holds for every program"
        )
    if not model.is_reward_an_outcome:
        raise ValueError(
            "adjusted_estimates needs a program that maximises the mean of its only outcome, which means are compared with: "
            "leave out its own expected_reward, and turn the adjusted means into that yourself"
        )
    raw = as_plain_numbers(means, "means")
    if raw.shape != (model.num_arms,) or not np.isfinite(raw).all():
        raise ValueError(f"means must be {model.num_arms} finite numbers, one for each arm, got {means!r}")
    truth_at = _truth_function(model)
    if not np.allclose(truth_at(raw)[1], raw, rtol=1e-6, atol=1e-9):
        raise ValueError(f"means are {raw.tolist()}, but the program's expected rewards cannot be these")
    simulator = TrialSimulator(model, design, engine, num_samples, arms, executor=executor)
    wanted, before, share = raw, np.zeros_like(raw), np.ones_like(raw)
    for _ in range(_MOST_ROUNDS):
        truth, estimate = truth_at(wanted)
        found = simulator.run(Environment(model, truth), num_trials, seed)
        simulated = np.where(found.outcomes > 0, found.sums / np.maximum(found.outcomes, 1), np.nan)
        # The error of a median of n normal numbers is sqrt(pi / 2 n) standard deviations.
        error = np.sqrt(0.5 * np.pi / num_trials) * np.nanstd(simulated, axis=0)
        gap = raw - np.nanmedian(simulated, axis=0)
        # Where few means are possible, the median jumps: the estimate is the place of the jump.
        share = np.where(gap * before < 0.0, 0.5 * share, share)
        if np.all(np.abs(share * gap) <= 0.1 * error):
            break
        wanted, before = estimate + share * gap, gap
    else:
        warnings.warn(
            f"after {_MOST_ROUNDS} rounds the median simulated means are still {np.abs(gap).max():.2g} from those observed: "
            "simulate more trials, or report the confidence sequence of evaluate",
            stacklevel=2,
        )
    columns = {"mean": raw, "adjusted": estimate, "simulation_error": error}
    return pandas.DataFrame(columns, index=pandas.Index(simulator.arms, name="arm"))


def _truth_function(model: RewardModel) -> Callable[[np.ndarray], tuple[dict[str, Any], np.ndarray]]:
    """Return expected rewards (A,) -> a truth that has them, or the nearest ones, and its own; by bisection."""
    (site,) = model.latent_shapes
    with jax.enable_x64(True):
        latents = {name: value[0] for name, value in model.sample_prior(jr.key(0), 1).items()}
        law = model.trace(latents, jnp.zeros(1, int), None)[site]["fn"]
        constrain = biject_to(law.support)

    def rewards(place: Any) -> Any:
        return model.expected_rewards({site: constrain(place)[None]}, None)[0]

    @jax.jit
    def find(wanted: Any) -> tuple[Any, Any]:
        ends = jnp.full_like(wanted, -_FARTHEST), jnp.full_like(wanted, _FARTHEST)
        is_rising = rewards(ends[1]) > rewards(ends[0])

        def halve(_: Any, ends: tuple[Any, Any]) -> tuple[Any, Any]:
            middle = 0.5 * (ends[0] + ends[1])
            is_low = (rewards(middle) < wanted) == is_rising
            return jnp.where(is_low, middle, ends[0]), jnp.where(is_low, ends[1], middle)

        place = sum(jax.lax.fori_loop(0, _NUM_BISECTIONS, halve, ends)) / 2
        return constrain(place), rewards(place)

    def truth_at(wanted: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
        with jax.enable_x64(True):
            truth, own = jax.device_get(find(jnp.asarray(wanted, float)))
        return {site: truth}, own

    return truth_at
