"""Labelled datasets of simulated realizations, step by step or summarised, with their provenance."""

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Bool

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import Rollout
from ppl_bandit.types import Engine, Key

if TYPE_CHECKING:
    import xarray

__all__ = [
    "LAST_QUARTER",
    "ChunkSums",
    "combine_selectors",
    "compact",
    "is_stuck",
    "provenance",
    "step_dataset",
    "sum_chunk",
    "summary_dataset",
    "without_padding",
]

_NUM_CHECKPOINTS = 50
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_OF_EACH_RUN = ("checkpoints", "is_stuck", "is_trusted")  # fields of `ChunkSums` with a row per realization
LAST_QUARTER = 4  # a run is stuck if every step of the last T / 4 has regret


class ChunkSums(NamedTuple):
    """Sums over the realizations of a chunk, with a leading axis of 1, and a few values of each realization.

    Attributes:
        num_runs: number of realizations.
        regret, squares: sums of the cumulative regret and of its square.
        arms, probs: how often each arm was played, and the sum of p-hat.
        candidates, optimal: sums of N, and of whether the play had no regret.
        checkpoints: (R, C), cumulative regret at the checkpoints, the last of which is the last step.
        is_stuck, is_trusted: (R,), whether the last quarter of the steps all had regret; whether all updates were trusted.
        one_probs, one_candidates: p-hat and N of the chunk's first realization.
    """

    num_runs: Array
    regret: Array
    squares: Array
    arms: Array
    probs: Array
    candidates: Array
    optimal: Array
    checkpoints: Array
    is_stuck: Array
    is_trusted: Array
    one_probs: Array
    one_candidates: Array


def compact(run: Rollout) -> Rollout:
    """Store the steps of a realization in narrow types."""
    return Rollout(
        run.arm.astype(jnp.int16),
        jax.tree.map(lambda leaf: leaf.astype(jnp.float32 if leaf.dtype.kind == "f" else jnp.int32), run.reward),
        run.regret.astype(jnp.float32),
        run.num_candidates.astype(jnp.int16),
        run.best_arm_probs.astype(jnp.float32),
        run.is_trusted,
        None if run.realised_regret is None else run.realised_regret.astype(jnp.float32),
    )


def checkpoints(num_steps: int) -> np.ndarray:
    """Return the steps, counted from 1, at which a summary keeps each realization's regret: evenly spaced, with the last."""
    return np.unique(np.round(np.linspace(1, num_steps, min(_NUM_CHECKPOINTS, num_steps))).astype(int))


def sum_chunk(runs: Rollout, is_real: Bool[Array, " R"]) -> ChunkSums:
    """Sum over a chunk of realizations, without padding."""
    weight = is_real.astype(float)

    def total(values: Array) -> Array:
        return jnp.tensordot(weight, values.astype(float), axes=1)[None]

    cumulative = jnp.cumsum(runs.regret.astype(float), axis=1)
    num_arms, num_steps = runs.best_arm_probs.shape[-1], runs.arm.shape[1]
    return ChunkSums(
        jnp.sum(is_real)[None],
        total(cumulative),
        total(cumulative**2),
        total(jax.nn.one_hot(runs.arm, num_arms)),
        total(runs.best_arm_probs),
        total(runs.num_candidates),
        total(runs.regret <= 0),
        cumulative[:, checkpoints(num_steps) - 1].astype(jnp.float32),
        is_stuck(runs.regret),
        jnp.all(runs.is_trusted, axis=1),
        runs.best_arm_probs[:1],
        runs.num_candidates[:1],
    )


