"""Draws and data as ArviZ objects: InferenceData on ArviZ 0.x, DataTree on 1.x."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppl_bandit.program import RewardModel
from ppl_bandit.types import Interaction

__all__ = ["export"]


def export(
    model: RewardModel,
    arms: Sequence[Any],
    posterior: Mapping[str, np.ndarray],
    prior: Mapping[str, np.ndarray],
    rows: tuple[np.ndarray, dict[str, np.ndarray], Any],
) -> Any:
    """Return draws and data in the groups posterior, prior, observed_data, constant_data and log_likelihood.

    An axis of a latent whose length is the number of arms is named `arm` where it comes first, with the arms' names as
    coordinates; other axes are named after the site. Draws are independent, so they form one chain.
    """
    import arviz as az

    indices, rewards, contexts = rows
    groups: dict[str, Any] = {
        "posterior": {name: np.asarray(value)[None] for name, value in posterior.items()},
        "prior": {name: np.asarray(value)[None] for name, value in prior.items()},
    }
    if indices.size:
        groups["observed_data"] = {name: np.asarray(value) for name, value in rewards.items()}
        constants = {"played_arm": np.asarray(arms)[indices]}
        for path, leaf in jax.tree_util.tree_flatten_with_path(contexts)[0]:
            constants["context" + jax.tree_util.keystr(path)] = np.asarray(leaf)
        groups["constant_data"] = constants
        groups["log_likelihood"] = {"reward": _log_likelihood(model, posterior, rows)[None]}
    dims = {name: _dims(name, shape, len(arms)) for name, shape in model.latent_shapes.items()}
    dims |= {name: ["row"] for name in (*model.outcomes, "played_arm", "reward")}
    coords = {"arm": list(arms)} if any("arm" in names for names in dims.values()) else {}
    if int(az.__version__.split(".")[0]) >= 1:
        return az.from_dict(groups, dims=dims, coords=coords)
    return az.from_dict(**groups, dims=dims, coords=coords)


def _dims(name: str, shape: tuple[int, ...], num_arms: int) -> list[str]:
    return ["arm" if axis == 0 and size == num_arms else f"{name}_dim_{axis}" for axis, size in enumerate(shape)]


def _log_likelihood(model: RewardModel, draws: Mapping[str, np.ndarray], rows: tuple) -> np.ndarray:
    arms, rewards, contexts = rows
    given = rewards if len(model.outcomes) > 1 else rewards[model.outcomes[0]]
    with jax.enable_x64(True):
        data = jax.tree.map(jnp.asarray, Interaction(arms, given, contexts))
        read = jax.jit(lambda latents: jax.lax.map(lambda one: model.log_likelihood(one, data), latents))
        return np.asarray(read({name: jnp.asarray(value) for name, value in draws.items()}))
