"""The edge of the live bandit: the pure functions of an engine and a selector, fused and compiled.

A step is two calls and two transfers: a decision comes back as one row of numbers, an update leaves its state on the device and
sends one row, its verdict. Between calls a state is held as few arrays. Functions are compiled once for all bandits that share
a model, an engine and a selector. Keys are made inside: from the seed, for a purpose, and for the number of the decision or of
the rows seen, so that the same calls give the same decisions.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit.engines.decide import decide
from ppl_bandit.numerics.random_bits import fold_key
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.recorded_readings import recorded
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import Ahead, in_order_options
from ppl_bandit.runtime.cpu_threads import in_turn
from ppl_bandit.runtime.packed_state import Joined, Joining, pack, unpacker
from ppl_bandit.runtime.unrolled_reductions import is_all
from ppl_bandit.types import Capabilities, Engine, Interaction, Selector

__all__ = [
    "QUICKLY",
    "Compiled",
    "Finish",
    "Form",
    "Verdict",
    "compiled_functions",
    "context_like",
    "contexts_like",
    "row_numbers",
]

_READ, _DRAW, _CHOOSE, _UPDATE = range(4)
QUICKLY = -1


class Verdict(NamedTuple):
    """What an update says of rows.

    Attributes:
        is_possible: whether the program can produce all rewards.
        possible: {outcome: (N,)}, whether the program can produce each reward.
        info: the engine's evidence.
    """

    is_possible: Any
    possible: dict[str, Any]
    info: Any


class Compiled(NamedTuple):
    """Compiled functions of a seed and a state as it is held; numbers are NumPy's, of 64 bits.

    Attributes:
        init: seed -> what `finish` takes, of the prior.
        select: (seed, held, number, context, allowed) -> a packed `Selection`, of the decision of that number, from 0.
        select_many: (seed, held, numbers, contexts, allowed) -> packed selections, one per row.
        learn: (seed, held, numbers, contexts) -> what `finish` takes, with `row_numbers`: one transfer for all of them.
        learn_quickly: the same of one row, by the engine's `quick_update`; None where it has none.
        finish: number of rows, 0 for `init`, `QUICKLY` for `learn_quickly` -> what turns that into (held, `Verdict`), or (held,
            (`Verdict`, is_enough)), once it was traced.
        draw: (seed, state, M) -> draws for reading.
        expected: (seed, state, context, M) -> (M, A) expected rewards for reading.
    """

    init: Ahead
    select: Ahead
    select_many: Ahead
    learn: Ahead
    learn_quickly: Ahead | None
    finish: dict[int, "Finish"]
    draw: Callable
    expected: Callable

    def hold(self, state: Any) -> Any:
        """Return a state of NumPy arrays as these functions take it."""
        joining = self.finish[0].joining
        return state if joining is None or not joining.fits(state) else joining.join(state)

    def state(self, held: Any) -> Any:
        """Return a state as the engine knows it, of NumPy arrays where it was held otherwise."""
        if not isinstance(held, Joined):
            return held
        return _opened(self.finish, Joined(tuple(np.asarray(array) for array in held.arrays)))


def compiled_functions(
    model: RewardModel,
    engine: Engine,
    selector: Selector,
    num_samples: int,
    draws: bool = False,
    is_portable: bool = False,
) -> Compiled:
    """Return the compiled functions of a model, an engine, a selector and M.

    Args:
        draws: as in `engines.decide`.
        is_portable: whether other processes are to have what is traced.
    """
    # An explanation is no key, and says nothing about what is computed.
    is_large = engine.capabilities.reserve is not None  # it reads its data again
    functions = *engine[:3], engine.capabilities.quick_update, engine.capabilities.marginals
    return _compiled_functions(model, *functions, selector, num_samples, draws, is_large, is_portable)


@functools.lru_cache(maxsize=8)  # each holds some 30 MB of compiled programs
def _compiled_functions(
    model: RewardModel,
    init: Callable,
    update: Callable,
    sample: Callable,
    quick_update: Callable | None,
    marginals: Callable | None,
    selector: Selector,
    num_samples: int,
    draws: bool,
    is_large: bool,
    is_portable: bool,
) -> Compiled:
    expected_rewards, in_support = recorded(model.expected_rewards), recorded(model.in_support)

    @recorded
    def some_latents() -> Any:
        return feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)

    def expected(key: Array, state: Any, context: Any, num: int) -> Array:
        return expected_rewards(sample(key, state, num), context)

    finish: dict[int, Finish] = {}
    opened = functools.partial(_opened, finish)

    select = _select(expected_rewards, sample, marginals, selector, num_samples, draws, opened)

    def select_many(seed: Array, held: Any, numbers: Array, contexts: Any, allowed: Array) -> Array:
        return jax.vmap(lambda number, context: select(seed, held, number, context, allowed))(numbers, contexts)

    def hand_over(num_rows: int, state: Any, verdict: Any, before: Any = None) -> tuple[list[Array], Array]:
        """Return arrays, and one row of numbers; how to undo that is noted while it is traced."""
        if num_rows:
            joining = finish[0].joining
        else:
            joining = None if is_large else Joining(state)
        found = finish[num_rows] = Finish(form_of(state, verdict, before), joining)
        row = pack(verdict) if num_rows else jnp.zeros(0)
        return found.arrays_of(state), row

    def first(seed: Array) -> tuple[list[Array], Array]:
        return hand_over(0, init(jr.key(seed)), ())

    def verdict_on(rows: Interaction, info: Any) -> Verdict:
        possible = in_support(some_latents(), rows)
        return Verdict(is_all(jnp.stack([is_all(fits) for fits in possible.values()])), possible, info)

    def learn(seed: Array, held: Any, numbers: Array, contexts: Any) -> tuple[list[Array], Array]:
        num_seen, rows = _rows_of(model, numbers, contexts)
        after, info = update(_key(seed, _UPDATE, num_seen), opened(held), rows)
        return hand_over(rows.arm.shape[0], after, verdict_on(rows, info))

    def learn_quickly(seed: Array, held: Any, numbers: Array, contexts: Any) -> tuple[list[Array], Array]:
        assert quick_update is not None
        num_seen, rows = _rows_of(model, numbers, contexts)
        before = opened(held)
        after, info, is_enough = quick_update(_key(seed, _UPDATE, num_seen), before, rows)
        return hand_over(QUICKLY, after, (verdict_on(rows, info), is_enough), before)

    return Compiled(
        Ahead(first, is_quick=True, is_portable=is_portable),
        Ahead(select, is_portable=is_portable),
        Ahead(select_many, is_batch=True),
        Ahead(learn, is_large=is_large, is_portable=is_portable),
        None if quick_update is None else Ahead(learn_quickly, is_portable=is_portable),
        finish,
        _for_reading(lambda num, seed, held: sample(_key(seed, _READ, 0), opened(held), num)),
        _for_reading(lambda num, seed, held, context: expected(_key(seed, _READ, 0), opened(held), context, num)),
    )


def _select(
    expected_rewards: Callable,
    sample: Callable,
    marginals: Callable | None,
    selector: Selector,
    num_samples: int,
    draws: bool,
    opened: Callable,
) -> Callable:
    engine: Any = Engine(None, None, sample, None, capabilities=Capabilities(marginals=marginals))  # type: ignore[arg-type]

    def select(seed: Array, held: Any, number: Array, context: Any, allowed: Array) -> Array:
        keys = _key(seed, _DRAW, number), _key(seed, _CHOOSE, number)
        options: dict[str, Any] = {"num_samples": num_samples, "allowed": allowed, "draws": draws}
        return pack(decide(*keys, expected_rewards, engine, selector, opened(held), context, number + 1, **options))

    return select


def _for_reading(function: Callable) -> Callable:
    """Compile a function whose last argument, there its first, is a number of draws, when it is first called."""

    @functools.cache
    def ready() -> Callable:
        return in_turn(jax.jit(function, static_argnums=0, compiler_options=in_order_options()))

    return lambda *args: ready()(args[-1], *args[:-1])


class Form(NamedTuple):
    """How a state and the verdict on what led to it are handed over.

    Attributes:
        state, verdict: shapes and types.
        kept: the leaves of the state, by number, that are not handed over: they hold nothing, or what the state before held.
        follows: whether it has the structure of the state before.
    """

    state: Any
    verdict: Any
    kept: tuple[int, ...]
    follows: bool


def form_of(state: Any, verdict: Any, before: Any = None) -> Form:
    """Return how a state is handed over.

    Args:
        before: the state that led to it, while it is traced: what it kept is not handed over; None where nothing led to it.
    """
    leaves, treedef = jax.tree.flatten(state)
    structure: Any = jax.tree.structure(before)
    follows = before is not None and structure == treedef
    old = jax.tree.leaves(before) if follows else [None] * len(leaves)
    kept = tuple(i for i, (leaf, own) in enumerate(zip(leaves, old, strict=True)) if leaf is own or not leaf.size)

    def shapes(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)

    return Form(shapes(state), shapes(verdict), kept, follows)


class Finish:
    """Undo how a state is handed over.

    Args:
        joining: how the states of a bandit are joined to few arrays, which has no use for one of another form; None where
            they are not, because they grow.
    """

    def __init__(self, form: Form, joining: Joining | None):
        self.form = form
        self.joining = joining if joining is not None and joining.fits(form.state) else None
        self._treedef: Any = jax.tree.structure(form.state)
        self._unpack = unpacker(form.verdict)

    def arrays_of(self, state: Any) -> list[Array]:
        """Return what is handed over of a state: the arrays that hold anything new."""
        if self.joining is not None:
            return list(self.joining.join(state).arrays)
        kept = set(self.form.kept)
        return [leaf for i, leaf in enumerate(jax.tree.leaves(state)) if i not in kept]

    def __call__(self, returned: Any, before: Any = None) -> tuple[Any, Any]:
        """Return the state as it is held, and the verdict on what led to it.

        Args:
            before: the state that led to it, as it is held.
        """
        arrays, row = returned
        verdict = self._unpack(np.asarray(row))
        if self.joining is not None:
            return Joined(tuple(arrays)), verdict
        old = jax.tree.leaves(before) if self.form.follows else self._empty
        for i in self.form.kept:
            arrays.insert(i, old[i])
        return self._treedef.unflatten(arrays), verdict

    @functools.cached_property
    def _empty(self) -> dict[int, jax.Array]:
        """The arrays that hold nothing, by the number of the leaf."""
        forms = enumerate(jax.tree.leaves(self.form.state))
        return {i: jax.device_put(np.zeros(form.shape, form.dtype)) for i, form in forms if not form.size}


def _opened(finish: Mapping[int, Finish], held: Any) -> Any:
    """Return a state as the engine knows it."""
    joining = finish[0].joining if isinstance(held, Joined) else None
    return held if joining is None else joining.cut(held)


def row_numbers(num_seen: int, num_rows: int, arms: np.ndarray, rewards: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return rows as `learn` takes them: how many were seen before, how many of these count, arms, and rewards by outcome."""
    if arms.size == 1:  # the common case, several times as fast
        return np.array([num_seen, num_rows, arms[0], *(values[0] for values in rewards.values())], np.float64)
    return np.concatenate([(num_seen, num_rows), arms, *rewards.values()], dtype=np.float64)


def _rows_of(model: RewardModel, numbers: Array, contexts: Any) -> tuple[Array, Interaction]:
    """Undo `row_numbers`."""
    parts = numbers[2:].reshape(1 + len(model.outcomes), -1)
    rewards = dict(zip(model.outcomes, parts[1:], strict=True))
    given = rewards if len(rewards) > 1 else parts[1]
    size = parts.shape[1]
    mask = None if size == 1 else jnp.arange(size) < numbers[1]
    return numbers[0].astype(int), Interaction(parts[0].astype(int), given, contexts, mask)


def contexts_like(model: RewardModel, num_rows: int) -> Any:
    """Return the example context over rows, in the types that checked contexts have."""
    return jax.tree.map(lambda leaf: np.repeat(_wide(leaf)[None], num_rows, axis=0), model.context)


def context_like(model: RewardModel) -> Any:
    """Return the example context in the types that a checked context has."""
    return jax.tree.map(lambda leaf: leaf[0], contexts_like(model, 1))


def _wide(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype({"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}[array.dtype.kind])


def _key(seed: Any, purpose: int, number: Any) -> Array:
    """Return the key of a purpose for the number of a decision or of the rows seen."""
    return fold_key(seed, 4 * number + purpose)