def is_stuck(regret: Any) -> Any:
    """Return, for each realization (R, T), whether every step of its last quarter had regret."""
    last = regret[:, -max(1, regret.shape[1] // LAST_QUARTER) :]
    return (last > 0).all(axis=1)


def without_padding(part: Any, num_done: int, summary: bool) -> Any:
    """Drop the rows of a chunk that are padding."""
    if not summary:
        return jax.tree.map(lambda leaf: leaf[:num_done], part)
    return part._replace(**{name: getattr(part, name)[:num_done] for name in _OF_EACH_RUN})


def step_dataset(parts: list[Rollout]) -> "xarray.Dataset":
    """Concatenate chunks into a dataset of every step of every realization."""
    import xarray

    runs = jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)
    rewards = runs.reward if isinstance(runs.reward, Mapping) else {"reward": runs.reward}
    fields = {**runs._asdict(), **rewards}
    if isinstance(runs.reward, Mapping):
        del fields["reward"]
    if runs.realised_regret is None:
        del fields["realised_regret"]
    dims = ("realization", "step", "arm")
    num_runs, num_steps = runs.arm.shape
    return xarray.Dataset(
        {name: (dims[: value.ndim], value) for name, value in fields.items()}
        | {"is_stuck": (dims[:1], is_stuck(runs.regret))},
        coords={"realization": np.arange(num_runs), "step": np.arange(1, num_steps + 1)},
    )


def summary_dataset(parts: list[ChunkSums]) -> "xarray.Dataset":
    """Combine chunks into a dataset of statistics over the realizations."""
    import xarray

    one = parts[0].one_probs[0], parts[0].one_candidates[0]
    own = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _OF_EACH_RUN}
    sums = {
        name: sum(np.asarray(getattr(part, name)).sum(axis=0) for part in parts)
        for name in ChunkSums._fields
        if name not in _OF_EACH_RUN and not name.startswith("one_")
    }
    count = int(sums["num_runs"])
    mean = {name: value / count for name, value in sums.items()}
    spread = np.sqrt(np.maximum(mean["squares"] - mean["regret"] ** 2, 0.0) * count / max(count - 1, 1))
    num_steps = mean["regret"].size
    return xarray.Dataset(
        {
            "cumulative_regret_mean": ("step", mean["regret"]),
            "cumulative_regret_sd": ("step", spread),
            "cumulative_regret_quantiles": (
                ("quantile", "checkpoint"),
                np.quantile(own["checkpoints"], _QUANTILES, axis=0),
            ),
            "play_share": (("step", "arm"), mean["arms"]),
            "best_arm_probs_mean": (("step", "arm"), mean["probs"]),
            "num_candidates_mean": ("step", mean["candidates"]),
            "optimal_share": ("step", mean["optimal"]),
            "one_best_arm_probs": (("step", "arm"), one[0]),
            "one_num_candidates": ("step", one[1]),
            "final_regret": ("realization", own["checkpoints"][:, -1]),
            "is_stuck": ("realization", own["is_stuck"]),
            "is_trusted": ("realization", own["is_trusted"]),
            "num_runs": ((), count),
        },
        coords={
            "realization": np.arange(count),
            "step": np.arange(1, num_steps + 1),
            "checkpoint": checkpoints(num_steps),
            "quantile": list(_QUANTILES),
        },
    )


def combine_selectors(
    datasets: Mapping[str, "xarray.Dataset"], has_names: bool, facts: Mapping[str, Any], num_requested: int
) -> "xarray.Dataset":
    """Concatenate the datasets of selectors, over the realizations that all of them finished."""
    import xarray

    num_done = min(found.sizes["realization"] for found in datasets.values())
    names = list(datasets)
    if has_names:
        whole = xarray.concat(
            [found.isel(realization=slice(num_done)) for found in datasets.values()],
            xarray.DataArray(names, dims="selector", name="selector"),
        )
    else:
        whole = datasets[names[0]].assign_coords(selector=names[0])
    for name, long_name in _LONG_NAMES.items():
        if name in whole:
            whole[name].attrs["long_name"] = long_name
    return whole.assign_attrs({**facts, "num_realizations": num_done, "is_complete": int(num_done == num_requested)})


def provenance(
    key: Key,
    reward_model: RewardModel,
    engine: Engine,
    environment: Environment,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the settings of a simulation as attributes that a NetCDF file can hold."""
    versions = {name: metadata.version(name) for name in ("jax", "numpyro", "numpy")}
    eras = {} if environment.truth is None else {1: environment.truth, **environment.changes}
    return {
        "model": _qualified(reward_model.program),
        "world": _qualified(environment.reward_model.program),
        "worlds": _worlds(environment),
        "truth": json.dumps({step: {n: np.asarray(v).tolist() for n, v in era.items()} for step, era in eras.items()}),
        "engine": engine.explanation.engine,
        "key": str(np.asarray(jr.key_data(key)).tolist()),
        **{name: int(value) for name, value in settings.items()},
        "versions": json.dumps(versions | {"python": platform.python_version()}),
        "device": str(jax.devices()[0].device_kind),
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _worlds(environment: Environment) -> str:
    if environment.truth is not None:
        return "truth, moving" if environment.reward_model.moving_sites else "truth"
    if environment.path is not None:
        return "path"
    if environment.draws is not None:
        return "draws"
    widths = ", ".join(f"{scale:.3g}" for scale in environment.scales)
    return "prior" if environment.scales == (1.0,) else f"prior, {widths} times as wide"


def _qualified(program: Any) -> str:
    return f"{getattr(program, '__module__', '?')}.{getattr(program, '__qualname__', 'program')}"


_LONG_NAMES = {
    "arm": "arm played",
    "reward": "reward",
    "regret": "expected (pseudo) regret of the step",
    "realised_regret": "the best arm's expected reward less the reward",
    "num_candidates": "candidates drawn, N",
    "best_arm_probs": "posterior probability that the arm is best, p-hat",
    "is_trusted": "whether the engine trusts its posterior",
    "num_runs": "number of realizations; after an interruption it may differ between selectors",
    "is_stuck": "whether every step of the last quarter had regret",
    "final_regret": "cumulative expected regret after the last step",
    "cumulative_regret_mean": "mean of the cumulative expected regret over realizations",
    "cumulative_regret_sd": "standard deviation of the cumulative expected regret over realizations",
    "cumulative_regret_quantiles": "quantiles of the cumulative expected regret over realizations",
    "one_best_arm_probs": "p-hat of the first realization",
    "one_num_candidates": "N of the first realization",
    "play_share": "share of realizations that play the arm",
    "best_arm_probs_mean": "mean over realizations of p-hat",
    "num_candidates_mean": "mean over realizations of N",
    "optimal_share": "share of realizations that play an optimal arm",
}
