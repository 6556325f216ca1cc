"""`ppl-bandit demo`: prove bundled models conjugate, simulate them, and draw how the bandits learn."""

import argparse
import inspect
import time
from collections.abc import Sequence
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.display.figure_style import figure_tools, save_figure, styles
from ppl_bandit.display.terminal import progress_reporter

# JAX and NumPyro take seconds to import: they are imported where they are used, after the first line is shown.

# One model per conjugate family; the slowest comes early, so that two processes end at about the same time.
CONJUGATE_MODELS = ("bernoulli", "hurdle", "linear_gaussian", "gaussian", "poisson", "hierarchical_gaussian")
NUM_STEPS, NUM_REALIZATIONS, NUM_SAMPLES = 300, 40, 100
HURDLE_NOTE = (
    "  Why hurdle is near random play: its arms earn 6, 8 and 6 per visitor, and one reward has a standard deviation of 14 to\n"
    f"  26, so {NUM_STEPS} decisions hardly tell the arms apart."
)
# Between one result and the next on two idle cores: the two processes need 48 CPU seconds without a cache, and 39 with one.
_SECONDS = (10.5, 5.5, 5.0, 4.0, 3.5, 1.5)
_NUM_ADDITIONS, _SECONDS_OF_ADDITIONS = 8_000_000, 0.104  # on such a core
_NUM_BLOCKS = 15  # points of a curve, each an average over steps


class DemoResult(NamedTuple):
    """Results of one model.

    Attributes:
        title: the model and its families, for the figure.
        families: posterior family of each site.
        regret: {policy: (mean, standard error)} of the cumulative expected regret after all steps.
        num_arms: number of arms.
        is_best: (R, T), whether the best arm was played, in each step of each realization.
        program: source of the reward model.
    """

    name: str
    title: str
    families: str
    regret: dict[str, tuple[float, float]]
    num_arms: int
    is_best: np.ndarray
    program: str


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Run the demo and write `demo.png`."""
    show(
        f"proving {len(CONJUGATE_MODELS)} bundled models exact, and simulating {NUM_REALIZATIONS} realizations of {NUM_STEPS} "
        "steps of each; regret of the bandit, and of random play"
    )
    results = list[DemoResult]()
    progress("starting two processes; the first model takes longest, because each process imports and compiles first")
    begun = time.perf_counter()
    sum(range(_NUM_ADDITIONS))
    slowness = (time.perf_counter() - begun) / _SECONDS_OF_ADDITIONS  # of this machine now: its cores may be shared
    seconds = [slowness * each for each in _SECONDS[: len(CONJUGATE_MODELS)]]
    advance = progress_reporter("demo", len(seconds), "models", seconds=seconds)
    from ppl_bandit.simulation.chunks import run_in_processes

    for result in run_in_processes([partial(_play, name, arguments.seed) for name in CONJUGATE_MODELS]):
        mean, error = result.regret["double sampling"]
        at_random, _ = result.regret["random play"]
        show(
            f"  {result.name:<22} regret {mean:6.1f} +- {error:4.1f} against {at_random:6.1f}; exact: {result.families}"
        )
        results.append(result)
        advance(1)
    show(HURDLE_NOTE)
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "demo.png"
    draw_demo(
        results,
        path,
        f"mean over {NUM_REALIZATIONS} simulated experiments of {NUM_STEPS} decisions each, with the 95% interval of the first "
        f"model's; double sampling, M = {NUM_SAMPLES} posterior draws a decision, seed {arguments.seed}",
    )
    show(f"\nwrote {path}")
    models = [{"name": r.name, "is_exact": True, "families": r.families, "regret": r.regret} for r in results]
    return {"models": models, "figure": str(path)}, 0


def _play(name: str, seed: int) -> DemoResult:
    import jax
    import jax.random as jr

    from ppl_bandit import engines, selectors
    from ppl_bandit.journal.model_files import load_model
    from ppl_bandit.runtime.compile_ahead import quick_jit
    from ppl_bandit.simulation.environment import Environment
    from ppl_bandit.simulation.rollouts import rollout
    from ppl_bandit.simulation.standings import standard_error

    with jax.enable_x64(True):
        file = load_model(name)
        model = file.reward_model()
        engine, selector = engines.conjugate(model), selectors.double_sampling()
        environment = Environment(model, file.truth or {}, file.contexts)

        def play(key: Any) -> Any:
            sizes: dict[str, Any] = {"num_steps": NUM_STEPS, "num_samples": NUM_SAMPLES}
            return rollout(key, model, engine, selector, environment, **sizes)[0].regret

        # Compilation takes longer than the simulation, so compile with few optimisations.
        regret = jax.device_get(quick_jit(jax.vmap(play))(jr.split(jr.key(seed), NUM_REALIZATIONS)))
        at_random = NUM_STEPS * _random_regret(environment)
    total = regret.sum(axis=1)
    sites = engine.explanation.sites
    kinds = dict.fromkeys(family.partition(",")[0] for family in sites.values())
    own = float(total.mean()), standard_error(total)
    return DemoResult(
        file.name,
        f"{file.name.replace('_', ' ')}: {' x '.join(kinds)}",
        ", ".join(f"{site} {family}" for site, family in sites.items()),
        {"double sampling": own, "random play": (at_random, 0.0)},
        file.num_arms,
        regret <= 0.0,
        inspect.getsource(file.program),
    )


def _random_regret(environment: Any) -> float:
    """Return the mean regret of one step of uniformly random play, averaged over 1,000 contexts if there are any."""
    import jax
    import jax.numpy as jnp
    import jax.random as jr

    from ppl_bandit.runtime.compile_ahead import quick_jit

    num_contexts = 1 if environment.reward_model.context is None else 1000

    def step_regret(key: Any) -> Any:
        rewards = environment.expected_rewards(environment.draw_context(key))
        return jnp.max(rewards) - jnp.mean(rewards)

    return float(jnp.mean(quick_jit(jax.vmap(step_regret))(jr.split(jr.key(0), num_contexts))))


def draw_demo(results: Sequence[DemoResult], path: str | PathLike, footnote: str) -> None:
    """Draw the first model's program on the left, and on the right the share of best-arm plays of every model."""
    figure, (left, right) = figure_tools().subplots(
        1, 2, figsize=(12.8, 4.8), layout="constrained", width_ratios=(1.2, 1)
    )
    _draw_program(left, results[0])
    _draw_curves(right, results)
    save_figure(figure, "Write the reward model; get the bandit; it learns", footnote, path)


