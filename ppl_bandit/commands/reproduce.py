"""`ppl-bandit reproduce`: run the paper's evaluation, draw its figures, and write `reproduction.md`."""

import argparse
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

from ppl_bandit.commands import CommandResult, ShowLine
from ppl_bandit.commands.names import check_names, executor_of
from ppl_bandit.paper import report as paper_figures, settings
from ppl_bandit.paper.parts import CLAIMS, FIGURE_PARTS, GRIDS, claims_of_grids, parts_of, run_parts
from ppl_bandit.paper.report import write_report
from ppl_bandit.paper.runs import GridRegret, ReproducedRegret, verdicts
from ppl_bandit.runtime.cpu_threads import is_on_cpu

if TYPE_CHECKING:
    import xarray


def execute(arguments: argparse.Namespace, show: ShowLine, progress: ShowLine) -> CommandResult:
    """Reproduce figures, and write `reproduction.md`, the figures and the data; the status is 130 if it was interrupted."""
    with executor_of(arguments) as executor:
        numbers, is_complete = reproduce(
            arguments.figures,
            arguments.out,
            is_full=arguments.full,
            seed=arguments.seed,
            show=show,
            executor=executor,
        )
    for ours in numbers:
        paper_value = f"{ours.number.value:6.2f} +- {ours.number.error:.2f}"
        show(
            f"{ours.number.setting:<16} {ours.number.policy:<29} {ours.number.source:<9} {paper_value}  "
            f"ours {ours.ours:6.2f} +- {ours.error:.2f}  {ours.verdict}"
        )
    show(f"\nwrote reproduction.md, figures and data to {arguments.out}")
    rows = [{**n.number._asdict(), "ours": n.ours, "our_error": n.error, "verdict": n.verdict} for n in numbers]
    return rows, 0 if is_complete else 130


def reproduce(
    figures: Sequence[str], out: Path, *, is_full: bool, seed: int, show: ShowLine, executor: Executor | None = None
) -> tuple[list[ReproducedRegret], bool]:
    """Reproduce figures of the paper, all if `figures` is empty; return every published number of their settings.

    Also returns whether all parts have finished: figures for which a part is missing are not drawn.

    Computes in float64, or in float32 if `is_full` on an accelerator.

    Args:
        executor: as in `simulate`.
    """
    chosen = list(figures) or list(FIGURE_PARTS)
    check_names(chosen, FIGURE_PARTS, "FIGURE")
    sizes = settings.FULL if is_full else settings.QUICK
    precision = "float32" if is_full and not is_on_cpu() else "float64"
    out.mkdir(parents=True, exist_ok=True)
    parts, left_out = parts_of(chosen, sizes, seed=seed, precision=precision)
    if not figures and not is_full:  # claims of their own simulations take as long as a figure
        left_out += [part.title.partition(":")[0] for part in parts if part.name in CLAIMS]
        parts = [part for part in parts if part.name not in CLAIMS]
    show(f"{len(parts)} parts; {'use a GPU' if is_full else 'mostly compilation'}")
    for part in parts:
        show(f"  {part.title}")
    if left_out:
        show(f"left out: {'; '.join(left_out)}; `--full` runs everything, `reproduce claims` all claims")
    began = time.time()
    results = run_parts(parts, executor)
    runs = {name: results[name] for name in settings.SETTINGS if name in results}
    grids = {name: results[name] for name in GRIDS if name in results}
    claims = [*claims_of_grids(grids), *(results[name] for name in CLAIMS if name in results)]
    numbers = verdicts(runs)
    missing = {part.name for part in parts} - set(results)
    _draw([figure for figure in chosen if not missing & set(FIGURE_PARTS[figure])], runs, grids, sizes.grid_runs, out)
    for claim in claims:
        show(f"{claim.claim}: {claim.verdict}\n  {claim.measured}")
    text = write_report(numbers, claims, runs, grids, seed, precision, time.time() - began)
    (out / "reproduction.md").write_text(text)
    for setting, dataset in runs.items():
        dataset.to_netcdf(out / f"{setting}.nc")
    return numbers, not missing


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
