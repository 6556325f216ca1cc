"""Compute the Bayes regret of selection rules and of the optimum, and draw the figure of docs/beyond-the-paper.md.

Run it with `python tests/benchmarks/bayes_regret/measure_bayes_regret.py docs/beyond`: about eight minutes on one core, without
any simulation.
"""

import argparse
import json
import time
from pathlib import Path

import backward_induction as induction

HORIZONS = {2: (10, 20, 50, 100, 200), 3: (10, 20, 30, 40)}
RULES = {
    "optimum": induction.optimal,
    "optimistic Gittins": induction.optimistic_gittins,
    "Bayes-UCB": induction.bayes_ucb,
    "double sampling": induction.double_sampling,
    "Thompson": induction.thompson,
}


def compute(rules, horizons):
    """Return {number of arms: {rule: {horizon: Bayes regret}}}; double sampling has a closed form for two arms only."""
    found = {}
    for num_arms, several in horizons.items():
        for name in rules:
            if num_arms > 2 and name == "double sampling":
                continue
            for horizon in several:
                begun = time.perf_counter()
                regret = induction.bayes_regret(RULES[name](horizon), horizon, num_arms)
                found.setdefault(num_arms, {}).setdefault(name, {})[horizon] = regret
                seconds = time.perf_counter() - begun
                print(
                    f"{num_arms} arms, {horizon:>3} decisions, {name:<18} {regret:.5f}   ({seconds:.1f} s)", flush=True
                )
    return found


def simulated(num_arms, horizon, num_worlds):
    """Return {rule: (Bayes regret, standard error)} of the library's selectors, in worlds drawn from the prior."""
    from ppl_bandit import Environment, RewardModel, engines, selectors, simulate
    from ppl_bandit.paper.settings import bernoulli_program
    from ppl_bandit.simulation.standings import score_selectors

    model = RewardModel(bernoulli_program(num_arms), num_arms)
    rules = {
        "optimistic Gittins": selectors.optimistic_gittins(horizon, patience=2.0, learning=1.0),
        "Bayes-UCB": selectors.bayes_ucb(),
        "double sampling": selectors.double_sampling(),
        "Thompson": selectors.thompson(),
    }
    runs = simulate(
        0, model, engines.conjugate, rules, Environment.from_prior(model),
        num_steps=horizon, num_realizations=num_worlds, summary=True,
    )  # fmt: skip
    return {score.selector: (score.mean, score.error) for score in score_selectors(runs)}


def draw(found, path):
    """Draw Bayes regret over the horizon, and how far each rule is above the optimum."""
    from ppl_bandit.display.figure_style import figure_tools, save_figure, styles

    plt = figure_tools()
    style = dict(zip(("optimistic Gittins", "Thompson", "Bayes-UCB", "double sampling"), styles(), strict=False))
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for name, regrets in found[2].items():
        colour, dash = style.get(name, ("black", "-"))
        width = 5.0 if name == "optimum" else 1.6
        left.plot(
            *zip(*regrets.items(), strict=True), color=colour, linestyle=dash, linewidth=width,
            alpha=0.35 if name == "optimum" else 1.0, marker=None if name == "optimum" else "o", markersize=4, label=name,
        )  # fmt: skip
    left.set(xlabel="decisions", ylabel="Bayes regret", ylim=(0, None), title="Two arms")
    left.legend(frameon=False)
    rows = []
    for num_arms, rules in sorted(found.items(), reverse=True):
        horizon = max(rules["optimum"])
        for name in reversed([name for name in rules if name != "optimum"]):
            rows.append(
                (f"{name}, {num_arms} arms", rules[name][horizon] / rules["optimum"][horizon] - 1.0, style[name][0])
            )
    right.barh([row[0] for row in rows], [100 * row[1] for row in rows], color=[row[2] for row in rows])
    for place, row in enumerate(rows):
        right.text(100 * row[1] + 1, place, f"{100 * row[1]:.1f}%", va="center", fontsize=9)
    horizons = ", ".join(f"{max(rules['optimum'])} decisions with {num} arms" for num, rules in sorted(found.items()))
    right.set(
        xlabel="Bayes regret above the optimum, %", title="Above the optimum", xlim=(0, 118 * max(r[1] for r in rows))
    )
    right.spines[["top", "right"]].set_visible(False)
    save_figure(
        figure,
        "Bernoulli arms with uniform priors: what is possible, and what each rule reaches",
        f"backward induction, no simulation; right: {horizons}; optimistic Gittins with patience 2, learning 1",
        path,
    )


def main():
    """Compute, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--draw", action="store_true", help="draw the results of an earlier run")
    arguments = parser.parse_args()
    path = arguments.out / "bayes_regret.json"
    if not arguments.draw:
        path.write_text(json.dumps(compute(RULES, HORIZONS), indent=1) + "\n")
    read = json.loads(path.read_text())
    found = {
        int(num): {name: {int(t): value for t, value in regrets.items()} for name, regrets in rules.items()}
        for num, rules in read.items()
    }
    draw(found, arguments.out / "bayes_regret.png")


if __name__ == "__main__":
    main()
