"""Is the selector that `tune` chooses good in new worlds? Six programs, three horizons, and priors that are wrong.

    python tests/benchmarks/held_out.py --programs poisson,gaussian --horizons 100,1000 --out results
    python tests/benchmarks/held_out.py --rules information-directed --out results       # adds a candidate
    python tests/benchmarks/held_out.py --report --out results

Every candidate plays worlds to choose from, judged by posterior regret as in `tune`, and held-out worlds, judged by
their truths; at 1,000 decisions also worlds whose prior is three times as wide, and a third as wide, as the bandit's. All
worlds and all candidates of a group are one batch of one compiled function: on a GPU ten thousand steps take as long for one
world as for thousands. The library then chooses from parts of these worlds. Float32.
"""

import argparse
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
from ppl_bandit.commands.model_files import ModelFile, load_model
from ppl_bandit.simulation.candidate_runs import group_selectors
from ppl_bandit.simulation.datasets import is_stuck
from ppl_bandit.simulation.posterior_regret import posterior_regret
from ppl_bandit.simulation.rollouts import rollout
from ppl_bandit.simulation.standings import CandidateRegret, choose_candidate
from ppl_bandit.simulation.tune import candidates

PROGRAMS = ["bernoulli", "bernoulli_sure", "poisson", "gaussian", "linear_gaussian", "hurdle", "hierarchical_gaussian"]
WIDER = {  # a world of the program's own prior, and a factor -> one of a prior that is as many times as wide
    "bernoulli": lambda world, by: {"rate": 0.5 + by * (world["rate"] - 0.5)},
    "poisson": lambda world, by: {"rate": by * world["rate"]},
    "gaussian": lambda world, by: world | {"mean": by * world["mean"]},
    "linear_gaussian": lambda world, by: world | {"weights": 1.0 + by * (world["weights"] - 1.0)},
    "hurdle": lambda world, by: world | {"order_value": by * world["order_value"]},
    "hierarchical_gaussian": lambda world, by: {name: by * value for name, value in world.items()},
}
RACE, NUM_TRUTHS, WRONG_AT = 1024, 32, 1000  # worlds to choose from, truths of a history, horizon with wrong priors


def sure(arm):
    with numpyro.plate("arms", 3):
        rate = numpyro.sample("rate", dist.Beta(13.0, 13.0))  # a third as wide as Beta(1, 1)
    numpyro.sample("reward", dist.Bernoulli(rate[arm]))


FILES = {"bernoulli_sure": ModelFile("bernoulli_sure", Path(__file__), sure, 3)}  # programs that are not bundled
AS_WIDE_AS_CAN_BE = ["bernoulli"]


def worlds_of(name, model):
    """{what the worlds are to the bandit's prior: key -> a truth}."""

    def own(key):
        return {site: value[0] for site, value in model.sample_prior(key, 1).items()}

    found = {"own": own}
    if name == "bernoulli_sure":
        found["wide"] = lambda key: {"rate": jr.uniform(key, (3,))}
    if name in WIDER:
        found["narrow"] = lambda key: WIDER[name](own(key), 1 / 3)
    if name in WIDER and name not in AS_WIDE_AS_CAN_BE:
        found["wide"] = lambda key: WIDER[name](own(key), 3.0)
    return found


def setup(name, horizon):
    """The program's model, contexts and engine, and tune's candidates for it."""
    file = FILES[name] if name in FILES else load_model(name)
    model, contexts = RewardModel(file.program, file.num_arms, file.context, file.outcomes), file.contexts
    engine = engines.laplace(model, capacity=horizon) if name == "logistic" else engines.conjugate(model)
    return model, contexts, engine, candidates(model, engine, horizon)


class Case:
    """A program and a horizon, with every kind of candidate compiled for `num_lanes` worlds at a time."""

    def __init__(self, name, horizon, num_lanes, rules=()):
        model, contexts, engine, named = setup(name, horizon)
        self.named = {rule: named[rule] for rule in rules or named}
        self.worlds, self.num_lanes = worlds_of(name, model), num_lanes
        is_exact = engine.explanation.is_exact

        def one(key, truth, kind, numbers):
            world, selector = Environment(model, truth, contexts), kind.make(numbers)
            record, seen, state = rollout(key, model, engine, selector, world, num_steps=horizon, num_samples=1000)
            own = jnp.sum(record.regret)[None], is_stuck(record.regret[None])
            if not is_exact:
                return own, own
            truths = engine.sample(jr.fold_in(key, 3), state, NUM_TRUTHS)
            return own, posterior_regret(model, truths, record.arm, seen)

        def lower(kind):
            def run(keys, truths, numbers):
                lanes = jax.vmap(lambda key, truth, own: one(key, truth, kind, own), in_axes=(0, 0, None))
                return jax.vmap(lanes, in_axes=(None, None, 0))(keys, truths, numbers)

            keys = self._keys(0, num_lanes)
            truths = self._truths("own", keys)
            return jax.jit(run).lower(keys, truths, jnp.asarray(list(kind.numbers.values())))

        self._kinds = group_selectors(self.named)
        lowered = [lower(kind) for kind in self._kinds]
        with ThreadPoolExecutor(8) as pool:
            self._compiled = list(pool.map(lambda low: low.compile(), lowered))

    def play(self, wanted):
        """Play {label: (worlds, seed, number)} and return {label: {name: (regret under its truth, posterior regret)}}."""
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
            for number, rule in enumerate(kind.numbers):
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


