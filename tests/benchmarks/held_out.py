"""Does what `tune` chooses hold up in worlds that it has not seen? Six programs, three horizons, and priors that are wrong.

    python tests/benchmarks/held_out.py --programs poisson,gaussian --horizons 100,1000 --out results
    python tests/benchmarks/held_out.py --report --out results

Every candidate plays the worlds of a race, judged in hindsight as `tune` does, and worlds held out, judged by their truths; at
1,000 decisions also worlds whose prior is three times as wide, and a third as wide, as the one that the bandit believes. All
worlds of a case and all candidates that differ in numbers alone are one batch of one compiled function: on a GPU ten thousand
steps take as long for one world as for thousands. The library's own race then looks at the worlds in its own rounds. Float32.
"""

import argparse
import contextlib
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

from ppl_bandit import Environment, RewardModel, engines
from ppl_bandit.commands.model_files import load_model
from ppl_bandit.simulation.hindsight import judge
from ppl_bandit.simulation.players import kinds_of
from ppl_bandit.simulation.races import finish
from ppl_bandit.simulation.records import is_stuck
from ppl_bandit.simulation.rollouts import rollout_to_end
from ppl_bandit.simulation.tune import candidates, race

SURE = "bernoulli_sure"  # believes in Beta(13, 13), a third as wide as the Beta(1, 1) that its worlds come from
PROGRAMS = ("bernoulli", SURE, "poisson", "gaussian", "linear_gaussian", "hurdle", "hierarchical_gaussian")
WIDER = {  # a world of the program's own prior, and a factor -> one of a prior that is as many times as wide
    "bernoulli": lambda world, by: {"rate": 0.5 + by * (world["rate"] - 0.5)},
    "poisson": lambda world, by: {"rate": by * world["rate"]},
    "gaussian": lambda world, by: world | {"mean": by * world["mean"]},
    "linear_gaussian": lambda world, by: world | {"weights": 1.0 + by * (world["weights"] - 1.0)},
    "hurdle": lambda world, by: world | {"order_value": by * world["order_value"]},
    "hierarchical_gaussian": lambda world, by: {name: by * value for name, value in world.items()},
}
RACE, NUM_TRUTHS, WRONG_AT = 512, 32, 1000  # worlds of a race, truths of a history, decisions at which priors are wrong


def sure(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(13.0, 13.0))
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


def worlds_of(name, model):
    """{what the worlds are to the bandit's prior: key -> a truth}."""

    def own(key):
        return {site: value[0] for site, value in model.sample_prior(key, 1).items()}

    if name == SURE:
        return {"own": own, "wide": lambda key: {"rate": jr.uniform(key, (3,))}}
    found = {"own": own}
    if name in WIDER:
        found["narrow"] = lambda key: WIDER[name](own(key), 1 / 3)
    if name in WIDER and name != "bernoulli":  # nothing is wider than rates of Beta(1, 1) by three
        found["wide"] = lambda key: WIDER[name](own(key), 3.0)
    return found


class Played:
    """Worlds that all candidates have played already, as the player that the library's `race` asks for them.

    Args:
        found: {name: (regret, is_stuck), each (worlds, truths)}.
    """

    num_chunk, num_workers = 16, 1  # as on a CPU, so that the race begins with 32 worlds

    def __init__(self, found):
        self._found = found

    def working(self):
        return contextlib.nullcontext()

    def prepare(self, named):
        pass

    def worlds(self, named, begin, end):
        return {name: tuple(part[begin:end] for part in self._found[name]) for name in named}


