"""The evaluation of the paper (Urteaga and Wiggins, 2017): its settings, our runs of them, and a verdict on every number.

"Authors" are values of the authors' public code, with standard errors where many runs of it are known; "figure" are values
read off the paper's own figures, which show realised regret of 5,000 realizations. Ours is expected regret.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_bandit import engines, selectors
from ppl_bandit.environment import Environment
from ppl_bandit.program import RewardModel
from ppl_bandit.rollouts import rollout
from ppl_bandit.simulation import realize, simulate
from ppl_bandit.types import Engine, Key, Selector

if TYPE_CHECKING:
    import xarray

__all__ = [
    "FULL",
    "NUMBERS",
    "QUICK",
    "SETTINGS",
    "Cloud",
    "Finding",
    "Sizes",
    "bernoulli_grid",
    "linear_grid",
    "paper_data",
    "run_setting",
    "verdicts",
]

LOWEST, RANDOM, THOMPSON, BAYES_UCB = "double sampling, ties lowest", "double sampling", "Thompson", "Bayes-UCB"
_POLICIES: Mapping[str, Callable[[], Selector]] = {
    THOMPSON: selectors.thompson,
    BAYES_UCB: selectors.bayes_ucb,
    LOWEST: lambda: selectors.double_sampling(ties="lowest"),
    RANDOM: selectors.double_sampling,
}
_GRID_STEPS = 1500
_STUCK = 1 / 1200  # share of runs of double sampling on (.4, .8) that end up stuck on the worse arm


class Setting(NamedTuple):
    """One bandit of the paper.

    Attributes:
        rates: success probabilities, for a Bernoulli bandit.
        weights, noise: (A, 2) and a standard deviation, for a linear Gaussian one.
    """

    title: str
    num_steps: int
    rates: tuple[float, ...] = ()
    weights: tuple[tuple[float, float], ...] = ()
    noise: float = 0.0


class Sizes(NamedTuple):
    """How much to run: realizations per setting, and problems and realizations of the grids; None for all problems."""

    runs: Mapping[str, int]
    num_pairs: int | None
    num_triples: int | None
    num_linear: int | None
    grid_runs: int


SETTINGS = {
    "bernoulli": Setting("Bernoulli, rates (.4, .8)", 1000, (0.4, 0.8)),
    "bernoulli-close": Setting("Bernoulli, rates (.5, .55)", 1000, (0.5, 0.55)),
    "bernoulli-three": Setting("Bernoulli, rates (.4, .7, .8)", 1500, (0.4, 0.7, 0.8)),
    "linear-caption": Setting(
        "linear Gaussian, weights (.4, .4), (.8, .8), noise .2", 1000, weights=((0.4, 0.4), (0.8, 0.8)), noise=0.2
    ),
    "linear-figure": Setting(
        "linear Gaussian, weights (-.5, -.5), (0, 0), (.5, .5), noise 1",
        1000,
        weights=((-0.5, -0.5), (0.0, 0.0), (0.5, 0.5)),
        noise=1.0,
    ),
}
QUICK = Sizes(
    {"bernoulli": 2000, "bernoulli-close": 600, "bernoulli-three": 250, "linear-caption": 500, "linear-figure": 200},
    num_pairs=16,
    num_triples=10,
    num_linear=12,
    grid_runs=60,
)
FULL = Sizes(dict.fromkeys(SETTINGS, 5000), None, None, None, 5000)


class Number(NamedTuple):
    """A number of the paper or of its authors' code: final cumulative regret of a policy in a setting."""

    setting: str
    policy: str
    value: float
    error: float
    source: str


