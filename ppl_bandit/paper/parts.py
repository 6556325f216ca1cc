"""The parts of the evaluation: simulations that do not depend on each other."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

from ppl_bandit.display.terminal import progress_reporter
from ppl_bandit.paper import claims, runs, settings
from ppl_bandit.simulation.chunks import run_in_processes
from ppl_bandit.simulation.executors import ExecutorLost

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


class Part(NamedTuple):
    """A setting, a grid or a claim to simulate.

    Attributes:
        name: key of its result.
        title: what it is, in words.
        run: simulates it, with `executor=`; can be sent to another process.
    """

    name: str
    title: str
    run: Callable[..., Any]


def parts_of(
    figures: Sequence[str], sizes: settings.Sizes, *, seed: int, precision: str
) -> tuple[list[Part], list[str]]:
    """Return the parts that figures need, the longest first, and what these sizes leave out."""
    needed = {name for figure in figures for name in FIGURE_PARTS[figure]}
    parts, left_out = [], []
    for name, (title, function, *counts) in _descriptions(sizes).items():
        if name not in needed:
            continue
        if 0 in counts:
            left_out.append(title)
            continue
        is_some = len(counts) == 2 and counts[0] is not None
        shown = f"{counts[0]} problems, " if is_some else ""
        run = partial(function, *counts, seed=seed, precision=precision)
        parts.append(Part(name, f"{title}: {shown}{counts[-1]} realizations", run))
    return parts, left_out


def _descriptions(sizes: settings.Sizes) -> dict[str, tuple[Any, ...]]:
    """Return {name: title, function, number of problems of a grid (None for all), number of realizations}."""

    def of_setting(name: str) -> tuple[Any, ...]:
        return settings.SETTINGS[name].title, partial(runs.run_setting, name), sizes.runs[name]

    def of_grid(num_arms: int, num_problems: int | None) -> tuple[Any, ...]:
        function = partial(runs.bernoulli_grid, num_arms)
        return f"Bernoulli grid of {num_arms} arms", function, num_problems, sizes.grid_runs

    quantile = "claim about the quantile of Bayes-UCB", claims.claim_of_quantile, sizes.runs["linear-figure"]
    table_size = "claim about the size of the table", claims.claim_of_table_size, sizes.runs["bernoulli"]
    linear = "linear Gaussian grid", runs.linear_grid, sizes.num_linear, sizes.grid_runs
    return {  # the longest at the quick sizes first
        _QUANTILE: quantile,
        "linear-figure": of_setting("linear-figure"),
        "linear": linear,
        "linear-caption": of_setting("linear-caption"),
        "bernoulli-three": of_setting("bernoulli-three"),
        "A = 3": of_grid(3, sizes.num_triples),
        "bernoulli": of_setting("bernoulli"),
        "bernoulli-close": of_setting("bernoulli-close"),
        _TABLE_SIZE: table_size,
        "A = 2": of_grid(2, sizes.num_pairs),
    }


def run_parts(parts: Sequence[Part], executor: Executor | None = None) -> dict[str, Any]:
    """Run the parts, and return their results by name; after Ctrl-C, or if the executor is lost, those of the finished parts.

    Args:
        executor: runs the chunks of each part on its workers; None runs two parts at once, in processes.
    """
    advance = progress_reporter("reproduce", len(parts), "parts")
    results = {}
    found: Iterable[Any] = run_in_processes([part.run for part in parts])
    if executor is not None:
        found = (part.run(executor=executor) for part in parts)
    try:
        for part, result in zip(parts, found, strict=True):
            results[part.name] = result
            advance(1)
    except (KeyboardInterrupt, ExecutorLost) as error:
        if not results:
            raise
        sys.stderr.write(f"\n{str(error) or 'interrupted'}: the finished parts are kept\n")
    return results
