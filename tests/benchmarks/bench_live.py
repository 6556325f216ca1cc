"""Live steps, batches and growth beside NumPy loops: python tests/benchmarks/bench_live.py [--parts live].

Implementations take turns of a few steps, so that other load on the machine affects all of them. A time is that of one
`select` and one `update`; construction and compilation are measured separately. Writes `bench.json`, `bench.md` and
`bench.png`.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from live_players import CASES, Case, Player, case_players, case_program

from ppl_bandit.commands.names import check_names
from ppl_bandit.display.figure_style import figure_tools, installed_versions, save_figure
from ppl_bandit.display.terminal import markdown_table

_TURN = 20  # consecutive steps of one implementation
_GROWTH_STEPS = 4300
_NUM_BATCHES = 5  # calls, of which the median is reported
_PACKAGES = ("ppl_bandit", "jax", "numpyro", "numpy", "bayesianbandits")


def run_bench(
    cases: Sequence[str],
    parts: Sequence[str],
    num_steps: int,
    num_samples: int,
    out: Path,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure, and write `bench.json`, `bench.md` and `bench.png` to a folder.

    Args:
        cases: names of problems.
        parts: some of "live", "batches" and "growth".
        num_steps: live steps of each implementation.
        num_samples: M.

    Returns:
        facts: date, machine, versions, settings. live: {case: [row of an implementation]}, in microseconds. batches: decisions
        or rows a second. growth: of an engine that stores its rows. memory: the largest of this process, in megabytes.
    """
    check_names(cases, CASES, "--cases")
    check_names(parts, ("live", "batches", "growth"), "--parts")
    live, batches, growth = {}, {}, {}
    for name in cases if "live" in parts else ():
        progress(f"{name}: {num_steps} live steps of each implementation, in turn")
        case = CASES[name]
        live[name] = measure_live(case, case_players(case, num_samples), num_steps)
    if "batches" in parts:
        progress("batches: 10,000 decisions and 100,000 rows of history, linear")
        batches = _batches(num_samples)
    if "growth" in parts:
        progress(f"growth: {_GROWTH_STEPS:,} live steps of a logistic program")
        growth = _growth(num_samples)
    facts = _facts(num_steps, num_samples)
    found = {"facts": facts, "live": live, "batches": batches, "growth": growth, "memory": _memory()}
    out.mkdir(parents=True, exist_ok=True)
    (out / "bench.json").write_text(json.dumps(found, indent=2) + "\n")
    (out / "bench.md").write_text(markdown(found) + "\n")
    if live:
        _draw_live(found, out / "bench.png")
    return found


