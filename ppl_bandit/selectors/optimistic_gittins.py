"""The optimistic Gittins index: the value of an arm if the next play revealed its true mean (Farias and Gutin, 2016).

With H decisions left, an arm of posterior mean mu and an arm that surely pays lambda are worth the same where

    (H + 1) lambda = mu + H E max(theta, lambda),

play it once, then keep the better of the two. The arm with the largest such lambda is played. It needs one column of the
table at a time, and of that its mean and its mean excess alone: lambda = mu + H E max(theta - lambda, 0).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.marginal_laws import hermite
from ppl_bandit.numerics.pareto_tail import tail_excess, tail_quantile
from ppl_bandit.runtime.jax_adapter import is_tracer
from ppl_bandit.selectors.selector_contract import RuleInputs, draw_arm, is_largest, make_selector, share_equally
from ppl_bandit.types import Key, Marginals, Selector, Tail, check_number

_NUM_NEWTON = 16  # from the mean: leaves 3e-6 of the distance from it at 1e6 decisions left, and nothing at 1e4
_NUM_BETWEEN = 5  # between two nodes a tenth of a deviation apart: leaves nothing
_ROUNDING = 64.0  # equal columns may differ in the last place, and so do their solutions


def optimistic_gittins(horizon: int, patience: float = 1.0, learning: float = 0.0) -> Selector:
    """Play the arm with the largest optimistic Gittins index, for an experiment of a known number of decisions.

    The index assumes that H = patience (horizon - step + 1) / n^learning later decisions profit from what the play reveals.
    Here n is the number of rewards that the arm's posterior is worth: the larger n, the less one more reward reveals.

    It is exact where the engine offers the tails of the arms' laws (`marginals`). Otherwise it is read off the table, with a
    generalised Pareto law beyond the largest draws (`ppl_bandit.numerics.pareto_tail`).

    At the edges: the last step has no use for information and plays the largest posterior mean (greedy). A step beyond the
    horizon is an error where it can be raised, and counts as the last inside a trace. Arms whose indices are equal to
    rounding share the play. With one draw the index is that draw. It is deterministic, given the table: `with_floor`
    makes its propensities positive. num_candidates is 0.

    Args:
        horizon: decisions in the whole experiment; steps count from 1 to it.
        patience: share of the remaining decisions that are assumed to profit; positive. The best value depends on the program
            and the horizon: `tune` finds it.
        learning: exponent of n in H; at least 0. Above 0 it needs an engine that offers
            `marginals.pseudo_counts`.
    """
    if isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1:
        raise ValueError(
            f"horizon must be an integer of at least 1, got {horizon!r}: the number of decisions in the whole experiment; "
            "use double_sampling() if it is unknown"
        )
    _check_positive(patience, learning)

    def decisions_left(step: Int[Array, ""], marginals: Marginals | None, dtype: jnp.dtype) -> Array:
        left = jnp.where(step < horizon, patience * (horizon - step + 1).astype(dtype), 0.0)
        if not is_tracer(learning) and learning == 0:
            return left
        counts = None if marginals is None or marginals.pseudo_counts is None else marginals.pseudo_counts()
        if counts is None:
            raise ValueError(
                f"learning={learning} needs marginals.pseudo_counts, how many rewards each arm's posterior is worth, which "
                "this engine does not offer for this program (engines.conjugate does for one reward whose variance follows "
                "from what its mean depends on); use learning=0.0"
            )
        return left / jnp.maximum(counts.astype(dtype), jnp.finfo(dtype).tiny) ** learning

    def score(marginals: Marginals, step: Int[Array, ""], allowed: Bool[Array, " A"]) -> Float[Array, " A"] | None:
        del allowed
        if marginals.tail is None:
            return None
        tail = marginals.tail()
        return gittins_index(tail, decisions_left(step, marginals, tail.mean.dtype))

    def rule(key: Key, inputs: RuleInputs):
        scores, dtype = inputs.scores, inputs.best_arm_probs.dtype
        if scores is None:
            table = inputs.table
            assert table is not None  # the contract: scores or a table
            left = decisions_left(inputs.step, None, table.dtype)
            scores = jax.vmap(gittins_index_of_draws, in_axes=(1, None))(table, left)
        propensities = share_equally(is_largest(scores, inputs.allowed, rounding=_ROUNDING), dtype)
        return draw_arm(key, propensities), jnp.asarray(0), propensities

    settings = {"horizon": horizon, "patience": patience, "learning": learning}
    return make_selector(
        rule,
        settings=settings,
        score=score,
        required_marginals=("tail",),
        reads_table=False,
        is_deterministic=True,
        horizon=horizon,
    )


def gittins_index(tail: Tail, left: Float[Array, "*#A"]) -> Float[Array, " A"]:
    """Solve lambda = mean + left E max(theta - lambda, 0) between the nodes of a tail, where the excess is a cubic.

    Args:
        left: decisions that profit; 0 gives the mean.
    """
    left = jnp.broadcast_to(left, tail.mean.shape)
    is_below = tail.nodes < tail.mean[:, None] + left[:, None] * tail.excess
    index = jnp.clip(jnp.sum(is_below, axis=1) - 1, 0, tail.nodes.shape[1] - 2)[:, None]

    def ends(values: Float[Array, "A G"]) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
        both = jnp.take_along_axis(
            values, jnp.concatenate([index, index + 1], axis=1), axis=1, mode="promise_in_bounds"
        )
        return both[:, 0], both[:, 1]

    (start, end), (value, last), (fall, last_fall) = ends(tail.nodes), ends(tail.excess), ends(tail.above)
    width = jnp.where(end > start, end - start, 1.0)

    def excess(at: Float[Array, " A"]) -> tuple[Float[Array, " A"], Float[Array, " A"]]:
        part = jnp.clip((at - start) / width, 0.0, 1.0)
        inside, slope = hermite(part, value, last, -fall * width, -last_fall * width)
        above = -slope / width
        return inside - above * (at - (start + part * width)), above  # a line before the first node

    return _climb(start, tail.mean, excess, left, _NUM_BETWEEN)


def gittins_index_of_draws(draws: Float[Array, " M"], left: Float[Array, ""]) -> Float[Array, ""]:
    """Solve the same equation for one column of the table, with a generalised Pareto tail beyond its draws."""
    mean = jnp.mean(draws)
    return _climb(mean, mean, tail_excess(draws), left, _NUM_NEWTON)


def _climb(start: Array, mean: Array, excess: Callable[[Array], tuple[Array, Array]], left: Array, num: int) -> Array:
    """Solve lambda = mean + left excess(lambda), from a start below the root.

    The right side falls and is convex in lambda, so that Newton's method climbs to the root and never passes it.
    """

    def step(_: Any, index: Array) -> Array:
        value, above = excess(index)
        return index + (mean + left * value - index) / (1.0 + left * above)

    return jax.lax.fori_loop(0, num, step, start, unroll=num <= _NUM_BETWEEN)


def _check_positive(patience: Any, learning: Any) -> None:
    """Check concrete values; `tune` passes patience as a traced value, so that all its candidates share one compilation."""
    if not is_tracer(patience) and not (math.isfinite(check_number(patience, "patience")) and patience > 0):
        raise ValueError(f"patience must be positive and finite, got {patience!r}; use greedy() to never explore")
    if not is_tracer(learning) and not (math.isfinite(check_number(learning, "learning")) and learning >= 0):
        raise ValueError(f"learning must be at least 0 and finite, got {learning!r}; 0 does not charge for learning")


def bayes_ucb(quantile: float | Callable[[Any], Any] | None = None) -> Selector:
    """Play the arm whose expected reward has the highest posterior quantile of order 1 - 1/step.

    The quantile is exact where `marginals` are given, as in the paper. Otherwise it is read off the table, whose M
    draws have no quantile beyond 1 - 1/M: from there on (and somewhat before) a generalised Pareto law fitted to the
    largest draws of each column extrapolates it (`ppl_bandit.numerics.pareto_tail`).

    At the edges: at step 1 the order is 0, the lower end of the support, which does not depend on the data, so every
    allowed arm is equally likely. Arms whose quantiles are equal to rounding share the play. With fewer than 25 draws
    nothing can be extrapolated and the largest draw stands for every higher quantile. num_candidates is 0.

    Args:
        quantile: the order of the quantile: a number strictly inside (0, 1); or a function of the step, written in jax.numpy,
            whose value is cut to [0, 1). None is 1 - 1/step, the paper's choice.
    """
    if quantile is not None and not callable(quantile):
        if isinstance(quantile, bool) or not isinstance(quantile, float) or not 0.0 < quantile < 1.0:
            raise ValueError(
                f"quantile must lie strictly inside (0, 1), or be a function of the step, got {quantile!r}; 0.95 plays the arm "
                "with the highest 95% quantile, None takes the order 1 - 1/step"
            )

    def order_at(step: Int[Array, ""], dtype: jnp.dtype) -> Float[Array, ""]:
        if quantile is None:
            return 1.0 - 1.0 / jnp.maximum(step, 1).astype(dtype)
        order = jnp.asarray(quantile(step) if callable(quantile) else quantile, dtype)
        return jnp.clip(order, 0.0, 1.0 - jnp.finfo(dtype).eps)

    def level(quantiles: Float[Array, " A"], order: Float[Array, ""]) -> Float[Array, " A"]:
        """At order 0 every arm has the same score: the lower end of the support does not depend on the data."""
        return jnp.where(order > 0, quantiles, jnp.zeros_like(quantiles))

    def score(marginals: Marginals, step: Int[Array, ""], allowed: Bool[Array, " A"]) -> Float[Array, " A"]:
        del allowed
        order = order_at(step, jnp.result_type(float))
        return level(marginals.quantile(order), order)

    def rule(key: Key, inputs: RuleInputs):
        table, step = inputs.table, inputs.step
        scores, dtype = inputs.scores, inputs.best_arm_probs.dtype
        if scores is None:
            assert table is not None  # the contract: scores or a table
            order = order_at(step, table.dtype)
            scores = level(jax.vmap(tail_quantile, in_axes=(1, None))(table, order), order)
        # Equal columns can differ in the last place, because vectorised code treats the last few lanes differently.
        propensities = share_equally(is_largest(scores, inputs.allowed, rounding=4.0), dtype)
        return draw_arm(key, propensities), jnp.asarray(0), propensities

    settings = {} if quantile is None else {"quantile": quantile}
    return make_selector(rule, settings=settings, score=score, reads_table=False, is_deterministic=True)
