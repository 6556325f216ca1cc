"""What makes an experiment the same experiment: the program's computation, and every setting that decisions depend on."""

import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from ppl_bandit.posterior.task import Task
from ppl_bandit.program.fingerprints import jaxpr_fingerprint
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.types import Engine, Interaction, Selector

__all__ = ["describe_engine", "describe_selector", "differences", "fingerprint", "identity_of", "versions"]


def fingerprint(model: RewardModel) -> str:
    """Return a digest of the program's computation, with every number in it.

    It is equal for the same program on the same versions of jax and numpyro, and differs if any constant does, also one
    that a jitted helper closes over.
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


def identity_of(task: Task, engine: Engine, burn_in: int) -> dict[str, Any]:
    """Describe an experiment in plain JSON values, by the names of a bandit's arguments."""
    return {
        "program": fingerprint(task.model),
        "arms": list(task.arms.names),
        "context": _form(task.model.context),
        "outcomes": list(task.model.outcomes),
        "engine": describe_engine(engine) | {"may_fall_back": task.may_fall_back},
        "selector": describe_selector(task.selector),
        "num_samples": task.num_samples,
        "draws": task.draws,
        "seed": task.seed,
        "burn_in": burn_in,
    }


def differences(opened: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name what differs between two identities, in words: argument, what it was, what it is."""
    found = []
    for name in now:
        before, after = opened.get(name), now[name]
        if before == after:
            continue
        if name == "program":
            found.append("program: its computation or a number in it is another one")
        else:
            found.append(f"{name}: it was {_shown(before)}, now it is {_shown(after)}")
    return found


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return an engine's name and settings."""
    return {"name": engine.explanation.engine, "settings": _plain(engine.settings)}


def describe_selector(selector: Selector) -> dict[str, Any]:
    """Return a selector's name and settings; a selector inside another is described in the same way."""
    settings = {
        name: describe_selector(value) if isinstance(value, Selector) else _plain(value)
        for name, value in selector.settings.items()
    }
    return {"name": selector.name, "settings": settings}


def versions() -> dict[str, str]:
    """Return the versions that a fingerprint depends on."""
    return {name: version(name) for name in ("jax", "numpyro")}


def _plain(value: Any) -> Any:
    """Return a setting as a JSON value; what has none is told by its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return np.asarray(value).tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__qualname__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _form(context: Any) -> Any:
    if context is None:
        return None
    leaves, structure = jax.tree.flatten(context)
    return [str(structure), *(f"{np.asarray(leaf).dtype.kind}{list(np.shape(leaf))}" for leaf in leaves)]


def _shown(value: Any) -> str:
    if isinstance(value, Mapping) and {"name", "settings"} <= set(value):
        given = ", ".join(f"{key}={_shown(item)}" for key, item in value["settings"].items())
        kept = "" if value.get("may_fall_back", True) else ", kept whatever comes"
        return f"{value['name']}({given}){kept}"
    return repr(value)
