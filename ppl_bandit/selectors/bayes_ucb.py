"""Bayes-UCB: play the arm with the highest posterior quantile (Kaufmann, Cappe and Garivier, 2012)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.pareto_tail import tail_quantile
from ppl_bandit.selectors.selector_contract import RuleInputs, make_selector
from ppl_bandit.selectors.winner_frequencies import draw_arm, is_largest, share_equally
from ppl_bandit.types import Key, Marginals, Selector


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
            return _order(step, dtype)
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


def _order(step: Int[Array, ""], dtype: jnp.dtype) -> Float[Array, ""]:
    return 1.0 - 1.0 / jnp.maximum(step, 1).astype(dtype)
