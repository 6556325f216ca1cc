"""Regret in worlds that move, of programs that say so, against discounted and windowed Thompson sampling.

    python tests/benchmarks/bench_moving.py --runs 1000 --steps 300 --out moving

writes `moving.json` with mean cumulative regret and standard errors, and the time of a step. All methods use Thompson
sampling and see the same worlds, drawn from the moving program, so differences are paired.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import Normal

from ppl_bandit import Bandit, Environment, RewardModel, engines, selectors, simulate
from ppl_bandit.display.figure_style import figure_tools, styles
from ppl_bandit.types import Engine, Explanation, Interaction

NUM_ARMS, NUM_FEATURES, NUM_RATINGS = 3, 2, 3
DISCOUNTS, WINDOWS = (0.9, 0.95, 0.98, 1.0), (25, 50, 100)
NUM_PARTICLES = 1000  # in simulations; a live bandit has more


def gaussian_walk(arm: Any, *, previous: Any = None) -> None:
    """Levels that return slowly to 0: their stationary standard deviation is 1."""
    with numpyro.plate("arms", NUM_ARMS):
        law = Normal(0.0, 1.0) if previous is None else Normal(0.98 * previous["level"], 0.199)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", Normal(level[arm], 1.0))


def gaussian_walk_unknown(arm: Any, *, previous: Any = None) -> None:
    """The same with an unknown scale of the steps."""
    drift = numpyro.sample("drift", dist.LogNormal(-2.0, 1.0))
    with numpyro.plate("arms", NUM_ARMS):
        law = Normal(0.0, 1.0) if previous is None else Normal(0.98 * previous["level"], drift)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", Normal(level[arm], 1.0))


def logistic_walk(arm: Any, *, previous: Any = None) -> None:
    """Log odds that return slowly to 0: their stationary standard deviation is 1.5."""
    with numpyro.plate("arms", NUM_ARMS):
        law = Normal(0.0, 1.5) if previous is None else Normal(0.98 * previous["level"], 0.2985)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Bernoulli(logits=level[arm]))


def contextual_walk(arm: Any, context: Any, *, previous: Any = None) -> None:
    """Weights of the features that return slowly to 0, for each arm."""
    with numpyro.plate("arms", NUM_ARMS, dim=-2), numpyro.plate("features", NUM_FEATURES):
        law = Normal(0.0, 1.0) if previous is None else Normal(0.98 * previous["weights"], 0.199)
        weights = numpyro.sample("weights", law)
    numpyro.sample("reward", Normal((weights[arm] * context).sum(-1), 1.0))


def softmax_walk(arm: Any, *, previous: Any = None) -> None:
    """A rating of 0, 1 or 2, whose log odds return slowly to 0, for each arm."""
    with numpyro.plate("arms", NUM_ARMS, dim=-2), numpyro.plate("ratings", NUM_RATINGS):
        law = Normal(0.0, 1.5) if previous is None else Normal(0.98 * previous["level"], 0.2985)
        level = numpyro.sample("level", law)
    numpyro.sample("reward", dist.Categorical(logits=level[arm]))
    numpyro.deterministic("expected_reward", jax.nn.softmax(level[arm]) @ jnp.arange(float(NUM_RATINGS)))


def contextual_still(arm: Any, context: Any) -> None:
    """Weights that do not move."""
    with numpyro.plate("arms", NUM_ARMS, dim=-2), numpyro.plate("features", NUM_FEATURES):
        weights = numpyro.sample("weights", Normal(0.0, 1.0))
    numpyro.sample("reward", Normal((weights[arm] * context).sum(-1), 1.0))


def softmax_still(arm: Any) -> None:
    """Probabilities of the ratings that do not move."""
    with numpyro.plate("arms", NUM_ARMS):
        probs = numpyro.sample("probs", dist.Dirichlet(jnp.ones(NUM_RATINGS)))
    numpyro.sample("reward", dist.Categorical(probs[arm]))
    numpyro.deterministic("expected_reward", probs[arm] @ jnp.arange(float(NUM_RATINGS)))


def gaussian_still(arm: Any) -> None:
    """Levels that do not move."""
    with numpyro.plate("arms", NUM_ARMS):
        level = numpyro.sample("level", Normal(0.0, 1.0))
    numpyro.sample("reward", Normal(level[arm], 1.0))


def bernoulli_still(arm: Any) -> None:
    """Rates that do not move."""
    with numpyro.plate("arms", NUM_ARMS):
        rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


class Recent(NamedTuple):
    """The latest rows in a ring buffer."""

    arm: Any
    reward: Any
    num_rows: Any


def sliding_window(model: RewardModel, *, size: int) -> Engine:
    """Return an engine that learns the latest rows only, for the two programs above that do not move."""
    is_gaussian = "level" in model.latent_shapes

    def init(key: Any) -> Recent:
        return Recent(jnp.full(size, -1), jnp.zeros(size), jnp.zeros((), int))

    def update(key: Any, state: Recent, rows: Interaction) -> tuple[Recent, Any]:
        place = state.num_rows % size
        arm, reward = state.arm.at[place].set(rows.arm[0]), state.reward.at[place].set(rows.reward[0].astype(float))
        return Recent(arm, reward, state.num_rows + 1), ()

    def sample(key: Any, state: Recent, num_samples: int) -> dict[str, Any]:
        is_own = (state.arm[:, None] == jnp.arange(NUM_ARMS)).astype(float)
        count, total = is_own.sum(axis=0), state.reward @ is_own
        if is_gaussian:
            return {"level": total / (1 + count) + jr.normal(key, (num_samples, NUM_ARMS)) / jnp.sqrt(1 + count)}
        return {"rate": jr.beta(key, 1 + total, 1 + count - total, (num_samples, NUM_ARMS))}

    return Engine(init, update, sample, Explanation("window", False, "", {}))


STILL = {
    gaussian_walk: gaussian_still,
    logistic_walk: bernoulli_still,
    contextual_walk: contextual_still,
    softmax_walk: softmax_still,
}


def build_model(program: Callable) -> RewardModel:
    """Return the reward model of one of the programs above."""
    is_contextual = program in (contextual_walk, contextual_still)
    return RewardModel(program, NUM_ARMS, context=np.ones(NUM_FEATURES) if is_contextual else None)


def methods(world: Callable) -> dict[str, tuple[Callable, Callable[[RewardModel], Engine]]]:
    """Return the programs and engines that play a world, by name."""
    is_linear, still = world in (gaussian_walk, contextual_walk), STILL[world]
    own = engines.kalman if is_linear else partial(engines.particle_filter, num_particles=NUM_PARTICLES)
    found: dict[str, Any] = {"the world's program": (world, own)}
    if world is gaussian_walk:
        unknown = partial(engines.collapsed_kalman, num_particles=NUM_PARTICLES // 2)
        found["unknown drift"] = gaussian_walk_unknown, unknown
    for discount in DISCOUNTS:
        name = "not moving" if discount == 1.0 else f"discount {discount:g}"
        found[name] = still, partial(engines.conjugate, discount=discount)
    if still in (gaussian_still, bernoulli_still):
        found |= {f"window {size}": (still, partial(sliding_window, size=size)) for size in WINDOWS}
    return found


def measure_regret(
    world: Callable, num_runs: int, num_steps: int, seed: int, save: Callable[[dict[str, Any]], None]
) -> None:
    """Save mean cumulative regret, its standard error, and its curve, by method."""
    contexts = (lambda key: jr.normal(key, (NUM_FEATURES,))) if world is contextual_walk else None
    environment, found = Environment.from_prior(build_model(world), contexts), dict[str, Any]()
    best = np.zeros(num_runs)
    for name, (program, factory) in methods(world).items():
        model = build_model(program)
        begun = time.perf_counter()
        data = simulate(
            seed,
            model,
            factory(model),
            selectors.thompson(),
            environment,
            num_steps=num_steps,
            num_realizations=num_runs,
            num_samples=200,
        )
        curve = data.regret.values.cumsum(axis=1)
        best = best if found else curve[:, -1]
        gaps = curve[:, -1] - best
        found[name] = {
            "engine": data.attrs["engine"],
            "regret": float(curve[:, -1].mean()),
            "standard_error": float(curve[:, -1].std(ddof=1) / np.sqrt(num_runs)),
            "gap": float(gaps.mean()),
            "gap_error": float(gaps.std(ddof=1) / np.sqrt(num_runs)),
            "curve": curve.mean(axis=0)[:: max(1, num_steps // 100)].tolist(),
            "trusted": float(data.is_trusted.values.mean()),
            "seconds": time.perf_counter() - begun,
        }
        print(world.__name__, name, {key: own for key, own in found[name].items() if key != "curve"}, flush=True)
        save(found)


def measure_steps(program: Callable, num_steps: int) -> dict[str, float]:
    """Return the time of building a live bandit, and of its steps (a decision and an update), in seconds."""
    rng, level = np.random.default_rng(0), np.zeros(NUM_ARMS)
    begun = time.perf_counter()
    bandit = Bandit(program, NUM_ARMS, seed=1)
    bandit.warm_up()
    build, seconds = time.perf_counter() - begun, []
    for _ in range(num_steps):
        level = 0.98 * level + 0.2 * rng.normal(size=NUM_ARMS)
        begun = time.perf_counter()
        decision = bandit.select()
        mean = level[decision.arm]
        reward = int(rng.random() < 1 / (1 + np.exp(-mean))) if program is logistic_walk else mean + rng.normal()
        bandit.update(decision, reward)
        seconds.append(time.perf_counter() - begun)
    later = seconds[20:] or seconds
    return {
        "engine": bandit.explanation.engine,
        "build": build,
        "first": max(seconds[:20]),
        "median": statistics.median(later),
        "largest": max(later),
    }


def plane(arm: Any, context: Any, *, previous: Any = None) -> None:
    """Two weights that return slowly to 0, which all arms share: a state of two dimensions."""
    with numpyro.plate("features", NUM_FEATURES):
        law = Normal(0.0, 1.0) if previous is None else Normal(0.98 * previous["weights"], 0.199)
        weights = numpyro.sample("weights", law)
    numpyro.sample("reward", Normal((weights * context).sum(-1) + 0.0 * arm, 1.0))


def measure_rows(num_rows: int = 20_000, num_runs: int = 15) -> dict[str, float]:
    """Return the rows a second that an exact filter of two dimensions learns in one batch: of all runs, and of the best."""
    rng = np.random.default_rng(0)
    engine = engines.kalman(RewardModel(plane, NUM_ARMS, context=np.ones(NUM_FEATURES)))
    contexts = rng.normal(size=(num_rows, NUM_FEATURES))
    with jax.enable_x64(True):
        rewards = contexts.sum(axis=1) + rng.normal(size=num_rows)
        rows = Interaction(*map(jnp.asarray, (rng.integers(0, NUM_ARMS, num_rows), rewards, contexts)))
        state, update, seconds = engine.init(jr.key(0)), jax.jit(engine.update), []
        assert update(jr.key(0), state, rows)[1].is_trusted
        for _ in range(num_runs):
            begun = time.perf_counter()
            jax.block_until_ready(update(jr.key(0), state, rows))
            seconds.append(time.perf_counter() - begun)
    return {"rows": num_rows, "median": num_rows / statistics.median(seconds), "best": num_rows / min(seconds)}


def draw_figure(paths: list[str], out: str) -> None:
    """Write a figure of mean cumulative regret over the steps, one panel for each world, from results in JSON files."""
    worlds: dict[str, Any] = {}
    for path in paths:
        with open(path) as file:
            found = json.load(file)
        worlds |= {name: (found, methods) for name, methods in found.get("regret", {}).items()}
    plt = figure_tools()
    figure, axes = plt.subplots(1, len(worlds), figsize=(5.6 * len(worlds), 4.2), layout="constrained", squeeze=False)
    for axis, (name, (found, by_method)) in zip(axes[0], worlds.items(), strict=True):
        for (method, own), (colour, dash) in zip(by_method.items(), styles(), strict=False):
            steps = np.arange(len(own["curve"])) * max(1, found["steps"] // 100) + 1
            label = f"{method}: {own['regret']:.1f} ± {own['standard_error']:.1f}"
            axis.plot(steps, own["curve"], color=colour, linestyle=dash, label=label)
        axis.set(title=name.replace("_", " "), xlabel="decision", ylabel="mean cumulative regret")
        axis.legend(fontsize=7, title=f"after {found['steps']} decisions, {found['runs']} runs", title_fontsize=7)
    figure.savefig(out, dpi=90)


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--live", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rows", action="store_true", help="measure the rows a second of an exact filter, and nothing else"
    )
    parser.add_argument("--worlds", default="gaussian_walk,logistic_walk,contextual_walk,softmax_walk")
    parser.add_argument("--out", default="moving")
    parser.add_argument("--figure", nargs="+", help="results to draw, instead of measuring", default=[])
    arguments = parser.parse_args()
    if arguments.figure:
        draw_figure(arguments.figure, f"{arguments.out}.png")
        return
    if arguments.rows:
        print(json.dumps(measure_rows()))
        return
    live = {program.__name__: program for program in (gaussian_walk, gaussian_walk_unknown, logistic_walk)}
    worlds = {program.__name__: program for program in STILL}
    found: dict[str, Any] = {
        "runs": arguments.runs,
        "steps": arguments.steps,
        "device": str(jax.devices()[0].device_kind),
    }
    for name, program in live.items():
        if arguments.live:
            found.setdefault("live", {})[name] = measure_steps(program, arguments.live)
            print(name, found["live"][name], flush=True)

    def save(name: str, by_method: dict[str, Any]) -> None:
        found.setdefault("regret", {})[name] = by_method
        with open(f"{arguments.out}.json", "w") as file:
            json.dump(found, file, indent=1)

    for name in filter(None, arguments.worlds.split(",")):
        measure_regret(worlds[name], arguments.runs, arguments.steps, arguments.seed, partial(save, name))
    if arguments.live and not arguments.worlds:
        with open(f"{arguments.out}.json", "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