def measure_live(case: Case, players: Sequence[Player], num_steps: int) -> list[dict[str, Any]]:
    """Time live steps of several implementations; return a row of microseconds for each."""
    truth = case.truth()
    made = [player.make(case, 0) for player in players]
    rngs = [np.random.default_rng(1) for _ in players]
    times: list[list[float]] = [[] for _ in players]

    def step(number: int) -> float:
        (select, update), rng = made[number], rngs[number]
        context = rng.uniform(0.0, 1.0, case.num_features) if case.num_features else None
        began = time.perf_counter()
        arm = int(select(context))
        chosen = time.perf_counter()
        if context is None:
            reward = float(rng.random() < truth[arm])
        else:
            reward = float(truth[arm] @ context + 0.5 * rng.normal())
        again = time.perf_counter()
        update(arm, reward, context)
        return chosen - began + time.perf_counter() - again

    for number in range(len(players)):
        step(number)  # the first step is not counted
    for _ in range(-(-num_steps // _TURN)):
        for number, spent in enumerate(times):
            spent.extend(step(number) for _ in range(_TURN))
    rows: list[dict[str, Any]] = []
    for player, spent in zip(players, times, strict=True):
        microseconds = 1e6 * np.array(spent)
        median, p99 = np.quantile(microseconds, (0.5, 0.99))
        ours = rows[0]["median_us"] if rows else float(median)
        rows.append(
            {
                "name": player.name,
                "note": player.note,
                "median_us": round(float(median), 1),
                "p99_us": round(float(p99), 1),
                "worst_us": round(float(microseconds.max()), 1),
                "relative_to_ppl_bandit": round(float(median) / ours, 2),
            }
        )
    return rows


def _batches(num_samples: int) -> dict[str, float]:
    from ppl_bandit import Bandit

    case = CASES["linear"]
    program, context = case_program(case)
    bandit = Bandit(program, case.num_arms, context=context, num_samples=num_samples)
    rng, truth = np.random.default_rng(0), case.truth()
    contexts = rng.uniform(0.0, 1.0, (100_000, case.num_features))
    arms = rng.integers(0, case.num_arms, len(contexts))
    rewards = np.sum(truth[arms] * contexts, axis=1) + 0.5 * rng.normal(size=len(arms))

    def learn(num_rows: int) -> None:
        bandit.update_many(arms=arms[:num_rows], rewards=rewards[:num_rows], contexts=contexts[:num_rows])

    learn(1100)  # compiles every size of piece
    bandit.select_many(contexts[:10_000])
    spent = dict[str, float]()
    for name, num, run in (
        ("select_many, decisions a second", 10_000, lambda: bandit.select_many(contexts[:10_000])),
        ("update_many, rows a second", 100_000, lambda: learn(100_000)),
    ):
        seconds = []
        for _ in range(_NUM_BATCHES):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        spent[name] = round(num / float(np.median(seconds)))
    return spent


def _growth(num_samples: int) -> dict[str, float]:
    """Play a program that is not conjugate; after the first step wait for what is compiled in the background."""
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as dist

    from ppl_bandit import Bandit

    num_arms, num_features = 5, 10

    def logistic(arm: Any, context: Any) -> None:
        with numpyro.plate("arms", num_arms):
            weights = numpyro.sample("weights", dist.Normal(jnp.zeros(num_features), 1.0).to_event(1))
        numpyro.sample("reward", dist.Bernoulli(logits=jnp.sum(weights[arm] * context, axis=-1)))

    bandit = Bandit(logistic, num_arms, context=np.full(num_features, 0.5), num_samples=num_samples)
    rng, truth = np.random.default_rng(0), np.random.default_rng(1).normal(size=(num_arms, num_features))
    spent = []
    for _ in range(_GROWTH_STEPS):
        context = rng.normal(size=num_features)
        began = time.perf_counter()
        decision = bandit.select(context)
        chance = 1.0 / (1.0 + np.exp(-truth[decision.arm] @ context))
        bandit.update(decision, float(rng.random() < chance))
        spent.append(time.perf_counter() - began)
        if len(spent) == 1:
            bandit.warm_up()
            warmed = time.perf_counter() - began
    later = 1e3 * np.array(spent[1:])
    return {
        "steps": _GROWTH_STEPS,
        "first step, s": round(spent[0], 2),
        "first step and warm_up, s": round(warmed, 2),
        "median, ms": round(float(np.median(later)), 2),
        "mean, ms": round(float(later.mean()), 2),
        "worst, ms": round(float(later.max()), 1),
    }


def _facts(num_steps: int, num_samples: int) -> dict[str, Any]:
    import jax

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "versions": installed_versions(_PACKAGES),
        "num_steps": num_steps,
        "num_samples": num_samples,
    }


def _memory() -> float:
    try:
        import resource
    except ImportError:  # not a Unix
        return float("nan")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(largest / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


def markdown(found: dict[str, Any]) -> str:
    """Return the results of `run_bench` as Markdown."""
    facts = found["facts"]
    lines = [
        f"{facts['date']}; {facts['machine']}; Python {facts['python']}; "
        + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    ]
    for name, rows in found["live"].items():
        lines += live_table(name, rows, facts["num_steps"], facts["num_samples"])
    if found["batches"]:
        lines += ["", "**batches**, linear", ""]
        lines += [f"- {name}: {number:,.0f}" for name, number in found["batches"].items()]
    if found["growth"]:
        lines += ["", "**growth**, logistic", ""]
        lines += [f"- {name}: {number:g}" for name, number in found["growth"].items()]
    return "\n".join([*lines, "", f"largest memory of this process: {found['memory']:,.0f} MB"])


def live_table(name: str, rows: list[dict[str, Any]], num_steps: int, num_samples: int) -> list[str]:
    """Return the lines of the table of one case."""
    title = f"**{name}**, {num_steps} live steps (select + update), M = {num_samples}"
    header = ("", "median, us", "99th percentile", "worst", "relative", "method")
    cells = [
        [row["name"], *(f"{row[key]:,.0f}" for key in ("median_us", "p99_us", "worst_us"))]
        + [f"{row['relative_to_ppl_bandit']:.2f}", row["note"]]
        for row in rows
    ]
    return ["", title, "", markdown_table(header, cells)]


def _draw_live(found: dict[str, Any], path: Path) -> None:
    """Draw the median time of a live step of every implementation, one panel per case."""
    facts, live = found["facts"], found["live"]
    figure, axes = figure_tools().subplots(
        1, len(live), figsize=(5.0 * len(live), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (name, rows) in zip(axes[0], live.items(), strict=True):
        names, middle = [row["name"] for row in rows][::-1], [row["median_us"] for row in rows][::-1]
        colours = ["#0072B2" if label.startswith("ppl_bandit") else "#777777" for label in names]
        axis.scatter(middle, names, c=colours, s=45, zorder=3)  # not bars: a logarithmic axis has no zero to start from
        for label, value in zip(names, middle, strict=True):
            axis.annotate(f"{value:,.0f}", (value, label), (7, -3), textcoords="offset points", fontsize=8)
        axis.set(xscale="log", xlabel="median, microseconds (logarithmic)", title=name)
        axis.margins(x=0.25, y=0.1)
        axis.grid(axis="x", color="0.92")
    caption = f"{facts['date']}, {facts['machine']}, {facts['num_steps']} steps each, M = {facts['num_samples']}"
    save_figure(figure, "One live step: select and update", caption, path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help="problems, comma-separated (%(default)s)")
    parser.add_argument("--parts", default="live,batches", help="some of live,batches,growth (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="live steps of each implementation (%(default)s)")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("ppl-bandit-bench"))
    options = parser.parse_args()
    cases, parts = options.cases.split(","), options.parts.split(",")
    print(markdown(run_bench(cases, parts, options.steps, options.samples, options.out, print)))
