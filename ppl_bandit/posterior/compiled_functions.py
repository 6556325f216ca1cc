"""The pure functions of an engine and a selector, fused and compiled for the live bandit.

A step is two compiled calls with one result row each: a decision returns its `Selection` as one row, an update leaves the state
on the device and returns a packed `UpdateResult`. Bandits with the same model, engine and selector share compiled functions.
Random keys are made inside, from the seed, a purpose, and the number of the decision or of the rows seen. So the same calls
give the same decisions.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.decide import decision_function
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import forbid_programs
from ppl_bandit.runtime.compile_ahead import CompiledAhead, traced_once
from ppl_bandit.runtime.packed_state import Packed, changed_leaves, pack, unpack
from ppl_bandit.runtime.random_draws import fold_in
from ppl_bandit.runtime.xla_options import batch_options, large_options, quick_options, small_options
from ppl_bandit.types import Engine, Interaction, Selection, Selector

_READ, _DRAW, _CHOOSE, _UPDATE = range(4)  # purposes of random keys


class UpdateResult(NamedTuple):
    """What an update returns besides the state.

    Attributes:
        is_possible: whether the program can produce all rewards.
        possible: {outcome: (N,)}, whether the program can produce each reward.
        info: the engine's evidence.
        is_complete: whether `quick_update` was sufficient; None for `update`.
    """

    is_possible: Any
    possible: dict[str, Any]
    info: Any
    is_complete: Any


class CompiledFunctions(NamedTuple):
    """Compiled functions of a seed and a stored state; numbers are 64-bit NumPy numbers.

    A stored state is packed, unless it grows with the number of rows.

    Attributes:
        init: seed -> the stored prior.
        select: (seed, stored, number of the decision from 0, context, allowed) -> a `Selection` as one row.
        select_many: (seed, stored, numbers, contexts, allowed) -> one row per decision.
        update: (seed, stored, rows as one row of numbers, contexts) -> (stored, packed `UpdateResult`).
        quick_update: the same for one row by the engine's `quick_update`, with `changed_leaves` of the state; None if the
            engine has none.
        draw: M -> the function (seed, stored, context) -> draws.
        expected_rewards: M -> the function (seed, stored, context) -> (M, A).
    """

    init: CompiledAhead
    select: CompiledAhead
    select_many: CompiledAhead
    update: CompiledAhead
    quick_update: CompiledAhead | None
    draw: Callable[[int], CompiledAhead]
    expected_rewards: Callable[[int], CompiledAhead]

    def first_functions(self) -> Iterator[tuple[str, CompiledAhead]]:
        """Yield the functions of the first decision and update, by name."""
        names = ("init", "select", "update", "quick_update")
        return ((name, getattr(self, name)) for name in names if getattr(self, name) is not None)

    def wait(self) -> None:
        """Wait until the functions that were prepared are compiled."""
        for _, function in self.first_functions():
            function.wait()


@functools.lru_cache(maxsize=8)  # compiled functions take about 30 MB
def compiled_functions(
    model: RewardModel,
    row_model: RewardModel,
    engine: Engine,
    selector: Selector,
    num_samples: int,
    draws: bool,
    is_exported: bool,
) -> CompiledFunctions:
    """Return the compiled functions of a model, an engine, a selector and a number of draws.

    Args:
        row_model: of the rows that the engine takes; see `partial_rows.learning_model`.
        engine: without explanation and settings: neither changes a result, so bandits whose factory returns the same engine
            share functions.
        draws: as in `engines.decide`.
        is_exported: whether the first functions are exported for other processes.
    """
    expected_rewards, in_support = traced_once(model.expected_rewards), traced_once(row_model.in_support)
    has_fixed_size = engine.capabilities.reserve is None
    reads_laws = selector.uses_marginals and not selector.is_exact
    quick = engine.capabilities.quick_update
    decide = decision_function(expected_rewards, engine, selector, num_samples, draws)

    @traced_once
    def some_latents() -> Any:
        return feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)

    def result(rows: Interaction, info: Any, is_complete: Any) -> Packed:
        possible = in_support(some_latents(), rows)
        is_possible = jnp.all(jnp.stack([jnp.all(fits) for fits in possible.values()]))
        return pack(UpdateResult(is_possible, possible, info, is_complete))

    def init(seed: Array) -> Any:
        state = engine.init(jr.key(seed))
        return pack(state) if has_fixed_size else state

    def select(seed: Array, stored: Any, number: Array, context: Any, allowed: Array) -> Array:
        keys = _key(seed, _DRAW, number), _key(seed, _CHOOSE, number)
        return _selection_row(decide(*keys, _unpacked(stored), context, number + 1, allowed))

    def select_many(seed: Array, stored: Any, numbers: Array, contexts: Any, allowed: Array) -> Array:
        return jax.vmap(lambda number, context: select(seed, stored, number, context, allowed))(numbers, contexts)

    def update(seed: Array, stored: Any, numbers: Array, contexts: Any) -> tuple[Any, Packed]:
        num_seen, rows = _unpack_rows(model, numbers, contexts)
        state, info = engine.update(_key(seed, _UPDATE, num_seen), _unpacked(stored), rows)
        return pack(state) if has_fixed_size else state, result(rows, info, None)

    def quick_update(seed: Array, stored: Any, numbers: Array, contexts: Any) -> tuple[Any, Packed]:
        assert quick is not None
        num_seen, rows = _unpack_rows(model, numbers, contexts)
        state, info, is_complete = quick(_key(seed, _UPDATE, num_seen), stored, rows)
        return changed_leaves(state, stored), result(rows, info, is_complete)

    def draw(num: int, seed: Array, stored: Any, context: Any) -> Any:
        key, state = _key(seed, _READ, 0), _unpacked(stored)
        if context is not None and engine.capabilities.advance is not None:
            state = engine.capabilities.advance(jr.fold_in(key, 1), state, context)
        return engine.sample(key, state, num)

    def draw_expected_rewards(num: int, seed: Array, stored: Any, context: Any) -> Array:
        return expected_rewards(draw(num, seed, stored, context), context)

    return CompiledFunctions(
        CompiledAhead(init, quick_options, is_exported=is_exported),
        CompiledAhead(select, is_exported=is_exported),
        CompiledAhead(select_many, batch_options if reads_laws else small_options),
        CompiledAhead(
            update,
            small_options if has_fixed_size else large_options,
            is_exported=is_exported,
            background=forbid_programs,
        ),
        None if quick is None else CompiledAhead(quick_update, is_exported=is_exported),
        _for_num_draws(draw),
        _for_num_draws(draw_expected_rewards),
    )


def _for_num_draws(function: Callable) -> Callable[[int], CompiledAhead]:
    """Return the function for each number of draws, its first argument."""
    return functools.lru_cache(maxsize=8)(lambda num: CompiledAhead(functools.partial(function, num)))


def _selection_row(selection: Selection) -> Array:
    """Return a selection as one row of float64: arm, best-arm probabilities, number of candidates, propensities."""
    return jnp.concatenate([jnp.ravel(field).astype(float) for field in selection])


def _unpack_rows(model: RewardModel, numbers: Array, contexts: Any) -> tuple[Array, Interaction]:
    """Return the number of rows seen before, and the rows.

    Args:
        numbers: in one float64 row: the number of rows seen before, the number of rows to count (the others are padding), the
            arms, and the rewards by outcome, in the model's order.
    """
    arms, *values = numbers[2:].reshape(1 + len(model.outcomes), -1)
    rewards = dict(zip(model.outcomes, values, strict=True))
    num_rows = arms.shape[0]
    mask = None if num_rows == 1 else jnp.arange(num_rows) < numbers[1]
    reward = rewards if len(rewards) > 1 else values[0]
    return numbers[0].astype(int), Interaction(arms.astype(int), reward, contexts, mask)


def example_contexts(model: RewardModel, num_rows: int) -> Any:
    """Repeat the example context over rows, in the dtypes that checked contexts have."""

    def wide(leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        return array.astype({"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind])

    return jax.tree.map(lambda leaf: np.repeat(wide(leaf)[None], num_rows, axis=0), model.context)


def _unpacked(stored: Any) -> Any:
    return unpack(stored) if isinstance(stored, Packed) else stored


def _key(seed: Any, purpose: int, number: Any) -> Array:
    """Return the random key of a purpose for the number of a decision or of the rows seen."""
    return fold_in(jr.key(seed, impl="threefry2x32"), jnp.asarray(4 * number + purpose))
