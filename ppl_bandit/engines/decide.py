"""One decision from the state of an engine, by the fastest of three ways with the same law; live and in simulations.

1. The engine offers the probability P that each arm is best, and the selector reads p-hat alone, or closed forms that the
   engine offers. Then p-hat is drawn as Multinomial(M, P) / M. (If P is an average over particles, computing it takes
   longer than M draws, so only selectors that use P itself take this way.)
2. The engine offers the joint law of the A expected rewards: the table is drawn from it, without the latents.
3. Otherwise the latents are drawn, and the program computes a row of the table from each draw.

Where the latents move, the state is first predicted to the time of the decision.
"""

from collections.abc import Callable
from typing import Any

import jax.random as jr
from jaxtyping import Array, Bool, Float, Int

from ppl_bandit.numerics.random_bits import multinomial
from ppl_bandit.types import Draws, Engine, Key, Selection, Selector


def decision_function(
    expected_rewards: Callable[[Draws, Any], Float[Array, "M A"]],
    engine: Engine,
    selector: Selector,
    num_samples: int,
    draws: bool = False,
) -> Callable[..., Selection]:
    """Return a function (key of the draws, key of the selector, state, context, step, allowed=None) -> the chosen arm.

    Steps count from 1; `allowed` are the arms that may be played, None for all.

    Args:
        expected_rewards: (draws, context) -> the table, from the reward model.
        num_samples: M.
        draws: whether to draw the latents and compute the table in any case.
    """

    def decide(
        key_draw: Key,
        key_select: Key,
        state: Any,
        context: Any,
        step: Int[Array, ""],
        allowed: Bool[Array, " A"] | None = None,
    ) -> Selection:
        if engine.capabilities.advance is not None:
            state = engine.capabilities.advance(jr.fold_in(key_draw, 1), state, context)
        marginals = None if engine.capabilities.marginals is None else engine.capabilities.marginals(state, context)
        if marginals is not None and not draws:
            if selector.can_skip_table(marginals) and (selector.is_exact or not marginals.is_mixture):
                assert selector.select_from_probs is not None and marginals.best_arm_probs is not None
                exact = marginals.best_arm_probs(allowed)
                shares = exact if selector.is_exact else multinomial(key_draw, num_samples, exact) / num_samples
                chosen = selector.select_from_probs(key_select, shares, step, allowed=allowed, marginals=marginals)
                if selector.is_linear:
                    # p-hat has mean P, so the arm has this law before p-hat is drawn; an arm that wins no draw is not at 0.
                    average = selector.select_from_probs(key_select, exact, step, allowed=allowed, marginals=marginals)
                    chosen = chosen._replace(propensities=average.propensities)
                return chosen
            if marginals.table is not None:
                table = marginals.table(key_draw, num_samples)
                return _from_table(key_select, selector, table, step, allowed, marginals)
        table = expected_rewards(engine.sample(key_draw, state, num_samples), context)
        return _from_table(key_select, selector, table, step, allowed, marginals)

    return decide


def _from_table(key: Key, selector: Selector, table: Any, step: Any, allowed: Any, marginals: Any) -> Selection:
    more = {} if marginals is None or not selector.uses_marginals else {"marginals": marginals}
    found = selector(key, table, step, allowed=allowed, **more)
    if not isinstance(found, Selection):
        raise ValueError(f"selector {selector.name} returned {type(found).__name__}, expected a Selection")
    return found
