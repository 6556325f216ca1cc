"""The text of `reproduction.md`: every published number with ours and a verdict, the tails, the grids and the claims."""

from typing import TYPE_CHECKING

import jax
import numpy as np

from ppl_bandit.display.terminal import markdown_table
from ppl_bandit.paper import settings
from ppl_bandit.paper.claims import Claim
from ppl_bandit.paper.runs import GridRegret, ReproducedRegret
from ppl_bandit.paper.settings import BAYES_UCB, RANDOM, THOMPSON
from ppl_bandit.simulation.standings import score_selectors

if TYPE_CHECKING:
    import xarray


def write_report(
    numbers: list[ReproducedRegret],
    claims: list[Claim],
    runs: "dict[str, xarray.Dataset]",
    grids: dict[str, GridRegret],
    seed: int,
    precision: str,
    seconds: float,
) -> str:
    """Return the text of `reproduction.md`."""
    lines = [
        "# Reproduction",
        "",
        f"Seed {seed}, {precision}, {jax.devices()[0].device_kind}, {seconds / 60:.1f} minutes. Regret is expected (pseudo) "
        "regret at the last step; a number reproduces if it lies within three standard errors of the difference. For double "
        "sampling the error allows for stuck runs (one in 1,200), even if none occurred.",
        "",
    ]
    rows = []
    for f in numbers:
        number, setting = f.number, settings.SETTINGS[f.number.setting]
        sizes = str(setting.num_steps), str(runs[number.setting].sizes["realization"])
        theirs, ours = f"{number.value:.2f} +- {number.error:.2f}", f"{f.ours:.2f} +- {f.error:.2f}"
        rows.append([setting.title, *sizes, number.policy, theirs, number.source, ours, f.verdict])
    header = ["setting", "steps", "realizations", "policy", "theirs", "source", "ours", "verdict"]
    lines.append(markdown_table(header, rows))
    if runs:
        rows = []
        for name, dataset in runs.items():
            for score in score_selectors(dataset):
                tail = f"{score.median:.2f}", f"{score.high:.2f}", f"{100 * score.stuck:.2f}%"
                rows.append([settings.SETTINGS[name].title, score.selector, *tail])
        header = ["setting", "policy", "median", "99th percentile", "stuck"]
        lines += ["", "Tails of the regret distributions:", "", markdown_table(header, rows)]
    for name, grid in grids.items():
        lines += ["", *_compare_grid(name, grid)]
    if claims:
        lines += ["", "What the paper says in words:", "", markdown_table(("claim", "measured", "verdict"), claims)]
    lines += ["", *_NOTES]
    return "\n".join(lines) + "\n"


def _compare_grid(name: str, grid: GridRegret) -> list[str]:
    """Return a table of a grid's mean relative regret and the paper's, for problems with a divergence above .25."""
    is_easy = grid.divergence > 0.25
    divergence, theirs = settings.paper_points("linear_gaussian_kl" if name == "linear" else "bernoulli_kl")
    title = "linear Gaussian grid" if name == "linear" else f"Bernoulli grid, {name}"
    lines = [f"{title} ({grid.divergence.size} problems), mean relative regret where the divergence exceeds .25:", ""]
    rows = []
    for policy in (THOMPSON, BAYES_UCB):
        their_mean = theirs[policy][divergence > 0.25].mean()
        ours = grid.relative[policy][is_easy]
        error = np.sqrt(np.sum(grid.error[policy][is_easy] ** 2)) / max(is_easy.sum(), 1)
        rows.append([policy, f"{100 * their_mean:+.1f}%", f"{100 * ours.mean():+.1f}% +- {100 * error:.1f}%"])
    lines.append(markdown_table(("against", "the paper's points", "ours"), rows))
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
