"""Is there one rule that beats all others everywhere? Tuned on the paper's 171 pairs, reported on its 969 triples, on a GPU.

    python tests/benchmarks/map_of_rules.py --seconds 400 --out results

Variants of the optimistic Gittins index (patience and learning; a floor that decays; a patience that shrinks where the arms'
means are further apart than their posteriors are wide) and of double sampling (p-hat sharpened as the horizon comes near) play
all pairs beside double sampling, Thompson sampling and Bayes-UCB, with common random numbers. Of each family the best on the
pairs goes on to the triples: by mean regret, by the number of pairs on which it is worse than one of the three, and by mean
regret among those whose 99th percentile is no higher than Thompson's.
"""

import argparse
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from map_of_selectors import KINDS, NUM_STEPS, Grid, problems, rounds

from ppl_bandit import selectors
from ppl_bandit.selectors.optimistic_gittins import gittins_index
from ppl_bandit.selectors.selector_contract import RuleInputs, make_selector
from ppl_bandit.selectors.winner_frequencies import draw_arm, is_largest, share_equally

RIVALS = {"double sampling": ("ds", (1.0, 0.0)), "Thompson": ("ts", (1.0, 0.0)), "Bayes-UCB": ("bucb", (1.0, 0.0))}


def sharpened(p):
    """Play arms in proportion to p-hat to a power that grows from p[0], as (horizon / decisions left)^p[1]."""

    def rule(key, inputs: RuleInputs):
        left = jnp.maximum(NUM_STEPS - inputs.step + 1, 1)
        log_probs = jnp.log(jnp.maximum(inputs.best_arm_probs, jnp.finfo(jnp.float32).tiny))
        scores = jnp.where(inputs.allowed, p[0] * (NUM_STEPS / left) ** p[1] * log_probs, -jnp.inf)
        shares = jnp.exp(scores - scores.max())
        shares = shares / shares.sum()
        return draw_arm(key, shares), jnp.asarray(0), shares

    return make_selector(rule, name="sharpened", reads_table=False, is_exact=True)


def by_spread(p):
    """The index with a patience that shrinks where the arms' means are further apart than their posteriors are wide."""

    def score(marginals, step):
        tail, counts = marginals.tail(), marginals.pseudo_counts()
        width = jnp.mean(tail.mean * (1.0 - tail.mean) / (counts + 1.0))
        left = jnp.where(step < NUM_STEPS, p[0] * (NUM_STEPS - step + 1) / counts ** p[1], 0.0)
        return gittins_index(tail, left * width / (width + jnp.var(tail.mean)))

    def rule(key, inputs: RuleInputs):
        shares = share_equally(is_largest(inputs.scores, inputs.allowed, rounding=64.0), jnp.float32)
        return draw_arm(key, shares), jnp.asarray(0), shares

    return make_selector(rule, name="by_spread", score=score, reads_table=False)


def floored(floor, decay):
    return lambda p: selectors.with_limits(
        selectors.optimistic_gittins(NUM_STEPS, p[0], p[1]), floors=floor, decay=decay
    )


RULES = {
    **{kind: KINDS[kind] for kind in ("ds", "ts", "bucb")},
    "gittins": lambda p: selectors.optimistic_gittins(NUM_STEPS, p[0], p[1]),
    "floor .1/t": floored(0.1, 1.0),
    "floor .3/t": floored(0.3, 1.0),
    "floor .02/sqrt(t)": floored(0.02, 0.5),
    "sharpened": sharpened,
    "by spread": by_spread,
}
BOTH = [(patience, learning) for learning in (0.0, 0.5, 1.0) for patience in (0.5, 1.0, 2.0, 4.0, 8.0)]
LADDERS = {
    "gittins": BOTH,
    "floor .1/t": [(1.0, 0.0), (2.0, 1.0)],
    "floor .3/t": [(1.0, 0.0), (2.0, 1.0)],
    "floor .02/sqrt(t)": [(1.0, 0.0), (2.0, 1.0)],
    "sharpened": [(1.0, 0.0), (1.5, 0.0), (2.0, 0.0), (3.0, 0.0), (1.0, 0.5), (1.5, 0.5), (1.0, 1.0), (2.0, 1.0)],
    "by spread": [(1.0, 0.0), (2.0, 0.0), (8.0, 0.0), (2.0, 1.0), (8.0, 1.0), (32.0, 1.0)],
}


def name_of(kind, setting):
    return f"{kind} ({setting[0]:g}, {setting[1]:g})"


def table_of(path):
    """Print and return, for each policy: mean, 99th percentile, stuck, problems on which it is worse than each rival."""
    found = dict(np.load(path))
    names, mean, covariance = list(found["names"]), found["mean"], found["covariance"]
    rows = {}
    for i, name in enumerate(names):
        worse = []
        for rival in (names.index(r) for r in RIVALS):
            variance = covariance[:, i, i] + covariance[:, rival, rival] - 2 * covariance[:, i, rival]
            errors = np.sqrt(np.maximum(variance, 1e-12) / found["num_runs"])
            worse.append(int(np.sum(mean[i] - mean[rival] > 2 * errors)) if i != rival else 0)
        error = np.sqrt(covariance[:, i, i].sum() / found["num_runs"]) / mean.shape[1]
        rows[name] = (mean[i].mean(), error, found["highest"][i].mean(), 100 * found["stuck"][i].mean(), worse)
    print(f"{path.stem}: {mean.shape[1]} problems x {found['num_runs']} runs; worse than {', '.join(RIVALS)} on")
    for name, row in sorted(rows.items(), key=lambda item: item[1][0]):
        print(
            f"  {name:28s} {row[0]:7.2f} +- {row[1]:.3f}   99%: {row[2]:6.1f}   stuck {row[3]:5.2f}%   {row[4]}",
            flush=True,
        )
    return rows


def best_of(rows):
    """Return the names that go on to the triples."""
    own = {name: row for name, row in rows.items() if name not in RIVALS}
    chosen = set()
    for kind in LADDERS:
        family = {name: row for name, row in own.items() if name.startswith(f"{kind} (")}
        chosen.add(min(family, key=lambda name: family[name][0]))
    chosen.add(min(own, key=lambda name: sum(own[name][4])))
    safe = {name: row for name, row in own.items() if row[2] <= rows["Thompson"][2]}
    chosen |= set(sorted(safe, key=lambda name: safe[name][0])[:2])
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=Path("map-of-selectors"))
    parser.add_argument("--runs", type=int, default=1000)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    began = time.time()
    policies = RIVALS | {name_of(kind, s): (kind, s) for kind, ladder in LADDERS.items() for s in ladder}
    pairs = Grid(problems(2), RULES, num_runs=250, like=jnp.ones(2))
    rounds(pairs, policies, 0.45 * arguments.seconds, arguments.runs, arguments.out / "rules-pairs.npz")
    chosen = best_of(table_of(arguments.out / "rules-pairs.npz"))
    going = {name: policy for name, policy in policies.items() if name in RIVALS or name in chosen}
    kinds = {kind: RULES[kind] for kind, _ in going.values()}
    triples = Grid(problems(3), kinds, num_runs=100, like=jnp.ones(2))
    left = arguments.seconds - (time.time() - began)
    rounds(triples, going, left, arguments.runs, arguments.out / "rules-triples.npz")
    table_of(arguments.out / "rules-triples.npz")


if __name__ == "__main__":
    main()
