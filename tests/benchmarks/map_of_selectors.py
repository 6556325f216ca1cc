"""Which selector has the least regret where: the paper's grid and more problems, on a GPU.

    python tests/benchmarks/map_of_selectors.py grid --out results       # 969 triples, 171 pairs, 1,500 steps
    python tests/benchmarks/map_of_selectors.py report --out results     # tables, and the figure of the triples
    python tests/benchmarks/map_of_selectors.py table                    # M draws against exact marginals
    python tests/benchmarks/map_of_selectors.py change                   # a world that changes

All policies meet the same random numbers. Runs of `grid` with other seeds add realizations, and `report` joins them. What
`tune` chooses is the matter of held_out.py. Float32.
"""

import argparse
import itertools
import time
from functools import partial
from math import erfc
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np

from ppl_bandit import Environment, RewardModel, engines, selectors, simulate
from ppl_bandit.display.figure_style import figure_tools, save_figure
from ppl_bandit.display.terminal import markdown_table
from ppl_bandit.journal.model_files import load_model
from ppl_bandit.paper.settings import bernoulli_program
from ppl_bandit.simulation.executors import Study, prepare
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.simulation.simulate import is_stuck
from ppl_bandit.simulation.standings import score_selectors, score_table

LEVELS = np.round(np.arange(1, 20) * 0.05, 2)
NUM_STEPS = 1500
gittins = partial(selectors.optimistic_gittins, NUM_STEPS)
POLICIES = {
    "double sampling": selectors.double_sampling(),
    "Thompson": selectors.thompson(),
    "Bayes-UCB": selectors.bayes_ucb(),
    "Gittins 1": gittins(1.0),
    "Gittins .7": gittins(0.7),
    "Gittins .5": gittins(0.5),
    "Gittins 2, learning 1": gittins(2.0, 1.0),
    "Gittins 4, learning .5": gittins(4.0, 0.5),
}
CLASSIC, BEST = ("double sampling", "Thompson", "Bayes-UCB"), "Gittins 2, learning 1"
WRONG = {
    "Gittins 1": gittins(1.0),
    "Gittins 1, horizon / 10": selectors.optimistic_gittins(NUM_STEPS // 10),
    "Gittins 1, horizon x 10": selectors.optimistic_gittins(NUM_STEPS * 10),
}
SLOW = {"top-two": selectors.top_two(), "information-directed": selectors.information_directed()}
GRIDS = {  # name -> number of arms, policies
    "triples": (3, POLICIES),
    "pairs": (2, POLICIES | SLOW),
    "horizon": (3, WRONG),
    "slow": (3, SLOW),
}


def bernoulli(num_arms):
    return RewardModel(bernoulli_program(num_arms), num_arms)


def play(rates, rule, num_runs, seed):
    """Return the regret of every realization of every problem, and whether it ended stuck: (problems, runs)."""
    model, stacked = bernoulli(rates.shape[1]), jnp.asarray(rates)

    def one(engine, key, number):
        world = Environment(model, {"rate": stacked[number // num_runs]})
        ran, _, _ = rollout(jr.fold_in(key, number), model, engine, rule, world, num_steps=NUM_STEPS)
        return jnp.sum(ran.regret), is_stuck(ran.regret[None])[0]

    key, num = jr.key(seed), len(rates) * num_runs
    chunks = prepare(Study(model, engines.conjugate(model), one), key, num)()(key, num)
    return [np.concatenate(part).reshape(-1, num_runs) for part in zip(*chunks, strict=True)]


def run_grid(arguments):
    for name in arguments.grids.split(","):
        num_arms, policies = GRIDS[name]
        rates, kept = np.array(list(itertools.combinations(LEVELS, num_arms))), {}
        for policy, rule in policies.items():
            began = time.time()
            kept[f"regret/{policy}"], kept[f"stuck/{policy}"] = play(rates, rule, arguments.runs, arguments.seed)
            print(f"{name}, {policy}: {time.time() - began:.0f} s", flush=True)
            np.savez_compressed(arguments.out / f"{name}-{arguments.seed}.npz", rates=rates, **kept)


def run_table(arguments):
    """M draws against exact marginals; patience 1, four Bernoulli problems and worlds from two priors."""
    cases = {}
    for rates in ((0.4, 0.5), (0.1, 0.2), (0.4, 0.7, 0.8), (0.8, 0.9, 0.95)):
        model = bernoulli(len(rates))
        cases[f"Bernoulli {rates}"] = model, Environment(model, {"rate": np.array(rates)})
    for name in ("gaussian", "poisson"):
        file = load_model(name)
        model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
        cases[name] = model, Environment.from_prior(model, file.contexts)
    for name, (model, world) in cases.items():
        exact = engines.conjugate(model)
        drawn = exact._replace(capabilities=exact.capabilities._replace(marginals=None))
        for engine, num_samples in ((exact, 1000), (drawn, 100), (drawn, 1000), (drawn, 10_000)):
            label = "exact law" if engine is exact else f"M = {num_samples}"
            show(f"{name}, {label}", model, engine, {"Gittins 1": selectors.optimistic_gittins(1000)}, world, 1000,
                 arguments, num_samples)  # fmt: skip


def run_change(arguments):
    """Rates (.4, .8) that become (.9, .2) half way, with a posterior that forgets and one that does not."""
    model = bernoulli(2)
    later = {NUM_STEPS // 2 + 1: {"rate": np.array([0.9, 0.2])}}
    world = Environment(model, {"rate": np.array([0.4, 0.8])}, changes=later)
    policies = {name: POLICIES[name] for name in (*CLASSIC, "Gittins 1")} | {"Gittins .1": gittins(0.1)}
    for discount in (1.0, 0.99):
        engine = engines.conjugate(model, discount=discount)
        show(f"discount {discount}", model, engine, policies, world, NUM_STEPS, arguments)


def show(label, model, engine, policies, world, num_steps, arguments, num_samples=1000):
    runs = simulate(
        arguments.seed, model, engine, policies, world, num_steps=num_steps, num_realizations=arguments.runs,
        num_samples=num_samples, summary=True, precision="float32",
    )  # fmt: skip
    print(f"\n{label}\n\n{score_table(score_selectors(runs))}", flush=True)


def report(arguments):
    for name in GRIDS:
        parts = [dict(np.load(path)) for path in sorted(arguments.out.glob(f"{name}-*.npz"))]
        if not parts:
            continue
        rates = parts[0].pop("rates")
        joined = {key: np.concatenate([part[key] for part in parts], axis=1) for key in parts[0]}
        regret, stuck = (
            {key.split("/")[1]: own for key, own in joined.items() if key.startswith(what)}
            for what in ("regret", "stuck")
        )
        num_runs = next(iter(regret.values())).shape[1]
        print(f"\n## {name}: {len(rates)} problems, {num_runs} realizations each\n")
        print(table_of(regret, stuck))
        print_worse(rates, regret)
        if name == "triples":
            draw_map(rates, {policy: own.mean(axis=1) for policy, own in regret.items()}, num_runs, arguments.out)


def table_of(regret, stuck):
    against = [name for name in CLASSIC if name in regret]
    rows, means = [], {name: own.mean(axis=1, dtype=float) for name, own in regret.items()}
    for name, own in regret.items():
        error = own.mean(axis=0, dtype=float).std(ddof=1) / own.shape[1] ** 0.5
        relative = [f"{100 * np.mean(means[name] / means[o] - 1):+.0f}%" if o != name else "" for o in against]
        tails = [f"{np.quantile(own, order, axis=1).mean():.1f}" for order in (0.95, 0.99)]
        share = f"{100 * stuck[name].mean():.2f}%"
        rows.append([name, f"{means[name].mean():.2f} +- {error:.2f}", *relative, *tails, share])
    heads = ["", "mean regret", *(f"to {name}" for name in against), "95th percentile", "99th percentile", "stuck"]
    return markdown_table(heads, rows)


def print_worse(rates, regret):
    """Print on how many problems each policy is worse than each other, and where the best index is at its worst."""

    def scores(name, other):
        gap = regret[name].astype(float) - regret[other]
        return gap.mean(axis=1) / np.maximum(gap.std(axis=1, ddof=1) / gap.shape[1] ** 0.5, 1e-6)

    z = {(name, other): scores(name, other) for name in regret for other in regret if name != other}
    for bound in (2.0, 3.0):
        chance = 0.5 * erfc(bound / 2**0.5) * len(rates)
        print(
            f"\nproblems on which the row is worse than the column, z > {bound:g} (by chance, where equal: {chance:.1f})\n"
        )
        rows = [
            [name, *("" if name == other else str(int((z[name, other] > bound).sum())) for other in regret)]
            for name in regret
        ]
        print(markdown_table(["", *regret], rows))
    for other in (name for name in CLASSIC if name in regret and BEST in regret):
        worst = []
        for k in np.argsort(-z[BEST, other])[:4]:
            shown = f"{regret[BEST][k].mean():.1f} against {regret[other][k].mean():.1f}"
            worst.append(f"{rates[k].tolist()}: {shown} (z {z[BEST, other][k]:.1f})")
        print(f"\n{BEST} at its worst against {other}: " + "; ".join(worst))


def draw_map(rates, means, num_runs, out):
    """Draw which policy has the least regret, over the gap between the two best arms and the level of the best."""
    from matplotlib.colors import ListedColormap

    names = list(means)
    level, gap = rates[:, -1], np.round(rates[:, -1] - rates[:, -2], 2)
    xs, ys = np.unique(gap), np.unique(level)
    cells = np.full((len(names), ys.size, xs.size), np.nan)
    for row, column in itertools.product(range(ys.size), range(xs.size)):
        own = (level == ys[row]) & (gap == xs[column])
        if own.any():
            cells[:, row, column] = [means[name][own].mean() for name in names]
    is_empty = np.isnan(cells[0])
    winner = np.where(is_empty, np.nan, np.argmin(np.where(is_empty, 0.0, cells), axis=0))
    colours = ["#E69F00", "#999999", "#56B4E9", "#0072B2", "#009E73", "#CC79A7", "#D55E00", "#F0E442"][: len(names)]
    plt = figure_tools()
    figure, axes = plt.subplots(2, 2, figsize=(11, 9), layout="constrained")
    edges = [np.append(v - 0.025, v[-1] + 0.025) for v in (xs, ys)]
    axes[0, 0].pcolormesh(*edges, winner, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(names) - 0.5)
    won = {i: int(np.sum(winner == i)) for i in range(len(names)) if np.any(winner == i)}
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[i]) for i in won]
    axes[0, 0].legend(handles, [f"{names[i]} ({num})" for i, num in won.items()], fontsize=8, loc="lower right")
    axes[0, 0].set_title("selector with the least mean regret (number of cells)", fontsize=11)
    for axis, name in zip(axes.flat[1:], CLASSIC, strict=True):
        gain = 100 * (cells[names.index(BEST)] / cells[names.index(name)] - 1)
        image = axis.pcolormesh(*edges, gain, cmap="RdBu_r", vmin=-60, vmax=60)
        axis.set_title(f"{BEST}: regret against {name}, %", fontsize=11)
        figure.colorbar(image, ax=axis)
    for axis in axes.flat:
        axis.set(xlabel="gap between the two best arms", ylabel="rate of the best arm")
    title = f"{len(rates)} triples of Bernoulli arms, 1,500 steps, {num_runs:,} realizations each"
    save_figure(figure, title, "a cell averages its triples", out / "map.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"grid": run_grid, "report": report, "table": run_table, "change": run_change}
    parser.add_argument("part", choices=parts)
    parser.add_argument("--runs", type=int, default=5000, help="realizations of each problem (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--grids", default=",".join(GRIDS), help="of `grid`: which (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("map-of-selectors"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts[arguments.part](arguments)


if __name__ == "__main__":
    main()
