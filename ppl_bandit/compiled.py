"""The edge of the live bandit: the pure functions of an engine and a selector, jitted.

They are compiled once for all bandits that share a model, an engine and a selector. Keys are made inside: from the seed, for
a purpose, and for the number of the decision or of the rows seen, so that the same calls give the same decisions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.random as jr
from jaxtyping import Array

from ppl_bandit.probing import feasible_latents
from ppl_bandit.program import RewardModel
from ppl_bandit.types import Interaction, Selection, Selector

__all__ = ["Compiled", "compiled_functions"]

_INIT, _SELECT, _UPDATE, _READ = range(4)


class Compiled(NamedTuple):
    """Jitted functions of a seed and a state.

    Attributes:
        init: seed -> state.
        decide: (seed, state, number, context, allowed) -> Selection; decisions are numbered from 0.
        decide_many: the same for rows of numbers and contexts.
        learn: (seed, state, num_seen, rows) -> (state, info, {outcome: is possible}).
        draw: (seed, state, M) -> draws.
        table: (seed, state, context, M) -> (M, A) expected rewards.
    """

    init: Callable
    decide: Callable
    decide_many: Callable
    learn: Callable
    draw: Callable
    table: Callable


@functools.lru_cache(maxsize=32)
def compiled_functions(
    model: RewardModel, init: Callable, update: Callable, sample: Callable, select: Selector, num_samples: int
) -> Compiled:
    """Return the jitted functions of a model, an engine's `init`, `update` and `sample`, a selector and M."""

    def table(key: Array, state: Any, context: Any, num: int) -> Array:
        return model.expected_rewards(sample(key, state, num), context)

    def decide(seed: int, state: Any, number: Array, context: Any, allowed: Array) -> Selection:
        key_draw, key_select = jr.split(jr.fold_in(_key(seed, _SELECT), number))
        return select(key_select, table(key_draw, state, context, num_samples), number + 1, allowed=allowed)

    def decide_many(seed: int, state: Any, numbers: Array, contexts: Any, allowed: Array) -> Selection:
        return jax.lax.map(lambda row: decide(seed, state, row[0], row[1], allowed), (numbers, contexts))

    def learn(seed: int, state: Any, num_seen: int, rows: Interaction) -> tuple[Any, Any, dict[str, Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, jr.key(0))
        after, info = update(jr.fold_in(_key(seed, _UPDATE), num_seen), state, rows)
        return after, info, model.in_support(latents, rows)

    return Compiled(
        jax.jit(lambda seed: init(_key(seed, _INIT))),
        jax.jit(decide),
        jax.jit(decide_many),
        jax.jit(learn),
        jax.jit(lambda seed, state, num: sample(_key(seed, _READ), state, num), static_argnums=2),
        jax.jit(lambda seed, state, context, num: table(_key(seed, _READ), state, context, num), static_argnums=3),
    )


def _key(seed: Any, purpose: int) -> Array:
    return jr.fold_in(jr.key(seed), purpose)
