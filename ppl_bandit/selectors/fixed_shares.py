"""A selector that does not adapt: equal or given shares."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ppl_bandit.selectors.selector_contract import RuleInputs, make_selector
from ppl_bandit.selectors.winner_frequencies import draw_arm, share_equally
from ppl_bandit.types import Key, Selector


def fixed(probs: Sequence[float] | None = None) -> Selector:
    """Play the arms with fixed probabilities, whatever the data say: the allocation of a trial that does not adapt.

    Where some arms are not allowed, the others keep their ratios. If all allowed arms have probability 0, they share the play
    equally.

    Args:
        probs: one nonnegative number per arm; they are divided by their sum. None plays all arms equally often.
    """
    given = None if probs is None else np.asarray(probs)
    if given is not None:
        is_list = given.dtype.kind in "fiu" and given.ndim == 1 and given.size > 0
        given = given.astype(float) if is_list else np.array([-1.0])
        if not np.all(np.isfinite(given) & (given >= 0.0)) or given.sum() == 0.0:
            raise ValueError(
                f"probs must be nonnegative numbers, one per arm, at least one of them positive, got {probs!r}; "
                "leave probs out to play all arms equally often"
            )
        given = given / given.sum()

    def rule(key: Key, inputs: RuleInputs):
        allowed = inputs.allowed
        shares = share_equally(allowed, inputs.best_arm_probs.dtype)
        if given is not None:
            if given.size != allowed.size:
                raise ValueError(f"probs has {given.size} entries for {allowed.size} arms: give one per arm")
            own = jnp.where(allowed, jnp.asarray(given, shares.dtype), 0.0)
            shares = jnp.where(jnp.sum(own) > 0, own / jnp.sum(own), shares)
        return draw_arm(key, shares), jnp.asarray(0), shares

    settings = {"probs": None if given is None else given.tolist()}
    return make_selector(rule, settings=settings, reads_table=False, is_linear=True)
