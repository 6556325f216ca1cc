"""Regret in a world whose best arm changes, with and without forgetting: the table of the docs.

Run by hand: python tests/benchmarks/bench_discount.py [--realizations 200]. Three arms with rates 0.6, 0.4 and 0.2, which
turn round after the first half of 600 steps; the exact engine and double sampling with 300 draws. All discounts meet the same
random numbers, and standard errors are over realizations.
"""

import argparse
import functools

import numpy as np

from ppl_bandit import Environment, RewardModel, engines, selectors, simulate
from ppl_bandit.paper.settings import bernoulli_program

NUM_STEPS = 600
BEFORE, AFTER = (0.6, 0.4, 0.2), (0.2, 0.4, 0.6)


def regrets(discount, num_realizations):
    """Regret of each realization before and after the change, (R, 2)."""
    model = RewardModel(bernoulli_program(3), 3)
    world = Environment(model, {"rate": BEFORE}, changes={NUM_STEPS // 2 + 1: {"rate": AFTER}})
    data = simulate(
        0,
        model,
        functools.partial(engines.conjugate, discount=discount),
        selectors.double_sampling(),
        world,
        num_steps=NUM_STEPS,
        num_realizations=num_realizations,
        num_samples=300,
    )
    return np.asarray(data["regret"].values).reshape(num_realizations, 2, -1).sum(axis=2)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--realizations", type=int, default=200)
    num = parser.parse_args().realizations
    kept = regrets(1.0, num)
    print("| discount | before the change | after it | in all | less than without forgetting |")
    print("| --- | --- | --- | --- | --- |")
    for discount in (1.0, 0.99, 0.98, 0.95):
        found = kept if discount == 1.0 else regrets(discount, num)
        total, gain = found.sum(axis=1), (kept - found).sum(axis=1)
        shown = (*found.T, total, gain) if discount < 1.0 else (*found.T, total)
        columns = [f"{x.mean():.1f} ± {x.std(ddof=1) / num**0.5:.1f}" for x in shown]
        print(f"| {discount:g} | {' | '.join([*columns, ''][:4])} |", flush=True)


if __name__ == "__main__":
    main()