class Case:
    """A program and a horizon, with every kind of candidate compiled for `num_lanes` worlds at a time."""

    def __init__(self, name, horizon, num_lanes, without=()):
        file = None if name == SURE else load_model(name)
        if file is None:
            self.model, contexts = RewardModel(sure, 3), None
        else:
            self.model = RewardModel(file.program, file.num_arms, file.context, file.outcomes)
            contexts = file.contexts
        is_exact = name != "logistic"
        engine = engines.conjugate(self.model) if is_exact else engines.laplace(self.model, capacity=horizon)
        named = candidates(self.model, engine, horizon)
        self.named = {rule: selector for rule, selector in named.items() if rule not in without}
        self.worlds, self.num_lanes = worlds_of(name, self.model), num_lanes
        model = self.model

        def one(key, truth, kind, numbers):
            world = Environment(model, truth, contexts)
            numbers = {"num_steps": horizon, "num_samples": 1000, "selector": kind.make(numbers)}
            record, seen, state = rollout_to_end(key, model, engine, environment=world, **numbers)
            own = jnp.sum(record.regret)[None], is_stuck(record.regret[None])
            if not is_exact:
                return own, own
            truths = engine.sample(jr.fold_in(key, 3), state, NUM_TRUTHS)
            return own, judge(model, truths, record.arm, seen)

        def lower(kind):
            def run(keys, truths, numbers):
                lanes = jax.vmap(lambda key, truth, own: one(key, truth, kind, own), in_axes=(0, 0, None))
                return jax.vmap(lanes, in_axes=(None, None, 0))(keys, truths, numbers)

            keys = self._keys(0, num_lanes)
            truths = self._truths("own", keys)
            return jax.jit(run).lower(keys, truths, jnp.asarray(list(kind.numbers.values())))

        self._kinds = kinds_of(list(self.named.values()))
        lowered = [lower(kind) for kind in self._kinds]
        with ThreadPoolExecutor(8) as pool:
            self._compiled = list(pool.map(lambda low: low.compile(), lowered))

    def play(self, wanted):
        """Play {label: (worlds, seed, number)} and return {label: {name: (judged by its truth, judged in hindsight)}}."""
        keys = [self._keys(seed, num) for _, seed, num in wanted.values()]
        truths = [self._truths(worlds, own) for own, (worlds, _, _) in zip(keys, wanted.values(), strict=True)]
        total = sum(num for _, _, num in wanted.values())
        keys, truths = jnp.concatenate(keys), jax.tree.map(lambda *parts: jnp.concatenate(parts), *truths)
        found = {}
        for kind, run in zip(self._kinds, self._compiled, strict=True):
            began, parts = time.time(), []
            for first in range(0, total, self.num_lanes):
                rows = np.arange(first, first + self.num_lanes) % total
                given = jax.tree.map(lambda leaf, rows=rows: leaf[rows], (keys, truths))
                parts.append(jax.device_get(run(*given, jnp.asarray(list(kind.numbers.values())))))
            joined = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1)[:, :total], *parts)
            for number, selector in enumerate(kind.numbers):
                rule = next(name for name, other in self.named.items() if id(other) == selector)
                found[rule] = jax.tree.map(lambda leaf, number=number: leaf[number], joined)
            print(f"  {len(kind.numbers)} of {rule}: {time.time() - began:.1f} s", flush=True)
        ends = np.cumsum([num for _, _, num in wanted.values()])
        spans = {label: slice(end - num, end) for end, (label, (_, _, num)) in zip(ends, wanted.items(), strict=True)}
        return {
            label: {rule: jax.tree.map(lambda leaf, span=span: leaf[span], found[rule]) for rule in self.named}
            for label, span in spans.items()
        }

    def _keys(self, seed, num):
        return jax.vmap(lambda number: jr.fold_in(jr.key(seed), number))(jnp.arange(num))

    def _truths(self, worlds, keys):
        return jax.jit(jax.vmap(lambda key: self.worlds[worlds](jr.fold_in(key, 2))))(keys)  # as a rollout would


def tuned(case, horizon, found):
    """Let the library's race look at worlds that were played, and choose."""
    begun, judged = time.time(), {rule: tuple(np.float64(part) for part in both[1]) for rule, both in found.items()}
    lanes = race(Played(judged), case.named, "mean", RACE, 0.06, lambda line: None)
    return finish(lanes, "mean", horizon, time.time() - begun)


def compare(found, best):
    """How each rule fared on held-out worlds, and how far it is behind the chosen one: by truths, and in hindsight."""
    rows, chosen = [], [np.float64(both[0]).mean(axis=1) for both in found[best]]
    for rule, both in found.items():
        regret, judged = (np.float64(part[0]).mean(axis=1) for part in both)
        row = {"rule": rule, "is_chosen": rule == best, "worlds": regret.size, "mean": regret.mean()}
        row |= {"error": _error(regret), "behind": (regret - chosen[0]).mean()}
        row |= {"behind_error": _error(regret - chosen[0]), "hindsight": judged.mean()}
        row |= {"hindsight_behind": (judged - chosen[1]).mean(), "hindsight_error": _error(judged - chosen[1])}
        row |= {"high": np.quantile(regret, 0.95), "highest": np.quantile(regret, 0.99)}
        row |= {"stuck": both[0][1].mean(), "heaviest": regret.max() / regret.sum()}
        rows.append({name: value if isinstance(value, str | bool) else float(value) for name, value in row.items()})
    return rows


