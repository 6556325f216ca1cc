"""Summary of the arms: expected reward with an interval, P(best), and expected loss."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from ppl_bandit.program.model.reward_model import RewardModel

if TYPE_CHECKING:
    import pandas

__all__ = ["Overview", "arm_overview", "subsample_contexts"]

_MAX_CONTEXTS = 200  # the standard error of an average is then 7% of the spread between contexts


class Overview(NamedTuple):
    """One entry for each of the A arms, from M posterior draws.

    Attributes:
        arms: names.
        num_rewards: number of rewards learnt.
        mean: posterior mean of the expected reward, or its median.
        is_median: whether `mean` is the median, because one draw makes up most of the average: the mean may not exist.
        low, high: central 95% interval of the expected reward.
        best_prob: posterior probability that the arm is best, averaged over contexts.
        loss: expected loss of choosing this arm now, E[max_b theta_b - theta_a], averaged over contexts; nan if the mean of any
            arm may not exist.
        draws: (M, A), expected rewards, averaged over contexts.
        num_contexts: number of contexts averaged over; 0 for a program without context.
    """

    arms: list[Any]
    num_rewards: np.ndarray
    mean: np.ndarray
    is_median: np.ndarray
    low: np.ndarray
    high: np.ndarray
    best_prob: np.ndarray
    loss: np.ndarray
    draws: np.ndarray
    num_contexts: int

    @property
    def where(self) -> str:
        """The contexts averaged over, in words; empty for a program without context."""
        if not self.num_contexts:
            return ""
        return "at one context" if self.num_contexts == 1 else f"averaged over {self.num_contexts} contexts"

    def to_frame(self) -> "pandas.DataFrame":
        """Return a DataFrame with one row per arm."""
        import pandas

        columns = {
            "arm": self.arms,
            "num_rewards": self.num_rewards,
            "expected_reward": self.mean,
            "low": self.low,
            "high": self.high,
            "best_arm_prob": self.best_prob,
            "expected_loss": self.loss,
        }
        frame = pandas.DataFrame(columns)
        frame.attrs["interval"] = "central 95% of the posterior"
        frame.attrs["num_contexts"] = self.num_contexts
        return frame


def arm_overview(
    model: RewardModel, arms: Sequence[Any], played: np.ndarray, draws: Mapping[str, np.ndarray], contexts: Any = None
) -> Overview:
    """Summarise the arms.

    Args:
        played: index of the arm of every learnt reward.
        draws: of the latents, {site: (M, ...)}.
        contexts: to average over, with a leading axis; None for a program without context.
    """
    num_contexts = 0 if contexts is None else len(jax.tree.leaves(contexts)[0])
    with jax.enable_x64(True):
        rows = contexts if num_contexts else None
        tables = np.asarray(_reward_tables(model, num_contexts > 0)(dict(draws), rows))  # (C, M, A)
    best = tables.max(axis=2, keepdims=True)
    wins = tables == best
    averaged = tables.mean(axis=0)
    low, median, high = np.quantile(averaged, [0.025, 0.5, 0.975], axis=0)
    # If the mean exists, the largest of M deviations is a small part of their sum.
    deviations = np.abs(averaged - median)
    is_median = (deviations.max(axis=0) > 0.5 * deviations.sum(axis=0)) & (len(averaged) >= 100)
    return Overview(
        list(arms),
        np.bincount(played, minlength=len(arms)),
        np.where(is_median, median, averaged.mean(axis=0)),
        is_median,
        low,
        high,
        (wins / wins.sum(axis=2, keepdims=True)).mean(axis=(0, 1)),
        np.where(is_median.any(), np.nan, (best - tables).mean(axis=(0, 1))),
        averaged,
        num_contexts,
    )


@functools.lru_cache(maxsize=8)
def _reward_tables(model: RewardModel, has_context: bool) -> Callable[[Any, Any], Any]:
    def read(draws: Any, contexts: Any) -> Any:
        if not has_context:
            return model.expected_rewards(draws, None)[None]
        return jax.lax.map(lambda context: model.expected_rewards(draws, context), contexts)

    return jax.jit(read)


def subsample_contexts(contexts: Any) -> Any:
    """Return at most 200 of the contexts, evenly spaced in their order."""
    num = len(jax.tree.leaves(contexts)[0])
    if num <= _MAX_CONTEXTS:
        return contexts
    index = np.linspace(0, num - 1, _MAX_CONTEXTS).round().astype(int)
    return jax.tree.map(lambda leaf: np.asarray(leaf)[index], contexts)
