"""`ppl-bandit demo`: prove, play and draw bundled conjugate models."""

import inspect
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit import engines, selectors
from ppl_bandit.commands.demo_figure import Learning, draw_demo
from ppl_bandit.commands.model_files import load_model
from ppl_bandit.program.model.reward_model import RewardModel
from ppl_bandit.runtime.compile_ahead import quick_jit
from ppl_bandit.runtime.cpu_count import num_cores
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.types import Key

__all__ = ["CONJUGATE_MODELS", "DemoResult", "run_demo"]

# One of each family that is proved conjugate; the costliest comes early, so that two processes end together.
CONJUGATE_MODELS = ("bernoulli", "hurdle", "linear_gaussian", "gaussian", "poisson", "hierarchical_gaussian")
NUM_STEPS, NUM_REALIZATIONS, NUM_SAMPLES = 300, 40, 100


class DemoResult(NamedTuple):
    """What the demo found out about one model.

    Attributes:
        title: the model and its families, for the figure.
        families: site by site, in words.
        regret: who plays -> (mean, standard error) of the cumulative expected regret after all steps.
        num_arms: how many arms there are to choose from.
        is_best: (R, T), whether the arm played was the best one, in each step of each realization.
        program: the source of the reward model.
    """

    name: str
    title: str
    families: str
    regret: dict[str, tuple[float, float]]
    num_arms: int
    is_best: np.ndarray
    program: str


def run_demo(out: Path, say: Callable[[str], None], seed: int = 0) -> list[DemoResult]:
    """Prove some bundled models conjugate, play them, and write `demo.png` to `out`.

    Args:
        say: told one line per finding, as it is found.
    """
    say(
        f"proving {len(CONJUGATE_MODELS)} bundled models exact, and playing {NUM_REALIZATIONS} realizations of {NUM_STEPS} "
        "steps of each; regret: of the bandit, and of random play"
    )
    results = []
    for result in _play_all(CONJUGATE_MODELS, seed):
        mean, error = result.regret["double sampling"]
        at_random, _ = result.regret["random play"]
        say(
            f"  {result.name:<22} regret {mean:6.1f} +- {error:4.1f} against {at_random:6.1f}; exact: {result.families}"
        )
        results.append(result)
    out.mkdir(parents=True, exist_ok=True)
    learnt = [Learning(result.title, result.is_best, 1.0 / result.num_arms) for result in results]
    draw_demo(
        results[0].program,
        learnt,
        out / "demo.png",
        f"mean over {NUM_REALIZATIONS} simulated experiments of {NUM_STEPS} decisions each, with the 95% interval of the first "
        f"model's; double sampling, M = {NUM_SAMPLES} posterior draws a decision, seed {seed}",
    )
    return results


def _play_all(names: Sequence[str], seed: int) -> Iterator[DemoResult]:
    """Yield the results in order. Tracing a program holds the interpreter's lock, so a second core needs a second process."""
    num_workers = min(2, num_cores(), len(names))
    if num_workers == 1:
        yield from map(_play, names, repeat(seed))
        return
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_play, names, repeat(seed))


def _play(name: str, seed: int) -> DemoResult:
    with jax.enable_x64(True):
        file = load_model(name)
        model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
        engine, selector = engines.conjugate(model), selectors.double_sampling()
        environment = Environment(model, file.truth or {}, file.contexts)

        def play(key: Key) -> Array:
            return rollout(
                key, model, engine, selector, environment, num_steps=NUM_STEPS, num_samples=NUM_SAMPLES
            ).regret

        # Compiling takes longer than playing: spend little on it.
        regret = jax.device_get(quick_jit(jax.vmap(play))(jr.split(jr.key(seed), NUM_REALIZATIONS)))
        at_random = NUM_STEPS * _random_regret(environment)
    total = regret.sum(axis=1)
    sites = engine.explanation.sites
    kinds = dict.fromkeys(words.partition(",")[0] for words in sites.values())
    own = float(total.mean()), float(total.std(ddof=1) / np.sqrt(NUM_REALIZATIONS))
    return DemoResult(
        file.name,
        f"{file.name.replace('_', ' ')}: {' x '.join(kinds)}",
        ", ".join(f"{site} {words}" for site, words in sites.items()),
        {"double sampling": own, "random play": (at_random, 0.0)},
        file.num_arms,
        regret <= 0.0,
        inspect.getsource(file.program),
    )


def _random_regret(environment: Environment) -> float:
    """Return what one step of random play loses on average, over 1,000 contexts where there are any."""
    num_contexts = 1 if environment.reward_model.context is None else 1000

    def lost(key: Key) -> Array:
        rewards = environment.expected_rewards(environment.draw_context(key))
        return jnp.max(rewards) - jnp.mean(rewards)

    return float(jnp.mean(quick_jit(jax.vmap(lost))(jr.split(jr.key(0), num_contexts))))
