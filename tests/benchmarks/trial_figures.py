"""Draw the figures of the pages on designs and conclusions: `python tests/benchmarks/trial_figures.py docs/trials [name ...]`.

Names are `peeking`, `trial` and `conclusions`; all by default, in about a minute.
"""

import sys
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist

from ppl_bandit import Bandit, Design, RewardModel, operating_characteristics, selectors, stopping
from ppl_bandit.display.figure_style import figure_tools
from ppl_bandit.paper.settings import bernoulli_program

NUM_TRIALS = 20_000


def two_means(arm):
    with numpyro.plate("arms", 2):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1000.0))
    numpyro.sample("reward", dist.Normal(mean[arm], 1.0))


def draw_trial(folder):
    design = Design(
        range(80, 401, 80),
        control="placebo",
        selector=selectors.with_control(selectors.with_limits(selectors.thompson(), floors=0.16), "sqrt"),
        allocation="looks",
        lag=20,
        max_rows=400,
        stopping=[stopping.superiority(0.99), stopping.inferiority(0.01), stopping.futility(0.95, 0.05)],
    )
    scenarios = {"no effect": 0.30, "one dose works": [0.30, 0.30, 0.35, 0.45]}
    arms = ["placebo", "low", "middle", "high"]
    found = operating_characteristics(
        RewardModel(bernoulli_program(4), 4), design, scenarios, num_trials=2000, seed=1, arms=arms
    )
    found.plot().savefig(folder / "designing-a-trial.png", dpi=110)


def draw_peeking(folder):
    """One superiority rule at P > .975 in either direction, 2,000 rows in all, looks at equal distances."""
    plt, model = figure_tools(), RewardModel(two_means, 2)
    numbers, errors, bars = (1, 2, 5, 10, 20), [], []
    for num in numbers:
        looks = [2000 * (k + 1) // num for k in range(num)]
        design = Design(looks, stopping=stopping.superiority(0.975))
        row = operating_characteristics(model, design, {"null": 0.0}, num_trials=NUM_TRIALS).table().iloc[0]
        errors.append(row["type_i_error"])
        bars.append(2.0 * row["type_i_error_se"])
    figure, axes = plt.subplots(figsize=(7, 3.8), layout="constrained")
    axes.errorbar(numbers, errors, bars, marker="o", color="#0072B2", capsize=3)
    axes.axhline(0.05, color="0.4", linestyle="--", linewidth=1)
    axes.annotate("5%", (20, 0.05), xytext=(0, 4), textcoords="offset points", ha="right", fontsize=9)
    axes.set(xlabel="number of looks", ylabel="probability of a false winner", ylim=(0, 0.28), xticks=numbers)
    axes.set_title("Two equal arms, stop at P(better) > 0.975 in either direction", fontsize=11)
    figure.supxlabel(f"{NUM_TRIALS:,} simulated tests each, 2,000 decisions; bars: two standard errors", fontsize=8)
    figure.savefig(folder / "peeking.png", dpi=110)


def draw_conclusions(folder):
    """The experiment of docs/conclusions.md."""
    bandit = Bandit(bernoulli_program(2), arms=["old", "new"], selector=selectors.with_floor(selectors.thompson(), 0.2))
    world, truth = np.random.default_rng(1), {"old": 0.20, "new": 0.35}
    for _ in range(800):
        decision = bandit.select()
        bandit.update(decision, float(world.random() < truth[decision.arm]))
    found = bandit.evaluate(("new", "old"))
    print(found.verdict)
    found.plot().savefig(folder / "conclusions.png", dpi=110)


DRAWINGS = {"peeking": draw_peeking, "trial": draw_trial, "conclusions": draw_conclusions}

if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or DRAWINGS:
        DRAWINGS[name](target)
