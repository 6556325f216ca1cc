"""Check contexts, rewards, data and engines that callers pass, and convert them to arrays.

An error names the argument, what was given, what was expected and what to do instead. No function here changes any state.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.inputs.numbers import Arms, as_numbers
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import run_once
from ppl_bandit.types import Engine, Interaction, InvalidContext

_ACCEPTED_KINDS = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}
_DTYPES = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}


def count_rows(model: RewardModel, contexts: Any) -> int:
    """Return the length of the leading axis of contexts, which may be arrays or lists; 0 if they have none."""
    try:
        treedef: Any = jax.tree.structure(model.context)
        leaves = treedef.flatten_up_to(contexts)
    except (ValueError, TypeError):
        leaves = jax.tree.leaves(contexts)  # the structure is wrong: `check_contexts` will raise
    is_sequence = leaves and hasattr(leaves[0], "__len__") and not (hasattr(leaves[0], "ndim") and leaves[0].ndim == 0)
    return len(leaves[0]) if is_sequence else 0


def check_contexts(model: RewardModel, contexts: Any, num_rows: int | None, argument: str) -> Any:
    """Return contexts as arrays with the structure, shapes and kinds of the example context.

    Args:
        num_rows: length of the leading axis; None for one context without a leading axis.

    Raises:
        InvalidContext: names the entry that does not fit.
    """
    if model.context is None:
        if contexts is not None:
            raise InvalidContext(f"{argument} was given, but the program takes arm alone: leave it out")
        return None
    if contexts is None:
        raise InvalidContext(f"{argument} is missing: the program takes a context like {_shapes(model.context)}")
    if num_rows is None and type(contexts) is np.ndarray and type(model.context) is np.ndarray:
        is_same = contexts.shape == model.context.shape and contexts.dtype == np.float64 == model.context.dtype
        if (
            is_same and not model.has_index_limits and math.isfinite(contexts.sum())
        ):  # the common case, several times as fast
            return contexts.copy()
    treedef: Any = jax.tree.structure(model.context)
    expected = jax.tree_util.tree_leaves_with_path(model.context)
    try:
        leaves = treedef.flatten_up_to(contexts)  # accepts lists of numbers where the example has arrays
    except (ValueError, TypeError):
        wrong, entry = _wrong_entry(model.context, contexts)
        raise InvalidContext(
            f"{argument} {wrong}: it has the structure {_shapes(contexts)}, expected {_shapes(model.context)}", entry
        ) from None
    lead = () if num_rows is None else (num_rows,)
    arrays = [
        check_leaf(leaf, example, lead, argument, jax.tree_util.keystr(path))
        for leaf, (path, example) in zip(leaves, expected, strict=True)
    ]
    checked = jax.tree.unflatten(treedef, arrays)
    if model.has_index_limits:
        rows = jax.tree.map(lambda leaf: leaf[None], checked) if num_rows is None else checked
        problem = model.outside_index(rows, argument)
        if problem is not None:
            raise InvalidContext(problem, problem.split(" = ")[0].removeprefix(argument))
    return checked


def check_leaf(leaf: Any, example: Any, lead: tuple[int, ...], argument: str, entry: str) -> np.ndarray:
    """Return one entry of a context as an array with the shape and kind of its example.

    Args:
        lead: shape of the leading axes.
        entry: path of the entry, as `jax.tree_util.keystr` writes it.

    Raises:
        InvalidContext: names the entry.
    """
    argument += entry
    shape = (*lead, *example.shape)
    try:
        array = np.asarray(leaf)
    except ValueError:
        raise InvalidContext(f"{argument} holds {leaf!r}, expected an array of shape {shape}", entry) from None
    if isinstance(leaf, np.ma.MaskedArray) and np.ma.is_masked(leaf):
        raise InvalidContext(
            f"{argument} is a masked array with masked entries; remove those rows, or fill them in", entry
        )
    if array.shape != shape:
        rows = f" ({lead[0]} rows)" if lead else ""
        raise InvalidContext(f"{argument} has shape {array.shape}, expected {shape}{rows}", entry)
    if array.dtype.kind not in _ACCEPTED_KINDS[example.dtype.kind]:
        raise InvalidContext(
            f"{argument} has dtype {array.dtype}, expected {example.dtype} as in the example context; convert it first",
            entry,
        )
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        where = tuple(int(i) for i in np.argwhere(~np.isfinite(array))[0])
        raise InvalidContext(f"{argument} holds {array[where]} at {where}: every entry must be finite", entry)
    if array.dtype.kind in "iu":
        try:
            as_numbers(array, argument)
        except ValueError as error:
            raise InvalidContext(str(error), entry) from None
    return array.astype(_DTYPES[example.dtype.kind])  # a copy: the caller may change its own array later


def _wrong_entry(example: Any, given: Any) -> tuple[str, str]:
    """Return what is wrong with the structure of a context, in words, and the path of the wrong entry."""
    expected, found = _paths(example), _paths(given)
    missing = next((path for path in expected if not any(one.startswith(path) for one in found)), "")
    if missing:
        return f"has no entry {missing}", missing
    unknown = next((path for path in found if not any(path.startswith(one) for one in expected)), "")
    return (f"has the unknown entry {unknown}" if unknown else "does not fit the example context"), unknown


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _shapes(tree: Any) -> str:
    return str(jax.tree.map(lambda leaf: f"{np.asarray(leaf).dtype}{list(np.shape(leaf))}", tree))


def check_rewards(
    model: RewardModel, rewards: Any, num_rows: int | None, argument: str, *, is_partial: bool = False
) -> dict[str, np.ndarray]:
    """Return {outcome: (N,)} of finite numbers; the update checks whether the program can produce them.

    Args:
        num_rows: N; None for one reward without a leading axis.
        is_partial: whether some outcomes may be missing.
    """
    if isinstance(rewards, Mapping):
        missing, unknown = set(model.outcomes) - set(rewards), set(rewards) - set(model.outcomes)
        if unknown or (missing and not is_partial) or not rewards:
            raise ValueError(f"{argument} has outcomes {sorted(map(str, rewards))}, expected {sorted(model.outcomes)}")
        given = {name: rewards[name] for name in model.outcomes if name in rewards}
    elif len(model.outcomes) > 1:
        raise ValueError(
            f"{argument} must be a dict with a value for each of the outcomes {list(model.outcomes)}, got {rewards!r}"
        )
    else:
        given = {model.outcomes[0]: rewards}
    checked = {}
    for name, value in given.items():
        label = argument if len(model.outcomes) == 1 else f"{argument}[{name!r}]"
        array = as_numbers(value, label).astype(np.float64)
        shape = () if num_rows is None else (num_rows,)
        if array.shape != shape:
            raise ValueError(f"{label} has shape {array.shape}, expected {shape}: one number per row")
        if not np.all(np.isfinite(array)):
            row = "" if num_rows is None else f" in row {int(np.flatnonzero(~np.isfinite(array))[0])}"
            raise ValueError(
                f"{label} is {array[~np.isfinite(array)][0] if array.ndim else array}{row}: a reward must be finite; "
                "leave out decisions whose reward is unknown"
            )
        if model.outcome_kinds[name] == "i" and array.size and np.abs(array).max() > 2**53:
            raise ValueError(
                f"{label} holds {np.abs(array).max():g}: counts beyond 2**53 are not exact; use larger units"
            )
        checked[name] = np.atleast_1d(array)
    return checked


def as_interaction(model: RewardModel, arms: Any, rewards: Mapping[str, Any], contexts: Any) -> Interaction:
    """Return rows as an `Interaction`; the reward of a program with one outcome is an array, not a dict."""
    return Interaction(arms, rewards if len(model.outcomes) > 1 else rewards[model.outcomes[0]], contexts)


def impossible_rows(model: RewardModel, rows: Interaction) -> dict[str, int]:
    """Return {outcome: first row}, for each outcome with a value that the program cannot produce."""

    def read() -> dict[str, Any]:
        latents = feasible_latents(model.program, tuple(model.latent_shapes), model.context, 0)
        return model.in_support(latents, jax.tree.map(jnp.asarray, rows))

    return {name: int(np.flatnonzero(~fits)[0]) for name, fits in run_once(read).items() if not fits.all()}


def check_data(model: RewardModel, data: Interaction, arms: Arms) -> Interaction:
    """Return rows as arrays of the kinds that the program expects; arms may be given by index or by name.

    Raises:
        ValueError: for a row with a wrong shape or kind, or a reward that the program cannot produce.
    """
    if not isinstance(data, Interaction):
        raise ValueError(f"data must be an Interaction(arm, reward, context), got {type(data).__name__}")
    is_indexed = np.asarray(data.arm).dtype.kind in "iu"  # numbers are indices, also where arms have names
    indices: Any = (Arms(len(arms), None) if is_indexed else arms).indices(data.arm, "data.arm")
    if indices.size == 0:
        raise ValueError("data is empty: give at least one row")
    if data.mask is not None:
        raise ValueError("data.mask was given: remove the masked rows instead")
    rewards = check_rewards(model, data.reward, indices.size, "data.reward")
    contexts = check_contexts(model, data.context, indices.size, "data.context")
    rows = as_interaction(model, indices, rewards, contexts)
    for name, row in impossible_rows(model, rows).items():
        raise ValueError(
            f"data.reward is {rewards[name][row]:g} in row {row}, outside the support of the outcome '{name}' on arm "
            f"{arms.names[indices[row]]!r}: the program cannot produce it; correct the reward or the program"
        )
    return rows


def check_engine(engine: Any) -> None:
    """Check that an engine is given as a factory.

    Raises:
        ValueError: for the name of an engine, for an engine that is already built, and for anything that is not callable.
    """
    if isinstance(engine, str):
        raise ValueError(f"engine is the text {engine!r}: pass the factory itself, as in engine=engines.{engine}")
    if isinstance(engine, Engine):
        name = engine.explanation.engine
        raise ValueError(
            f"engine was built already: pass its factory, as in engine=engines.{name}, which the bandit calls"
        )
    if engine is not None and not callable(engine):
        raise ValueError(f"engine must be a factory such as engines.nuts, got {engine!r}")