_FIGURE_ERROR = 13.0 / np.sqrt(5000)  # the figure's own standard deviation, over 5,000 realizations
_LINEAR_FIGURE_ERROR = 34.0 / np.sqrt(5000)
NUMBERS = (
    Number("bernoulli", THOMPSON, 4.52, 0.04, "authors"),
    Number("bernoulli", BAYES_UCB, 3.91, 0.04, "authors"),
    Number("bernoulli", LOWEST, 2.92, 0.02, "authors"),
    Number("bernoulli", THOMPSON, 4.42, _FIGURE_ERROR, "figure"),
    Number("bernoulli", BAYES_UCB, 3.55, _FIGURE_ERROR, "figure"),
    Number("bernoulli", LOWEST, 2.79, _FIGURE_ERROR, "figure"),
    Number("bernoulli-close", THOMPSON, 12.48, 0.15, "authors"),
    Number("bernoulli-close", BAYES_UCB, 11.99, 0.13, "authors"),
    Number("bernoulli-close", LOWEST, 13.64, 0.10, "authors"),
    Number("bernoulli-close", RANDOM, 12.57, 0.10, "reference"),
    Number("bernoulli-three", THOMPSON, 15.2, 0.2, "authors"),
    Number("bernoulli-three", BAYES_UCB, 14.2, 0.15, "authors"),
    Number("bernoulli-three", LOWEST, 16.5, 0.4, "authors"),
    Number("bernoulli-three", RANDOM, 13.8, 0.4, "reference"),
    Number("linear-caption", THOMPSON, 7.67, 0.01, "authors"),
    Number("linear-caption", BAYES_UCB, 9.48, 0.01, "authors"),
    Number("linear-caption", LOWEST, 5.94, 0.02, "authors"),
    Number("linear-caption", THOMPSON, 44.40, _LINEAR_FIGURE_ERROR, "figure"),
    Number("linear-caption", BAYES_UCB, 56.17, _LINEAR_FIGURE_ERROR, "figure"),
    Number("linear-caption", LOWEST, 39.07, _LINEAR_FIGURE_ERROR, "figure"),
    Number("linear-figure", THOMPSON, 44.40, _LINEAR_FIGURE_ERROR, "figure"),
    Number("linear-figure", BAYES_UCB, 56.17, _LINEAR_FIGURE_ERROR, "figure"),
    Number("linear-figure", LOWEST, 39.07, _LINEAR_FIGURE_ERROR, "figure"),
    Number("linear-figure", THOMPSON, 45.5, 0.2, "authors"),
    Number("linear-figure", BAYES_UCB, 55.4, 0.2, "authors"),
    Number("linear-figure", LOWEST, 39.1, 0.4, "authors"),
)


class Finding(NamedTuple):
    """A number, ours, and what to make of the two."""

    number: Number
    ours: float
    error: float
    verdict: str


class Cloud(NamedTuple):
    """Relative regret of double sampling over a grid of problems.

    Attributes:
        problems: what each problem is, in words.
        divergence: (K,), its Kullback-Leibler divergence.
        relative: policy -> (K,), regret of double sampling over that policy's, less 1.
        error: policy -> (K,), its standard error.
    """

    problems: list[str]
    divergence: np.ndarray
    relative: dict[str, np.ndarray]
    error: dict[str, np.ndarray]


def paper_data(name: str) -> Any:
    """Return figures of the paper as numbers: regret_curves, bernoulli_kl or linear_gaussian_kl."""
    return json.loads((resources.files("ppl_bandit") / "data" / f"paper_{name}.json").read_text())


def bernoulli_program(num_arms: int) -> Callable[[Array], None]:
    """Return the Bernoulli bandit: rates uniform on (0, 1)."""

    def bernoulli(arm: Array) -> None:
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return bernoulli


def linear_program(num_arms: int) -> Callable[[Array, Array], None]:
    """Return the contextual linear Gaussian bandit with two features, unknown weights and unknown noise."""

    def linear(arm: Array, context: Array) -> None:
        with numpyro.plate("arms", num_arms):
            variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
            prior = dist.Normal(jnp.ones(2), jnp.sqrt(variance)[:, None])
            weights = numpyro.sample("weights", prior.to_event(1))
        mean = jnp.sum(weights[arm] * context, axis=-1)
        numpyro.sample("reward", dist.Normal(mean, jnp.sqrt(variance[arm])))

    return linear


def uniform_context(key: Key) -> Array:
    """Draw the paper's context: two features uniform on (0, 1)."""
    return jr.uniform(key, (2,))


def run_setting(name: str, num_realizations: int, *, seed: int = 0, precision: str, progress: bool) -> "xarray.Dataset":
    """Simulate every policy in a setting, and return the summary."""
    setting = SETTINGS[name]
    is_linear = bool(setting.weights)
    model = _linear(len(setting.weights)) if is_linear else _bernoulli(len(setting.rates))
    truth = _linear_truth(setting.weights, setting.noise) if is_linear else {"rate": np.array(setting.rates)}
    return simulate(
        seed,
        model,
        engines.conjugate,
        {policy: make() for policy, make in _POLICIES.items()},
        Environment(model, truth, uniform_context if is_linear else None),
        num_steps=setting.num_steps,
        num_realizations=num_realizations,
        summary=True,
        precision=precision,
        progress=progress,
    )


def verdicts(runs: Mapping[str, "xarray.Dataset"]) -> list[Finding]:
    """Compare the numbers of all settings that were run.

    Two numbers agree if they differ by less than three standard errors of their difference. For double sampling the error
    counts runs that are stuck, also where none was seen: one in 1,200 that loses the gap at half of the steps.
    """
    found = []
    for number in NUMBERS:
        if number.setting not in runs:
            continue
        final = np.asarray(runs[number.setting].final_regret.sel(selector=number.policy), float)
        error = float(final.std(ddof=1) / np.sqrt(final.size))
        if number.policy in (LOWEST, RANDOM):
            error = max(error, _stuck_error(SETTINGS[number.setting], final.size))
        distance = abs(final.mean() - number.value)
        agrees = distance < 3.0 * np.hypot(error, number.error)
        verdict = "reproduces" if agrees else _EXPLAINED.get((number.setting, number.source), "differs")
        found.append(Finding(number, float(final.mean()), error, verdict))
    return found


