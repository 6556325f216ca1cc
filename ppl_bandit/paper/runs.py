"""Runs of the paper's evaluation: every setting, the two grids, and a comparison with the published regrets."""

import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit import engines
from ppl_bandit.paper.settings import (
    BAYES_UCB,
    LOWEST,
    POLICIES,
    PUBLISHED_REGRETS,
    RANDOM,
    SETTINGS,
    THOMPSON,
    PublishedRegret,
    bernoulli_program,
    linear_program,
    uniform_context,
)
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.executors import Study, prepare
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.simulation.simulate import simulate
from ppl_bandit.simulation.standings import score_selectors
from ppl_bandit.types import Engine, Key, Selector

if TYPE_CHECKING:
    import xarray

_GRID_STEPS = 1500
_STUCK = 1 / 1200  # share of runs of double sampling on (.4, .8) that end up stuck on the worse arm


class ReproducedRegret(NamedTuple):
    """A published regret, ours with its standard error, and whether they agree."""

    number: PublishedRegret
    ours: float
    error: float
    verdict: str


class GridRegret(NamedTuple):
    """Relative regret of double sampling over a grid of problems.

    Attributes:
        problems: a description of each problem.
        divergence: (K,), its Kullback-Leibler divergence.
        relative: policy -> (K,), regret of double sampling over that policy's, less 1.
        error: policy -> (K,), its standard error.
    """

    problems: list[str]
    divergence: np.ndarray
    relative: dict[str, np.ndarray]
    error: dict[str, np.ndarray]


def run_setting(
    name: str,
    num_realizations: int,
    policies: Mapping[str, Selector] | None = None,
    *,
    num_samples: int = 1000,
    seed: int = 0,
    precision: str,
    executor: Executor | None = None,
) -> "xarray.Dataset":
    """Simulate policies, or all of the paper's, in a setting, and return the summary.

    Raises:
        KeyboardInterrupt: if not all have finished: a verdict on fewer realizations would mislead.
    """
    setting = SETTINGS[name]
    is_linear = bool(setting.weights)
    model = _linear(len(setting.weights)) if is_linear else _bernoulli(len(setting.rates))
    truth = {"rate": np.array(setting.rates)}
    if is_linear:
        truth = {"weights": np.array(setting.weights), "variance": np.full(model.num_arms, setting.noise**2)}
    found = simulate(
        seed,
        model,
        engines.conjugate,
        {policy: make() for policy, make in POLICIES.items()} if policies is None else policies,
        Environment(model, truth, uniform_context if is_linear else None),
        num_steps=setting.num_steps,
        num_realizations=num_realizations,
        num_samples=num_samples,
        summary=True,
        precision=precision,
        executor=executor,
    )
    if not found.attrs["is_complete"]:
        raise KeyboardInterrupt
    return found


def verdicts(runs: Mapping[str, "xarray.Dataset"]) -> list[ReproducedRegret]:
    """Compare the published regrets of all settings that were run with ours.

    Two numbers agree if they differ by less than three standard errors of their difference. For double sampling the error
    includes stuck runs, even if none occurred: one in 1,200, which loses the gap at half of the steps.
    """
    found = []
    scores = {name: {score.selector: score for score in score_selectors(runs[name])} for name in runs}
    for number in PUBLISHED_REGRETS:
        if number.setting not in runs:
            continue
        ours = scores[number.setting][number.policy]
        mean, error = ours.mean, ours.error
        if number.policy in (LOWEST, RANDOM):
            setting = SETTINGS[number.setting]
            means = np.sort(setting.rates or [sum(row) / 2 for row in setting.weights])
            loss = 0.5 * (means[-1] - means[-2]) * setting.num_steps
            error = max(error, float(np.sqrt(_STUCK / runs[number.setting].sizes["realization"]) * loss))
        distance = abs(mean - number.value)
        agrees = distance < 3.0 * np.hypot(error, number.error)
        verdict = "reproduces" if agrees else _EXPLAINED.get((number.setting, number.source), "differs")
        found.append(ReproducedRegret(number, mean, error, verdict))
    return found


_EXPLAINED = {
    ("linear-caption", "figure"): "does not reproduce: the figure is not the setting of its caption, see the row below",
}


def bernoulli_grid(
    num_arms: int,
    num_problems: int | None,
    num_runs: int,
    *,
    seed: int = 0,
    precision: str,
    executor: Executor | None = None,
) -> GridRegret:
    """Run bandits whose rates are ascending multiples of .05, all or evenly spread over the divergence.

    The divergence is that of the second best arm from the best, as on the paper's axis.
    """
    rates = np.array(list(itertools.combinations(np.arange(1, 20) * 0.05, num_arms)))
    divergence = _bernoulli_divergence(rates[:, -2], rates[:, -1])
    chosen = _spread(divergence, num_problems)
    rates, divergence = rates[chosen], divergence[chosen]
    model = _bernoulli(num_arms)
    titles = [str(tuple(round(float(r), 2) for r in row)) for row in rates]
    return _run_grid(model, {"rate": rates}, None, titles, divergence, num_runs, seed, precision, executor)


