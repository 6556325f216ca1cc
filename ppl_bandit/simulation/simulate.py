"""`simulate`: realizations of a selector in an environment, and their datasets.

All selectors see the same realizations (common random numbers), so their differences are paired.
"""

import json
import platform
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from ppl_bandit.display.terminal import progress_reporter
from ppl_bandit.engines.choose import as_engine
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.program.outcomes import check_information_directed
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.simulation.environment import Environment, check_world
from ppl_bandit.simulation.executors import ExecutorLost, Study, check_executor, prepare
from ppl_bandit.simulation.rollouts import Rollout, rollout
from ppl_bandit.types import Engine, Key, Selector, check_flag

if TYPE_CHECKING:
    import xarray


def simulate(
    key: Key | int,
    reward_model: RewardModel,
    engine: Engine | Callable[[RewardModel], Engine],
    selector: Selector | Mapping[str, Selector],
    environment: Environment,
    *,
    num_steps: int,
    num_realizations: int,
    num_samples: int = 1000,
    summary: bool = False,
    memory: int | None = None,
    draws: bool = False,
    precision: str = "float64",
    mesh: Mesh | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> "xarray.Dataset":
    """Simulate realizations of a bandit, and return every step, or a summary.

    After Ctrl-C, or if the executor is lost, it returns the finished realizations; the attribute `is_complete` is then 0.

    Args:
        key: a key, or a seed.
        engine: an engine of the reward model, or a factory such as `engines.conjugate`.
        selector: a selector, or {name: selector}: several give the result a dimension `selector`.
        environment: the simulated world; its program may differ from the reward model.
        num_steps: decisions in a realization.
        num_realizations: independent repetitions.
        num_samples: posterior draws M behind each decision.
        summary: whether to return means, standard deviations and quantiles over the realizations instead of every step.
        memory: approximate bytes for all chunks that run at once; None is half a GiB on a CPU, and a third of the memory
            of another device.
        draws: whether to draw all M rows of every table, even if p-hat can be drawn from its own law (see `rollout`).
        precision: "float64", as in the live bandit, or "float32", several times faster on a GPU.
        mesh: devices, in one axis, over which to spread the realizations; None is JAX's default device.
        executor: runs chunks of realizations on its workers, anything like `concurrent.futures.Executor`; the result is the
            same for every executor and number of workers. None runs them in this process, on all cores.
        progress: whether to report progress on the standard error.

    Returns:
        A dataset over `realization`, `step` and `arm`: arm, reward, regret (expected, of each step), realised_regret,
        num_candidates, best_arm_probs, is_trusted. Or, with `summary`, statistics of them over `step`, `arm`, `checkpoint`,
        `quantile`, and each realization's final regret.
    """
    check_reward_model(reward_model, "reward_model")
    _check_key(key)
    counts = {"num_steps": num_steps, "num_realizations": num_realizations, "num_samples": num_samples}
    for name, flag in {"summary": summary, "draws": draws, "progress": progress}.items():
        check_flag(flag, name)
    check_sizes(counts | ({} if memory is None else {"memory": memory}), precision)
    check_world(reward_model, environment, num_steps)
    several = selector if isinstance(selector, Mapping) else {as_selector(selector).name: selector}
    named = {name: as_selector(select) for name, select in several.items()}
    if not named:
        raise ValueError("selector is empty: give at least one")
    check_executor(executor, mesh)
    for select in named.values():
        check_information_directed(reward_model, select)
    num_realizations = int(num_realizations)
    with jax.enable_x64(precision == "float64"):
        engine = as_engine(reward_model, engine)
        key = jr.key(key) if isinstance(key, int | np.integer) else key
        # On a CPU, realizations of an approximate engine run one at a time: see `trace_chunk`.
        summarise = summarise_chunk if summary else None
        is_sequential = not engine.explanation.is_exact and mesh is None and is_on_cpu()
        parts: dict[str, list[Any]] = {name: [] for name in named}
        try:
            for order, (name, select) in enumerate(named.items(), 1):
                play = _play_function(reward_model, select, environment, int(num_steps), int(num_samples), draws)
                if progress:
                    sys.stderr.write(f"{name}: compiling ({order} of {len(named)} selectors)\n")
                advance = progress_reporter(name, num_realizations, "realizations", " for this selector")
                size = 1 if is_sequential else None
                study = Study(reward_model, engine, play, size, is_sequential, summarise)
                run = prepare(study, key, num_realizations, memory=memory, mesh=mesh, executor=executor)()
                for part in run(key, num_realizations):
                    parts[name].append(part)
                    if progress:
                        advance(part.num_runs if summary else len(part.arm))
        except (KeyboardInterrupt, ExecutorLost) as error:
            if not any(parts.values()):
                raise
            sys.stderr.write(f"\n{str(error) or 'interrupted'}: the finished realizations are kept\n")
    make = summary_dataset if summary else step_dataset
    made = {name: make(found) for name, found in parts.items() if found}
    facts = provenance(key, reward_model, engine, environment, counts) | {"precision": precision}
    num_requested = num_realizations * len(named)
    return combine_selectors(made, isinstance(selector, Mapping), facts, num_requested)


def _play_function(
    reward_model: RewardModel,
    selector: Selector,
    environment: Environment,
    num_steps: int,
    num_samples: int,
    draws: bool,
) -> Callable[[Engine, Key, Array], Rollout]:
    def play(engine: Engine, key: Key, number: Array) -> Rollout:
        key, sizes = jr.fold_in(key, number), {"num_steps": num_steps, "num_samples": num_samples}
        return compact(rollout(key, reward_model, engine, selector, environment, **sizes, draws=draws)[0])

    return play


def _check_key(key: Any) -> None:
    is_seed = isinstance(key, int | np.integer) and not isinstance(key, bool)
    is_key = isinstance(key, jax.Array) and (
        jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key) or (key.dtype == np.uint32 and key.shape == (2,))
    )
    if not is_seed and not is_key:
        raise ValueError(f"key must be a key of jax.random.key, or a seed, got {key!r}")


def check_sizes(counts: Mapping[str, Any], precision: str) -> None:
    """Refuse numbers that are not positive integers, and other precisions than float64 and float32.

    Raises:
        ValueError: with the argument and what was given.
    """
    for name, value in counts.items():
        check_count(value, name)
    if precision not in ("float64", "float32"):
        raise ValueError(f'precision must be "float64" or "float32", got {precision!r}')


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
