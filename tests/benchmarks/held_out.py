"""Is the selector that `tune` chooses good in new worlds? Eleven programs, several horizons, and priors that are wrong.

    python tests/benchmarks/held_out.py --programs poisson,gaussian --horizons 100,1000 --out results
    python tests/benchmarks/held_out.py --programs gaussian8,linear4 --horizons 1000,300 --out further
    python tests/benchmarks/held_out.py --report --out results

Every candidate of `tune` plays worlds to choose from, judged in hindsight as there, and held-out worlds, judged both in
hindsight and by their truths; at 1,000 decisions also worlds whose prior is three times as wide, and a third as wide, as the
bandit's. The library then chooses from parts of the first worlds. Meant for a GPU; float32.
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Environment, engines
from ppl_bandit.display.terminal import markdown_table
from ppl_bandit.journal.model_files import ModelFile, load_model
from ppl_bandit.simulation.standings import CandidateRegret, choose_candidate, standard_error
from ppl_bandit.simulation.tune import candidates, simulate_candidates

PROGRAMS = ["bernoulli", "bernoulli_sure", "poisson", "gaussian", "linear_gaussian", "hurdle", "hierarchical_gaussian"]
RACE, WRONG_AT, NUM_DRAWS = (
    1024,
    1000,
    1 << 14,
)  # worlds to choose from; horizon with wrong priors; worlds of a wrong prior


def bernoulli_arms(num_arms, a, b):
    def program(arm):
        with numpyro.plate("arms", num_arms):
            rate = numpyro.sample("rate", dist.Beta(a, b))
        numpyro.sample("reward", dist.Bernoulli(rate[arm]))

    return program


def gaussian8(arm):
    with numpyro.plate("arms", 8):
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        mean = numpyro.sample("mean", dist.Normal(1.0, 0.5 * jnp.sqrt(variance)))
    numpyro.sample("reward", dist.Normal(mean[arm], jnp.sqrt(variance[arm])))


def linear4(arm, context):
    with numpyro.plate("arms", 4):
        variance = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(3), jnp.sqrt(variance)[:, None]).to_event(1))
    numpyro.sample("reward", dist.Normal(jnp.sum(weights[arm] * context, axis=-1), jnp.sqrt(variance[arm])))


def features(key):
    return jnp.concatenate([jnp.ones(1), jax.random.normal(key, (2,))])


def poisson6(arm):
    with numpyro.plate("arms", 6):
        rate = numpyro.sample("rate", dist.Gamma(1.0, 0.5))
    numpyro.sample("reward", dist.Poisson(rate[arm]))


HERE = Path(__file__)
# Programs that are not bundled. The first is a third as wide as Beta(1, 1); the others were not used to design `tune`.
FILES = {
    "bernoulli_sure": ModelFile("bernoulli_sure", HERE, bernoulli_arms(3, 13.0, 13.0), 3),
    "gaussian8": ModelFile("gaussian8", HERE, gaussian8, 8),
    "linear4": ModelFile("linear4", HERE, linear4, 4, jnp.array([1.0, 0.2, -0.3]), contexts=features),
    "poisson6": ModelFile("poisson6", HERE, poisson6, 6),
    "bernoulli10": ModelFile("bernoulli10", HERE, bernoulli_arms(10, 1.0, 9.0), 10),
}


def scaled(**centres):
    """Return (draws, factor) -> draws that lie as many times as far from the centres of these sites."""
    return lambda draws, by: draws | {name: at + by * (draws[name] - at) for name, at in centres.items()}


WIDER = {  # draws of the program's own prior, and a factor -> draws of one that is as many times as wide
    "bernoulli": scaled(rate=0.5),
    "poisson": scaled(rate=0.0),
    "gaussian": scaled(mean=0.0),
    "linear_gaussian": scaled(weights=1.0),
    "hurdle": scaled(order_value=0.0),
    "hierarchical_gaussian": lambda draws, by: {name: by * value for name, value in draws.items()},
    "exponential": lambda draws, by: {"rate": draws["rate"] / by},
    "gaussian8": scaled(mean=1.0),
    "linear4": scaled(weights=0.0),
    "poisson6": scaled(rate=0.0),
    "bernoulli10": scaled(rate=0.0),
}
AS_WIDE_AS_CAN_BE = ("bernoulli", "bernoulli10")


def setup(name, horizon):
    """Return the program's model, contexts and engine, and tune's candidates for it."""
    file = FILES[name] if name in FILES else load_model(name)
    model = file.reward_model()
    engine = engines.laplace(model, capacity=horizon) if name == "logistic" else engines.conjugate(model)
    return model, file.contexts, engine, candidates(model, engine, horizon)


def wrong_worlds(name, model, contexts):
    """Return {how the worlds are to the bandit's prior: environment}."""
    draws, found = model.sample_prior(jr.key(9), NUM_DRAWS), {}
    if name == "bernoulli_sure":
        found["wide"] = {"rate": jr.uniform(jr.key(9), (NUM_DRAWS, 3))}
    if name in WIDER:
        found["narrow"] = WIDER[name](draws, 1 / 3)
    if name in WIDER and name not in AS_WIDE_AS_CAN_BE:
        found["wide"] = WIDER[name](draws, 3.0)
    return {how: Environment.from_draws(model, own, contexts) for how, own in found.items()}


def run_case(name, horizon, arguments):
    """Play all candidates and write {worlds/candidate: regret}, (worlds,); of the race, (worlds, truths)."""
    start, label, num = time.time(), f"{name}-{horizon}", arguments.worlds
    model, contexts, engine, named = setup(name, horizon)
    own = Environment.from_prior(model, contexts)
    wanted = {"race": (own, 0, RACE, None), "own": (own, 1, num, 1), "hindsight": (own, 1, num, None)}
    if horizon == WRONG_AT:
        wanted |= {how: (worlds, 2, num, 1) for how, worlds in wrong_worlds(name, model, contexts).items()}
    kept = {}
    for worlds, (environment, seed, num_worlds, num_truths) in wanted.items():
        sizes = {"num_steps": horizon, "num_worlds": num_worlds, "num_truths": num_truths}
        found = simulate_candidates(named, model, engine, environment, **sizes, num_samples=1000, seed=seed, say=print)
        for rule, one in found.items():
            kept[f"{worlds}/{rule}"] = one.regret if worlds == "race" else one.regret.mean(axis=1)
        print(f"{label}, {worlds}: after {time.time() - start:.0f} s", flush=True)
    np.savez_compressed(arguments.out / f"{label}.npz", **kept)


def report(out):
    """Let the library choose, and print the regret of its choice and of all rules on the held-out worlds."""
    excess = {}
    for worlds in ("own", "narrow", "wide"):
        heads = ["program", "decisions", "chosen", "regret", "best other", "behind"]
        heads += ["best other in hindsight", "behind"] if worlds == "own" else []
        rows = []
        for path in sorted(out.glob("*-*.npz"), key=_place):
            name, horizon = path.stem.rsplit("-", 1)
            data = dict(np.load(path))
            truth, judged = (
                {key.split("/")[1]: own for key, own in data.items() if key.startswith(f"{what}/")}
                for what in (worlds, "hindsight" if worlds == "own" else worlds)
            )
            if not truth:
                continue
            choices = chosen(data, setup(name, int(horizon))[3], int(horizon))
            best = choices[0]
            cells = [name, horizon, best, f"{truth[best].mean():.4g} +- {standard_error(truth[best]):.2g}"]
            for found in (truth, judged) if worlds == "own" else (truth,):
                other = min((rule for rule in found if rule != best), key=lambda rule, found=found: found[rule].mean())
                behind = found[other] - found[best]
                cells += [other, f"{behind.mean():+.2g} +- {standard_error(behind):.2g}"]
            gaps = {rule: own - truth[best] for rule, own in truth.items() if rule != best}
            ahead = [rule for rule, gap in gaps.items() if gap.mean() < -2 * standard_error(gap)]
            rows.append([*cells, "; ".join(ahead)])
            least = min(value.mean() for value in judged.values())
            above = {rule: 100 * (own.mean() / least - 1) for rule, own in judged.items()}
            above["tune"] = np.mean([above[rule] for rule in choices])
            for rule, value in above.items():
                excess.setdefault(rule, {}).setdefault(worlds, []).append(value)
        table = markdown_table([*heads, "ahead by more than two standard errors"], rows)
        print(f"\n## worlds: {worlds}\n\n{table}")
    print("\n## regret above that of the best candidate of each case, %: mean (largest; cases)\n")
    rows = []
    for rule, found in sorted(excess.items(), key=lambda item: np.mean(item[1]["own"])):
        values = [found.get(worlds, [np.nan]) for worlds in ("own", "narrow", "wide")]
        rows.append([rule, *(f"{np.mean(own):.1f} ({max(own):.0f}; {len(own)})" for own in values)])
    print(markdown_table(["", "own", "narrow", "wide"], rows))


def chosen(data, named, horizon, num_choices=4):
    """Return the library's choices from as many parts of the worlds."""
    parts = {rule: np.split(data[f"race/{rule}"], num_choices) for rule in named}
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default=",".join(PROGRAMS))
    parser.add_argument("--horizons", default="1000,100,10000")
    parser.add_argument("--worlds", type=int, default=4096, help="worlds held out (%(default)s)")
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
