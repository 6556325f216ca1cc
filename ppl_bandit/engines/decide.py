"""One decision, by the shortest way that has its law: the same function in the live bandit and in simulations.

What a selector needs is the law of its decision, not the draws themselves. In order of cost:

1. The engine knows the probability P that each arm is best, and the selector looks at p-hat alone, or at what else the engine
   knows in closed form: the share of M draws that each arm wins is Multinomial(M, P) / M, and is drawn as such. (A P that is
   an average over particles takes longer than M draws, and is left to selectors that want P itself.)
2. The engine knows the joint law of the A expected rewards: the table is drawn from it, A numbers a row, not all the latents.
3. Otherwise the latents are drawn, and the program turns each draw into a row of the table.
"""

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.counts import multinomial
from ppl_bandit.types import Draws, Engine, Key, Selection, Selector

__all__ = ["decide"]


def decide(
    key_draw: Key,
    key_select: Key,
    expected_rewards: Callable[[Draws, Any], Float[Array, "M A"]],
    engine: Engine,
    selector: Selector,
    state: Any,
    context: Any,
    step: Int[Array, ""],
    *,
    num_samples: int,
    allowed: Bool[Array, " A"] | None = None,
    draws: bool = False,
) -> Selection:
    """Choose an arm from what an engine knows.

    Args:
        key_draw: of the posterior draws.
        key_select: of the selector.
        expected_rewards: (draws, context) -> the table, the reward model's own.
        step: counts from 1.
        num_samples: M.
        allowed: arms that may be played; None allows all.
        draws: whether to draw the latents and fill the table also where there is a shorter way; the law is the same.
    """
    marginals = None if engine.capabilities.marginals is None else engine.capabilities.marginals(state, context)
    if marginals is not None and not draws:
        if selector.can_skip_table(marginals) and (selector.is_exact or not marginals.is_mixture):
            assert selector.select_from_probs is not None and marginals.best_arm_probs is not None
            shares = marginals.best_arm_probs(allowed)
            if not selector.is_exact:
                shares = multinomial(key_draw, num_samples, shares) / num_samples
            return selector.select_from_probs(key_select, shares, step, allowed=allowed, marginals=marginals)
        if marginals.table is not None:
            table = marginals.table(key_draw, num_samples)
            return _from_table(key_select, selector, table, step, allowed, marginals)
    table = expected_rewards(engine.sample(key_draw, state, num_samples), context)
    return _from_table(key_select, selector, table, step, allowed, marginals)


def _from_table(key: Key, selector: Selector, table: Any, step: Any, allowed: Any, marginals: Any) -> Selection:
    if marginals is None or not selector.uses_marginals:
        return selector(key, table, step, allowed=allowed)
    return selector(key, table, step, allowed=allowed, marginals=marginals)
