"""A least probability for every arm, whatever the selector would do."""

import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.selectors.contract import as_selector, check_arguments
from ppl_bandit.selectors.shares import draw_arm, share_equally
from ppl_bandit.types import Key, Marginals, Selection, Selector

__all__ = ["with_floor"]


def with_floor(selector: Selector, floor: float) -> Selector:
    """Play every allowed arm with probability at least `floor`, and follow `selector` otherwise.

    With K allowed arms, the propensities become floor + (1 - K floor) times those of `selector`. So no arm starves,
    runs cannot get stuck, and a log of decisions can be re-weighted to value another policy: no weight exceeds 1 /
    floor.

    Args:
        selector: what to follow with probability 1 - K floor; its `num_candidates` and `best_arm_probs` are passed on.
        floor: at least 0 and at most 1 / A; 1 / A plays all A arms equally often.
    """
    if not 0.0 <= floor <= 1.0:
        raise ValueError(
            f"floor must lie in [0, 1/A] for A arms, got {floor}; "
            "it is the least probability of each single arm, not of exploring"
        )

    selector = as_selector(selector)

    def select(
        key: Key,
        table: Float[Array, "M A"],
        step: int | Int[Array, ""],
        *,
        allowed: Bool[Array, " A"] | None = None,
        marginals: Marginals | None = None,
    ) -> Selection:
        key_selector, key_coin, key_arm = jr.split(key, 3)
        table, mask, step = check_arguments(table, allowed, step)
        num_arms = table.shape[1]
        if floor > 1.0 / num_arms:
            raise ValueError(
                f"floor must be at most 1/A = {1.0 / num_arms:.6g} for the table's {num_arms} arms, got {floor}: "
                "the arms' floors would sum to more than 1; lower it"
            )
        selection = selector(key_selector, table, step, allowed=mask, marginals=marginals)
        dtype = selection.propensities.dtype
        uniform_probs = share_equally(mask, dtype)
        explore_prob = jnp.minimum(floor * jnp.sum(mask), 1.0).astype(dtype)
        is_exploring = jr.bernoulli(key_coin, explore_prob) & (selection.arm >= 0)
        floored = explore_prob * uniform_probs + (1.0 - explore_prob) * selection.propensities
        return selection._replace(
            arm=jnp.where(is_exploring, draw_arm(key_arm, uniform_probs), selection.arm),
            propensities=floored,
        )

    settings = {"selector": selector, "floor": floor}
    return Selector("with_floor", settings, select, uses_marginals=selector.uses_marginals, horizon=selector.horizon)
