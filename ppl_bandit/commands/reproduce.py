"""`ppl-bandit reproduce`: run the paper's evaluation, draw its figures, and write `reproduction.md`."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ppl_bandit.commands.arguments.names import check_names
from ppl_bandit.paper import figures as paper_figures, runs as paper, settings
from ppl_bandit.paper.claims import Claim, claims_of_grids, claims_of_settings
from ppl_bandit.paper.runs import GridRegret, ReproducedRegret
from ppl_bandit.paper.settings import BAYES_UCB, RANDOM, THOMPSON
from ppl_bandit.runtime.cpu_threads import is_on_cpu

if TYPE_CHECKING:
    import xarray

__all__ = ["FIGURE_SETTINGS", "execute", "reproduce"]

FIGURE_SETTINGS = {  # {figure: settings that it needs}; grids and claims run their own problems
    "execution": ("bernoulli-three",),
    "correct-actions": ("bernoulli",),
    "bernoulli-regret": ("bernoulli", "bernoulli-close"),
    "bernoulli-kl": (),
    "linear-regret": ("linear-caption", "linear-figure"),
    "linear-kl": (),
    "claims": (),
}


def execute(
    arguments: argparse.Namespace, show: Callable[[str], None], progress: Callable[[str], None]
) -> tuple[Any, int]:
    """Reproduce figures, and write `reproduction.md`, the figures and the data."""
    has_bar = not arguments.json and sys.stderr.isatty()
    numbers = reproduce(
        arguments.figures, arguments.out, is_full=arguments.full, seed=arguments.seed, show=show, has_bar=has_bar
    )
    for ours in numbers:
        paper_value = f"{ours.number.value:6.2f} +- {ours.number.error:.2f}"
        show(
            f"{ours.number.setting:<16} {ours.number.policy:<29} {ours.number.source:<9} {paper_value}  "
            f"ours {ours.ours:6.2f} +- {ours.error:.2f}  {ours.verdict}"
        )
    show(f"\nwrote reproduction.md, figures and data to {arguments.out}")
    rows = [{**n.number._asdict(), "ours": n.ours, "our_error": n.error, "verdict": n.verdict} for n in numbers]
    return rows, 0


def reproduce(
    figures: Sequence[str], out: Path, *, is_full: bool, seed: int, show: Callable[[str], None], has_bar: bool
) -> list[ReproducedRegret]:
    """Reproduce figures of the paper, all if `figures` is empty, and every published number of their settings.

    Computes in float64, or in float32 if `is_full` on an accelerator.
    """
    chosen = list(figures) or list(FIGURE_SETTINGS)
    check_names(chosen, FIGURE_SETTINGS, "FIGURE")
    sizes = settings.FULL if is_full else settings.QUICK
    precision = "float32" if is_full and not is_on_cpu() else "float64"
    out.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(setting for name in chosen for setting in FIGURE_SETTINGS[name])
    clock = _Clock(show, len(names) + len(_grid_names(chosen)))
    began = time.time()
    cost = "use a GPU" if is_full else "compilation alone takes about half a minute a part on two cores"
    show(f"{clock.num_parts} parts; {cost}; the time left is stated after each part")
    runs: dict[str, xarray.Dataset] = {}
    for setting in names:
        show(f"{settings.SETTINGS[setting].title}: {sizes.runs[setting]} realizations of 4 policies ...")
        runs[setting] = paper.run_setting(
            setting, sizes.runs[setting], seed=seed, precision=precision, progress=has_bar
        )
        clock.finish_part()
    grids: dict[str, GridRegret] = {}
    options: dict[str, Any] = {"seed": seed, "precision": precision, "advance": lambda: show("  one policy done")}
    if "bernoulli-kl" in chosen:
        for name, num_arms, num in (("A = 2", 2, sizes.num_pairs), ("A = 3", 3, sizes.num_triples)):
            show(f"Bernoulli grid, {name}: {num or 'all'} problems, {sizes.grid_runs} realizations, 3 policies ...")
            grids[name] = paper.bernoulli_grid(num_arms, num, sizes.grid_runs, **options)
            clock.finish_part()
    if "linear-kl" in chosen:
        show(
            f"linear Gaussian grid: {sizes.num_linear or 'all'} problems, {sizes.grid_runs} realizations, 3 policies ..."
        )
        grids["linear"] = paper.linear_grid(sizes.num_linear, sizes.grid_runs, **options)
        clock.finish_part()
    _draw(chosen, runs, grids, sizes.grid_runs, out)
    numbers, claims = paper.verdicts(runs), claims_of_grids(grids)
    if "claims" in chosen:
        show("claims about M and about the quantile of Bayes-UCB ...")
        claims += claims_of_settings(sizes.runs, seed=seed, precision=precision, progress=has_bar)
    for claim in claims:
        show(f"{claim.claim}: {claim.verdict}\n  {claim.measured}")
    (out / "reproduction.md").write_text(_report(numbers, claims, runs, grids, seed, precision, time.time() - began))
    for setting, dataset in runs.items():
        dataset.to_netcdf(out / f"{setting}.nc")
    return numbers


def _grid_names(chosen: Sequence[str]) -> list[str]:
    return ["A = 2", "A = 3"] * ("bernoulli-kl" in chosen) + ["linear"] * ("linear-kl" in chosen)


class _Clock:
    """Tells after each part how long the others will take, if they take as long as those before."""

    def __init__(self, show: Callable[[str], None], num_parts: int):
        self.num_parts = num_parts
        self._show, self._num_done, self._began = show, 0, time.monotonic()

    def finish_part(self) -> None:
        """Count a part, and show the time left."""
        self._num_done += 1
        spent = time.monotonic() - self._began
        left = spent / self._num_done * (self.num_parts - self._num_done)
        self._show(f"  {self._num_done} of {self.num_parts} parts in {spent:.0f} s; about {left:.0f} s left")


def _draw(
    chosen: Sequence[str], runs: "dict[str, xarray.Dataset]", grids: dict[str, GridRegret], num_runs: int, out: Path
) -> None:
    if "execution" in chosen:
        paper_figures.draw_execution(runs["bernoulli-three"], out / "execution.png")
    if "correct-actions" in chosen:
        paper_figures.draw_correct_actions(runs["bernoulli"], out / "correct_actions.png")
    if "bernoulli-regret" in chosen:
        paper_figures.draw_regret(runs["bernoulli"], "bernoulli", out / "bernoulli_regret.png")
    if "linear-regret" in chosen:
        paper_figures.draw_regret(runs["linear-caption"], "linear-caption", out / "linear_regret_caption.png")
        paper_figures.draw_regret(runs["linear-figure"], "linear-figure", out / "linear_regret_figure.png")
    if "bernoulli-kl" in chosen:
        bernoulli = {name: grid for name, grid in grids.items() if name != "linear"}
        title = "Bernoulli bandits: relative regret against divergence"
        paper_figures.draw_grid(bernoulli, "bernoulli_kl", title, num_runs, out / "bernoulli_kl.png")
    if "linear-kl" in chosen:
        title = "Linear Gaussian bandits: relative regret against divergence"
        linear = {"two arms": grids["linear"]}
        paper_figures.draw_grid(linear, "linear_gaussian_kl", title, num_runs, out / "linear_kl.png")


def _report(
    numbers: list[ReproducedRegret],
    claims: list[Claim],
    runs: "dict[str, xarray.Dataset]",
    grids: dict[str, GridRegret],
    seed: int,
    precision: str,
    seconds: float,
) -> str:
    lines = [
        "# Reproduction",
        "",
        f"Seed {seed}, {precision}, {jax.devices()[0].device_kind}, {seconds / 60:.1f} minutes. Regret is expected (pseudo) "
        "regret at the last step; a number reproduces if it lies within three standard errors of the difference. For double "
        "sampling the error allows for stuck runs (one in 1,200), even if none occurred.",
        "",
        "| setting | steps | realizations | policy | theirs | source | ours | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for f in numbers:
        setting = settings.SETTINGS[f.number.setting]
        num_runs = runs[f.number.setting].sizes["realization"]
        lines.append(
            f"| {setting.title} | {setting.num_steps} | {num_runs} | {f.number.policy} | {f.number.value:.2f} +- "
            f"{f.number.error:.2f} | {f.number.source} | {f.ours:.2f} +- {f.error:.2f} | {f.verdict} |"
        )
    if runs:
        lines += [
            "",
            "Tails of the regret distributions:",
            "",
            "| setting | policy | median | 99th percentile | stuck |",
        ]
        lines.append("| --- | --- | --- | --- | --- |")
        for name, dataset in runs.items():
            for policy in dataset.selector.values:
                final = np.asarray(dataset.final_regret.sel(selector=policy), float)
                stuck = float(dataset.is_stuck.sel(selector=policy).mean())
                lines.append(
                    f"| {settings.SETTINGS[name].title} | {policy} | {np.median(final):.2f} | "
                    f"{np.quantile(final, 0.99):.2f} | {100 * stuck:.2f}% |"
                )
    for name, grid in grids.items():
        lines += ["", *_compare_grid(name, grid)]
    if claims:
        lines += ["", "What the paper says in words:", "", "| claim | measured | verdict |", "| --- | --- | --- |"]
        lines += [f"| {claim.claim} | {claim.measured} | {claim.verdict} |" for claim in claims]
    lines += ["", *_NOTES]
    return "\n".join(lines) + "\n"


def _compare_grid(name: str, grid: GridRegret) -> list[str]:
    """Return a table of a grid's mean relative regret and the paper's, for problems with a divergence above .25."""
    is_easy = grid.divergence > 0.25
    data = settings.paper_data("linear_gaussian_kl" if name == "linear" else "bernoulli_kl")["points"]
    title = "linear Gaussian grid" if name == "linear" else f"Bernoulli grid, {name}"
    lines = [f"{title} ({grid.divergence.size} problems), mean relative regret where the divergence exceeds .25:", ""]
    lines += ["| against | the paper's points | ours |", "| --- | --- | --- |"]
    for policy, field in ((THOMPSON, "vs_thompson"), (BAYES_UCB, "vs_bayes_ucb")):
        theirs = np.mean([p[field] for p in data if p.get("min_kl", p.get("kl")) > 0.25])
        ours = grid.relative[policy][is_easy]
        error = np.sqrt(np.sum(grid.error[policy][is_easy] ** 2)) / max(is_easy.sum(), 1)
        lines.append(f"| {policy} | {100 * theirs:+.1f}% | {100 * ours.mean():+.1f}% +- {100 * error:.1f}% |")
    if name != "A = 2":
        return lines
    return [*lines, "", "The paper's text announces grids of two and of three arms; its figure shows three arms only."]


_NOTES = [
    "What does not reproduce, and why:",
    "",
    "- The linear Gaussian regret figure is not the setting of its caption: two arms with weights (.4, .4) and (.8, .8) and "
    "noise .2 give a sixth of the regret that the figure shows. Three arms with weights (-.5, -.5), (0, 0), (.5, .5) and "
    "noise 1 give the figure.",
    "- The paper breaks ties of the mode by the lowest index, which favours the first arm. Policies marked "
    f'"ties lowest" do the same; "{RANDOM}" breaks ties at random, so that no result depends on the order of the arms.',
    "- The paper's figures show realised regret of 5,000 realizations, whose standard deviation (13 and 34) is mostly the "
    "noise of the rewards; ours is expected regret, which has the same mean.",
    "- The weights of the paper's linear Gaussian grid are not listed: ours are 360 problems drawn from the grid that its "
    "footnote describes, with one arm better in every context, so compare the clouds of points, not single points.",
]
