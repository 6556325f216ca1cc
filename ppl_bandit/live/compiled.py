"""The edge of the live bandit: the pure functions of an engine and a selector, fused and compiled.

A step is two calls and two transfers: a decision comes back as one row of numbers, an update leaves its state on the device and
sends one row, its verdict. Functions are compiled once for all bandits that share a model, an engine and a selector. Keys are
made inside: from the seed, for a purpose, and for the number of the decision or of the rows seen, so that the same calls give
the same decisions.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.decide import decide
from ppl_bandit.numerics.compilation import Ahead
from ppl_bandit.numerics.packing import pack
from ppl_bandit.program.probing import feasible_latents
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Engine, Interaction, Selector

__all__ = ["Compiled", "Verdict", "compiled_functions", "rows_like"]

_READ, _DRAW, _CHOOSE, _UPDATE = range(4)


class Verdict(NamedTuple):
    """What an update says of rows.

    Attributes:
        possible: {outcome: (N,)}, whether the program can produce each reward.
        info: the engine's evidence.
    """

    possible: dict[str, Any]
    info: Any


class Compiled(NamedTuple):
    """Compiled functions of a seed and a state; numbers are NumPy's, of 64 bits.

    Attributes:
        init: seed -> state.
        select: (seed, state, number, context, allowed) -> a packed `Selection`, of the decision of that number, from 0.
        select_many: (seed, state, numbers, contexts, allowed) -> packed selections, one per row.
        learn: (seed, state, num_seen, rows, num_rows) -> (state, packed `Verdict`); rows beyond num_rows do not count.
        forms: number of rows -> the form of their verdict, for `unpack`, once `learn` is compiled for as many.
        draw: (seed, state, M) -> draws for reading.
        expected: (seed, state, context, M) -> (M, A) expected rewards for reading.
    """

    init: Callable
    select: Ahead
    select_many: Ahead
    learn: Ahead
    forms: dict[int, Verdict]
    draw: Callable
    expected: Callable


def compiled_functions(
    model: RewardModel, engine: Engine, selector: Selector, num_samples: int, draws: bool = False
) -> Compiled:
    """Return the compiled functions of a model, an engine, a selector and M; `draws` as in `engines.decide`."""
    # An explanation is no key, and says nothing about what is computed.
    return _compiled_functions(model, *engine[:3], engine.marginals, selector, num_samples, draws)


@functools.lru_cache(maxsize=32)
def _compiled_functions(
    model: RewardModel,
    init: Callable,
    update: Callable,
    sample: Callable,
    marginals: Callable | None,
    selector: Selector,
    num_samples: int,
    draws: bool,
) -> Compiled:
    engine: Any = Engine(init, update, sample, None, marginals=marginals)  # type: ignore[arg-type]

    def expected(key: Array, state: Any, context: Any, num: int) -> Array:
        return model.expected_rewards(sample(key, state, num), context)

    def select(seed: Array, state: Any, number: Array, context: Any, allowed: Array) -> Array:
        keys = _key(seed, _DRAW, number), _key(seed, _CHOOSE, number)
        options = {"num_samples": num_samples, "allowed": allowed, "draws": draws}
        return pack(decide(*keys, model, engine, selector, state, context, number + 1, **options))

    def select_many(seed: Array, state: Any, numbers: Array, contexts: Any, allowed: Array) -> Array:
        return jax.vmap(lambda number, context: select(seed, state, number, context, allowed))(numbers, contexts)

    def judge(seed: Array, state: Any, num_seen: Array, rows: Interaction, num_rows: Array) -> tuple[Any, Verdict]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        size = rows.arm.shape[0]
        mask = None if size == 1 else jnp.arange(size) < num_rows
        after, info = update(_key(seed, _UPDATE, num_seen), state, rows._replace(mask=mask))
        return after, Verdict(model.in_support(latents, rows), info)

    forms: dict[int, Verdict] = {}

    def learn(seed: Array, state: Any, num_seen: Array, rows: Interaction, num_rows: Array) -> tuple[Any, Array]:
        after, verdict = judge(seed, state, num_seen, rows, num_rows)
        # Noted while this is traced: what it returns is one row of numbers.
        forms[rows.arm.shape[0]] = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), verdict)
        return after, pack(verdict)

    return Compiled(
        jax.jit(lambda seed: init(jr.key(seed))),
        Ahead(select),
        Ahead(select_many),
        Ahead(learn),
        forms,
        jax.jit(lambda seed, state, num: sample(_key(seed, _READ, 0), state, num), static_argnums=2),
        jax.jit(
            lambda seed, state, context, num: expected(_key(seed, _READ, 0), state, context, num), static_argnums=3
        ),
    )


def rows_like(model: RewardModel, num_rows: int) -> Interaction:
    """Return rows as `learn` takes them, of zeros and the example context: their shapes are those of real rows."""
    rewards = {name: np.zeros(num_rows) for name in model.outcomes}
    given = rewards if len(model.outcomes) > 1 else rewards[model.outcomes[0]]
    contexts = jax.tree.map(lambda leaf: np.repeat(_wide(leaf)[None], num_rows, axis=0), model.context)
    return Interaction(np.zeros(num_rows, np.int64), given, contexts)  # type: ignore[arg-type]


def _wide(leaf: Any) -> np.ndarray:
    """Return a context's leaf in the type that checked contexts have."""
    array = np.asarray(leaf)
    return array.astype({"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind])


def _key(seed: Any, purpose: int, number: Any) -> Array:
    """Return the key of a purpose for the number of a decision or of the rows seen."""
    return jr.fold_in(jr.key(seed), 4 * number + purpose)
