"""The expected loss after more decisions, from the posterior; `numerics.expected_loss` has the formula.

It needs the number of rewards that each arm's posterior is worth. Where that has no closed form, the program is simulated. Let
theta_a be the expected reward of arm a. For each posterior draw of the latents, k rewards of the arm are drawn, and theta_a is
regressed on their means (and on the means of reward times context entry). With R^2 the share of the variance of theta_a that
the regression explains, the posterior is worth k (1 - R^2) / R^2 rewards; for Beta(a, b) and Bernoulli rewards this is a + b.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit.journal.experiment import Experiment
from ppl_bandit.live.overview import Overview, arm_overview, draws_from, subsample_contexts
from ppl_bandit.numerics.tail_excess import loss_after
from ppl_bandit.posterior.learning import draw
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit

_NUM_DRAWS = 4000
_NUM_SIMULATED = 15  # arms whose rewards are simulated; the others are taken to stay as they are
_NUM_SHARES = 16  # contexts over which propensities are averaged
_MAX_REWARDS = 64  # simulated for each arm and draw
_MAX_ENTRIES = 30  # of a context that the regression uses
_LEAST_SHARE = 1e-4  # of the variance that can be told from 0 with a thousand draws


class LossesAfter(NamedTuple):
    """Expected losses of choosing the leader after more decisions.

    Attributes:
        by_number: {n: loss after n more}, which are shared by the current propensities.
        shared_equally: the loss after the largest of these numbers, if every arm that can still be played got the same share
            of them.
    """

    by_number: dict[int, float]
    shared_equally: float


def losses_after(experiment: Experiment, found: Overview, numbers: Sequence[int]) -> LossesAfter:
    """Return the expected loss of the leader after more decisions.

    A reward is counted for its own arm: where arms share latents, the loss shrinks faster. Empty for a single arm, if an
    expected reward has no mean, or if latents move.
    """
    projection, counts = experiment.projection, found.pseudo_counts
    task, contexts = projection.task, None
    # The formula is for expected rewards that stay as they are.
    if found.num_open == 1 or found.is_median.any() or task.model.moving_sites or not numbers:
        return LossesAfter({}, np.nan)
    if found.num_contexts:
        contexts = experiment.history.rows()[2] if len(experiment.history) else task.model.context_rows(1)
    if found.draws is None and counts is not None:
        table = draws_from(found, max(task.num_samples, _NUM_DRAWS), task.seed)
    else:
        drawn = draw(projection.learner, task.num_samples)
        averaged = arm_overview(task.model, found.arms, np.arange(0), drawn, found.contexts).draws
        assert averaged is not None  # it is made from draws
        table = averaged
        if counts is None:
            simulated = found.leaders[: min(_NUM_SIMULATED, found.num_open)]
            given = task.model, drawn, table, simulated, contexts, found.num_rewards, task.seed
            counts = simulated_pseudo_counts(*given)
    is_open = task.arms.all_allowed if found.is_open is None else found.is_open
    shares, equal = _shares(experiment, contexts)[is_open], np.full(found.num_open, 1 / found.num_open)
    table, counts = table[:, is_open], counts[is_open]
    now, loss = loss_after(table, 0.0 * shares, counts), float(found.loss[found.leaders[0]])

    # Both are means over the same draws: their ratio is more accurate than either.
    def loss_with(rows: np.ndarray) -> float:
        return float(np.clip(loss_after(table, rows, counts) / now if now > 0 else 0.0, 0.0, 1.0)) * loss

    return LossesAfter({n: loss_with(n * shares) for n in numbers}, loss_with(max(numbers) * equal))


def _shares(experiment: Experiment, contexts: Any) -> np.ndarray:
    """Return the probability with which the next decision plays each arm, averaged over a few of the contexts."""
    projection = experiment.projection
    mask = projection.task.arms.mask(None)
    if contexts is None:
        return experiment.next_propensities(projection, mask, None)
    some = subsample_contexts(contexts, _NUM_SHARES)
    rows = range(len(jax.tree.leaves(some)[0]))
    each = (jax.tree.map(lambda leaf, row=row: np.asarray(leaf)[row], some) for row in rows)
    return np.mean([experiment.next_propensities(projection, mask, context) for context in each], axis=0)


def simulated_pseudo_counts(
    model: RewardModel,
    draws: Mapping[str, np.ndarray],
    table: np.ndarray,
    arms: np.ndarray,
    contexts: Any,
    num_rewards: np.ndarray,
    seed: int,
) -> np.ndarray:
    """Return the number of rewards that the posterior of each arm is worth, (A,); infinite for arms that are left out.

    Args:
        draws: of the latents, {site: (M, ...)}.
        table: (M, A), expected rewards at these draws.
        arms: indices of the arms to simulate.
        contexts: of the simulated rewards, with a leading axis; None for a program without context.
        num_rewards: (A,), learnt so far: about as many are simulated, so that R^2 is near one half.
    """
    num_draws, num = len(table), int(np.clip(np.median(num_rewards[arms]), 4, _MAX_REWARDS))
    rng = np.random.default_rng(seed)
    chosen = None
    if contexts is not None:
        rows = rng.integers(0, len(jax.tree.leaves(contexts)[0]), (num_draws, num))
        chosen = jax.tree.map(lambda leaf: np.asarray(leaf)[rows], contexts)

    def simulate(key: Any, latents: Any, arm: Any, context: Any) -> Any:
        outcome = model.draw_reward(key, latents, jnp.full(num, arm), context)
        values = outcome if isinstance(outcome, dict) else {"reward": outcome}
        columns = [values[name].astype(float) for name in values]
        entries = [] if context is None else [jnp.reshape(leaf, (num, -1)) for leaf in jax.tree.leaves(context)]
        if entries and sum(part.shape[1] for part in entries) <= _MAX_ENTRIES:
            wide = jnp.concatenate(entries, axis=1).astype(float)
            columns = [*columns, *(column * wide[:, i] for column in columns for i in range(wide.shape[1]))]
        return jnp.stack([jnp.mean(column) for column in columns])

    with jax.enable_x64(True):
        over_draws = jax.vmap(simulate, in_axes=(0, 0, None, None if chosen is None else 0))

        def run(key: Any, latents: Any, arms: Any, rows: Any) -> Any:
            keys = jr.split(key, num_draws)
            return jax.lax.map(lambda arm: over_draws(keys, latents, arm, rows), arms)

        means = np.asarray(quick_jit(run)(jr.key(seed), dict(draws), arms, chosen))  # (arms, M, columns)
    found = np.full(table.shape[1], np.inf)
    for position, arm in enumerate(arms):
        found[arm] = num / max(_explained(means[position], table[:, arm]), _LEAST_SHARE) - num
    return np.maximum(found, 1e-6)


def _explained(columns: np.ndarray, values: np.ndarray) -> float:
    """Return the share of the variance that a linear regression explains, adjusted for the number of columns."""
    design = np.column_stack([np.ones(len(values)), columns])
    total = np.square(values - values.mean()).sum()
    if total == 0:
        return 1.0
    fitted, *_ = np.linalg.lstsq(design, values, rcond=None)
    left = np.square(values - design @ fitted).sum()
    rank = np.linalg.matrix_rank(design)
    return float(1.0 - left / total * (len(values) - 1) / max(len(values) - rank, 1))
