"""Which selector has the least regret where: the paper's grid and more problems, on a GPU.

    python tests/benchmarks/map_of_selectors.py grid --seconds 3000 --out results       # 969 triples, 171 pairs, 1,500 steps
    python tests/benchmarks/map_of_selectors.py table --out results                     # M draws against exact marginals
    python tests/benchmarks/map_of_selectors.py change --out results                    # a world that changes
    python tests/benchmarks/map_of_selectors.py report --out results                    # tables and figures

Each part plays in rounds, the same random numbers for every policy, and stops at --runs realizations a problem (the paper's
5,000) or when --seconds are over, whichever is first. What `tune` chooses is the matter of held_out.py. Float32.
"""

import argparse
import importlib.util
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Environment, RewardModel, engines, selectors
from ppl_bandit.simulation.datasets import is_stuck
from ppl_bandit.simulation.rollouts import rollout

LEVELS = np.round(np.arange(1, 20) * 0.05, 2)
NUM_STEPS = 1500
MODELS = Path(__file__).parents[2] / "models"


def bernoulli(num_arms):
    def program(arm):
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(1.0, 1.0))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return RewardModel(program, num_arms)


def bundled(name):
    spec = importlib.util.spec_from_file_location(name, MODELS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    facts = getattr(module, "context", None), getattr(module, "outcomes", ("reward",))
    return RewardModel(module.model, module.num_arms, *facts), getattr(module, "contexts", None)


def problems(num_arms):
    return np.array(list(itertools.combinations(LEVELS, num_arms)))


class Grid:
    """Compiled (key, runs of each problem, patience) -> regret and stuck, (problems, runs), per kind of selector."""

    def __init__(
        self,
        rates,
        rules,
        *,
        num_steps=NUM_STEPS,
        num_runs=16,
        num_samples=1000,
        engine=None,
        max_lanes=1 << 17,
        like=1.0,
    ):
        self.rates, self.num_runs = np.asarray(rates), num_runs
        model = bernoulli(self.rates.shape[1])
        engine = engines.conjugate(model) if engine is None else engine(model)
        self.num_part = max(1, min(len(self.rates), max_lanes // num_runs))

        def lower(rule):
            def one(key, rates, patience):
                world = Environment(model, {"rate": rates})
                ran, _, _ = rollout(
                    key, model, engine, rule(patience), world, num_steps=num_steps, num_samples=num_samples
                )
                return jnp.sum(ran.regret), is_stuck(ran.regret[None])[0]

            def run(key, first, rates, patience):
                def problem(number, rates):
                    keys = jr.split(jr.fold_in(key, number), num_runs)
                    return jax.vmap(one, in_axes=(0, None, None))(keys, rates, patience)

                return jax.vmap(problem)(first + jnp.arange(self.num_part), rates)

            zeros = jnp.zeros((self.num_part, self.rates.shape[1]))
            return jax.jit(run).lower(jr.key(0), jnp.asarray(0), zeros, jnp.asarray(like))

        began = time.time()
        lowered = {name: lower(rule) for name, rule in rules.items()}
        with ThreadPoolExecutor(16) as pool:
            self.compiled = dict(zip(lowered, pool.map(lambda low: low.compile(), lowered.values()), strict=True))
        print(f"{len(rules)} kinds for {self.rates.shape} compiled in {time.time() - began:.0f} s", flush=True)

    def play(self, kind, seed, patience=1.0):
        regret, stuck = [], []
        for first in range(0, len(self.rates), self.num_part):
            rates = self.rates[first : first + self.num_part]
            padded = np.resize(rates, (self.num_part, rates.shape[1]))
            found = self.compiled[kind](jr.key(seed), jnp.asarray(first), jnp.asarray(padded), jnp.asarray(patience))
            regret.append(np.asarray(found[0])[: len(rates)])
            stuck.append(np.asarray(found[1])[: len(rates)])
        return np.concatenate(regret), np.concatenate(stuck)


KINDS = {
    "ds": lambda p: selectors.double_sampling(),
    "ts": lambda p: selectors.thompson(),
    "bucb": lambda p: selectors.bayes_ucb(),
    "top-two": lambda p: selectors.top_two(),
    "ogi": lambda p: selectors.optimistic_gittins(NUM_STEPS, p),
    "ogi-learning": lambda p: selectors.optimistic_gittins(NUM_STEPS, p, 1.0),
    "ogi-root": lambda p: selectors.optimistic_gittins(NUM_STEPS, p, 0.5),
    "ogi-short": lambda p: selectors.optimistic_gittins(NUM_STEPS // 10, p),
    "ogi-long": lambda p: selectors.optimistic_gittins(NUM_STEPS * 10, p),
    "ids": lambda p: selectors.information_directed(),
}
POLICIES = {  # name -> kind, patience
    "double sampling": ("ds", 1.0),
    "Thompson": ("ts", 1.0),
    "Bayes-UCB": ("bucb", 1.0),
    "top-two": ("top-two", 1.0),
    "Gittins 1": ("ogi", 1.0),
    "Gittins .7": ("ogi", 0.7),
    "Gittins .5": ("ogi", 0.5),
    "Gittins 2, learning 1": ("ogi-learning", 2.0),
    "Gittins 4, learning .5": ("ogi-root", 4.0),
}
WRONG = {"Gittins 1, horizon / 10": ("ogi-short", 1.0), "Gittins 1, horizon x 10": ("ogi-long", 1.0)}


def summary(rates, found):
    """Statistics of {policy: (regret, stuck)}, each (problems, runs): all that the report needs, with the covariances."""
    names = list(found)
    regret = np.stack([found[name][0] for name in names]).astype(np.float64)  # policies, problems, runs
    centred = regret - regret.mean(axis=2, keepdims=True)
    num_runs = regret.shape[2]
    return {
        "names": np.array(names),
        "rates": rates,
        "num_runs": num_runs,
        "mean": regret.mean(axis=2),
        "covariance": np.einsum("apr,bpr->pab", centred, centred) / max(num_runs - 1, 1),
        "high": np.quantile(regret, 0.95, axis=2),
        "highest": np.quantile(regret, 0.99, axis=2),
        "stuck": np.stack([found[name][1].mean(axis=1) for name in names]),
    }


def rounds(grid, policies, seconds, most, path, begin=0):
    """Play rounds of all policies until the time or the number of runs is reached, and write partial results."""
    found = {name: [] for name in policies}
    began, written, done, longest = time.time(), time.time(), 0, 0.0
    while done < most and time.time() - began + 1.2 * longest < seconds or done == 0:
        start = time.time()
        for name, (kind, patience) in policies.items():
            started = time.time()
            found[name].append(grid.play(kind, begin + done, patience))
            if done == 0:
                print(f"  {name}: {time.time() - started:.1f} s", flush=True)
        done += grid.num_runs
        longest = max(longest, time.time() - start)
        if done == grid.num_runs:
            print(f"{path.stem}: {grid.num_runs} runs of {len(policies)} policies took {longest:.1f} s", flush=True)
        whole = {
            name: tuple(np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
            for name, parts in found.items()
        }
        if time.time() - written > 30.0:
            np.savez_compressed(path, **summary(grid.rates, whole))
            written = time.time()
    np.savez_compressed(path, **summary(grid.rates, whole))
    print(f"{path.stem}: {done} runs in {time.time() - began:.0f} s", flush=True)


GRIDS = {  # name -> problems, policies, realizations of a round, most that are played at once
    "pairs": (problems(2), POLICIES, 500, 1 << 17),
    "horizon": (problems(3), WRONG | {"Gittins 1": ("ogi", 1.0)}, 100, 1 << 17),
    "triples": (problems(3), {name: own for name, own in POLICIES.items() if name != "top-two"}, 100, 1 << 17),
    "top-two": (problems(3), {"top-two": ("top-two", 1.0)}, 100, 1 << 17),
    "directed": (problems(3), {"information-directed": ("ids", 1.0)}, 100, 1 << 17),
    "directed-pairs": (problems(2), {"information-directed": ("ids", 1.0)}, 500, 1 << 17),
}


def run_grid(arguments, out):
    wanted = arguments.grids.split(",")
    for number, name in enumerate(wanted):
        began = time.time()
        rates, policies, num_runs, most = GRIDS[name]
        grid = Grid(rates, {kind: KINDS[kind] for kind, _ in policies.values()}, num_runs=num_runs, max_lanes=most)
        left = arguments.seconds / (len(wanted) - number) - (time.time() - began)
        rounds(grid, policies, left, arguments.runs, out / f"{name}-{arguments.begin}.npz", arguments.begin)
        arguments.seconds -= time.time() - began


def run_table(arguments, out):
    """M draws against exact marginals; patience 1, four Bernoulli problems and worlds from two priors."""
    rows, num_steps = [], 1000
    cases, worlds = {}, {}
    for rates in ((0.4, 0.5), (0.1, 0.2), (0.4, 0.7, 0.8), (0.8, 0.9, 0.95)):
        name = f"Bernoulli {rates}"
        cases[name] = bernoulli(len(rates))
        worlds[name] = Environment(cases[name], {"rate": jnp.array(rates)})
    for name in ("gaussian", "poisson"):
        model, contexts = bundled(name)
        cases[name], worlds[name] = model, Environment.from_prior(model, contexts)
    work = {}
    for name, model in cases.items():
        engine = engines.conjugate(model)
        for num_samples in (None, 100, 1000, 10_000):
            chunk = {None: 4096, 100: 4096, 1000: 4096, 10_000: 1024}[num_samples]

            def one(key, model=model, engine=engine, world=worlds[name], num_samples=num_samples):
                own = (
                    engine
                    if num_samples is None
                    else engine._replace(capabilities=engine.capabilities._replace(marginals=None))
                )
                rule = selectors.optimistic_gittins(num_steps)
                ran, _, _ = rollout(key, model, own, rule, world, num_steps=num_steps, num_samples=num_samples or 1000)
                return jnp.sum(ran.regret)

            def run(key, chunk=chunk, one=one):
                return jax.vmap(one)(jr.split(key, chunk))

            work[name, num_samples] = jax.jit(run).lower(jr.key(0))
    with ThreadPoolExecutor(16) as pool:
        work = dict(zip(work, pool.map(lambda low: low.compile(), work.values()), strict=True))
    began = time.time()
    share = arguments.seconds / len(cases)
    for name in cases:
        for num_samples, weight in ((None, 0.1), (100, 0.1), (1000, 0.3), (10_000, 0.5)):
            parts, start = [], time.time()
            while time.time() - start < weight * share and len(parts) < 10:
                parts.append(np.asarray(work[name, num_samples](jr.key(len(parts)))))
            regret = np.concatenate(parts).astype(float)
            row = {"problem": name, "draws": num_samples, "runs": regret.size, "mean": regret.mean()}
            rows.append(row | {"error": regret.std() / regret.size**0.5, "seconds": time.time() - start})
            (out / "table.json").write_text(json.dumps(rows, indent=1))
    print(f"table: {time.time() - began:.0f} s", flush=True)


def run_change(arguments, out):
    """Rates (.4, .8) that become (.9, .2) half way, with a posterior that forgets and one that does not."""
    rows, num_steps, num_runs = [], 1500, 4096
    model = bernoulli(2)
    world = Environment(
        model, {"rate": jnp.array([0.4, 0.8])}, changes={num_steps // 2 + 1: {"rate": jnp.array([0.9, 0.2])}}
    )
    work = {}
    for discount in (1.0, 0.99):
        engine = engines.conjugate(model, discount=discount)
        for kind in ("ds", "ts", "bucb", "ogi"):

            def run(key, patience, engine=engine, kind=kind):
                def one(key):
                    return jnp.sum(
                        rollout(key, model, engine, KINDS[kind](patience), world, num_steps=num_steps)[0].regret
                    )

                return jax.vmap(one)(jr.split(key, num_runs))

            work[discount, kind] = jax.jit(run).lower(jr.key(0), jnp.asarray(1.0))
    with ThreadPoolExecutor(16) as pool:
        work = dict(zip(work, pool.map(lambda low: low.compile(), work.values()), strict=True))
    for (discount, kind), run in work.items():
        for patience in (1.0, 0.1) if kind == "ogi" else (1.0,):
            regret = np.asarray(run(jr.key(0), jnp.asarray(patience))).astype(float)
            row = {"discount": discount, "rule": f"Gittins {patience:g}" if kind == "ogi" else kind, "runs": num_runs}
            rows.append(
                row
                | {"mean": regret.mean(), "error": regret.std() / num_runs**0.5, "highest": np.quantile(regret, 0.99)}
            )
            (out / "change.json").write_text(json.dumps(rows, indent=1))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["grid", "table", "change", "report"])
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--begin", type=int, default=0, help="of `grid`: continue at this realization")
    parser.add_argument("--grids", default=",".join(GRIDS), help="of `grid`: which (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("map-of-selectors"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    parts = {"grid": run_grid, "table": run_table, "change": run_change}
    if arguments.part == "report":
        from map_report import report

        report(arguments.out)
        return
    parts[arguments.part](arguments, arguments.out)


if __name__ == "__main__":
    main()
