"""The settings of the paper's evaluation (Urteaga and Wiggins, 2017), and its published regrets.

The source "authors" means the authors' public code, with standard errors over many runs of it; "figure" means values read
off the paper's figures, which show realised regret of 5,000 realizations. Our regret is expected regret.
"""

import json
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any, NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array

from ppl_bandit import selectors
from ppl_bandit.types import Key, Selector

LOWEST, RANDOM, THOMPSON, BAYES_UCB = "double sampling, ties lowest", "double sampling", "Thompson", "Bayes-UCB"
POLICIES: Mapping[str, Callable[[], Selector]] = {
    THOMPSON: selectors.thompson,
    BAYES_UCB: selectors.bayes_ucb,
    LOWEST: lambda: selectors.double_sampling(ties="lowest"),
    RANDOM: selectors.double_sampling,
}


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
    """Numbers of realizations per setting, and of problems and realizations of the grids; None for all problems, 0 for none."""

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
    {"bernoulli": 150, "bernoulli-close": 0, "bernoulli-three": 60, "linear-caption": 40, "linear-figure": 40},
    num_pairs=0,
    num_triples=6,
    num_linear=6,
    grid_runs=20,
)
FULL = Sizes(dict.fromkeys(SETTINGS, 5000), None, None, None, 5000)


class PublishedRegret(NamedTuple):
    """Final cumulative regret of a policy in a setting, from the paper or its authors' code."""

    setting: str
    policy: str
    value: float
    error: float
    source: str


_FIGURE_ERROR = 13.0 / np.sqrt(5000)  # the figure's standard deviation, over 5,000 realizations
_LINEAR_FIGURE_ERROR = 34.0 / np.sqrt(5000)
PUBLISHED_REGRETS = (
    PublishedRegret("bernoulli", THOMPSON, 4.52, 0.04, "authors"),
    PublishedRegret("bernoulli", BAYES_UCB, 3.91, 0.04, "authors"),
    PublishedRegret("bernoulli", LOWEST, 2.92, 0.02, "authors"),
    PublishedRegret("bernoulli", THOMPSON, 4.42, _FIGURE_ERROR, "figure"),
    PublishedRegret("bernoulli", BAYES_UCB, 3.55, _FIGURE_ERROR, "figure"),
    PublishedRegret("bernoulli", LOWEST, 2.79, _FIGURE_ERROR, "figure"),
    PublishedRegret("bernoulli-close", THOMPSON, 12.48, 0.15, "authors"),
    PublishedRegret("bernoulli-close", BAYES_UCB, 11.99, 0.13, "authors"),
    PublishedRegret("bernoulli-close", LOWEST, 13.64, 0.10, "authors"),
    PublishedRegret("bernoulli-close", RANDOM, 12.57, 0.10, "reference"),
    PublishedRegret("bernoulli-three", THOMPSON, 15.2, 0.2, "authors"),
    PublishedRegret("bernoulli-three", BAYES_UCB, 14.2, 0.15, "authors"),
    PublishedRegret("bernoulli-three", LOWEST, 16.5, 0.4, "authors"),
    PublishedRegret("bernoulli-three", RANDOM, 13.8, 0.4, "reference"),
    PublishedRegret("linear-caption", THOMPSON, 7.67, 0.01, "authors"),
    PublishedRegret("linear-caption", BAYES_UCB, 9.48, 0.01, "authors"),
    PublishedRegret("linear-caption", LOWEST, 5.94, 0.02, "authors"),
    PublishedRegret("linear-caption", THOMPSON, 44.40, _LINEAR_FIGURE_ERROR, "figure"),
    PublishedRegret("linear-caption", BAYES_UCB, 56.17, _LINEAR_FIGURE_ERROR, "figure"),
    PublishedRegret("linear-caption", LOWEST, 39.07, _LINEAR_FIGURE_ERROR, "figure"),
    PublishedRegret("linear-figure", THOMPSON, 44.40, _LINEAR_FIGURE_ERROR, "figure"),
    PublishedRegret("linear-figure", BAYES_UCB, 56.17, _LINEAR_FIGURE_ERROR, "figure"),
    PublishedRegret("linear-figure", LOWEST, 39.07, _LINEAR_FIGURE_ERROR, "figure"),
    PublishedRegret("linear-figure", THOMPSON, 45.5, 0.2, "authors"),
    PublishedRegret("linear-figure", BAYES_UCB, 55.4, 0.2, "authors"),
    PublishedRegret("linear-figure", LOWEST, 39.1, 0.4, "authors"),
)


def paper_data(name: str) -> Any:
    """Return the data of a figure of the paper: regret_curves, bernoulli_kl or linear_gaussian_kl."""
    return json.loads((resources.files("ppl_bandit.paper") / "data" / f"paper_{name}.json").read_text())


def paper_points(name: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the points of a grid's figure, bernoulli_kl or linear_gaussian_kl.

    Returns:
        Divergences, and {policy: regret of double sampling over that policy's, less 1}.
    """
    points = paper_data(name)["points"]
    divergence = np.array([point.get("min_kl", point.get("kl")) for point in points])
    fields = {THOMPSON: "vs_thompson", BAYES_UCB: "vs_bayes_ucb"}
    return divergence, {policy: np.array([point[field] for point in points]) for policy, field in fields.items()}


def bernoulli_program(num_arms: int) -> Callable[[Array], None]:
    """Return the Bernoulli bandit: rates uniform on (0, 1)."""

    def bernoulli(arm: Array) -> None:
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return bernoulli


def linear_program(num_arms: int, num_features: int = 2) -> Callable[[Array, Array], None]:
    """Return the contextual linear Gaussian bandit with unknown weights and unknown noise."""

    def linear(arm: Array, context: Array) -> None:
        with numpyro.plate("arms", num_arms):
            variance = numpyro.sample("variance", dist.InverseGamma(1.0, 1.0))
            prior = dist.Normal(jnp.ones(num_features), jnp.sqrt(variance)[:, None])
            weights = numpyro.sample("weights", prior.to_event(1))
        mean = jnp.sum(weights[arm] * context, axis=-1)
        numpyro.sample("reward", dist.Normal(mean, jnp.sqrt(variance[arm])))

    return linear


def uniform_context(key: Key) -> Array:
    """Draw the paper's context: two features uniform on (0, 1)."""
    return jr.uniform(key, (2,))
