"""Rewards of which some outcomes are not known yet: which of the missing ones do not matter."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.dependence import dependencies
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import masked_rows
from ppl_bandit.runtime.compile_ahead import quick_jit

__all__ = ["irrelevant_outcomes"]


def irrelevant_outcomes(model: RewardModel, arm: int, context: Any, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the outcomes that are missing in one reward and that the program masks, given those that are known.

    A sale of 0 masks the spend: whatever its value is, the likelihood is the same.

    Args:
        values: the outcomes that are known.
    """
    rows = None if context is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], context)
    names = tuple(name for name in model.outcomes if name in values)
    given = {name: np.array([values[name]], float) for name in names}
    with jax.enable_x64(True):
        is_masked = _masked_outcomes(model, names)(np.array([arm]), given, rows)
    return tuple(name for name, masked in is_masked.items() if masked.all())


@functools.lru_cache(maxsize=32)
def _masked_outcomes(model: RewardModel, names: tuple[str, ...]) -> Callable[..., dict[str, Any]]:
    """Return (arm, {known outcome: value}, context) -> {missing outcome: is masked}.

    Outcomes whose mask depends on a missing value, or on a latent, are left out.
    """
    missing = [name for name in model.outcomes if name not in names]

    def masked(unknown: Any, arm: Any, given: Any, context: Any) -> list[Any]:
        others, latents = unknown
        trace = model.trace(latents, arm, context, model.outcome_values({**given, **others}))
        return [masked_rows(trace[name]["fn"], arm.shape)[0] for name in missing]

    def values() -> tuple[Any, Any]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        return {name: jnp.zeros(1) for name in missing}, latents

    rows = np.zeros(1, np.int64), dict.fromkeys(names, np.zeros(1)), model.context_rows(1)
    closed = jax.make_jaxpr(lambda unknown: masked(unknown, *rows))(jax.eval_shape(values))
    reached = dependencies(closed, [frozenset(["unknown"])] * len(closed.jaxpr.invars))

    def check(arm: Any, given: Any, context: Any) -> dict[str, Any]:
        found = zip(missing, masked(values(), arm, given, context), reached, strict=True)
        return {name: is_masked for name, is_masked, labels in found if not labels}

    return quick_jit(check)
