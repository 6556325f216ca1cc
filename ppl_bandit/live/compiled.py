"""The edge of the live bandit: the pure functions of an engine and a selector, jitted.

They are compiled once for all bandits that share a model, an engine and a selector. Keys are made inside: from the seed, for
a purpose, and for the number of the decision or of the rows seen, so that the same calls give the same decisions.
"""

import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.numerics.compilation import quick_jit
from ppl_bandit.program.probing import feasible_latents
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Interaction, Selection, Selector

__all__ = ["Compiled", "compiled_choice", "compiled_functions"]

_READ, _DRAW, _CHOOSE, _UPDATE = range(4)

# XLA compiles without the interpreter's lock, so a second core can work while the main thread traces.
_BACKGROUND = ThreadPoolExecutor(1, thread_name_prefix="ppl_bandit-compile")


class Compiled(NamedTuple):
    """Jitted functions of a seed and a state.

    Attributes:
        init: seed -> state.
        table: (seed, state, number, context) -> (M, A) expected rewards behind the decision of that number, from 0.
        decide: (seed, state, number, context, allowed) -> Selection, for a selector that uses the engine's marginals.
        decide_many: (seed, state, numbers, contexts, allowed) -> Selections.
        learn: (seed, state, num_seen, rows) -> (state, info, {outcome: is possible}).
        draw: (seed, state, M) -> draws for reading.
        expected: (seed, state, context, M) -> (M, A) expected rewards for reading.
    """

    init: Callable
    table: Callable
    decide: Callable
    decide_many: Callable
    learn: Callable
    draw: Callable
    expected: Callable


@functools.lru_cache(maxsize=32)
def compiled_choice(select: Selector, num_samples: int, num_arms: int) -> "Future[Callable]":
    """Start to compile a selector for tables of a shape, and return the promise of it.

    A selector knows nothing about the model, so this goes on while the model is being examined.

    Returns:
        The future of (seed, table, number, allowed) -> Selection.
    """

    def choose(seed: Array, table: Array, number: Array, allowed: Array) -> Selection:
        return select(_key(seed, _CHOOSE, number), table, number + 1, allowed=allowed)

    def compile_choice() -> Callable:
        with jax.enable_x64(True):
            whole = jax.ShapeDtypeStruct((), np.int64)
            table = jax.ShapeDtypeStruct((num_samples, num_arms), np.float64)
            return quick_jit(choose).lower(whole, table, whole, jax.ShapeDtypeStruct((num_arms,), bool)).compile()

    return _BACKGROUND.submit(compile_choice)


@functools.lru_cache(maxsize=32)
def compiled_functions(
    model: RewardModel,
    init: Callable,
    update: Callable,
    sample: Callable,
    marginals: Callable | None,
    select: Selector,
    num_samples: int,
) -> Compiled:
    """Return the jitted functions of a model, the functions of an engine, a selector and M."""

    def expected(key: Array, state: Any, context: Any, num: int) -> Array:
        return model.expected_rewards(sample(key, state, num), context)

    def table(seed: int, state: Any, number: Array, context: Any) -> Array:
        return expected(_key(seed, _DRAW, number), state, context, num_samples)

    def decide(seed: int, state: Any, number: Array, context: Any, allowed: Array) -> Selection:
        rewards, key = table(seed, state, number, context), _key(seed, _CHOOSE, number)
        if marginals is None:
            return select(key, rewards, number + 1, allowed=allowed)
        return select(key, rewards, number + 1, allowed=allowed, marginals=marginals(state, context))

    def decide_many(seed: int, state: Any, numbers: Array, contexts: Any, allowed: Array) -> Selection:
        return jax.lax.map(lambda row: decide(seed, state, row[0], row[1], allowed), (numbers, contexts))

    def learn(seed: int, state: Any, num_seen: int, rows: Interaction) -> tuple[Any, Any, dict[str, Array]]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        after, info = update(_key(seed, _UPDATE, num_seen), state, rows)
        return after, info, model.in_support(latents, rows)

    return Compiled(
        jax.jit(lambda seed: init(jr.key(seed))),
        jax.jit(table),
        jax.jit(decide),
        jax.jit(decide_many),
        jax.jit(learn),
        jax.jit(lambda seed, state, num: sample(_key(seed, _READ, 0), state, num), static_argnums=2),
        jax.jit(
            lambda seed, state, context, num: expected(_key(seed, _READ, 0), state, context, num), static_argnums=3
        ),
    )


def _key(seed: Any, purpose: int, number: Any) -> Array:
    """Return the key of a purpose for the number of a decision or of the rows seen."""
    return jr.fold_in(jr.key(seed), 4 * number + purpose)
