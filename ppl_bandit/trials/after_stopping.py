"""Estimates after a trial that could stop early: median unbiased, by simulation of the design.

The mean outcome of an arm is too far from the others if the trial stopped because of it. Order the possible results of an arm
by that mean (Emerson and Fleming, 1990, "Parameter estimation following group sequential hypothesis testing"). The adjusted
estimate is the truth under which half of all trials of the design give a larger mean, and half a smaller one; of all arms at
once.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from numpyro.distributions import biject_to

from ppl_bandit.inputs.numbers import as_plain_numbers, check_count
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.trials.design import Design
from ppl_bandit.trials.simulator import TrialSimulator, check_kinds
from ppl_bandit.types import Engine

if TYPE_CHECKING:
    import pandas

_MOST_ROUNDS = 10
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
    until these agree. The adjusted estimate has a sampling error as large as that of the mean: report an interval beside it.

    Args:
        model: a program with one latent per arm and no others.
        means: the mean of the outcomes of each arm, in the program's order.
        num_trials: simulated trials in each round; there are at most ten rounds.
        seed, engine, num_samples, arms, executor: as in `operating_characteristics`.

    Returns:
        A DataFrame by arm: `mean`; `adjusted`; and `simulation_error`, the standard error of the latter due to simulation.

    Raises:
        ValueError: if the program has other latents, or a mean is none that the program can have.
    """
    import pandas

    check_kinds(model, design)
    check_count(num_trials, "num_trials")
    check_count(seed, "seed", 0)
    if model.context is not None or list(model.latent_shapes.values()) != [(model.num_arms,)]:
        raise ValueError(
            f"adjusted_estimates needs a program with one latent per arm and no context, got the sites {model.latent_shapes}: "
            "report the confidence sequence of evaluate, which holds for every program"
        )
    raw = as_plain_numbers(means, "means")
    if raw.shape != (model.num_arms,) or not np.isfinite(raw).all():
        raise ValueError(f"means must be {model.num_arms} finite numbers, one for each arm, got {means!r}")
    truth_at = _truth_function(model)
    if not np.allclose(truth_at(raw)[1], raw, rtol=1e-6, atol=1e-9):
        raise ValueError(f"means are {raw.tolist()}, but the program's expected rewards cannot be these")
    simulator = TrialSimulator(model, design, engine, num_samples, arms, executor=executor)
    estimate = raw.copy()
    for _ in range(_MOST_ROUNDS):
        truth, estimate = truth_at(estimate)
        found = simulator.run(Environment(model, truth), num_trials, seed)
        simulated = np.where(found.outcomes > 0, found.sums / np.maximum(found.outcomes, 1), np.nan)
        # The error of a median of n normal numbers is sqrt(pi / 2 n) standard deviations.
        error = np.sqrt(0.5 * np.pi / num_trials) * np.nanstd(simulated, axis=0)
        gap = raw - np.nanmedian(simulated, axis=0)
        if np.all(np.abs(gap) <= 0.1 * error):
            break
        estimate = estimate + gap
    columns = {"mean": raw, "adjusted": truth_at(estimate)[1], "simulation_error": error}
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
