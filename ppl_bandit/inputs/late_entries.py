"""What comes late: facts of a context that are known with the reward, and rewards of which some outcomes are missing.

`Bandit(..., late=("days",))` declares them. A decision is made at their example value; the reward of the decision brings the
value that is learnt.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.inputs.checks import check_leaf
from ppl_bandit.program.jaxpr.interpreter import dependencies
from ppl_bandit.program.model.probing import feasible_latents
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.program.model.tracing import masked_rows
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.types import Interaction, InvalidContext


def check_late_names(model: RewardModel, late: Any) -> tuple[str, ...]:
    """Return the names of late entries.

    Raises:
        ValueError: unless they are keys of a context that is a dict, each with one array.
    """
    if not isinstance(late, str | list | tuple):
        raise ValueError(f"late must be a list or tuple of entries of the context, got {late!r}")
    names = (late,) if isinstance(late, str) else tuple(late)
    if not names:
        return ()
    keys = _array_keys(model)
    unknown = [name for name in names if name not in keys]
    if unknown or len(set(names)) < len(names):
        have = f"its keys with one array each are {keys}" if keys else "the context is not a dict of arrays"
        raise ValueError(
            f"late={names!r} must name different entries of the example context, but {have}: give a context such as "
            "context={'age': 40.0, 'days': 30.0} and late=('days',)"
        )
    return names


def late_numbers(model: RewardModel, late: Sequence[str]) -> dict[str, int]:
    """Return {late entry: number of its leaf in the context}."""
    keys = [path[0].key if path else None for path, _ in _leaves_with_paths(model)]
    return {name: keys.index(name) for name in late}


def fill_late(
    model: RewardModel, late: Sequence[str], contexts: Any, *, is_batch: bool = False, num_rows: int | None = None
) -> Any:
    """Return contexts with the example values of the late entries that they do not have.

    Args:
        is_batch: whether they have a leading axis.
        num_rows: its length if no entry is given.
    """
    if not late or not (contexts is None or isinstance(contexts, Mapping)):
        return contexts
    given, lead = contexts or {}, list[int]()
    if is_batch:
        lead = [len(value) for value in given.values() if hasattr(value, "__len__")][:1] or [num_rows or 0]
    absent = {name: np.asarray(model.context[name]) for name in late if name not in given}
    return dict(given) | {name: np.broadcast_to(value, (*lead, *value.shape)) for name, value in absent.items()}


def at_example_values(model: RewardModel, late: Sequence[str], contexts: Any) -> Any:
    """Return contexts with a leading axis in which the late entries have their example values, as a decision has them."""
    if not late or contexts is None:
        return contexts
    given = {name: value for name, value in contexts.items() if name not in late}
    return fill_late(model, late, given, is_batch=True, num_rows=len(jax.tree.leaves(contexts)[0]))


def check_late_values(
    model: RewardModel, late: Sequence[str], given: Any, num_rows: int | None, argument: str
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the late entries that come with a reward, and other entries, which must be those of the decision.

    Args:
        num_rows: length of the leading axis; None for one context without a leading axis.

    Raises:
        ValueError: for a context of a bandit without late entries, and for an unknown or wrong entry.
    """
    if given is None:
        return {}, {}
    if not late:
        raise InvalidContext(
            f"{argument} was given with a decision, which has its context already. An entry that is known only with the "
            "reward, such as the days of follow-up, must be declared: Bandit(..., context={'days': 30.0}, late=('days',)), "
            f"then update(decision, reward, context={{'days': 12.0}}). Otherwise leave {argument} out"
        )
    if not isinstance(given, Mapping) or not set(given) <= set(model.context):
        raise InvalidContext(
            f"{argument} must be a dict with the late entries {list(late)}, got {given!r}; the entries of the context are "
            f"{list(model.context)}"
        )
    lead = () if num_rows is None else (num_rows,)
    keys = _array_keys(model)
    checked = {
        name: check_leaf(value, np.asarray(model.context[name]), lead, argument, f"[{name!r}]")
        for name, value in given.items()
        if name in keys
    }
    own = {name: value for name, value in checked.items() if name in late}
    return own, {name: value for name, value in checked.items() if name not in late}


def late_note(model: RewardModel, late: Sequence[str]) -> str:
    """Return a sentence on the late entries and the values that decisions use; empty if there are none."""
    if not late:
        return ""
    shown = ", ".join(f"{name} = {np.asarray(model.context[name]).tolist()}" for name in late)
    return (
        f"known only with the reward: {', '.join(late)}; decisions and expected rewards use the example value ({shown})"
    )


def _leaves_with_paths(model: RewardModel) -> list[Any]:
    return jax.tree_util.tree_flatten_with_path(model.context)[0]


def _array_keys(model: RewardModel) -> list[str]:
    """Return the keys of a context that is a dict, each of which holds one array."""
    if not isinstance(model.context, Mapping):
        return []
    return [path[0].key for path, _ in _leaves_with_paths(model) if len(path) == 1]


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
