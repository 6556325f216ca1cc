"""The overview of the arms in closed form: intervals, densities, P(best) and expected loss, from the laws of the arms."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.live.show.overview import ORDERS, Overview
from ppl_bandit.numerics.expected_loss import losses_from_moments
from ppl_bandit.posterior.learning import Learner
from ppl_bandit.runtime.compile_ahead import quick_jit

_INTERVAL = (0.025, 0.5, 0.975)


def closed_form(learner: Learner, arms: Sequence[Any], played: np.ndarray, contexts: Any = None) -> Overview | None:
    """Summarise the arms in closed form; None where their laws have none, or are mixtures over particles.

    P(best) and the expected loss have a closed form if the arms are independent; otherwise they are nan.

    Args:
        played: index of the arm of every learnt reward.
        contexts: one context, with a leading axis; None for a program without context.
    """
    capabilities, context = learner.engine.capabilities, jax.tree.map(lambda leaf: leaf[0], contexts)
    if capabilities.marginals is None or not learner.engine.explanation.is_exact:
        return None
    with jax.enable_x64(True):
        found = jax.device_get(_reader(capabilities.marginals)(learner.state, context))
        if found is None:
            return None
        is_median = np.zeros(len(arms), bool)
        if capabilities.infinite_means is not None:
            is_median = np.asarray(capabilities.infinite_means(learner.state, context), bool)
    low, median, high = found["interval"]
    unknown = np.full(len(arms), np.nan)
    return Overview(
        list(arms),
        np.bincount(played, minlength=len(arms)),
        np.where(is_median, median, found["mean"]),
        is_median,
        low,
        high,
        found.get("best_prob", unknown),
        unknown if is_median.any() else found.get("loss", unknown),
        draws=None,
        num_contexts=0 if contexts is None else 1,
        quantiles=found["quantiles"],
        pseudo_counts=found["pseudo_counts"],
        contexts=contexts,
    )


def draws_from(found: Overview, num_samples: int, seed: int) -> np.ndarray:
    """Return draws of the expected rewards of independent arms, (M, A), by interpolation between the quantiles."""
    assert found.quantiles is not None
    orders = np.random.default_rng(seed).random((num_samples, len(found.arms)))
    columns = zip(orders.T, found.quantiles.T, strict=True)
    return np.stack([np.interp(own, ORDERS, quantiles) for own, quantiles in columns], axis=1)


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
            "pseudo_counts": None if marginals.pseudo_counts is None else marginals.pseudo_counts(),
        } | ({} if moments is None else {"best_prob": moments.probs, "loss": losses_from_moments(moments)})

    return quick_jit(read)
