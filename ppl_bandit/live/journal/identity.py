"""What makes an experiment the same experiment: the program's computation, and every setting that decisions depend on."""

import hashlib
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from ppl_bandit.live.learning import Task
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Engine, Interaction, Selector

__all__ = ["describe_engine", "describe_selector", "differences", "fingerprint", "identity_of", "versions"]

# Parameters that say how an operation is called or placed, not what it computes.
_NAMES = {"name", "debug_info", "ctx_mesh", "in_shardings", "out_shardings", "in_layouts", "out_layouts"}


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
        latents = {name: jnp.zeros(shape) for name, shape in model.latent_shapes.items()}
        rewards = {name: jnp.zeros(2) for name in model.outcomes}
        rows = Interaction(jnp.zeros(2, int), rewards, model.context_rows(2))
        closed = jax.make_jaxpr(joint)(latents, rows)
        digest = hashlib.sha256()
        _digest_jaxpr(digest, closed.jaxpr, closed.consts)
    return digest.hexdigest()


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


def _digest_jaxpr(digest: Any, jaxpr: Jaxpr, consts: Any) -> None:
    """Add a jaxpr to a digest: its operations, their parameters, how they are wired, and its numbers."""
    names: dict[Any, int] = {}

    def name(atom: Any) -> None:
        if isinstance(atom, Literal):
            _digest_value(digest, atom.val)
        else:
            digest.update(f"v{names.setdefault(atom, len(names))}:{atom.aval};".encode())

    for variable in [*jaxpr.constvars, *jaxpr.invars]:
        name(variable)
    for const in consts:
        _digest_value(digest, const)
    for eqn in jaxpr.eqns:
        digest.update(f"{eqn.primitive.name}(".encode())
        for atom in eqn.invars:
            name(atom)
        for key in sorted(set(eqn.params) - _NAMES):
            digest.update(f"{key}=".encode())
            _digest_parameter(digest, eqn.params[key])
        for atom in eqn.outvars:
            name(atom)
    for atom in jaxpr.outvars:
        name(atom)


def _digest_parameter(digest: Any, value: Any) -> None:
    if isinstance(value, ClosedJaxpr):
        _digest_jaxpr(digest, value.jaxpr, value.consts)
    elif isinstance(value, Jaxpr):
        _digest_jaxpr(digest, value, [])
    elif isinstance(value, tuple | list):
        for item in value:
            _digest_parameter(digest, item)
    elif isinstance(value, np.ndarray | jax.Array):
        _digest_value(digest, value)
    elif callable(value) and not isinstance(value, type):
        digest.update(getattr(value, "__name__", type(value).__name__).encode())
    else:
        digest.update(re.sub(r"0x[0-9a-f]+", "0x", str(value)).encode())


def _digest_value(digest: Any, value: Any) -> None:
    if isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    array: Any = np.asarray(value)
    digest.update(f"{array.dtype}{array.shape}".encode())
    digest.update(array.tobytes())


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
