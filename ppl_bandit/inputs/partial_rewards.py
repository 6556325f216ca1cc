"""Rewards of which some outcomes are not known yet: what holds whatever the missing values are."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import masked_rows
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction


def impossible_outcome(model: RewardModel, arm: int, context: Any, values: Mapping[str, float]) -> str | None:
    """Return an outcome whose value the program cannot produce, whatever the outcomes that are not known yet; None if none.

    Args:
        values: the outcomes of one play that are known.
    """
    possible = _certain_flags(model, arm, context, values, is_masked=False)
    return next((name for name, fits in possible.items() if not fits.all()), None)


def irrelevant_outcomes(model: RewardModel, arm: int, context: Any, values: Mapping[str, float]) -> tuple[str, ...]:
    """Return the outcomes that are missing in one reward and that the program masks, given those that are known.

    A sale of 0 masks the spend: whatever its value is, the likelihood is the same.

    Args:
        values: the outcomes that are known.
    """
    masked = _certain_flags(model, arm, context, values, is_masked=True)
    return tuple(name for name, flags in masked.items() if flags.all())


def _certain_flags(
    model: RewardModel, arm: int, context: Any, values: Mapping[str, float], *, is_masked: bool
) -> dict[str, Any]:
    rows = None if context is None else jax.tree.map(lambda leaf: np.asarray(leaf)[None], context)
    known = tuple(name for name in model.outcomes if name in values)
    given = {name: np.array([values[name]], float) for name in known}
    with jax.enable_x64(True):
        return _flag_reader(model, known, is_masked)(np.array([arm]), given, rows)


@functools.lru_cache(maxsize=64)
def _flag_reader(model: RewardModel, known: tuple[str, ...], is_masked: bool) -> Callable[..., dict[str, Any]]:
    """Return (arm, {known outcome: value}, context) -> {outcome: flag}, without outcomes whose flag depends on what is missing.

    Args:
        is_masked: whether the flags say that missing outcomes are masked, which may not depend on a latent either; otherwise
            they say that known outcomes are possible.
    """
    missing = tuple(name for name in model.outcomes if name not in known)
    judged = missing if is_masked else known

    def read(others: Any, latents: Any, arm: Any, given: Any, context: Any) -> list[Any]:
        rewards = {**given, **others}
        if is_masked:
            trace = model.trace(latents, arm, context, model.outcome_values(rewards))
            return [masked_rows(trace[name]["fn"], arm.shape)[0] for name in judged]
        possible = model.in_support(latents, Interaction(arm, rewards, context))
        return [possible[name] for name in judged]

    def stand_ins() -> tuple[Any, Any]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        return {name: jnp.zeros(1) for name in missing}, latents

    rows = np.zeros(1, np.int64), dict.fromkeys(known, np.zeros(1)), model.context_rows(1)
    closed = jax.make_jaxpr(lambda others, latents: read(others, latents, *rows))(*jax.eval_shape(stand_ins))
    labels = [frozenset(["missing"])] * len(missing)
    labels += [frozenset(["missing"] if is_masked else [])] * len(model.latent_shapes)
    reached = dependencies(closed, labels)

    def check(arm: Any, given: Any, context: Any) -> dict[str, Any]:
        found = zip(judged, read(*stand_ins(), arm, given, context), reached, strict=True)
        return {name: flag for name, flag, missing in found if not missing}

    return quick_jit(check)
