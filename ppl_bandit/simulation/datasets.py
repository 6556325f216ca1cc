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

from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import Rollout
from ppl_bandit.types import Engine, Key

if TYPE_CHECKING:
    import xarray

_NUM_CHECKPOINTS = 50
_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LAST_QUARTER = 4  # a run is stuck if every step of the last T / 4 has regret


class ChunkSummary(NamedTuple):
    """What a summary keeps of a chunk of realizations.

    Attributes:
        num_runs: number of realizations.
        sums: sums over the realizations, by the name of the mean that they give.
        runs: values of each realization, (R,) or (R, C) for the cumulative regret at C checkpoints.
        first: p-hat and N of the first realization.
    """

    num_runs: int
    sums: dict[str, Any]
    runs: dict[str, Any]
    first: dict[str, Any]


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


def summarise_chunk(runs: Rollout) -> ChunkSummary:
    """Sum over a chunk of realizations."""
    cumulative = np.cumsum(runs.regret, axis=1, dtype=float)
    is_played = runs.arm[..., None] == np.arange(runs.best_arm_probs.shape[-1])
    summed: dict[str, Any] = {
        "cumulative_regret_mean": cumulative,
        "cumulative_regret_squares": cumulative**2,
        "play_share": is_played,
        "best_arm_probs_mean": runs.best_arm_probs,
        "num_candidates_mean": runs.num_candidates,
        "optimal_share": runs.regret <= 0,
    }
    own = {
        "checkpoints": cumulative[:, checkpoints(cumulative.shape[1]) - 1].astype(np.float32),
        "is_stuck": is_stuck(runs.regret),
        "is_trusted": np.all(runs.is_trusted, axis=1),
    }
    sums = {name: values.sum(axis=0, dtype=float) for name, values in summed.items()}
    first = {"one_best_arm_probs": runs.best_arm_probs[0], "one_num_candidates": runs.num_candidates[0]}
    return ChunkSummary(len(cumulative), sums, own, first)


def is_stuck(regret: Any) -> Any:
    """Return, for each realization (R, T), whether every step of its last quarter had regret."""
    last = regret[:, -max(1, regret.shape[1] // LAST_QUARTER) :]
    return (last > 0).all(axis=1)


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


def summary_dataset(parts: list[ChunkSummary]) -> "xarray.Dataset":
    """Combine chunks into a dataset of statistics over the realizations."""
    import xarray

    count = sum(part.num_runs for part in parts)
    mean = {name: sum(part.sums[name] for part in parts) / count for name in parts[0].sums}
    own = {name: np.concatenate([part.runs[name] for part in parts]) for name in parts[0].runs}
    variance = np.maximum(mean.pop("cumulative_regret_squares") - mean["cumulative_regret_mean"] ** 2, 0.0)
    at_checkpoints = own.pop("checkpoints")
    num_steps = variance.size
    return xarray.Dataset(
        {name: (("step", "arm")[: values.ndim], values) for name, values in (mean | parts[0].first).items()}
        | {name: ("realization", values) for name, values in own.items()}
        | {
            "cumulative_regret_sd": ("step", np.sqrt(variance * count / max(count - 1, 1))),
            "cumulative_regret_quantiles": (
                ("quantile", "checkpoint"),
                np.quantile(at_checkpoints, _QUANTILES, axis=0),
            ),
            "final_regret": ("realization", at_checkpoints[:, -1]),
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
    """Concatenate the datasets of selectors, over the realizations that all of them finished.

    Args:
        num_requested: realizations of all selectors together.
    """
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
    is_complete = int(num_done * len(datasets) == num_requested)
    return whole.assign_attrs({**facts, "num_realizations": num_done, "is_complete": is_complete})


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
    return "prior" if environment.draws is None else "draws"


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
