"""Simulate many realizations of bandits against an environment, as one labelled dataset.

All selectors see the same realizations (common random numbers), so their differences are paired.
"""

import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any

import jax
import jax.random as jr
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from ppl_bandit.arguments import check_flag
from ppl_bandit.display.terminal import progress_reporter
from ppl_bandit.engines.choose import as_engine
from ppl_bandit.inputs.numbers import check_count
from ppl_bandit.program.model.reward_model import RewardModel, check_reward_model
from ppl_bandit.program.outcomes import check_information_directed
from ppl_bandit.runtime.cpu_threads import is_on_cpu
from ppl_bandit.selectors.selector_contract import as_selector
from ppl_bandit.simulation import datasets
from ppl_bandit.simulation.environment import Environment, check_world
from ppl_bandit.simulation.executors import ExecutorLost, Study, check_executor, prepare
from ppl_bandit.simulation.rollouts import Rollout, rollout
from ppl_bandit.types import Engine, Key, Selector

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
        summarise = datasets.summarise_chunk if summary else None
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
    make = datasets.summary_dataset if summary else datasets.step_dataset
    made = {name: make(found) for name, found in parts.items() if found}
    facts = datasets.provenance(key, reward_model, engine, environment, counts) | {"precision": precision}
    num_requested = num_realizations * len(named)
    return datasets.combine_selectors(made, isinstance(selector, Mapping), facts, num_requested)


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
        return datasets.compact(rollout(key, reward_model, engine, selector, environment, **sizes, draws=draws)[0])

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