def _draw_program(axis: Any, first: DemoResult) -> None:
    lines = [
        "import numpyro",
        "import numpyro.distributions as dist",
        "from ppl_bandit import Bandit",
        "",
        f"num_arms = {first.num_arms}",
        "",
        *first.program.rstrip().splitlines(),
        "",
        "bandit = Bandit(model, num_arms)",
        "decision = bandit.select()",
        "bandit.update(decision, reward=1)",
    ]
    axis.set_axis_off()
    axis.set_title("What you write", loc="left", fontsize=12)
    box = {"boxstyle": "round,pad=0.9", "facecolor": "#f5f7fa", "edgecolor": "#c8d0da"}
    font = {"family": "monospace", "fontsize": 9, "linespacing": 1.5}
    axis.text(0.03, 0.5, "\n".join(lines), transform=axis.transAxes, va="center", bbox=box, **font)


def _draw_curves(axis: Any, results: Sequence[DemoResult]) -> None:
    num_steps = results[0].is_best.shape[1]
    edges = np.linspace(0, num_steps, _NUM_BLOCKS + 1).astype(int)
    centres = (edges[:-1] + edges[1:]) / 2
    ends = []
    for number, (model, (colour, dash)) in enumerate(zip(results, styles(), strict=False)):
        each = np.stack([model.is_best[:, a:b].mean(axis=1) for a, b in zip(edges[:-1], edges[1:], strict=True)])
        share = 100.0 * each.mean(axis=1)
        x, y = np.array([0.0, *centres, num_steps]), np.array([100.0 / model.num_arms, *share, share[-1]])
        axis.plot(x, y, color=colour, linestyle=dash, linewidth=2.4 if number == 0 else 1.2, zorder=3 - (number > 0))
        if number == 0:
            margin = 196.0 * each.std(axis=1, ddof=1) / np.sqrt(each.shape[1])
            around = np.array([0.0, *margin, margin[-1]])  # before the first decision the share is known
            low, high = np.clip(y - around, 0, 100), np.clip(y + around, 0, 100)
            axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        ends.append((share[-1], model.title, colour))
    axis.set(
        xlabel="decisions made, each followed by its reward",
        ylabel="decisions for the best arm (%)",
        xlim=(0, num_steps),
        ylim=(0, 103),
        yticks=range(0, 101, 20),
    )
    count = {1: "one program", 6: "six programs"}.get(len(results), f"{len(results)} programs")
    axis.set_title(f"What it does: {count}, each proved exact", loc="left", fontsize=12)
    axis.text(
        0.02 * num_steps, 4, "each starts at the share of random play, 1 / number of arms", fontsize=8.5, color="0.4"
    )
    axis.spines[["top", "right"]].set_visible(False)
    _label_curves(axis, ends, num_steps)


def _label_curves(axis: Any, ends: list[tuple[float, str, str]], num_steps: int) -> None:
    """Label each curve at its end; shift labels that would overlap."""
    gap, ceiling = 5.2, 101.0
    for share, title, colour in sorted(ends, reverse=True):
        place = min(share, ceiling)
        ceiling = place - gap
        x = [num_steps * right for right in (1.0, 1.03, 1.05)]
        axis.plot(x, [share, place, place], color=colour, linewidth=1.5, clip_on=False)
        axis.text(1.06 * num_steps, place, f"{share:.0f}%  {title}", va="center", fontsize=9)
