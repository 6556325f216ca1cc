"""A bandit in a file: arrays and a JSON header in one npz archive, versioned, without pickle."""

import hashlib
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["check_same", "fingerprint", "read", "write"]

_FORMAT, _VERSION = "ppl_bandit.live.bandit", 1
_TREES = ("context", "open_contexts", "state", "history")


def fingerprint(model: RewardModel) -> str:
    """Return a digest of the program's computation: equal for the same program on the same versions of jax and numpyro."""

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
        digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "0x", str(closed.jaxpr)).encode())
        for const in closed.consts:  # numbers that the program closes over: a table of prices, say
            digest.update(np.asarray(const).tobytes())
    return digest.hexdigest()


def write(path: str | PathLike, contents: Mapping[str, Any]) -> None:
    """Write contents to a file, replacing it whole or not at all."""
    target = Path(path)
    header = {key: value for key, value in contents.items() if key not in _TREES}
    header |= {"format": _FORMAT, "version": _VERSION, "versions": _versions()}
    arrays: dict[str, np.ndarray] = {}
    for name in _TREES:
        leaves = jax.tree.leaves(contents[name])
        header[f"num_{name}"] = None if contents[name] is None else len(leaves)
        header[f"keys_{name}"] = [i for i, leaf in enumerate(leaves) if _is_key(leaf)]
        arrays |= {f"{name}_{i}": _plain(leaf) for i, leaf in enumerate(leaves)}
    header["context_form"] = _form(contents["context"])
    arrays["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read(path: str | PathLike) -> dict[str, Any]:
    """Return the contents of a file; state and history come as lists of arrays.

    Raises:
        ValueError: if the file is not a saved bandit, or of a later version.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        header = json.loads(arrays.pop("header").tobytes())
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: {error}") from error
    if header.get("format") != _FORMAT:
        raise ValueError(f"{os.fspath(path)} is not a saved bandit: its format is {header.get('format')!r}")
    if header["version"] > _VERSION:
        raise ValueError(
            f"{os.fspath(path)} has version {header['version']}, this release reads up to {_VERSION}: upgrade ppl_bandit"
        )
    kept = dict(header)
    for name in _TREES:
        count = header[f"num_{name}"]
        leaves: list[Any] = [arrays[f"{name}_{i}"] for i in range(count or 0)]
        for i in header[f"keys_{name}"]:
            leaves[i] = jax.random.wrap_key_data(leaves[i])
        kept[name] = None if count is None else leaves
    context = None if kept["context"] is None else iter(kept["context"])
    kept["context"] = (
        None if context is None or header["context_form"] is None else _shape(header["context_form"], context)
    )
    kept["open"] = [tuple(pair) for pair in kept["open"]]
    arms, *rest = kept["history"]
    outcomes = sorted(header["outcomes"])  # the order in which a dict's leaves are kept
    kept["history"] = (arms, dict(zip(outcomes, rest, strict=False)), rest[len(outcomes) :])
    return kept


def check_same(kept: Mapping[str, Any], fresh: Mapping[str, Any]) -> None:
    """Check that a bandit was rebuilt as it was saved.

    Raises:
        ValueError: naming what differs and which argument of `load` to give.
    """
    if kept["engine"] != fresh["engine"]:
        raise ValueError(
            f"the bandit was saved with engine {kept['engine']}, now it is {fresh['engine']}: pass the same engine="
        )
    if kept["selector"] != fresh["selector"]:
        raise ValueError(
            f"the bandit was saved with selector {kept['selector']}, now it is {fresh['selector']}: pass the same selector="
        )
    is_same_stack = kept["versions"] == _versions()
    if is_same_stack and kept["fingerprint"] != fresh["fingerprint"]:
        raise ValueError("the program differs from the one that the bandit was saved with: pass the same program")
    shapes = [tuple(np.shape(leaf)) for leaf in jax.tree.leaves(fresh["state"])]
    if shapes != [tuple(np.shape(leaf)) for leaf in kept["state"]]:
        raise ValueError("the saved posterior does not fit this program and engine: pass the same program and engine=")


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("jax", "numpyro")}


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)


def _form(tree: Any) -> Any:
    """Describe a pytree of dicts, lists and tuples in JSON; None if it holds anything else."""
    if isinstance(tree, dict) and all(isinstance(key, str) for key in tree):
        inner: Any = {key: _form(tree[key]) for key in sorted(tree)}
        return None if None in inner.values() else {"dict": inner}
    if type(tree) in (list, tuple):
        inner = [_form(item) for item in tree]
        return None if None in inner else {type(tree).__name__: inner}
    return "leaf" if isinstance(tree, np.ndarray | np.generic) else None


def _shape(form: Any, leaves: Any) -> Any:
    if form == "leaf":
        return next(leaves)
    (kind, inner), *_ = form.items()
    if kind == "dict":
        return {key: _shape(value, leaves) for key, value in inner.items()}
    items = [_shape(value, leaves) for value in inner]
    return tuple(items) if kind == "tuple" else items
