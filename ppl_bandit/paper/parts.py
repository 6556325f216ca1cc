"""The parts of the evaluation: simulations that do not depend on each other, and the time left while they run."""

import functools
import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from ppl_bandit.paper import claims, runs, settings
from ppl_bandit.runtime.cpu_threads import is_on_cpu, num_cores

__all__ = ["CLAIMS", "FIGURE_PARTS", "GRIDS", "Part", "expected_seconds", "parts_of", "run_parts"]

GRIDS = ("A = 2", "A = 3", "linear")
CLAIMS = _TABLE_SIZE, _QUANTILE = "size of the table", "quantile of Bayes-UCB"  # claims with simulations of their own
FIGURE_PARTS: Mapping[str, tuple[str, ...]] = {  # figure -> settings, grids and claims that it needs
    "execution": ("bernoulli-three",),
    "correct-actions": ("bernoulli",),
    "bernoulli-regret": ("bernoulli", "bernoulli-close"),
    "bernoulli-kl": ("A = 2", "A = 3"),
    "linear-regret": ("linear-caption", "linear-figure"),
    "linear-kl": ("linear",),
    "claims": ("A = 3", "linear", _TABLE_SIZE, _QUANTILE),
}
# Seconds of one core at the quick sizes, from measured parts, most of them for compilation; the longest parts start first.
_SECONDS = {
    _QUANTILE: 75.0,
    "linear-figure": 66.0,
    "linear": 65.0,
    "linear-caption": 60.0,
    "bernoulli-three": 46.0,
    "A = 3": 46.0,
    "bernoulli": 46.0,
    "bernoulli-close": 46.0,
    _TABLE_SIZE: 45.0,
    "A = 2": 40.0,
}
_SECONDS_BETWEEN_LINES = 15.0


class Part(NamedTuple):
    """A setting, a grid or a claim to simulate.

    Attributes:
        name: key of its result.
        title: what it is, in words.
        run: simulates it; can be sent to another process.
        seconds: expected time on one core at the quick sizes.
    """

    name: str
    title: str
    run: Callable[[], Any]
    seconds: float


def parts_of(
    figures: Sequence[str], sizes: settings.Sizes, *, seed: int, precision: str
) -> tuple[list[Part], list[str]]:
    """Return the parts that figures need, the longest first, and what these sizes leave out."""
    names = dict.fromkeys(name for figure in figures for name in FIGURE_PARTS[figure])
    options: dict[str, Any] = {"seed": seed, "precision": precision}
    parts, left_out = [], []
    for name in sorted(names, key=lambda name: -_SECONDS[name]):
        title, num_problems, function, *counts = _describe(name, sizes)
        if 0 in (num_problems, *counts):
            left_out.append(title)
            continue
        shown = ", ".join([f"{num_problems} problems"] * (num_problems is not None) + [f"{counts[-1]} realizations"])
        run = functools.partial(function, *counts, **options)
        parts.append(Part(name, f"{title}: {shown}", run, _SECONDS[name]))
    return parts, left_out


def _describe(name: str, sizes: settings.Sizes) -> tuple[Any, ...]:
    """Return the title, the number of problems (None for all, or one), a function and its arguments."""
    if name == "linear":
        return "linear Gaussian grid", sizes.num_linear, runs.linear_grid, sizes.num_linear, sizes.grid_runs
    if name in GRIDS:
        num_arms, num = (2, sizes.num_pairs) if name == "A = 2" else (3, sizes.num_triples)
        return (
            f"Bernoulli grid of {num_arms} arms",
            num,
            functools.partial(runs.bernoulli_grid, num_arms),
            num,
            sizes.grid_runs,
        )
    if name == _TABLE_SIZE:
        return "claim about the size of the table", None, claims.claim_of_table_size, sizes.runs["bernoulli"]
    if name == _QUANTILE:
        return "claim about the quantile of Bayes-UCB", None, claims.claim_of_quantile, sizes.runs["linear-figure"]
    title = settings.SETTINGS[name].title
    return title, None, functools.partial(runs.run_setting, name), sizes.runs[name]


def expected_seconds(parts: Sequence[Part]) -> float:
    """Return the expected time of parts at the quick sizes, on an idle machine."""
    return sum(part.seconds for part in parts) / max(_num_processes(len(parts)), 1)


def run_parts(parts: Sequence[Part], show: Callable[[str], None]) -> dict[str, Any]:
    """Run the parts and return their results by name; show a line after each part, and every 15 seconds.

    Tracing holds the interpreter lock and most of the time is tracing and compilation, so a CPU runs two processes. The time
    left assumes that the remaining parts are as much slower or faster than expected as the finished ones.
    """
    began, total = time.monotonic(), sum(part.seconds for part in parts)
    results: dict[str, Any] = {}
    num = _num_processes(len(parts))
    pool = ThreadPoolExecutor(1) if num < 2 else ProcessPoolExecutor(num, multiprocessing.get_context("spawn"))
    try:
        futures = {pool.submit(part.run): part for part in parts}
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_SECONDS_BETWEEN_LINES, return_when=FIRST_COMPLETED)
            for future in done:
                results[futures[future].name] = future.result()
                show(f"  done: {futures[future].title}")
            spent, undone = time.monotonic() - began, sum(futures[future].seconds for future in waiting)
            left = spent * undone / (total - undone) if results else max(expected_seconds(parts) - spent, 0.0)
            show(f"  {len(results)} of {len(parts)} parts in {spent:.0f} s; about {left:.0f} s left")
    finally:
        pool.shutdown(cancel_futures=True)
    return results


def _num_processes(num_parts: int) -> int:
    return min(2, num_cores(), num_parts) if is_on_cpu() else 1