def _error(values):
    return values.std() / values.size**0.5


def run_case(name, horizon, arguments):
    start, label = time.time(), f"{name}-{horizon}"
    num, most = arguments.worlds, arguments.lanes
    has_wrong = horizon == WRONG_AT and name in (*WIDER, SURE)
    wanted = {"race": ("own", 0, RACE), "own": ("own", 1, num)}
    if has_wrong:
        wanted |= {wrong: (wrong, 2, num) for wrong in worlds_of(name, None) if wrong != "own"}
    total = sum(own for _, _, own in wanted.values())
    case = Case(name, horizon, -(-total // -(-total // most)), tuple(arguments.without.split(",")))
    print(f"{label}: {len(case.named)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    found = case.play(wanted)
    answer = tuned(case, horizon, found["race"])
    races = []  # how the choice varies: further races, on parts of the held-out worlds
    for first in range(0, num - RACE + 1, RACE):
        span = slice(first, first + RACE)
        other = tuned(case, horizon, jax.tree.map(lambda leaf, span=span: leaf[span], found["own"]))
        races.append([other.name, other.standings[0].num_worlds])
    result = {"program": name, "horizon": horizon, "chosen": answer.name, "race": answer.standings[0].num_worlds}
    result |= {"races": races, "seconds": time.time() - start}
    result["standings"] = [standing._asdict() for standing in answer.standings]
    result["held"] = {worlds: compare(found[worlds], answer.name) for worlds in wanted if worlds != "race"}
    (arguments.out / f"{label}.json").write_text(json.dumps(result, indent=1, default=float))
    kept = {f"{worlds}/{rule}/truth": both[0][0] for worlds in found for rule, both in found[worlds].items()}
    kept |= {f"own/{rule}/hindsight": both[1][0].mean(axis=1) for rule, both in found["own"].items()}
    kept |= {f"race/{rule}/hindsight": both[1][0] for rule, both in found["race"].items()}
    np.savez_compressed(arguments.out / f"{label}.npz", **kept)
    print(f"{label}: {answer.name} after {result['race']} worlds; {time.time() - start:.0f} s", flush=True)


def report(out):
    """Print a row a case: what was chosen, and the best other rule on the worlds held out."""
    heads = [
        "program",
        "horizon",
        "worlds of",
        "chosen",
        "race",
        "worlds",
        "regret",
        "best other",
        "behind",
        "hindsight",
    ]
    print("| " + " | ".join(heads) + " |\n|" + " --- |" * len(heads))
    for path in sorted(out.glob("*-*.json")):
        result = json.loads(path.read_text())
        for worlds, rows in result["held"].items():
            chosen = next(row for row in rows if row["is_chosen"])
            other = min((row for row in rows if not row["is_chosen"]), key=lambda row: row["mean"])
            judged = f"{other['hindsight_behind']:+.3g} +- {other['hindsight_error']:.2g}" if worlds == "own" else ""
            clear = [row["rule"] for row in rows if row["behind"] < -2 * row["behind_error"]]
            cells = [result["program"], result["horizon"], worlds, result["chosen"], result["race"], chosen["worlds"]]
            cells += [f"{chosen['mean']:.4g} +- {chosen['error']:.2g}", other["rule"]]
            cells += [f"{other['behind']:+.3g} +- {other['behind_error']:.2g}", judged, "; ".join(clear)]
            print("| " + " | ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in cells) + " |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--horizons", default="1000,100,10000")
    parser.add_argument("--worlds", type=int, default=4096, help="worlds held out (%(default)s)")
    parser.add_argument("--lanes", type=int, default=1 << 14, help="worlds that are played together (%(default)s)")
    parser.add_argument("--without", default="", help="candidates that are left out")
    parser.add_argument("--out", type=Path, default=Path("held-out"))
    parser.add_argument("--report", action="store_true", help="print what is there")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        report(arguments.out)
        return
    for horizon in (int(word) for word in arguments.horizons.split(",")):
        for name in arguments.programs.split(","):
            if name != SURE or horizon == WRONG_AT:
                run_case(name, horizon, arguments)


if __name__ == "__main__":
    main()
