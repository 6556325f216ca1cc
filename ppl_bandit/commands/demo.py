"""`ppl-bandit demo`: prove, play and draw the bundled conjugate models."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from ppl_bandit import engines, selectors
from ppl_bandit.commands.demo_figure import DemoPlay, draw_demo
from ppl_bandit.commands.model_files import ModelFile, load_model
from ppl_bandit.numerics.compilation import quick_jit
from ppl_bandit.program.reward_model import RewardModel
from ppl_bandit.selectors.contract import as_selector
from ppl_bandit.simulation.environment import Environment
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.types import Engine, Key, Selection, Selector

__all__ = ["CONJUGATE_MODELS", "DemoResult", "run_demo"]

CONJUGATE_MODELS = (
    "bernoulli",
    "binomial",
    "poisson",
    "exponential",
    "gaussian",
    "linear_gaussian",
    "dirichlet_categorical",
    "hurdle",
    "hierarchical_gaussian",
)
NUM_STEPS, NUM_REALIZATIONS, NUM_SAMPLES = 200, 12, 100


class DemoResult(NamedTuple):
    """What the demo found out about one model.

    Attributes:
        regret: selector -> (mean, standard error) of the cumulative expected regret after all steps.
    """

    name: str
    families: str
    report: str
    regret: dict[str, tuple[float, float]]


class _Prepared(NamedTuple):
    file: ModelFile
    engine: Engine
    environment: Environment
    played: "Future[np.ndarray]"


def run_demo(out: Path, say: Callable[[str], None], seed: int = 0) -> list[DemoResult]:
    """Prove each bundled conjugate model, play it, and write `demo.png` to `out`.

    Args:
        say: told one line per finding, as it is found.
    """
    say(f"proving {len(CONJUGATE_MODELS)} bundled models conjugate ...")
    with jax.enable_x64(True), ThreadPoolExecutor(1) as pool:
        # The next program is traced here while the last one is compiled and played there.
        prepared = [_prepare(name, pool, seed, say) for name in CONJUGATE_MODELS]
        say(f"\nplaying {NUM_REALIZATIONS} realizations of {NUM_STEPS} steps each ...")
        played = [_result(item) for item in prepared]
    plays, results = [play for play, _ in played], [result for _, result in played]
    for result in results:
        scores = ", ".join(f"{name} {mean:.2f} +- {error:.2f}" for name, (mean, error) in result.regret.items())
        say(f"  {result.name:<22} regret after {NUM_STEPS} steps: {scores}")
    out.mkdir(parents=True, exist_ok=True)
    draw_demo(
        plays,
        out / "demo.png",
        f"{NUM_REALIZATIONS} realizations of {NUM_STEPS} steps, M = {NUM_SAMPLES} posterior draws a step, seed {seed}; "
        "expected (pseudo) regret: mean and 95% interval of the mean",
    )
    return results


_SELECTORS = {"double sampling": selectors.double_sampling(), "Thompson": selectors.thompson()}


def _one_of(number: Array) -> Selector:
    """Return the selector of a number: both decide, one is heeded, and the world around them is compiled once."""

    def select(key: Key, table: Array, step: Array, **_: Any) -> Selection:
        chosen = [select(key, table, step) for select in _SELECTORS.values()]
        return jax.tree.map(lambda *parts: jnp.stack(parts)[number], *chosen)

    return as_selector(select)


def _prepare(name: str, pool: ThreadPoolExecutor, seed: int, say: Callable[[str], None]) -> _Prepared:
    file = load_model(name)
    model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
    engine = engines.conjugate(model)
    families = ", ".join(f"{site} {words}" for site, words in engine.explanation.sites.items())
    say(f"  {name:<22} exact: {families}")
    environment = Environment(model, file.truth or {}, file.contexts)

    def play(key: Key, number: Array) -> Array:
        chosen = _one_of(number)
        return rollout(key, model, engine, chosen, environment, num_steps=NUM_STEPS, num_samples=NUM_SAMPLES).regret

    # Compiling takes longer than playing: spend little on it.
    runs = _runs(seed)
    lowered = quick_jit(jax.vmap(play)).lower(*runs)

    def compile_and_play() -> np.ndarray:
        with jax.enable_x64(True):
            return jax.device_get(lowered.compile()(*runs))

    return _Prepared(file, engine, environment, pool.submit(compile_and_play))


def _runs(seed: int) -> tuple[Array, Array]:
    """Return keys and selector numbers of all runs, selector by selector."""
    num_runs = len(_SELECTORS) * NUM_REALIZATIONS
    return jr.split(jr.key(seed), num_runs), jnp.repeat(jnp.arange(len(_SELECTORS)), NUM_REALIZATIONS)


def _result(item: _Prepared) -> tuple[DemoPlay, DemoResult]:
    steps = item.played.result()
    by_selector = steps.reshape(len(_SELECTORS), NUM_REALIZATIONS, NUM_STEPS)
    regret = {label: np.cumsum(runs, axis=1) for label, runs in zip(_SELECTORS, by_selector, strict=True)}
    final = {
        label: (float(total[:, -1].mean()), float(total[:, -1].std(ddof=1) / np.sqrt(NUM_REALIZATIONS)))
        for label, total in regret.items()
    }
    families = dict.fromkeys(words.partition(",")[0] for words in item.engine.explanation.sites.values())
    play = DemoPlay(f"{item.file.name}: {' x '.join(families)}", regret, _random_regret(item.environment))
    words = ", ".join(f"{site} {family}" for site, family in item.engine.explanation.sites.items())
    return play, DemoResult(item.file.name, words, item.engine.explanation.report, final)


def _random_regret(environment: Environment) -> float:
    """Return what one step of random play loses on average, over 1,000 contexts where there are any."""
    num_contexts = 1 if environment.reward_model.context is None else 1000

    def lost(key: Key) -> Array:
        rewards = environment.expected_rewards(environment.draw_context(key))
        return jnp.max(rewards) - jnp.mean(rewards)

    return float(jnp.mean(quick_jit(jax.vmap(lost))(jr.split(jr.key(0), num_contexts))))
