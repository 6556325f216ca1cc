"""The parts of the reproduction, and the verdicts on the paper's claims."""

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ppl_bandit import selectors
from ppl_bandit.display.terminal import progress_reporter
from ppl_bandit.paper import runs, settings
from ppl_bandit.paper.runs import GridRegret, run_setting
from ppl_bandit.paper.settings import BAYES_UCB, RANDOM, THOMPSON, paper_points
from ppl_bandit.simulation.chunks import run_in_processes
from ppl_bandit.simulation.executors import ExecutorLost
from ppl_bandit.simulation.standings import score_selectors
from ppl_bandit.types import Selector

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
        return settings.SETTINGS[name].title, partial(run_setting, name), sizes.runs[name]

    def of_grid(num_arms: int, num_problems: int | None) -> tuple[Any, ...]:
        function = partial(runs.bernoulli_grid, num_arms)
        return f"Bernoulli grid of {num_arms} arms", function, num_problems, sizes.grid_runs

    quantile = "claim about the quantile of Bayes-UCB", claim_of_quantile, sizes.runs["linear-figure"]
    table_size = "claim about the size of the table", claim_of_table_size, sizes.runs["bernoulli"]
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


_TABLE_SIZES = (100, 1000, 10_000)
_HARD = 0.25  # the divergence below which the paper calls a problem challenging
_QUANTILES: Mapping[str, Callable[[], Selector]] = {
    BAYES_UCB: selectors.bayes_ucb,
    "order 1 - 1/sqrt(t)": lambda: selectors.bayes_ucb(lambda step: 1.0 - 1.0 / jnp.sqrt(step)),
    "order .95": lambda: selectors.bayes_ucb(0.95),
    "order .75": lambda: selectors.bayes_ucb(0.75),
}


class Claim(NamedTuple):
    """A sentence of the paper, what we measure, and whether it holds."""

    claim: str
    measured: str
    verdict: str


def claim_of_table_size(num_runs: int, *, seed: int, precision: str, executor: Executor | None = None) -> Claim:
    """Simulate and judge the claim that a larger M does not help."""
    regrets = {}
    for size in _TABLE_SIZES:
        policies = {RANDOM: selectors.double_sampling()}
        found = run_setting(
            "bernoulli", num_runs, policies, num_samples=size, seed=seed, precision=precision, executor=executor
        )
        (regrets[size],) = score_selectors(found)
    shown = ", ".join(f"M = {size}: {score.mean:.2f} +- {score.error:.2f}" for size, score in regrets.items())
    base, large = regrets[1000], regrets[10_000]
    is_gain = base.mean - large.mean > 3.0 * math.hypot(base.error, large.error)
    return Claim(
        "M = 1,000; larger M do not significantly improve regret",
        f"double sampling on rates (.4, .8), {num_runs} realizations: {shown}",
        "does not hold" if is_gain else "holds",
    )


def claim_of_quantile(num_runs: int, *, seed: int, precision: str, executor: Executor | None = None) -> Claim:
    """Simulate and judge the claim that the quantile of Bayes-UCB causes its loss on linear Gaussian problems."""
    policies = {THOMPSON: selectors.thompson()} | {name: make() for name, make in _QUANTILES.items()}
    found = run_setting("linear-figure", num_runs, policies, seed=seed, precision=precision, executor=executor)
    regrets = {score.selector: (score.mean, score.error) for score in score_selectors(found)}
    shown = ", ".join(f"{name} {mean:.1f} +- {error:.1f}" for name, (mean, error) in regrets.items())
    paper, thompson = regrets[BAYES_UCB][0], regrets[THOMPSON][0]
    best = min((name for name in _QUANTILES if name != BAYES_UCB), key=lambda name: regrets[name][0])
    gain, error = paper - regrets[best][0], math.hypot(regrets[BAYES_UCB][1], regrets[best][1])
    if gain <= 3.0 * error:
        verdict = "not supported: no other order loses less"
    elif regrets[best][0] < thompson + 3.0 * math.hypot(regrets[best][1], regrets[THOMPSON][1]):
        verdict = f"holds: with the {best} the loss against Thompson is gone"
    else:
        verdict = f"holds in part: the {best} loses less, but more than Thompson"
    return Claim(
        "the loss of Bayes-UCB on linear Gaussian problems relates to its quantile, alpha = 1/t",
        f"regret on weights (-.5, -.5), (0, 0), (.5, .5), noise 1, {num_runs} realizations: {shown}",
        verdict,
    )


def claims_of_grids(grids: Mapping[str, GridRegret]) -> list[Claim]:
    """Judge the claims about problems with a small divergence, and about the largest reductions, from grids that were run."""
    claims = []
    if "A = 3" in grids:
        grid, (their_divergence, theirs) = grids["A = 3"], paper_points("bernoulli_kl")
        is_hard, parts, holds = grid.divergence < _HARD, [], []
        for policy in (THOMPSON, BAYES_UCB):
            hard, easy = grid.relative[policy][is_hard], grid.relative[policy][~is_hard]
            their_mean = theirs[policy][their_divergence < _HARD].mean()
            parts.append(
                f"{100 * hard.mean():+.1f}% below and {100 * easy.mean():+.1f}% above .25 against {policy} (the paper's points "
                f"below: {100 * their_mean:+.1f}%)"
            )
            holds.append(hard.mean() > easy.mean())
        claims.append(
            Claim(
                "where the divergence is below .25, performance worsens, to near-equivalent with Thompson",
                f"{is_hard.sum()} of {is_hard.size} triples: {'; '.join(parts)}",
                "holds" if all(holds) else "does not hold",
            )
        )
    if "linear" in grids:
        grid = grids["linear"]
        is_easy = grid.divergence > _HARD
        parts, holds = [], []
        for policy, reduction in ((THOMPSON, 0.40), (BAYES_UCB, 0.50)):
            least = int(np.argmin(np.where(is_easy, grid.relative[policy], np.inf)))
            value, error = grid.relative[policy][least], grid.error[policy][least]
            parts.append(f"{100 * value:+.1f}% +- {100 * error:.1f}% against {policy}, on {grid.problems[least]}")
            holds.append(value < -reduction + 3.0 * error)
        claims.append(
            Claim(
                "linear Gaussian problems: reductions of up to 40% against Thompson and 50% against Bayes-UCB",
                f"the largest of {is_easy.sum()} problems above .25: {'; '.join(parts)}",
                "holds" if all(holds) else "not reached on these problems",
            )
        )
    return claims