def run_case(name, horizon, arguments):
    start, label, num = time.time(), f"{name}-{horizon}", arguments.worlds
    wanted = {"race": ("own", 0, RACE), "own": ("own", 1, num)}
    if horizon == WRONG_AT:
        wanted |= {wrong: (wrong, 2, num) for wrong in worlds_of(name, None) if wrong != "own"}
    total = sum(own for _, _, own in wanted.values())
    rules = [rule for rule in arguments.rules.split(";") if rule]
    case = Case(name, horizon, -(-total // -(-total // arguments.lanes)), rules)
    print(f"{label}: {len(case.named)} candidates compiled in {time.time() - start:.0f} s", flush=True)
    found = case.play(wanted)
    kept = {f"{worlds}/{rule}/truth": both[0][0] for worlds in found for rule, both in found[worlds].items()}
    kept |= {f"own/{rule}/hindsight": both[1][0].mean(axis=1) for rule, both in found["own"].items()}
    kept |= {f"race/{rule}/hindsight": both[1][0] for rule, both in found["race"].items()}
    path = arguments.out / f"{label}.npz"
    before = dict(np.load(path)) if rules and path.exists() else {}
    np.savez_compressed(path, **before | kept)
    print(f"{label}: {time.time() - start:.0f} s", flush=True)


def report(out):
    """Let the library choose, and print the regret of its choice and of all rules on the held-out worlds."""
    excess = {}
    for worlds in ("own", "narrow", "wide"):
        heads = "program | decisions | chosen | worlds | regret | best other | behind"
        heads += " | best other in hindsight | behind" if worlds == "own" else ""
        heads += " | ahead by more than two standard errors"
        print(f"\n## worlds: {worlds}\n\n| {heads} |\n|" + " --- |" * (heads.count("|") + 1))
        for path in sorted(out.glob("*-*.npz"), key=_place):
            name, horizon = path.stem.rsplit("-", 1)
            data = dict(np.load(path))
            if f"{worlds}/greedy/truth" not in data:
                continue
            choices = chosen(data, setup(name, int(horizon))[3], int(horizon))
            rules = [key.split("/")[1] for key in data if key.startswith(f"{worlds}/") and key.endswith("truth")]
            truth = {rule: data[f"{worlds}/{rule}/truth"][:, 0].astype(float) for rule in rules}
            judged = {rule: data.get(f"{worlds}/{rule}/hindsight", truth[rule]).astype(float) for rule in rules}
            best = choices[0]
            cells = [name, horizon, best, truth[best].size]
            cells += [f"{truth[best].mean():.4g} +- {_error(truth[best]):.2g}"]
            for found in (truth, judged) if worlds == "own" else (truth,):
                other = min((rule for rule in rules if rule != best), key=lambda rule, found=found: found[rule].mean())
                behind = found[other] - found[best]
                cells += [other, f"{behind.mean():+.2g} +- {_error(behind):.2g}"]
            behind = {rule: truth[rule] - truth[best] for rule in rules if rule != best}
            cells += ["; ".join(rule for rule, lead in behind.items() if lead.mean() < -2 * _error(lead))]
            print("| " + " | ".join(str(cell) for cell in cells) + " |")
            least = min(value.mean() for value in judged.values())
            above = {rule: 100 * (judged[rule].mean() / least - 1) for rule in rules}
            above["tune"] = np.mean([above[rule] for rule in choices])
            for rule, value in above.items():
                excess.setdefault(rule, {}).setdefault(worlds, []).append(value)
    print("\n## regret above that of the best candidate of each case, %: mean (largest; cases)\n")
    print("| | own | narrow | wide |\n| --- | --- | --- | --- |")
    for rule, found in sorted(excess.items(), key=lambda item: np.mean(item[1]["own"])):
        cells = [
            f"{np.mean(v):.1f} ({max(v):.0f}; {len(v)})"
            for v in (found.get(w, [np.nan]) for w in ("own", "narrow", "wide"))
        ]
        print(f"| {rule} | " + " | ".join(cells) + " |")


def chosen(data, named, horizon, num_choices=4):
    """Return the library's choices from as many parts of the worlds."""
    parts = {rule: np.split(data[f"race/{rule}/hindsight"].astype(float), num_choices) for rule in named}
    choices = []
    for number in range(num_choices):
        regrets = {
            rule: CandidateRegret(rule, named[rule], part[number], np.zeros(part[number].shape, bool))
            for rule, part in parts.items()
        }
        choices.append(choose_candidate(regrets, "mean", horizon, 0.0).name)
    return choices


def _place(path):
    name, horizon = path.stem.rsplit("-", 1)
    return PROGRAMS.index(name) if name in PROGRAMS else len(PROGRAMS), name, int(horizon)


def _error(values):
    return values.std() / values.size**0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--horizons", default="1000,100,10000")
    parser.add_argument("--worlds", type=int, default=4096, help="worlds held out (%(default)s)")
    parser.add_argument("--lanes", type=int, default=1 << 14, help="worlds that are simulated at once (%(default)s)")
    parser.add_argument("--rules", default="", help="candidates to play, by name, separated by ';' (all)")
    parser.add_argument("--out", type=Path, default=Path("held-out"))
    parser.add_argument("--report", action="store_true", help="print the results")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        report(arguments.out)
        return
    for horizon in (int(word) for word in arguments.horizons.split(",")):
        for name in arguments.programs.split(","):
            if name != "bernoulli_sure" or horizon == WRONG_AT:  # used for its wrong prior only
                run_case(name, horizon, arguments)


if __name__ == "__main__":
    main()
