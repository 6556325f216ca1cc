"""A report of a design that a protocol can cite: the design in words, its operating characteristics, seeds and versions."""

from typing import Any

from ppl_bandit.display.html_pages import html_figure, html_page, html_paragraphs, html_rows
from ppl_bandit.trials.operating_characteristics import OperatingCharacteristics

__all__ = ["design_report"]


def design_report(found: OperatingCharacteristics, name: str, num_trials: int, seed: int) -> str:
    """Return the HTML of a design's operating characteristics.

    Args:
        name: of the reward model.
        num_trials: simulated trials of each scenario.
        seed: of the simulation.
    """
    design = found.design
    table = found.table()
    columns = [column for column in table.columns if not column.endswith("_se")]
    rows = [[str(scenario), *(_cell(row, column) for column in columns)] for scenario, row in table.iterrows()]
    turned = [[column.replace("_", " "), *(row[index + 1] for row in rows)] for index, column in enumerate(columns)]
    lead = f"{num_trials} simulated trials per scenario, posterior: {found.method}. Values are given ± their standard error."
    parts = [
        "<h2>The design</h2>",
        html_paragraphs(design.describe().splitlines()),
        "<h2>Operating characteristics</h2>",
        html_rows(["", *map(str, table.index)], turned),
        html_figure(f"Operating characteristics of the design for {name}", found.plot()),
    ]
    return html_page(f"Design of an experiment: {name}", lead, parts, seed)


def _cell(row: Any, column: str) -> str:
    value, error = row[column], row.get(f"{column}_se")
    if not isinstance(value, float | int):
        return str(value)
    return f"{value:.4g}" if error is None or not error == error else f"{value:.4g} ± {error:.2g}"
