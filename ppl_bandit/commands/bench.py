"""`ppl-bandit bench`: what a live step costs, here and elsewhere, measured in one run.

Contestants take turns, a few steps each, so that whatever else the machine does falls on all of them. Times are of `select` and
`update` together; compilation, and what a contestant is built with, is measured by itself.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ppl_bandit.commands.bench_peers import CASES, Case, contestants, program_of
from ppl_bandit.commands.words import check_words

__all__ = ["BenchOptions", "Bench", "run_bench", "words"]

_TURN = 20  # steps of one contestant before the next one's turn
_GROWTH_STEPS = 4300  # rows: there is room for 4,096 at first
_NUM_BATCHES = 5  # calls, of which the median is told
_PACKAGES = ("ppl_bandit", "jax", "numpyro", "numpy", "bayesianbandits", "mabwiser", "river")


class BenchOptions(NamedTuple):
    """What to measure.

    Attributes:
        cases: names of problems.
        num_steps: live steps of each contestant.
        num_samples: M.
        parts: some of "live", "batches", "growth" and "start".
    """

    cases: Sequence[str] = ("bernoulli", "linear", "bernoulli-100")
    num_steps: int = 400
    num_samples: int = 1000
    parts: Sequence[str] = ("live", "batches", "start")


class Bench(NamedTuple):
    """What was measured, in plain values.

    Attributes:
        facts: date, machine, versions, settings.
        live: {case: [row of a contestant]}; microseconds.
        batches: {what: number}.
        growth: of an approximate engine whose data outgrow their room.
        start: {case: {"cold" or "cached": {"built", "decided", "updated": seconds since the process began}}}.
        memory: megabytes of this process at the most.
    """

    facts: dict[str, Any]
    live: dict[str, list[dict[str, Any]]]
    batches: dict[str, float]
    growth: dict[str, float]
    start: dict[str, Any]
    memory: float


def run_bench(options: BenchOptions, out: Path | None, say: Callable[[str], None]) -> Bench:
    """Measure, and write `bench.json`, `bench.md` and `bench.png` to `out` if it is given."""
    check_words(options.cases, CASES, "--cases")
    check_words(options.parts, ("live", "batches", "growth", "start"), "--parts")
    live, batches, growth, start = {}, {}, {}, {}
    for name in options.cases if "live" in options.parts else ():
        say(f"{name}: {options.num_steps} live steps of each contestant, in turn")
        live[name] = _live(CASES[name], options)
    if "batches" in options.parts:
        say("batches: 10,000 decisions and 100,000 rows of history, linear")
        batches = _batches(options.num_samples)
    if "growth" in options.parts:
        say(f"growth: {_GROWTH_STEPS:,} live steps of a logistic program")
        growth = _growth(options.num_samples)
    if "start" in options.parts:
        for name in options.cases:
            say(f"{name}: from the start of a process to its first decision and update, cold and cached")
            start[name] = _starts(name)
    found = Bench(_facts(options), live, batches, growth, start, _memory())
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "bench.json").write_text(json.dumps(found._asdict(), indent=2) + "\n")
        (out / "bench.md").write_text(words(found) + "\n")
        if live:
            _draw(found, out / "bench.png")
    return found


def _live(case: Case, options: BenchOptions) -> list[dict[str, Any]]:
    truth = case.truth()
    players, times = contestants(case, options.num_samples), dict[str, list[float]]()
    made = {player.name: player.make(case, 0) for player in players}
    rngs = {player.name: np.random.default_rng(1) for player in players}

    def step(name: str) -> float:
        (select, update), rng = made[name], rngs[name]
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

    for name in made:
        step(name)  # the first step is not counted
    for _ in range(-(-options.num_steps // _TURN)):
        for name in made:
            times.setdefault(name, []).extend(step(name) for _ in range(_TURN))
    ours = float(np.median(times[players[0].name]))
    rows = []
    for player in players:
        spent = 1e6 * np.array(times[player.name])
        middle, late = np.quantile(spent, (0.5, 0.99))
        rows.append(
            {
                "name": player.name,
                "note": player.note,
                "median_us": round(float(middle), 1),
                "p99_us": round(float(late), 1),
                "worst_us": round(float(spent.max()), 1),
                "relative_to_ppl_bandit": round(float(middle) / (1e6 * ours), 2),
            }
        )
    return rows


def _batches(num_samples: int) -> dict[str, float]:
    from ppl_bandit import Bandit

    case = CASES["linear"]
    program, context = program_of(case)
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
    """Play a program that is not conjugate until its data outgrow the room that they have at first, and more."""
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
    later, run = 1e3 * np.array(spent[1:]), bandit._learner.run
    functions = run.select, run.learn_quickly, run.learn
    return {
        "first step, s": round(spent[0], 2),
        "median, ms": round(float(np.median(later)), 2),
        "mean, ms": round(float(later.mean()), 2),
        "worst, ms": round(float(later.max()), 1),
        "steps that waited for the compiler": sum(function.num_waits for function in functions if function is not None),
    }


_FIRST = """
import time, sys
began = float(sys.argv[2])
import numpy as np
from ppl_bandit import Bandit
from ppl_bandit.commands.bench_peers import CASES, program_of
case = CASES[sys.argv[1]]
program, context = program_of(case)
marks = [time.time()]
bandit = Bandit(program, case.num_arms, context=context)
marks.append(time.time())
decision = bandit.select(context)
marks.append(time.time())
bandit.update(decision, 1.0)
marks.append(time.time())
print(*(round(mark - began, 2) for mark in marks))
"""


def _starts(name: str) -> dict[str, dict[str, float]]:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "JAX_ENABLE_COMPILATION_CACHE": "true",
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for state in ("cold", "cached"):
            command = [sys.executable, "-c", _FIRST, name, str(time.time())]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            marks = map(float, ended.stdout.split())
            found[state] = dict(zip(("imported", "built", "decided", "updated"), marks, strict=True))
    return found


def _facts(options: BenchOptions) -> dict[str, Any]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    import jax

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {jax.devices()[0].device_kind}",
        "python": platform.python_version(),
        "versions": versions,
        "num_steps": options.num_steps,
        "num_samples": options.num_samples,
    }


def _memory() -> float:
    try:
        import resource
    except ImportError:  # not a Unix
        return float("nan")
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(largest / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1)


def words(found: Bench) -> str:
    """Return the results as Markdown."""
    facts = found.facts
    lines = [
        f"{facts['date']}; {facts['machine']}; Python {facts['python']}; "
        + ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    ]
    for name, rows in found.live.items():
        lines += ["", f"**{name}**, {facts['num_steps']} live steps (select + update), M = {facts['num_samples']}", ""]
        lines += [
            "| | median, us | 99th percentile | worst | relative | what it does |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        for row in rows:
            lines.append(
                f"| {row['name']} | {row['median_us']:,.0f} | {row['p99_us']:,.0f} | {row['worst_us']:,.0f} | "
                f"{row['relative_to_ppl_bandit']:.2f} | {row['note']} |"
            )
    if found.batches:
        lines += ["", "**batches**, linear", ""] + [
            f"- {name}: {number:,.0f}" for name, number in found.batches.items()
        ]
    if found.growth:
        lines += ["", f"**growth**, logistic, {_GROWTH_STEPS:,} live steps", ""]
        lines += [f"- {name}: {number:g}" for name, number in found.growth.items()]
    if found.start:
        lines += [
            "",
            "**from the start of the process**, seconds",
            "",
            "| | imported | built | first decision | first update |",
        ]
        lines += ["| --- | --- | --- | --- | --- |"]
        for name, states in found.start.items():
            lines += [
                f"| {name}, {state} | " + " | ".join(f"{mark:.2f}" for mark in marks.values()) + " |"
                for state, marks in states.items()
            ]
    return "\n".join([*lines, "", f"memory of this process, at the most: {found.memory:,.0f} MB"])


def _draw(found: Bench, path: Path) -> None:
    from ppl_bandit.numerics.figure_style import figure_tools, save_figure

    figure, axes = figure_tools().subplots(
        1, len(found.live), figsize=(5.0 * len(found.live), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (name, rows) in zip(axes[0], found.live.items(), strict=True):
        names, middle = [row["name"] for row in rows][::-1], [row["median_us"] for row in rows][::-1]
        axis.barh(names, middle, color=["#0072B2" if label.startswith("ppl_bandit") else "#999999" for label in names])
        axis.set(xscale="log", xlabel="median, microseconds", title=name)
    facts = found.facts
    caption = f"{facts['date']}, {facts['machine']}, {facts['num_steps']} steps each, M = {facts['num_samples']}"
    save_figure(figure, "One live step: select and update", caption, path)
