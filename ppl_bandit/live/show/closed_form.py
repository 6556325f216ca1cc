"""The laws of the arms' expected rewards in closed form, as numbers to show: intervals, densities, P(best), expected loss."""

import functools
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.numerics.expected_loss import losses_from_moments
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.runtime.compile_ahead import quick_jit

__all__ = ["ORDERS", "ClosedForm", "closed_form", "draws_from"]

ORDERS = np.array(
    [NormalDist().cdf(z) for z in np.linspace(-3.5, 3.5, 81)]
)  # of the tabulated quantiles: evenly spaced for a Normal law
_INTERVAL = (0.025, 0.5, 0.975)


class ClosedForm(NamedTuple):
    """One entry for each of the A arms; a field is None where the engine has no closed form of it.

    Attributes:
        mean: posterior mean of the expected reward; its median where the mean is infinite.
        is_median: whether `mean` is the median.
        low, high: central 95% interval.
        quantiles: (G, A), at `ORDERS`.
        best_prob: probability that the arm is best; offered if the arms are independent.
        loss: expected loss of choosing the arm, E[max_b theta_b - theta_a]; offered if the arms are independent.
        pseudo_counts: number of rewards that each arm's posterior is worth.
    """

    mean: np.ndarray
    is_median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    quantiles: np.ndarray
    best_prob: np.ndarray | None
    loss: np.ndarray | None
    pseudo_counts: np.ndarray | None

    @property
    def is_complete(self) -> bool:
        """Whether no draws are needed, because the arms are independent."""
        return self.best_prob is not None


def closed_form(learner: Learner, context: Any = None) -> ClosedForm | None:
    """Return the laws of the arms at one context; None where they have no closed form, or are mixtures over particles."""
    capabilities = learner.engine.capabilities
    if capabilities.marginals is None or not learner.engine.explanation.is_exact:
        return None
    with jax.enable_x64(True):
        found = jax.device_get(_reader(capabilities.marginals)(learner.state, context))
        if found is None:
            return None
        is_median = np.zeros(found["mean"].size, bool)
        if capabilities.infinite_means is not None:
            is_median = np.asarray(capabilities.infinite_means(learner.state, context), bool)
    low, median, high = found["interval"]
    loss = found["loss"]
    if loss is not None and is_median.any():
        loss = np.full(is_median.size, np.nan)
    mean = np.where(is_median, median, found["mean"])
    return ClosedForm(mean, is_median, low, high, found["quantiles"], found["best_prob"], loss, found["pseudo_counts"])


def draws_from(exact: ClosedForm, num_samples: int, seed: int) -> np.ndarray:
    """Return draws of the expected rewards of independent arms, (M, A), by interpolation between the quantiles."""
    orders = np.random.default_rng(seed).random((num_samples, exact.mean.size))
    return np.stack([np.interp(orders[:, a], ORDERS, exact.quantiles[:, a]) for a in range(exact.mean.size)], axis=1)


@functools.lru_cache(maxsize=8)  # compiled programs
def _reader(marginals_of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def read(state: Any, context: Any) -> dict[str, Any] | None:
        marginals = marginals_of(state, context)
        if marginals is None or marginals.is_mixture or marginals.tail is None:
            return None
        orders = jnp.asarray(np.concatenate([_INTERVAL, ORDERS]))
        quantiles = jax.lax.map(marginals.quantile, orders)  # XLA takes minutes to compile its vmap
        moments = None if marginals.best_arm_moments is None else marginals.best_arm_moments(None)
        return {
            "mean": marginals.tail().mean,
            "interval": quantiles[: len(_INTERVAL)],
            "quantiles": quantiles[len(_INTERVAL) :],
            "best_prob": None if moments is None else moments.probs,
            "loss": None if moments is None else losses_from_moments(moments),
            "pseudo_counts": None if marginals.pseudo_counts is None else marginals.pseudo_counts(),
        }

    return quick_jit(read)
