"""The identity of an experiment: a fingerprint of the program, and every setting that decisions depend on."""

import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from ppl_bandit import engines, selectors
from ppl_bandit.posterior.task import Task
from ppl_bandit.program.fingerprints import function_fingerprint, jaxpr_fingerprint
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Engine, Interaction, Selector


def fingerprint(model: RewardModel) -> str:
    """Return a digest of the program's computation and of every number in it.

    It is equal for the same program on the same versions of jax and numpyro. It differs if any constant differs, also one that
    a jitted helper closes over.
    """

    def joint(latents: Any, rows: Interaction) -> Any:
        return (
            model.log_prior(latents),
            model.log_likelihood(latents, rows),
            model.expected_rewards(jax.tree.map(lambda leaf: leaf[None], latents), model.context),
        )

    with jax.enable_x64(True):
        latents = {name: np.zeros(shape) for name, shape in model.latent_shapes.items()}
        rewards = {name: np.zeros(2) for name in model.outcomes}
        rows = Interaction(np.zeros(2, int), rewards, model.context_rows(2))  # type: ignore[arg-type]
        return jaxpr_fingerprint(jax.make_jaxpr(joint)(latents, rows))


def experiment_identity(task: Task, engine: Engine, burn_in: int) -> dict[str, Any]:
    """Return program and settings as JSON values, by the names of a bandit's arguments.

    An experiment without late entries has no key "late", nor one of a window that it does not have, as in older journals.
    """
    optional: dict[str, Any] = {"late": list(task.late)} if task.late else {}
    unit_window, reward_window, default = task.windows
    if unit_window is not None:
        optional["unit_window"] = unit_window
    if reward_window is not None:
        optional |= {"reward_window": reward_window, "default_reward": None if default is None else dict(default)}
    return optional | {
        "program": fingerprint(task.model),
        "arms": list(task.arms.names),
        "context": _context_shape(task.model.context),
        "outcomes": list(task.model.outcomes),
        "engine": {
            "name": engine.explanation.engine,
            "settings": to_json(engine.settings),
            "may_fall_back": task.may_fall_back,
        },
        "selector": to_json(task.selector),
        "num_samples": task.num_samples,
        "draws": task.draws,
        "seed": task.seed,
        "burn_in": burn_in,
        "design": None if task.design is None else dict(task.design.settings),
    }


def arguments_from_identity(identity: Mapping[str, Any], engine: Any = None, selector: Any = None) -> dict[str, Any]:
    """Return the arguments of the bandit that has this identity, without program and context.

    Args:
        engine, selector: used instead of the recorded ones.

    Raises:
        ValueError: for an engine or a selector that is not part of this library, and was not given.
    """
    names = identity["arms"]
    is_named = not isinstance(names[0], int)
    return {
        "num_arms": None if is_named else len(names),
        "arms": names if is_named else None,
        "outcomes": tuple(identity["outcomes"]),
        "engine": engine_factory_from(identity["engine"]) if engine is None else engine,
        "selector": selector_from(identity["selector"]) if selector is None else selector,
        "num_samples": identity["num_samples"],
        "draws": identity["draws"],
        "seed": identity["seed"],
        "burn_in": identity["burn_in"],
        "design": identity.get("design"),
        "late": tuple(identity.get("late", ())),
        "unit_window": identity.get("unit_window"),
        "reward_window": identity.get("reward_window"),
        "default_reward": identity.get("default_reward"),
    }


def engine_factory_from(description: Mapping[str, Any]) -> Callable[..., Engine] | None:
    """Return the factory of a recorded engine; None lets the library choose, or if it does not have that engine."""
    if description.get("may_fall_back"):
        return None
    factory = getattr(engines, description["name"], None)
    return None if factory is None else functools.partial(factory, **description["settings"])


def selector_from(description: Mapping[str, Any]) -> Selector:
    """Return a recorded selector.

    Raises:
        ValueError: for a selector that is not part of this library.
    """
    factory = getattr(selectors, description["name"], None)
    if factory is None:
        raise ValueError(f"the selector {description['name']!r} is not part of this library: pass the same selector=")
    settings = {
        name: selector_from(value) if isinstance(value, Mapping) and {"name", "settings"} <= set(value) else value
        for name, value in description["settings"].items()
    }
    return factory(**settings)


def identity_differences(recorded: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Describe each argument that differs between two identities."""
    found = []
    for name in dict.fromkeys([*given, *recorded]):
        before, after = recorded.get(name), given.get(name)
        if before == after:
            continue
        if name == "program":
            found.append("program: its computation, or a number in it, is different")
        else:
            found.append(f"{name}: it was {_format(before)}, now it is {_format(after)}")
    return found


@functools.cache  # reading the metadata of packages takes a millisecond
def library_versions() -> dict[str, str]:
    """Return the versions that a fingerprint depends on."""
    return {name: version(name) for name in ("jax", "numpyro")}


def program_source(model: RewardModel) -> list[str] | None:
    """Return the absolute path of the file of a program's function, and the function's name; None if it has no file."""
    function = inspect.unwrap(model.program)
    code = getattr(function, "__code__", None)
    if code is None or not os.path.isfile(code.co_filename):
        return None
    return [os.path.abspath(code.co_filename), function.__name__]


def to_json(value: Any) -> Any:
    """Return a setting as a JSON value; an object that has none is represented by its name."""
    if isinstance(value, Selector):
        return {"name": value.name, "settings": _selector_settings(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))
    return f"{name} {function_fingerprint(value)[:16]}" if callable(value) else name


def _selector_settings(selector: Selector) -> dict[str, Any]:
    """Return the settings of a selector; one that a user wrote has the fingerprint of its function among them."""
    own = {} if _is_of_library(selector.decide) else {"function": function_fingerprint(selector.decide)[:16]}
    return to_json(selector.settings) | own


def _is_of_library(function: Any, depth: int = 3) -> bool:
    """Return whether a function, and the functions that it closes over, are this library's."""
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, types.FunctionType):
        return depth < 3  # a value, such as a number or another selector, which is among the settings
    inner = (cell.cell_contents for cell in function.__closure__ or ())
    own = function.__module__.startswith("ppl_bandit.")
    return own and (depth == 0 or all(_is_of_library(value, depth - 1) for value in inner))


def _context_shape(context: Any) -> Any:
    if context is None:
        return None
    leaves, structure = jax.tree.flatten(context)
    return [str(structure), *(f"{np.asarray(leaf).dtype.kind}{list(np.shape(leaf))}" for leaf in leaves)]


def _format(value: Any) -> str:
    if isinstance(value, Mapping) and {"name", "settings"} <= set(value):
        settings = ", ".join(f"{key}={_format(item)}" for key, item in value["settings"].items())
        fixed = "" if value.get("may_fall_back", True) else ", without fallback"
        return f"{value['name']}({settings}){fixed}"
    return repr(value)