def linear_grid(
    num_problems: int | None, num_runs: int, *, seed: int = 0, precision: str, executor: Executor | None = None
) -> GridRegret:
    """Run two-armed linear Gaussian bandits of the paper's footnote: 360 drawn from its grid, or some of them.

    Both weights of the second arm are larger, as in the paper's example, so that it is better in every context: the paper's
    points lie on one curve, and problems whose best arm depends on the context do not. The divergence divides by the noise,
    not its square, as the paper's axis does: E (x' (w1 - w0))^2 / (2 noise).
    """
    rng = np.random.default_rng(0)
    weights = np.sort(rng.integers(-10, 11, (1000, 2, 2)), axis=1) * 0.1
    weights = weights[np.all(weights[:, 1] > weights[:, 0], axis=1)][:360]
    noise = rng.integers(1, 11, 360) * 0.1
    gap = weights[:, 1] - weights[:, 0]
    divergence = ((gap**2).sum(axis=1) / 3.0 + gap.prod(axis=1) / 2.0) / (2.0 * noise)
    chosen = _spread(divergence, num_problems)
    weights, noise, divergence = weights[chosen], noise[chosen], divergence[chosen]
    truths = {"weights": weights, "variance": np.repeat(noise[:, None] ** 2, 2, axis=1)}
    titles = [f"{w.round(1).tolist()}, noise {s:.1f}" for w, s in zip(weights, noise, strict=True)]
    return _run_grid(_linear(2), truths, uniform_context, titles, divergence, num_runs, seed, precision, executor)


def _run_grid(
    model: RewardModel,
    truths: dict[str, np.ndarray],
    contexts: Callable | None,
    titles: list[str],
    divergence: np.ndarray,
    num_runs: int,
    seed: int,
    precision: str,
    executor: Executor | None,
) -> GridRegret:
    regret = {}
    with jax.enable_x64(precision == "float64"):
        engine = engines.conjugate(model)
        for policy in (LOWEST, THOMPSON, BAYES_UCB):
            # Thompson sampling uses one draw of M, and one draw is cheaper than a quadrature.
            table = {"num_samples": 1, "draws": True} if policy == THOMPSON else {}
            regret[policy] = _final_regrets(
                jr.key(seed), model, engine, POLICIES[policy](), truths, contexts, num_runs, executor, **table
            )
    ours = regret[LOWEST]
    relative, error = {}, {}
    for policy in (THOMPSON, BAYES_UCB):
        other = regret[policy].mean(axis=1)
        ratio = ours.mean(axis=1) / other
        relative[policy] = ratio - 1.0
        residual = ours - ratio[:, None] * regret[policy]
        error[policy] = residual.std(axis=1, ddof=1) / np.sqrt(num_runs) / other
    return GridRegret(titles, divergence, relative, error)


def _final_regrets(
    key: Key,
    model: RewardModel,
    engine: Engine,
    selector: Selector,
    truths: dict[str, np.ndarray],
    contexts: Callable | None,
    num_runs: int,
    executor: Executor | None = None,
    **table: Any,
) -> np.ndarray:
    """Return the final regret of each problem's realizations, (K, R): all problems run the same compiled function.

    Args:
        table: arguments of `rollout` for the table of draws.
    """
    stacked = {name: jnp.asarray(value) for name, value in truths.items()}

    def play(engine: Engine, key: Key, number: Array) -> Array:
        world = Environment(model, {name: value[number // num_runs] for name, value in stacked.items()}, contexts)
        run, _, _ = rollout(jr.fold_in(key, number), model, engine, selector, world, num_steps=_GRID_STEPS, **table)
        return jnp.sum(run.regret)

    num = next(iter(truths.values())).shape[0] * num_runs
    parts = prepare(Study(model, engine, play), key, num, executor=executor)()(key, num)
    regret = np.concatenate(list(parts))
    return regret.astype(float).reshape(-1, num_runs)


def _spread(divergence: np.ndarray, num: int | None) -> np.ndarray:
    """Choose problems evenly over the order of their divergence; None chooses all."""
    order = np.argsort(divergence, kind="stable")
    if num is None or num >= order.size:
        return order
    return order[np.round(np.linspace(0, order.size - 1, num)).astype(int)]


def _bernoulli_divergence(worse: np.ndarray, best: np.ndarray) -> np.ndarray:
    return worse * np.log(worse / best) + (1 - worse) * np.log((1 - worse) / (1 - best))


def _bernoulli(num_arms: int) -> RewardModel:
    return RewardModel(bernoulli_program(num_arms), num_arms)


def _linear(num_arms: int) -> RewardModel:
    return RewardModel(linear_program(num_arms), num_arms, jnp.full(2, 0.5))