_EXPLAINED = {
    ("linear-caption", "figure"): "does not reproduce: the figure is not the setting of its caption, see the row below",
}


def _stuck_error(setting: Setting, num_runs: int) -> float:
    means = np.sort(setting.rates or [sum(row) / 2 for row in setting.weights])
    loss = 0.5 * (means[-1] - means[-2]) * setting.num_steps
    return float(np.sqrt(_STUCK / num_runs) * loss)


def bernoulli_grid(
    num_arms: int,
    num_problems: int | None,
    num_runs: int,
    *,
    seed: int = 0,
    precision: str,
    advance: Callable[[], None],
) -> Cloud:
    """Run bandits whose rates are ascending multiples of .05, all or evenly spread over the divergence.

    The divergence is that of the second best arm from the best, as on the paper's axis.
    """
    rates = np.array(list(itertools.combinations(np.arange(1, 20) * 0.05, num_arms)))
    divergence = _bernoulli_divergence(rates[:, -2], rates[:, -1])
    chosen = _spread(divergence, num_problems)
    rates, divergence = rates[chosen], divergence[chosen]
    model = _bernoulli(num_arms)
    words = [str(tuple(round(float(r), 2) for r in row)) for row in rates]
    return _cloud(model, {"rate": rates}, None, words, divergence, num_runs, seed, precision, advance)


def linear_grid(
    num_problems: int | None, num_runs: int, *, seed: int = 0, precision: str, advance: Callable[[], None]
) -> Cloud:
    """Run two-armed linear Gaussian bandits of the paper's footnote: 360 drawn from its grid, or some of them.

    Both weights of the second arm are the larger ones, as in the paper's example, so that it is better in every context.
    The paper's points lie on one curve, which bandits whose best arm depends on the context leave. The divergence divides
    by the noise, not its square, as the paper's axis does: E (x' (w1 - w0))^2 / (2 noise).
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
    words = [f"{w.round(1).tolist()}, noise {s:.1f}" for w, s in zip(weights, noise, strict=True)]
    return _cloud(_linear(2), truths, uniform_context, words, divergence, num_runs, seed, precision, advance)


def _cloud(
    model: RewardModel,
    truths: dict[str, np.ndarray],
    contexts: Callable | None,
    words: list[str],
    divergence: np.ndarray,
    num_runs: int,
    seed: int,
    precision: str,
    advance: Callable[[], None],
) -> Cloud:
    regret = {}
    with jax.enable_x64(precision == "float64"):
        engine = engines.conjugate(model)
        for policy in (LOWEST, THOMPSON, BAYES_UCB):
            # One draw decides for Thompson sampling, however many there are; and one is cheaper than a quadrature.
            table = {"num_samples": 1, "draws": True} if policy == THOMPSON else {}
            regret[policy] = _final_regrets(
                jr.key(seed), model, engine, _POLICIES[policy](), truths, contexts, num_runs, **table
            )
            advance()
    ours = regret[LOWEST]
    relative, error = {}, {}
    for policy in (THOMPSON, BAYES_UCB):
        other = regret[policy].mean(axis=1)
        ratio = ours.mean(axis=1) / other
        relative[policy] = ratio - 1.0
        residual = ours - ratio[:, None] * regret[policy]
        error[policy] = residual.std(axis=1, ddof=1) / np.sqrt(num_runs) / other
    return Cloud(words, divergence, relative, error)


def _final_regrets(
    key: Key,
    model: RewardModel,
    engine: Engine,
    selector: Selector,
    truths: dict[str, np.ndarray],
    contexts: Callable | None,
    num_runs: int,
    **table: Any,
) -> np.ndarray:
    """Return the final regret of each problem's realizations, (K, R): all problems run the same compiled function.

    Args:
        table: of `rollout`: how the table of draws is made.
    """
    stacked = {name: jnp.asarray(value) for name, value in truths.items()}

    def play(key: Key, number: Array) -> Array:
        world = Environment(model, {name: value[number // num_runs] for name, value in stacked.items()}, contexts)
        run = rollout(jr.fold_in(key, number), model, engine, selector, world, num_steps=_GRID_STEPS, **table)
        return jnp.sum(run.regret)

    num_problems = next(iter(truths.values())).shape[0]
    parts = [part[:num_real] for part, num_real in realize(play, key, num_problems * num_runs)]
    return np.concatenate(parts).astype(float).reshape(num_problems, num_runs)


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


def _linear_truth(weights: tuple[tuple[float, float], ...], noise: float) -> dict[str, np.ndarray]:
    return {"weights": np.array(weights), "variance": np.full(len(weights), noise**2)}
