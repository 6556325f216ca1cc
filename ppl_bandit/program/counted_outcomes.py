"""A reward model whose rows say which of their outcomes count.

The outcomes of one decision may become known one after another. A program samples them in order, so the density of those that
are known is the product of their own factors: a later outcome, of which nothing else depends, integrates to 1. The model here
is the same program with a mask on every outcome, which is one more entry of the context. So every engine learns the known
outcomes now and the factors of the others later, with the same compiled functions.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.model.probing import feasible_latents, feasible_rewards
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import log_prob
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.runtime.numpyro_adapter import mask_sites


@functools.lru_cache(maxsize=8)
def counting_model(model: RewardModel) -> RewardModel:
    """Return the model of the same program with contexts {"context": its own, "counted": (outcomes,) booleans}."""

    def counting(arm: Any, context: Any) -> Any:
        counted = {name: context["counted"][:, i] for i, name in enumerate(model.outcomes)}
        with mask_sites(counted):
            return model.program(arm) if model.context is None else model.program(arm, context["context"])

    counting.__name__ = getattr(model.program, "__name__", "program")
    example = counting_context(model, model.context, np.ones(len(model.outcomes), bool))
    return RewardModel(counting, model.num_arms, example, model.outcomes)


def counting_context(model: RewardModel, context: Any, counted: Any) -> dict[str, Any]:
    """Return a context of `counting_model`."""
    return {"counted": counted} if model.context is None else {"counted": counted, "context": context}


@functools.lru_cache(maxsize=8)
def any_rewards(model: RewardModel) -> dict[str, float]:
    """Return a value of every outcome that the program can produce, to stand in for one that does not count."""

    def choose() -> Any:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        picks = jnp.zeros((1, len(model.outcomes)), int)
        kinds = {name: model.outcome_kinds[name] for name in model.outcomes}
        return feasible_rewards(model.program, latents, jnp.zeros(1, int), model.context_rows(1), kinds, picks)[0]

    with jax.enable_x64(True):
        return {name: float(value[0]) for name, value in run_once(choose).items()}


def separable_outcomes(model: RewardModel, known: frozenset[str]) -> tuple[str, ...]:
    """Return the known outcomes whose factors can be learnt before the others are known.

    These are the ones whose density depends on no value that is missing. The result is empty if no latent reaches them.
    """
    reads = _reads(model)
    found = tuple(name for name in model.outcomes if name in known and reads[name] - {_LATENTS} <= known)
    return found if any(_LATENTS in reads[name] for name in found) else ()


_LATENTS = ""  # no outcome has this name


@functools.lru_cache(maxsize=8)
def _reads(model: RewardModel) -> dict[str, frozenset[str]]:
    """Return, for each outcome, the outcomes whose values its density depends on, and `_LATENTS` if latents reach it."""

    def densities(latents: Any, outcomes: Any) -> list[Any]:
        trace = model.trace(latents, jnp.zeros(1, int), model.context_rows(1), outcomes)
        return [log_prob(trace[name]) for name in model.outcomes]

    latents = {name: np.zeros(shape) for name, shape in model.latent_shapes.items()}
    with jax.enable_x64(True):
        outcomes = model.zero_outcomes(1)
        closed = jax.make_jaxpr(densities)(latents, outcomes)
    labels = [frozenset([_LATENTS])] * len(latents) + [frozenset([name]) for name in sorted(outcomes)]
    return dict(zip(model.outcomes, dependencies(closed, labels), strict=True))
